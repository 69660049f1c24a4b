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

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

/* Keeps 0, 1, 2, the cgroups' and the uid lock's descriptors, and the named ones. */
void close_all_but(int a, int b, int c, int d) {
    int keep[MAX_CGROUPS + 6] = {a, b, c, d, 2}, n = 5;
    for (int i = 0; i < box.ncgroups; i++) keep[n++] = box.cgroup_fds[i];
    for (int low = 3;;) {
        int next = -1;
        for (int i = 0; i < n; i++)
            if (keep[i] >= low && (next < 0 || keep[i] < next)) next = keep[i];
        unsigned last = next < 0 ? ~0u : (unsigned)next - 1;
        if ((unsigned)low <= last && syscall(SYS_close_range, (unsigned)low, last, 0))
            for (int fd = low; fd <= (int)(last > 65536 ? 65536 : last); fd++) close(fd);
        if (next < 0) return;
        low = next + 1;
    }
}

static bool bind_socket(struct fault *f) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    if ((size_t)snprintf(a.sun_path, sizeof a.sun_path, "%s/agent.sock", box.dir) >= sizeof a.sun_path) return fault_set(f, ENAMETOOLONG, "agent.sock");
    keeper.listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    umask(077);
    if (keeper.listener < 0 || bind(keeper.listener, (struct sockaddr *)&a, sizeof a)) return fault_set(f, errno, "bind agent.sock");
    return true;
}

static void set_oom_score(const char *score) {
    cleanup_fd int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) (void)!write(fd, score, strlen(score));
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
    if (ranged) act_as(box.uid_base, SECBIT_NO_SETUID_FIXUP); /* keeping our capabilities */
    set_oom_score("500"); /* inherited by the box: when the host runs out of memory, a box goes before the host's own */
    if (box.namespaces) flags |= CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP;
    pid_t pid = (pid_t)syscall(SYS_clone, flags, 0, 0, 0, 0);
    if (!pid) init_main(ctl);
    if (pid < 0) fault_set(f, errno, "clone");
    if (ranged) act_as(0, 0);
    set_oom_score("0");
    return pid;
}

/* Tells pid 1 to go and waits until its root stands. */
static bool await_init(int ctl, int *disk_fd, struct fault *f) {
    struct ctl m = {.command = C_GO};
    int nfds = 1;
    if (!send_fds(ctl, &m, sizeof m, NULL, 0) || recv_fds(ctl, &m, sizeof m, disk_fd, &nfds) != sizeof m) return fault_set(f, ECHILD, "pid 1 ended during set-up");
    if (!nfds) *disk_fd = -1;
    if (m.command == C_READY) return true;
    m.stage[sizeof m.stage - 1] = 0;
    return fault_set(f, m.err, "%s", m.stage);
}

static bool prepare(struct fault *f) {
    if (!box_claim_uids(f) || !box_make_cgroups(f)) return false;
    if (box.namespaces && box.user_mode == USER_RANGE) {
        if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) return fault_set(f, errno, "mount namespace");
    }
    return disk_mount(f) && bind_socket(f);
}

static void undo(pid_t init) {
    if (init > 0) {
        kill(init, SIGKILL);
        waitpid(init, NULL, 0);
    }
    remove_cgroups(box.cgroups, box.ncgroups);
    if (box.disk_kind && !strcmp(box.disk_kind, "dir") && box.disk_path) remove_tree(AT_FDCWD, box.disk_path);
    if (box.dir) remove_tree(AT_FDCWD, box.dir);
}

static void launch(int conn, char *text, size_t n, void *filter, size_t filter_len) {
    struct fault f = {0};
    int ctl[2] = {-1, -1}, disk_fd = -1;
    pid_t init = -1;
    box.filter = filter;
    box.filter_len = filter_len;
    box.started = now_ms();
    signal(SIGCHLD, SIG_DFL);
    bool ok = box_parse(text, n, &f) && prepare(&f);
    if (ok && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ctl)) ok = fault_set(&f, errno, "socketpair");
    if (ok) ok = (init = start_init(ctl[1], &f)) > 0;
    drop_fd(&ctl[1]);
    if (ok && box.namespaces) ok = box_map_user(init, &f);
    if (ok) ok = await_init(ctl[0], &disk_fd, &f);

    if (ok && listen(keeper.listener, 256)) ok = fault_set(&f, errno, "listen");
    if (ok) keeper_run(conn, ctl[0], init, disk_fd);
    undo(init);
    frame_error(conn, &f, NULL);
    _exit(1);
}

static bool same_program(pid_t pid) {
    char path[64], a[4096], b[4096];
    snprintf(path, sizeof path, "/proc/%d/exe", (int)pid);
    ssize_t n = readlink(path, a, sizeof a), m = readlink("/proc/self/exe", b, sizeof b);
    /* " (deleted)" follows when the file was replaced since, as by an upgrade */
    return n >= m && m > 0 && !memcmp(a, b, (size_t)m) && (n == m || a[m] == ' ');
}

static void kill_uid(uid_t uid) {
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
    pid_t pid = (pid_t)json_num(r, "pid", 0);
    uid_t uid = (uid_t)json_num(r, "uid", 0);
    int n = 0;
    struct buf b = {0};
    signal(SIGCHLD, SIG_DFL);
    if (pid > 1 && same_program(pid)) kill(pid, SIGKILL);
    for (const struct json *j = list ? list->child : NULL; j && n < MAX_CGROUPS; j = j->next)
        if (j->type == J_STR) dirs[n++] = j->str;
    remove_cgroups(dirs, n);
    if (uid > 0) kill_uid(uid);
    if (disk) remove_tree(AT_FDCWD, disk);
    bool gone = !dir || remove_tree(AT_FDCWD, dir) || errno == ENOENT;
    buf_printf(&b, "{\"removed\":%s}", gone ? "true" : "false");
    frame_json(conn, F_REPLY, &b);
    _exit(0);
}

/* One connection: HELLO, REQUEST, and for a launch the seccomp program. */
static void serve(int conn) {
    struct header h;
    char *hello, *text, *p;
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
    if (!frame_read(conn, &h, &hello) || h.type != F_HELLO) _exit(1);
    free(hello);
    frame_write(conn, F_HELLO, 0, 0, "{\"version\":1}", 13);
    if (!frame_read(conn, &h, &text) || h.type != F_REQUEST) _exit(1);
    size_t n = h.length;
    cleanup_free char *copy = strdup(text);
    struct json *r = copy ? json_parse(copy, strlen(copy)) : NULL;
    const char *op = json_str(r, "op");
    if (op && !strcmp(op, "sweep")) sweep(conn, r);
    if (op && !strcmp(op, "probe")) probe_serve(conn, r);
    if (!op || strcmp(op, "launch")) {
        struct fault f = {.code = "unsupported", .stage = "request"};
        frame_error(conn, &f, "unknown operation");
        _exit(1);
    }
    free(r);
    while (frame_read(conn, &h, &p) && h.type == F_DATA) {
        buf_add(&filter, p, h.length);
        free(p);
    }
    launch(conn, text, n, filter.p, filter.n);
}

int launcher_main(int listener, int lifeline) {
    signal(SIGCHLD, SIG_IGN); /* nobody here waits: children are reaped by the kernel */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    set_nonblocking(listener, true);
    for (;;) {
        struct pollfd p[2] = {{listener, POLLIN, 0}, {lifeline, 0, 0}};
        if (poll(p, 2, -1) < 0 && errno != EINTR) return 1;
        if (p[1].revents) return 0; /* the server is gone; boxes live on */
        int conn = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (conn < 0) continue;
        if (!fork()) {
            close(listener);
            close(lifeline);
            serve(conn);
        }
        close(conn);
    }
}
