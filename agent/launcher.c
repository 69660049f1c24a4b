/* The launcher forks keepers, so that a box is no child of the server, and the server's size does not slow a fork. */
#include "agent.h"
#include "keeper.h"
#include <linux/sched.h>
#include <linux/securebits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

/* Keeps 0, 1, 2, the cgroups' and the uid lock's descriptors, what is to be mounted, and the named ones. The lock is held by whoever is of the box:
 * its uids are given to no other before all are gone. */
void close_all_but(int a, int b) {
    int keep[MAX_CGROUPS + MAX_MOUNTS + 5] = {a, b, box.uid_lock, box.host, box.disk}, n = 5;
    for (int i = 0; i < MAX_MOUNTS; i++)
        if (box.trees[i]) keep[n++] = box.trees[i];
    for (int i = 0; i < box.ncgroups; i++) keep[n++] = box.cgroup_fds[i];
    for (int low = 3;;) {
        int next = -1;
        for (int i = 0; i < n; i++)
            if (keep[i] >= low && (next < 0 || keep[i] < next)) next = keep[i];
        unsigned last = next < 0 ? LAST_FD : (unsigned)next - 1;
        if ((unsigned)low <= last && syscall(SYS_close_range, (unsigned)low, last, 0))
            for (int fd = low; fd <= (int)(last > 65536 ? 65536 : last); fd++) close(fd);
        if (next < 0) return;
        low = next + 1;
    }
}

static bool box_address(const char *dir, struct sockaddr_un *a) {
    *a = (struct sockaddr_un){.sun_family = AF_UNIX};
    return (size_t)snprintf(a->sun_path, sizeof a->sun_path, "%s/agent.sock", dir) < sizeof a->sun_path;
}

bool bind_socket(struct fault *f) {
    struct sockaddr_un a;
    if (!box_address(box.dir, &a)) return fault_set(f, ENAMETOOLONG, "agent.sock");
    keeper.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    umask(077);
    if (keeper.listener < 0 || bind(keeper.listener, (struct sockaddr *)&a, sizeof a)) return fault_set(f, errno, "bind agent.sock");
    return true;
}

/* What a user namespace holds of inotify instances, queued signals, timers and message queues counts against whoever made
 * it, too. So each box's is made by the box's own user: otherwise one box could use up what root has, and all boxes share. */
static void act_as(uid_t uid, unsigned long securebits) {
    prctl(PR_SET_SECUREBITS, securebits, 0, 0, 0);
    if (seteuid(uid)) {} /* without it the box still starts; only that counter is shared */
}

static pid_t start_init(int ctl, struct fault *f) {
    unsigned long flags = SIGCHLD;
    bool ranged = box.namespaces && box.user_mode == USER_RANGE;
    cleanup_fd int home = box.bare ? nowhere_enter(f) : -1;
    if (box.bare && home < 0) return -1;
    if (ranged) act_as(box.uid_base, SECBIT_NO_SETUID_FIXUP); /* keeping our capabilities */
    if (box.namespaces) flags |= box.net_made ? ALL_NAMESPACES & ~(unsigned long)CLONE_NEWNET : ALL_NAMESPACES;
    pid_t pid = (pid_t)syscall(SYS_clone, flags, 0, 0, 0, 0);
    if (!pid) init_main(ctl);
    if (pid < 0) fault_set(f, errno, "clone");
    if (ranged) act_as(0, 0);
    if (box.bare) nowhere_leave(home, f);
    nowhere_let_go();
    /* inherited by the whole box: when the host runs out of memory, a box goes before the host's own */
    if (pid > 0) write_proc(pid, "oom_score_adj", "500", &(struct fault){0});
    return pid;
}

bool await_init(int ctl, int *disk_fd, struct fault *f) {
    struct ctl m;
    struct timeval patience = {15, 0}; /* a file system of the host may hang */
    int nfds = 1;
    setsockopt(ctl, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    ssize_t n = recv_fds(ctl, &m, sizeof m, disk_fd, &nfds);
    if (n < 0 && errno == ECONNRESET) n = recv_fds(ctl, &m, sizeof m, NULL, NULL); /* it left with a word of ours unread: told first, once */
    if (n != sizeof m) return fault_set(f, ECHILD, "pid 1 ended during set-up");
    if (!nfds) *disk_fd = -1;
    if (m.command == C_READY) return true;
    m.stage[sizeof m.stage - 1] = 0;
    return fault_set(f, m.err, "%s", m.stage);
}

bool tell_init(int ctl, enum ctl_command word, const int *fds, int nfds, struct fault *f) {
    struct ctl m = {.command = word};
    if (send_fds(ctl, &m, sizeof m, fds, nfds)) return true;
    return await_init(ctl, &(int){-1}, f) && fault_set(f, ECHILD, "pid 1 does not listen"); /* it said why it ended */
}

static bool own_mounts(struct fault *f) {
    if (!unshare(CLONE_NEWNS) && !mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) return true;
    return fault_set(f, errno, "mount namespace");
}

/* In a namespace of our own there is no file of a mount namespace, which the kernel does not move into another, and nothing that may not
 * be bound. */
static bool open_host(struct fault *f) {
    if (!box.bare || rootfs_needs_host()) return own_mounts(f);
    if (rootfs_open(f)) return true;
    if (f->err != EINVAL) return false;
    *f = (struct fault){0};
    rootfs_close();
    return own_mounts(f) && rootfs_open(f);
}

/* What pid 1 begins with. */
static bool prepare(struct fault *f) {
    if (!box_claim_uids(f) || !bind_socket(f)) return false; /* both where the host sees them */
    if (box.namespaces && box.user_mode == USER_RANGE) {
        box.bare = nowhere_is();
        if (!open_host(f)) return false;
        cleanup_fd int net = ahead_take_net();
        box.net_made = net >= 0 && !setns(net, CLONE_NEWNET); /* we have no use for another ourselves */
    }
    bool mounted = disk_mount(f);
    ahead_let_go();
    return mounted && layers_map(f);
}

/* What it needs at the end, and what we do for ourselves, while it makes the root. */
static bool prepare_meanwhile(int ctl, struct fault *f) {
    if (!disk_prepare(f) || (box.namespaces && !tell_init(ctl, C_DISK, NULL, 0, f))) return false;
    disk_let_go(); /* the box has its own hold on it */
    if (!box_make_cgroups(f) || !tell_init(ctl, C_CGROUPS, box.cgroup_fds, box.ncgroups, f)) return false;
    if (listen(keeper.listener, 256)) return fault_set(f, errno, "listen");
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    return confine_keeper(f);
}

static void undo(pid_t init) {
    disk_let_go(); /* mounted before the box has a hold on it, where the host sees it */
    if (init > 0) {
        kill(init, SIGKILL);
        waitpid(init, NULL, 0);
    }
    box_remove();
}

static void launch(int conn, struct json *spec, const struct buf *filter) {
    struct fault f = {0};
    int ctl[2] = {-1, -1}, disk_fd = -1;
    pid_t init = -1;
    box.filter = filter;
    box.started = now_ms();
    signal(SIGCHLD, SIG_DFL);
    bool ok = box_parse(spec, &f) && prepare(&f);
    if (ok && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ctl)) ok = fault_set(&f, errno, "socketpair");
    if (ok) ok = (init = start_init(ctl[1], &f)) > 0 && !f.err;
    drop_fd(&ctl[1]);
    if (ok && box.namespaces) ok = box_map_user(init, &f);
    if (ok) ok = tell_init(ctl[0], C_GO, NULL, 0, &f) && prepare_meanwhile(ctl[0], &f) && await_init(ctl[0], &disk_fd, &f);
    if (ok) keeper_run(conn, ctl[0], init, disk_fd);
    undo(init);
    frame_error(conn, &f, NULL);
    _exit(1);
}

/* Whoever listens on its socket is the box's keeper. The recorded number alone may be another's by now, even another
 * keeper's. */
static void kill_keeper(const char *dir, pid_t recorded) {
    struct sockaddr_un a;
    struct ucred peer = {0};
    socklen_t n = sizeof peer;
    cleanup_fd int s = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (s < 0 || !dir || !box_address(dir, &a)) return;
    if (!connect(s, (struct sockaddr *)&a, sizeof a)) getsockopt(s, SOL_SOCKET, SO_PEERCRED, &peer, &n);
    else if (errno == EAGAIN) peer.pid = recorded; /* its queue is full: it lives, so the number is still its own */
    if (peer.pid > 1) kill(peer.pid, SIGKILL);
}

/* Where programs have a uid of the host. Not before the claim on it has ended with the last of ours: once it is another
 * box's, they are another box's processes. */
static void kill_uid(uid_t uid) {
    cleanup_fd int claim = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    for (int tries = 0; !box_bind_slot(claim, uid - 1000 /* plan.py: who a program is in its slot */); tries++) {
        if (tries == 200) return;
        usleep(5000);
    }
    pid_t pid = fork();
    if (!pid) {
        if (!setresgid(uid, uid, uid) && !setresuid(uid, uid, uid)) kill(-1, SIGKILL);
        _exit(0);
    }
    if (pid > 0) waitpid(pid, NULL, 0);
}

/* What a keeper that was killed left behind. */
static void sweep(int conn, const struct json *r) {
    const char *dirs[MAX_CGROUPS], *dir = json_str(r, "dir"), *disk = json_str(r, "disk_dir");
    const struct json *list = json_get(r, "cgroups");
    pid_t pid = (pid_t)json_int(r, "pid", 0, 0, INT32_MAX);
    uid_t uid = (uid_t)json_int(r, "uid", 0, 0, UINT32_MAX);
    int n = 0;
    struct buf b = {0};
    signal(SIGCHLD, SIG_DFL);
    kill_keeper(dir, pid);
    for (const struct json *j = list ? list->child : NULL; j && n < MAX_CGROUPS; j = j->next)
        if (j->type == J_STR) dirs[n++] = j->str;
    bool gone = remove_cgroups(dirs, n);
    if (uid > 1000) kill_uid(uid);
    for (int tries = 0; !get_rid_of(disk); tries++, usleep(10000)) /* while they die */
        if (tries == 100) { gone = false; break; }
    gone = gone && get_rid_of(dir);
    buf_printf(&b, "{\"removed\":%s}", gone ? "true" : "false");
    frame_json(conn, F_REPLY, &b);
    _exit(0);
}

/* One connection: HELLO, REQUEST, and for a launch the seccomp program. */
static void serve(int conn) {
    struct header h;
    char *text, *p;
    struct timeval patience = {20, 0};
    struct buf filter = {0};
    struct rlimit files;
    setsid();
    if (!getrlimit(RLIMIT_NOFILE, &files)) { /* for ourselves; programs get their own limit */
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    prctl(PR_SET_NAME, "capsule-agent", 0, 0, 0);
    setsockopt(conn, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    if (!frame_read(conn, &h, &text) || h.type != F_HELLO) _exit(1);
    free(text);
    frame_write(conn, F_HELLO, 0, 0, "{\"version\":1}", 13);
    if (!frame_read(conn, &h, &text) || h.type != F_REQUEST) _exit(1);
    struct json *r = json_parse(text, h.length);
    const char *op = json_str(r, "op");
    if (op && !strcmp(op, "sweep")) sweep(conn, r);
    if (op && !strcmp(op, "probe")) probe_serve(conn, r);
    if (!op || strcmp(op, "launch")) {
        struct fault f = {.code = "unsupported", .stage = "request"};
        frame_error(conn, &f, "unknown operation");
        _exit(1);
    }
    for (;;) {
        if (!frame_read(conn, &h, &p) || (h.type != F_DATA && h.type != F_EOF)) _exit(1); /* never a box with half a filter */
        if (h.type == F_EOF) launch(conn, r, &filter);
        buf_add(&filter, p, h.length);
        free(p);
    }
}

int launcher_main(int listener, int lifeline) {
    signal(SIGCHLD, SIG_IGN); /* nobody here waits: children are reaped by the kernel */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    set_nonblocking(listener, true);
    int ahead = ahead_open();
    nowhere_make();
    for (;;) {
        struct pollfd p[3] = {{listener, POLLIN, 0}, {lifeline, 0, 0}, {ahead, POLLIN, 0}};
        if (poll(p, 3, ahead_patience()) < 0 && errno != EINTR) return 1;
        if (p[1].revents) return 0; /* the server is gone; boxes live on */
        if (p[2].revents) ahead_hear();
        if (ahead_due() && !fork()) {
            close(listener);
            close(lifeline);
            ahead_make();
        }
        int conn = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (conn < 0 && (errno == EMFILE || errno == ENFILE)) usleep(5000); /* rather wait than spin */
        if (conn < 0) continue;
        if (!fork()) {
            close(listener);
            close(lifeline);
            serve(conn);
        }
        close(conn);
        ahead_given();
    }
}
