/* Without namespaces of our own a shepherd stands between pid 1's stand-in and each program: it is a subreaper, so that
 * orphans come back to the right exec, and descendants stay descendants.
 *
 * At the landlock level programs have its uid and could stop it: there it is forked for one exec. In a container it is root's,
 * and serves one exec after the other as the keeper says (flock.c): what a process needs to start another, its pages and, under
 * gVisor, its patched system calls, is made anew for each that is forked, and takes longer there than all the rest of an exec. */
#include "agent.h"
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define SOON 3            /* ms, for which nobody misses the news that a program runs */
#define SOON_IN_GVISOR 20 /* there none starts and ends in less than 5 */
#define KEEPER 3 /* the socket to it; every descriptor of an exec's is above: 3 is a carry's place */

/* What became of the child that our memory is lent to. */
static volatile bool reached; /* its execve */
static struct fault fault;    /* err 0: none */

static void note_ready(int status) {
    (void)status;
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0); /* a change of user would have cleared it */
    reached = true;
}

/* We wait until the child is a program or gone: there is no copy of our memory to be made, which is most of the cost under
 * gVisor. It changes nothing we look at afterwards, but for the above. */
static pid_t bear(const struct program *p, const int stdio[3], int carry, int status) {
    reached = false;
    fault = (struct fault){0};
    pid_t pid = vfork();
    if (pid) return pid;
    program_become(p, stdio, carry, status, note_ready, &fault);
    if (!fault.err) fault.err = EINVAL;
    _exit(127);
}

static void tell(const struct status_message *m) { send_fds(KEEPER, m, sizeof *m, NULL, 0); }

static void tell_fault(void) {
    struct status_message m = {.kind = ST_FAILED, .err = fault.err, .last = true};
    memcpy(m.stage, fault.stage, sizeof m.stage);
    tell(&m);
}

/* __WALL: also who was cloned to end without a SIGCHLD. No child is missed when it is said that there is none. */
static pid_t wait_for_any(int *status, int how, struct rusage *u) { return (pid_t)RETRY(wait4(-1, status, how | __WALL, u)); }

/* Whether a child ends within so many ms. Its signal is blocked, as all are, and taken here. */
static bool ends_within(int ms) {
    sigset_t child;
    struct timespec time = {0, ms * 1000000L};
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    return sigtimedwait(&child, NULL, &time) == SIGCHLD;
}

static void forget_signal(void) { ends_within(0); } /* what is left would seem the next program's */

/* Until nobody is left below us. A program that ends soon wakes the keeper once: that it ran is told with its end. */
static void tend(pid_t program, int soon) {
    struct status_message m = {.kind = ST_RUNNING, .pid = program, .err = reached ? 0 : ECHILD};
    struct rusage u;
    int status;
    pid_t pid = soon && ends_within(soon) ? wait_for_any(&status, WNOHANG, &u) : 0;
    if (pid != program) {
        tell(&m);
        m.pid = 0;
    }
    while (pid >= 0 && pid != program) pid = wait_for_any(&status, 0, &u);
    m.kind = ST_EXITED;
    m.status = status;
    m.cpu_ms = cpu_ms(&u);
    m.rss = (uint64_t)u.ru_maxrss * 1024;
    m.last = wait_for_any(&status, WNOHANG, &u) < 0;
    tell(&m);
    if (m.last && m.pid) return;
    while (wait_for_any(&status, 0, &u) > 0) {}
    if (!m.last) tell(&(struct status_message){.kind = ST_IDLE, .last = true});
    forget_signal();
}

/* Who became no program. */
static void bury(pid_t pid) {
    RETRY(waitpid(pid, NULL, 0));
    forget_signal();
}

static void close_others(void) { syscall(SYS_close_range, KEEPER + 1, LAST_FD, 0); }

static bool make_root(struct program *p) {
    fault = (struct fault){0};
    p->root = root_namespace(&fault);
    forget_signal(); /* of whoever made it */
    if (p->root >= 0) return true;
    close_others();
    fault_root(&fault);
    return false;
}

static void run(struct program *p, const int stdio[3], int carry) {
    if (wants_root(p->request) && !make_root(p)) return tell_fault();
    pid_t pid = bear(p, stdio, carry, KEEPER);
    if (pid < 0) fault_set(&fault, errno, "fork");
    close_others();
    if (fault.err && pid > 0) bury(pid);
    if (fault.err) return tell_fault();
    tend(pid, p->tty || !box.container ? 0 : box.filter_ahead ? SOON_IN_GVISOR : SOON);
}

static void become_shepherd(int sock) {
    if (sock != KEEPER) dup3(sock, KEEPER, O_CLOEXEC);
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
}

/* For one exec, which pid 1's stand-in was told of. */
void shepherd_main(const int fds[FD_ROLES], int nfds) {
    struct program p;
    int stdio[3] = {lift_fd(fds[FD_IN]), lift_fd(fds[FD_OUT]), lift_fd(fds[FD_ERR])};
    int request = lift_fd(fds[FD_REQUEST]), carry = nfds > FD_CARRY ? lift_fd(fds[FD_CARRY]) : -1;
    become_shepherd(fds[FD_STATUS]);
    if (program_read(&p, json_read(request), &fault)) run(&p, stdio, carry);
    else tell_fault();
    _exit(0);
}

static char *read_text(int fd, size_t *n) {
    struct stat st;
    char *text = fstat(fd, &st) ? NULL : xrealloc(NULL, (size_t)st.st_size + 1);
    *n = text ? (size_t)st.st_size : 0;
    if (!text || pread(fd, text, *n, 0) == (ssize_t)*n) return text;
    free(text);
    return NULL;
}

static void serve(struct order_message *m, size_t n, const int *fds, int nfds) {
    struct program p = {0};
    int want = 3 + m->large + m->carry;
    bool whole = nfds == want && m->size <= n - offsetof(struct order_message, text);
    size_t size = m->size;
    cleanup_free char *large = whole && m->large ? read_text(fds[3], &size) : NULL;
    char *text = m->large ? large : m->text;
    box.open_files = m->open_files;
    if (program_read(&p, whole && text ? json_parse(text, size) : NULL, &fault)) run(&p, fds, m->carry ? fds[want - 1] : -1);
    else {
        close_others();
        tell_fault();
    }
    program_free(&p);
}

/* All that an exec does, up to an execve that fails: its pages are ours then, when the first real one comes. */
static void rehearse(void) {
    char text[] = "{\"argv\":[\"/.capsule/\"],\"env\":{\"PATH\":\"/bin\"},\"cwd\":\"/\"}";
    int stdio[3] = {0, 1, 2};
    struct program p;
    if (program_read(&p, json_parse(text, sizeof text - 1), &fault)) {
        pid_t pid = bear(&p, stdio, -1, -1);
        if (pid > 0) bury(pid);
    }
    program_free(&p);
}

/* For one exec after the other, until the keeper lets go of us. */
void shepherd_serve(int sock) {
    static struct order_message m;
    become_shepherd(sock);
    close_others();
    struct pollfd order = {KEEPER, POLLIN, 0};
    if (!poll(&order, 1, 0)) rehearse(); /* else the first exec is there already */
    for (;;) {
        int fds[FD_ROLES], nfds = FD_ROLES;
        ssize_t n = recv_fds(KEEPER, &m, sizeof m, fds, &nfds);
        if (n < (ssize_t)offsetof(struct order_message, text)) _exit(0);
        serve(&m, (size_t)n, fds, nfds);
    }
}
