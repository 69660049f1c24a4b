/* The keeper: outside the box, serving its wire. Programs cannot see it, signal it or reach its socket; when it dies,
 * pid 1 dies, and the box with it.
 *
 * One poll loop, no threads. Everything it waits for: the listener, the connections, pid 1 (ctl), each exec's pipes. */
#include "keeper.h"
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>

struct keeper keeper;

/* What pid 1 said while we were waiting for it to listen. */
static struct heard { struct ctl m; int fd; } *heard;
static size_t nheard;

static bool hear_one(void) {
    struct heard h = {.fd = -1};
    int count = 1;
    ssize_t n = recv_fds(keeper.ctl, &h.m, sizeof h.m, &h.fd, &count);
    if (n < 0 && errno == EAGAIN) return false;
    if (n <= 0) { keeper.init_dead = true; return false; }
    if (!count) h.fd = -1;
    heard = xrealloc(heard, (nheard + 1) * sizeof *heard);
    heard[nheard++] = h;
    return true;
}

/* Never blocks for good: while pid 1's queue is full, ours is emptied, so the two cannot wait for each other. */
bool ctl_tell(const struct ctl *m, const int *fds, int nfds) {
    while (!keeper.init_dead) {
        if (send_fds(keeper.ctl, m, sizeof *m, fds, nfds)) return true;
        if (errno == ETOOMANYREFS) return false; /* too many descriptors on their way: the request is refused, not the box ended */
        if (errno != EAGAIN) break;
        struct pollfd p = {keeper.ctl, POLLIN | POLLOUT, 0};
        poll(&p, 1, -1);
        if (p.revents & POLLIN) hear_one();
    }
    keeper.init_dead = true;
    return false;
}

static void counted(const struct ctl *m) {
    for (struct conn *c = keeper.conns; c; c = c->next) {
        if (c->role != ROLE_USAGE || c->ticket != m->no) continue;
        struct buf b = {0};
        usage_json(&b, keeper.disk_fd, m->status, m->cpu_ms, m->rss);
        conn_finish(c, F_REPLY, &b);
    }
}

static void hear_init(void) {
    while (hear_one()) {}
    for (size_t i = 0; i < nheard; i++) { /* handlers may tell, and so hear more */
        struct heard h = heard[i];
        switch (h.m.command) {
        case C_SPAWNED: exec_spawned(&h.m); break;
        case C_EXITED: exec_exited(&h.m); break;
        case C_KILLED: exec_killed(&h.m); break;
        case C_SIGNALED: exec_signaled(&h.m); break;
        case C_SOCKETED: net_socketed(&h.m, h.fd); break;
        case C_COUNTED: counted(&h.m); break;
        case C_FROZEN: freeze_heard(&h.m); break;
        case C_SHEPHERD: flock_arrived(&h.m, h.fd); break;
        case C_OOM: oom_told(); break;
        case C_VISIT: flock_visited(h.m.pid); break;
        default: if (h.fd >= 0) close(h.fd);
        }
    }
    nheard = 0;
}

/* Whether every process of the box is dead when this returns. */
static bool end_processes(void) {
    close(keeper.ctl);
    if (!box.namespaces) freeze_end();
    if (!box.namespaces) return sweep_descendants();
    if (keeper.init <= 0) return true; /* reaped: the number may be another's by now */
    kill(keeper.init, SIGKILL);   /* the kernel takes everyone in its pid namespace along */
    freeze_end();
    while (waitpid(keeper.init, NULL, 0) < 0 && errno == EINTR) {}
    return true;
}

/* With little on it, to unmount the disk takes the kernel a millisecond. */
static bool disk_is_light(void) {
    struct statfs fs;
    return !fstatfs(keeper.disk_fd, &fs) && (uint64_t)(fs.f_blocks - fs.f_bfree) * (uint64_t)fs.f_bsize <= 8u << 20;
}

/* The disk has no name anywhere and we are the last to hold it: whatever becomes of us, the kernel takes it back when we are gone.
 * Nobody has to wait for that, unless there is much to write or to free: then whoever fills disks waits until they are empty. */
static void shut_down(struct conn *asked) {
    drop_fd(&keeper.listener);
    bool over = end_processes();
    if (!disk_is_light()) drop_fd(&keeper.disk_fd);
    if (over) box_remove(); /* else the provider finds it by its folder, and sees to the rest */
    if (asked && over) conn_reply(asked);
    _exit(over ? 0 : 1);
}

/* Somebody may clear away our directory. Then no server finds the box any more, and nobody else would ever end it. */
#define LOOK_EVERY 15000.0 /* ms */
static double look_at;

static void look_for_socket(double now) {
    char path[4200];
    struct stat st;
    if (now < look_at) return;
    look_at = now + LOOK_EVERY;
    snprintf(path, sizeof path, "%s/agent.sock", box.dir);
    if (lstat(path, &st) && errno == ENOENT) shut_down(NULL);
}

static double next_event(void) {
    double at = look_at, ahead = flock_next();
    if (ahead > 0 && (at <= 0 || ahead < at)) at = ahead;
    if (keeper.freeze_look > 0 && (at <= 0 || keeper.freeze_look < at)) at = keeper.freeze_look;
    for (struct exec *e = keeper.frozen ? NULL : keeper.execs; e; e = e->next) {
        if (e->deadline > 0 && (at <= 0 || e->deadline < at)) at = e->deadline;
        if (e->look_at > 0 && (at <= 0 || e->look_at < at)) at = e->look_at;
        if (e->grace_at > 0 && (at <= 0 || e->grace_at < at)) at = e->grace_at;
    }
    for (size_t i = 0; i < sizeof keeper.pending / sizeof *keeper.pending; i++)
        if (keeper.pending[i].expires > 0 && (at <= 0 || keeper.pending[i].expires < at)) at = keeper.pending[i].expires;
    return at;
}

/* What a pollfd stands for. */
struct watch { enum { W_LISTENER, W_CTL, W_SIGNALS, W_CONN, W_PEER, W_EXEC, W_INPUT, W_SAVE, W_FLOCK } kind; void *what; int which; };
static struct pollfd *fds;
static struct watch *watches;
static size_t nfds, room;

static void add(int fd, short events, struct watch w) {
    if (fd < 0) return;
    if (nfds == room) {
        room = room ? room * 2 : 32;
        fds = xrealloc(fds, room * sizeof *fds);
        watches = xrealloc(watches, room * sizeof *watches);
    }
    fds[nfds] = (struct pollfd){fd, events, 0};
    watches[nfds++] = w;
}

static void add_shepherd(int fd, int which) { add(fd, POLLIN, (struct watch){W_FLOCK, NULL, which}); }

static void gather(void) {
    nfds = 0;
    add(keeper.listener, POLLIN, (struct watch){W_LISTENER, NULL, 0});
    add(keeper.ctl, POLLIN, (struct watch){W_CTL, NULL, 0});
    add(keeper.signals, POLLIN, (struct watch){W_SIGNALS, NULL, 0});
    add(keeper.saving, POLLIN, (struct watch){W_SAVE, NULL, 0});
    flock_watch(add_shepherd);
    for (struct exec *e = keeper.execs; e; e = e->next) {
        short first = (short)((exec_waits(e, 0) ? 0 : POLLIN) | (e->tty && exec_has_input(e) ? POLLOUT : 0));
        if (e->look_at <= 0 && first) add(e->out[0], first, (struct watch){W_EXEC, e, 0});
        if (!exec_waits(e, 1)) add(e->out[1], POLLIN, (struct watch){W_EXEC, e, 1});
        add(e->status_fd, POLLIN, (struct watch){W_EXEC, e, 2});
        add(e->carry_fd, POLLIN, (struct watch){W_EXEC, e, 3});
        if (!e->tty && exec_has_input(e)) add(e->in, POLLOUT, (struct watch){W_INPUT, e, 0});
    }
    for (struct conn *c = keeper.conns; c; c = c->next) {
        short events = (short)((conn_wants_input(c) ? POLLIN : 0) | ((c->out.n > c->out_at && !conn_holds_back(c)) || c->more ? POLLOUT : 0));
        add(c->fd, events, (struct watch){W_CONN, c, 0});
        if (c->listener >= 0) add(c->listener, POLLIN, (struct watch){W_PEER, c, 1});
        if (c->connecting) add(c->peer, POLLOUT, (struct watch){W_PEER, c, 0});
    }
}

static bool exec_known(const struct exec *known) {
    for (struct exec *e = keeper.execs; e; e = e->next)
        if (e == known) return true;
    return false;
}

static void reap(void) {
    for (pid_t pid; (pid = waitpid(-1, NULL, WNOHANG)) > 0;) {
        if (pid != keeper.init) { keeper.npumps--; continue; } /* or an orphan, where there are no pumps */
        keeper.init_dead = true;
        keeper.init = 0;
    }
}

static void serve(const struct watch *w, short events) {
    struct exec *e = w->what;
    struct conn *c = w->what;
    struct signalfd_siginfo s;
    switch (w->kind) {
    case W_LISTENER: conn_accept(); break;
    case W_CTL: hear_init(); break;
    case W_SAVE: save_ended(); break;
    case W_FLOCK: flock_readable(w->which); break;
    case W_SIGNALS:
        if (read(keeper.signals, &s, sizeof s) == sizeof s && s.ssi_signo == SIGTERM) shut_down(NULL);
        reap();
        break;
    case W_EXEC:
        if (!exec_known(e)) break; /* released by an earlier event of this round */
        if (w->which == 0 && e->tty && (events & POLLOUT)) exec_flush_input(e);
        if (events & ~POLLOUT) exec_readable(e, w->which);
        break;
    case W_INPUT:
        if (exec_known(e)) exec_flush_input(e);
        break;
    case W_CONN:
        if (events & POLLOUT) c->full = false;
        if (events & (POLLIN | POLLHUP | POLLERR)) {
            if (conn_wants_input(c)) conn_readable(c);
            else if (events & (POLLHUP | POLLERR)) c->dead = true;
        }
        break;
    case W_PEER:
        if (c->dead) break;
        if (w->which) net_accept(c);
        else net_connected(c);
        break;
    }
}

static void __attribute__((noreturn)) loop(void) {
    for (;;) {
        gather();
        double at = next_event(), now = now_ms();
        int wait = at <= 0 ? -1 : at <= now ? 0 : at - now > 3600e3 ? 3600000 : (int)(at - now) + 1;
        if (poll(fds, nfds, wait) < 0 && errno != EINTR) _exit(1);
        for (size_t i = 0; i < nfds; i++)
            if (fds[i].revents) serve(&watches[i], fds[i].revents);
        if (nheard) hear_init();
        if (keeper.init_dead) shut_down(NULL); /* the box died; nothing of it is left when we are gone */
        now = now_ms();
        for (struct exec *e = keeper.frozen ? NULL : keeper.execs; e; e = e->next) exec_tick(e, now);
        freeze_tick(now);
        net_tick(now);
        flock_tick(now);
        look_for_socket(now);
        for (struct conn *c = keeper.conns, *next; c; c = next) {
            next = c->next;
            if (!c->dead) conn_pump(c);
            if (c->role == ROLE_SHUTDOWN && !c->dead) shut_down(c);
            if (c->dead) conn_free(c);
        }
    }
}

void keeper_run(int launcher, int ctl_fd, pid_t init, int disk_fd) {
    sigset_t mask;
    keeper = (struct keeper){.ctl = ctl_fd, .init = init, .disk_fd = disk_fd, .listener = keeper.listener, .signals = -1, .saving = -1};
    set_nonblocking(keeper.ctl, true);
    sigemptyset(&mask);
    sigaddset(&mask, SIGCHLD);
    if (box.container) sigaddset(&mask, SIGTERM); /* the engine's way to ask */
    sigprocmask(SIG_BLOCK, &mask, NULL);
    keeper.signals = signalfd(-1, &mask, SFD_CLOEXEC | SFD_NONBLOCK);
    for (int i = 0; i < box.ncgroups; i++) drop_fd(&box.cgroup_fds[i]);
    if (!box.namespaces) { /* should the stand-in for pid 1 die, its orphans are ours to end */
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        sweep_open(-1);
    }
    struct buf b = {0};
    buf_printf(&b, "{\"pid\":%d,\"init\":%d,\"uid_base\":%u,\"started_ms\":%.3f}", (int)getpid(), (int)init, box.uid_base,
               now_ms() - box.started);
    bool answered = launcher < 0 || frame_json(launcher, F_REPLY, &b); /* an engine does not ask */
    buf_free(&b);
    drop_fd(&launcher);
    if (!answered) shut_down(NULL); /* whoever asked is gone: a box nobody knows of must not live */
    look_at = now_ms() + LOOK_EVERY;
    flock_start();
    reap(); /* of whom we had no signal yet */
    loop();
}
