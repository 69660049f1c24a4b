/* pid 1 of the box (without namespaces: an ordinary process in its place). It reaps, it forks, it kills trees.
 * It parses nothing and holds nothing a program wrote, so there is little to attack; no signal from inside
 * reaches it, and it is the one process of ours that a program could even name. */
#include "agent.h"
#include <arpa/inet.h>
#include <grp.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

struct task { uint32_t no; pid_t pid; bool awaited, alive, killing; int quiet; }; /* one per exec; no 0: a free place */
#define TASKS 512 /* more than execs are remembered */
#define QUIET 64
#define SPARE_AFTER 200 /* ms in which nobody asked for anything: the first exec of a box is not to share the CPU with it */

static int ctl = -1, signals = -1;
static struct task tasks[TASKS];
static struct birth { uint64_t tag; pid_t pid; bool over; } *births; /* of tasks, then of workers; shared: each child writes its own first */
static pid_t workers[WORKERS]; /* 0: a free place; below: the order, while its birth is awaited */
static pid_t shepherds[TASKS]; /* in a container; 0: a free place */
static uint32_t ordered;
static double forked_cpu_ms; /* of processes already reaped */

/* The keeper is gone. As pid 1 our exit takes everyone along; otherwise they must be hunted down. */
static void end_box(void) {
    if (!box.namespaces) sweep_descendants();
    _exit(0);
}

static void tell(const struct ctl *m, const int *fds, int nfds) {
    if (!send_fds(ctl, m, sizeof *m, fds, nfds)) end_box();
}

void init_tell_oom(void) { tell(&(struct ctl){.command = C_OOM}, NULL, 0); }

static struct task *find(uint32_t no) {
    for (struct task *t = tasks; t < tasks + TASKS; t++)
        if (t->no == no) return t;
    return NULL;
}

/* In a container the keeper gives execs to shepherds without us: we learn of one when it is to be signalled. */
static struct task *find_or_note(const struct ctl *m) {
    struct task *t = find(m->no);
    if (!t && init_has_shepherd(m->pid) && (t = find(0))) *t = (struct task){.no = m->no, .pid = m->pid, .alive = true};
    return t;
}

static pid_t *find_worker(pid_t pid) {
    for (pid_t *w = workers; w < workers + WORKERS; w++)
        if (*w == pid) return w;
    return NULL;
}

bool init_knows(pid_t pid) {
    for (int i = 0; i < TASKS; i++) {
        if (tasks[i].alive && tasks[i].pid == pid) return true;
        if (tasks[i].awaited && births[i].pid == pid) return true;
    }
    for (int i = 0; i < WORKERS; i++)
        if (workers[i] == pid || (workers[i] < 0 && births[TASKS + i].pid == pid)) return true;
    return forker_is(pid);
}

/* 0: nobody is there. Below: he is on his way, and has no number yet. */
pid_t init_worker(int place) {
    pid_t pid = workers[place], born = pid < 0 ? births[TASKS + place].pid : 0;
    return born > 0 ? born : pid;
}

bool init_has_shepherd(pid_t pid) {
    for (int i = 0; pid > 0 && i < TASKS; i++)
        if (shepherds[i] == pid) return true;
    return false;
}

/* While the box is stopped they are the ones that were at work before: nobody is born then but who saves it. */
bool init_has_worker(pid_t pid) { return pid > 0 && find_worker(pid); }
bool init_lingers(int place) { return births[TASKS + place].over; }

void init_stop_workers(void) {
    for (pid_t *w = workers; w < workers + WORKERS; w++)
        if (*w > 0) kill(*w, SIGSTOP);
}

/* Inode numbers are given again once a namespace is dead; then the older exec has nobody left to find. */
static uint64_t tag_of_task(const struct task *t) {
    uint64_t tag = births[t - tasks].tag;
    for (int i = 0; i < TASKS; i++)
        if (births[i].tag == tag && tasks[i].no > t->no) return 0;
    return tag;
}

/* What a child of ours must not have. */
void init_let_go(void) {
    drop_fd(&ctl);
    drop_fd(&signals);
    root_let_go();
    door_let_go();
    forker_let_go();
    spare_let_go();
}

void init_run(const struct ctl *m, const int *fds, int nfds) {
    struct birth *birth = &births[m->slot];
    birth->pid = getpid();
    init_let_go();
    if (m->kind != K_SAVE) track_let_go();
    if (m->kind == K_FILE) file_main(fds[0], fds[1]);
    if (m->kind == K_SAVE) save_main(fds[0], fds[1], m->port, m->cpu_ms);
    box.open_files = m->port;
    if (m->kind == K_SUDO) door_main(fds, nfds, &birth->over);
    birth->tag = sweep_own_tag();
    if (box.namespaces && (!birth->tag || birth->tag == UINT64_MAX)) _exit(1); /* no kill could find it */
    sweep_close(); /* the request names a working directory, which may be /proc/self/fd/N: no descriptor of ours may be one */
    int as = m->root ? fds[--nfds] : -1;
    if (box.namespaces) program_main(fds, nfds, as);
    shepherd_main(fds, nfds);
}

/* In pid 1, and in the forker, whose children are pid 1's as well. */
pid_t init_bear(const struct ctl *m, const int *fds, int nfds, unsigned long how) {
    bool tagged = m->kind == K_EXEC && box.namespaces;
    pid_t pid = (pid_t)syscall(SYS_clone, SIGCHLD | how | (tagged ? CLONE_NEWUTS : 0), 0, 0, 0, 0);
    if (!pid) init_run(m, fds, nfds);
    return pid;
}

static void ended(struct task *t, int status, const struct rusage *u) {
    t->alive = false;
    if (!box.namespaces) t->pid = 0;
    struct ctl m = {.command = C_EXITED, .no = t->no, .status = status, .cpu_ms = cpu_ms(u)};
    m.rss = (uint64_t)u->ru_maxrss * 1024;
    tell(&m, NULL, 0);
}

static void born(struct task *t, pid_t pid, int err) {
    struct ctl m = {.command = C_SPAWNED, .no = t->no, .pid = pid, .err = err};
    *t = pid > 0 ? (struct task){.no = t->no, .pid = pid, .alive = true, .killing = t->killing} : (struct task){0};
    tell(&m, NULL, 0);
}

static void settle_task(struct task *t, pid_t pid, int err) {
    if (!t->awaited) return; /* it was recognised when it ended */
    born(t, pid, err);
    bool missed = pid > 0 && kill(pid, 0) && errno == ESRCH; /* killed before it could say its number: reaped as a stranger */
    if (missed) ended(t, SIGKILL, &(struct rusage){0});
}

static void settle_worker(const struct ctl *order, pid_t pid, int err, const int *fds, int nfds) {
    pid_t *worker = &workers[order->slot - TASKS];
    if (*worker == -(pid_t)order->order) *worker = pid > 0 && !(kill(pid, 0) && errno == ESRCH) ? pid : 0;
    if (pid <= 0) refuse_worker(order->kind, err, fds, nfds);
}

/* The forker's answer; where it could not, it is done here. */
void init_born(const struct ctl *order, const struct ctl *answer, const int *fds, int nfds) {
    pid_t pid = answer->pid;
    int err = answer->err;
    if (err) {
        pid = init_bear(order, fds, nfds, 0);
        err = pid < 0 ? errno : 0;
    }
    if (order->kind != K_EXEC) settle_worker(order, pid, err, fds, nfds);
    else if (tasks[order->slot].no == order->no) settle_task(&tasks[order->slot], pid, err);
}

/* One more descriptor for a program that is to be root. */
static bool add_root(const struct ctl *m, int *fds, int *nfds) {
    struct fault f = {0};
    int copy = *nfds < FD_ROLES ? root_copy(&f) : -1;
    if (copy >= 0) return fds[(*nfds)++] = copy, true;
    fault_root(&f);
    if (m->kind == K_SUDO) return door_refuse(fds[0], f.err, f.stage), false;
    struct ctl refusal = {.command = C_SPAWNED, .no = m->no, .pid = -1, .err = f.err};
    memcpy(refusal.stage, f.stage, sizeof refusal.stage);
    tell(&refusal, NULL, 0);
    return false;
}

/* true: the descriptors are kept until the child is born. */
static bool spawn(struct ctl *m, int *fds, int nfds) {
    bool file = m->kind != K_EXEC;
    struct task *t = file ? NULL : find(0);
    pid_t *worker = file ? find_worker(0) : NULL;
    if ((!t && !worker) || nfds < (m->kind == K_SUDO ? 1 : file ? 2 : FD_CARRY)) {
        if (file) refuse_worker(m->kind, EAGAIN, fds, nfds);
        else tell(&(struct ctl){.command = C_SPAWNED, .no = m->no, .pid = -1, .err = EAGAIN}, NULL, 0);
        return false;
    }
    m->slot = (uint32_t)(t ? t - tasks : TASKS + (worker - workers));
    m->order = ordered = ordered % INT32_MAX + 1;
    births[m->slot] = (struct birth){0};
    memory_wake();
    if (t) *t = (struct task){.no = m->no, .awaited = true};
    else *worker = -(pid_t)m->order;
    if (t) box.open_files = m->port; /* for the sessions that it may ask for */
    else visit_note((int)(worker - workers), m->kind == K_SUDO ? m->rss : 0);
    if (m->kind != K_SAVE && forker_order(m, fds, nfds)) return true; /* the forker stands still when a box is saved */
    if (m->kind == K_SAVE && m->port & SAVE_ROW && m->port & SAVE_WATCH) track_open();
    pid_t pid = m->kind == K_SAVE ? 0 : spare_order(m, fds, nfds);
    init_born(m, &(struct ctl){.pid = pid, .err = pid > 0 ? 0 : EAGAIN}, fds, nfds);
    forker_start();
    return false;
}

static bool begin(struct ctl *m, int *fds, int *nfds) { return (!m->root || add_root(m, fds, nfds)) && spawn(m, fds, *nfds); }

/* While the box stands still by our own signals, what is ordered waits. With a freezer whoever is born is caught by it. */
static struct held { struct ctl m; int fds[FD_ROLES], nfds; } held[64];
static int nheld;

static bool hold(const struct ctl *m, const int *fds, int nfds) {
    if (!sweep_paused() || m->kind == K_SAVE || nheld == sizeof held / sizeof *held) return false;
    held[nheld] = (struct held){.m = *m, .nfds = nfds};
    memcpy(held[nheld++].fds, fds, (size_t)nfds * sizeof *fds);
    return true;
}

static void go_on(void) {
    sweep_continue();
    for (int i = 0; i < nheld; i++) {
        if (begin(&held[i].m, held[i].fds, &held[i].nfds)) continue;
        for (int k = 0; k < held[i].nfds; k++) close(held[i].fds[k]);
    }
    nheld = 0;
}

/* Not while the box stands still by our own signals: nobody is to be born then. */
static int open_door(void) { return sweep_paused() || door_fd() < 0 || visits_full() ? -1 : door_fd(); }

static void welcome(void) {
    struct visitor v;
    if (door_admit(&v)) return;
    struct ctl m = {.kind = K_SUDO, .root = box.namespaces, .port = box.open_files, .rss = v.tag};
    int fds[FD_ROLES] = {v.conn, v.uts}, nfds = v.uts < 0 ? 1 : 2;
    if (begin(&m, fds, &nfds)) return;
    for (int i = 0; i < nfds; i++) close(fds[i]);
}

static uint64_t whose_visit(const struct task *t) {
    return box.namespaces ? tag_of_task(t) : t->pid > 0 ? (uint64_t)t->pid : VISIT_OF_EXEC | t->no;
}

/* The keeper is told, so that no other exec gets this shepherd, and answers which exec it has. */
uint64_t init_exec_of(pid_t visitor) {
    uint64_t whose = visit_whose(visitor);
    if (whose < VISIT_OF_EXEC && init_has_shepherd((pid_t)whose)) tell(&(struct ctl){.command = C_VISIT, .pid = (pid_t)whose}, NULL, 0);
    return whose;
}

static void shepherd_gone(pid_t pid) {
    struct task *t = tasks;
    while (t < tasks + TASKS && !(t->no && t->pid == pid)) t++;
    visits_pass_on((uint64_t)pid, t == tasks + TASKS ? VISIT_UNNAMED | (uint64_t)pid : VISIT_OF_EXEC | t->no);
}

/* The keeper's answer. The shepherd may have gone meanwhile: what its sessions left is found by the exec's number then. */
static void note_visited(const struct ctl *m) {
    if (!find_or_note(m) && find(0)) *find(0) = (struct task){.no = m->no};
    visits_pass_on(VISIT_UNNAMED | (uint64_t)m->pid, VISIT_OF_EXEC | m->no);
}

/* It ended before its birth was reported. */
static void recognise(pid_t pid) {
    for (int i = 0; i < TASKS; i++)
        if (tasks[i].awaited && births[i].pid == pid) born(&tasks[i], pid, 0);
    for (int i = 0; i < WORKERS; i++)
        if (workers[i] < 0 && births[TASKS + i].pid == pid) workers[i] = pid;
}

static void reap(void) {
    struct rusage u;
    int status;
    pid_t pid;
    while ((pid = wait4(-1, &status, WNOHANG, &u)) > 0) {
        if (forker_ended(pid) || spare_ended(pid)) continue;
        recognise(pid);
        pid_t *worker = find_worker(pid);
        if (worker) *worker = 0;
        for (int i = 0; i < TASKS; i++)
            if (shepherds[i] == pid) shepherd_gone(pid), shepherds[i] = 0;
        forked_cpu_ms += cpu_ms(&u);
        for (struct task *t = tasks; t < tasks + TASKS; t++)
            if (t->alive && t->pid == pid) ended(t, status, &u);
        spare_start(); /* nobody waits for anything just now, most of the time */
    }
}

/* The main process first: a shell whose child was killed before it would seem to have ended by itself. And it may not have
 * written its tag yet. A shepherd ends by itself, when nobody is left below it; no look at /proc is as sure as its end. */
static enum sweep kill_task(struct task *t) {
    if (t->awaited && births[t - tasks].pid) born(t, births[t - tasks].pid, 0);
    if (t->awaited) return SWEEP_SOMEBODY;
    bool alive = t->alive && (!box.namespaces || !kill(t->pid, SIGKILL));
    enum sweep others = sweep_signal(tag_of_task(t), t->pid, SIGKILL);
    if (visits_kill(whose_visit(t))) return SWEEP_SOMEBODY;
    return alive ? SWEEP_SOMEBODY : others;
}

/* Kill passes until it is quiet. New processes have higher numbers than old ones, so one that goes on in its child again
 * and again is overtaken by a pass, or seen to be gone when it was looked at: a pass during which nobody was found, lost or
 * born is proof; there must be two all the same. Where others in the box come and go no pass may be that sure: then everybody
 * is stopped for the last one. Between passes the loop answers the keeper, so a fork bomb delays no one. */
static bool continue_kills(void) {
    bool more = false;
    for (struct task *t = tasks; t < tasks + TASKS; t++) {
        enum sweep result = SWEEP_NOBODY;
        for (int pass = 0; t->killing && pass < 4 && t->quiet < QUIET; pass++) {
            result = kill_task(t);
            t->quiet = result == SWEEP_SOMEBODY ? 0 : t->quiet + (result == SWEEP_NOBODY ? QUIET / 2 : 1);
            reap();
        }
        if (!t->killing) continue;
        if (t->quiet < QUIET) { more = true; continue; }
        if (result == SWEEP_UNSURE) sweep_frozen(tag_of_task(t));
        t->killing = false;
        t->quiet = 0;
        tell(&(struct ctl){.command = C_KILLED, .no = t->no}, NULL, 0);
    }
    return more;
}

static void signal_task(const struct ctl *m) {
    struct task *t = find_or_note(m);
    if (t && (m->kind || !box.namespaces)) sweep_signal(tag_of_task(t), t->pid, m->signal);
    else if (t && t->alive) kill(-t->pid, m->signal); /* every exec leads a session of its own */
    tell(&(struct ctl){.command = C_SIGNALED, .no = m->no}, NULL, 0);
}

static void forget(uint32_t no) {
    struct task *t = find(no);
    if (t) *t = (struct task){0};
}

/* The keeper gets the other end of its socket. */
static void make_shepherd(void) {
    struct ctl reply = {.command = C_SHEPHERD, .pid = -1, .err = EAGAIN};
    int pair[2] = {-1, -1}, place = 0;
    while (place < TASKS && shepherds[place]) place++;
    bool room = place < TASKS && !socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair);
    if (room && !(reply.pid = fork())) {
        init_let_go();
        sweep_close();
        shepherd_serve(pair[1]);
    }
    if (room && reply.pid < 0) reply.err = errno;
    if (room) close(pair[1]);
    if (reply.pid > 0) {
        shepherds[place] = reply.pid;
        reply.err = 0;
    }
    tell(&reply, pair, reply.err ? 0 : 1);
    if (room) close(pair[0]);
}

/* Sockets belong to the network namespace they are made in; the keeper gets the descriptor. kind: 0 dial, 1 listen, 2 dial ::1 */
static void make_socket(const struct ctl *m) {
    struct ctl reply = {.command = C_SOCKETED, .no = m->no, .kind = m->kind};
    struct sockaddr_in a4 = {.sin_family = AF_INET, .sin_port = htons((uint16_t)m->port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 a6 = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)m->port), .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    const struct sockaddr *a = m->kind == 2 ? (struct sockaddr *)&a6 : (struct sockaddr *)&a4;
    socklen_t n = m->kind == 2 ? sizeof a6 : sizeof a4;
    int on = 1;
    bool own = box.namespaces || box.container;
    cleanup_fd int s = own ? socket(a->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0) : -1;
    if (s < 0) reply.err = own ? errno : EOPNOTSUPP;
    else if (m->kind == 1) {
        setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(s, a, n) || listen(s, 64)) reply.err = errno;
    } else if (connect(s, a, n) && errno != EINPROGRESS) reply.err = errno;
    tell(&reply, &s, reply.err ? 0 : 1);
}

static void answer_count(uint32_t no) {
    struct tally t;
    sweep_count(&t);
    struct ctl m = {.command = C_COUNTED, .no = no, .status = t.processes, .cpu_ms = t.cpu_ms + forked_cpu_ms, .rss = t.rss};
    tell(&m, NULL, 0);
}

static void obey(struct ctl *m, int *fds, int nfds) {
    struct task *t;
    switch (m->command) {
    case C_SPAWN:
        if (hold(m, fds, nfds) || begin(m, fds, &nfds)) return;
        break;
    case C_KILL:
        if ((t = find_or_note(m))) t->killing = true;
        else tell(&(struct ctl){.command = C_KILLED, .no = m->no}, NULL, 0);
        break;
    case C_SIGNAL: signal_task(m); break;
    case C_VISIT: note_visited(m); break;
    case C_FORGET: forget(m->no); break;
    case C_SOCKET: make_socket(m); break;
    case C_COUNT: answer_count(m->no); break;
    case C_FREEZE: tell(&(struct ctl){.command = C_FROZEN, .status = sweep_stop()}, NULL, 0); break;
    case C_THAW: go_on(); break;
    case C_SHEPHERD: make_shepherd(); break;
    case C_REST: memory_rest(m->status); break;
    }
    for (int i = 0; i < nfds; i++) close(fds[i]);
}

static void __attribute__((noreturn)) loop(void) {
    for (;;) {
        bool killing = continue_kills();
        struct pollfd p[4] = {{ctl, POLLIN, 0}, {signals, POLLIN, 0}, {forker_fd(), POLLIN, 0}, {open_door(), POLLIN, 0}};
        int wait = memory_patience();
        bool spare = spare_wanted() && (wait < 0 || wait >= SPARE_AFTER);
        int ready = poll(p, 4, killing ? 1 : spare ? SPARE_AFTER : wait);
        if (ready < 0 && errno != EINTR) end_box();
        memory_tick();
        if (!ready && !killing && spare) spare_start();
        if (p[2].revents & POLLIN) forker_hear();
        if (p[3].revents & POLLIN) welcome();
        if (p[1].revents) {
            struct signalfd_siginfo s;
            (void)!read(signals, &s, sizeof s);
            reap();
        }
        if (!p[0].revents) continue;
        struct ctl m;
        int fds[FD_ROLES], nfds = FD_ROLES;
        ssize_t n = recv_fds(ctl, &m, sizeof m, fds, &nfds);
        if (n <= 0) end_box();
        if (n == sizeof m) obey(&m, fds, nfds);
    }
}

bool init_await(enum ctl_command word, int *fds, int *nfds, struct fault *f) {
    struct ctl m = {0};
    int room = nfds ? *nfds : 0;
    while (m.command != word) {
        if (nfds) *nfds = room;
        if (recv_fds(ctl, &m, sizeof m, fds, nfds) != sizeof m) return fault_set(f, ECHILD, "the keeper ended during set-up");
    }
    return true;
}

static bool prepare(int *disk_fd, struct fault *f) {
    int proc_fd = -1;
    if (!box.namespaces && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) return fault_set(f, errno, "become a subreaper");
    if (box.namespaces && box.user_mode == USER_RANGE && (setgroups(0, NULL) || setresgid(0, 0, 0) || setresuid(0, 0, 0)))
        return fault_set(f, errno, "become root of the box");
    if (box.namespaces && !rootfs_make(disk_fd, &proc_fd, f)) return false;
    sweep_open(proc_fd);
    if (!box.container && !take_cgroups(f)) return false;
    landlock_disk = *disk_fd;
    bool confined = box.namespaces ? landlock_apply(f) : !box.container || confine_ahead(f);
    landlock_disk = -1;
    return confined && (sweep_works() || fault_set(f, EACCES, "see processes"));
}

void init_main(int ctl_fd) {
    struct fault f = {0};
    int disk_fd = -1;
    sigset_t all, child;
    ctl = ctl_fd;
    close_all_but(ctl, -1);
#ifndef __SANITIZE_ADDRESS__
    dup2(STDOUT_FILENO, STDERR_FILENO); /* a file of the host, which /proc/self/fd would lead a file worker's client to */
#endif
    births = mmap(NULL, (TASKS + WORKERS) * sizeof *births, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (births == MAP_FAILED) _exit(1);
    forget_signals();
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    signals = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    if (!init_await(C_GO, NULL, NULL, &f)) _exit(1);
    bool ok = prepare(&disk_fd, &f);
    if (box.namespaces) prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0); /* a change of user would have cleared it; otherwise see end_box */
    struct ctl m = {.command = ok ? C_READY : C_FAILED, .err = f.err};
    memcpy(m.stage, f.stage, sizeof m.stage);
    tell(&m, &disk_fd, ok && disk_fd >= 0 ? 1 : 0);
    if (!ok) _exit(1);
    hide_memory();
    drop_fd(&disk_fd);
    forker_start();
    if (box.namespaces) limit_namespace();
    door_open();
    memory_begin();
    if (box.container) make_shepherd(); /* the keeper counts on it */
    loop();
}
