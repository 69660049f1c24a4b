/* Root of the box, who is nobody outside: a user namespace below the box's own in which the sandbox's user, and nobody
 * else, is 0. Its files are the user's files, its processes the user's processes; what it may do beyond that user is the short list
 * of confine.c, and holds for what that user owns. Pid 1, the host and other boxes are as far away as before.
 *
 * Made when the first program asks for it; where sudo's door is open and programs have the uid of whoever makes it, before they run:
 * they could stop him, and pid 1 would wait. Its owner is whoever forks programs, so that no program may enter it. */
#include "agent.h"
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define PATIENCE 2000 /* ms */

bool wants_root(const struct json *request) {
    const char *user = json_str(request, "user");
    return user && !strcmp(user, "root");
}

/* What is counted per user namespace, and so cannot be had by way of rlimits. Behind seccomp: no further namespaces;
 * UTS and cgroup ones are made per exec. In front of the user who runs a server without root: inotify. */
void limit_namespace(void) {
    static const struct { const char *name, *value; } limits[] = {
        {"max_inotify_instances", "32"}, {"max_inotify_watches", "16384"}, {"max_fanotify_groups", "0"},
        {"max_user_namespaces", "0"}, {"max_pid_namespaces", "0"}, {"max_mnt_namespaces", "0"}, {"max_net_namespaces", "0"},
        {"max_ipc_namespaces", "0"}, {"max_time_namespaces", "0"}};
    for (size_t i = 0; i < sizeof limits / sizeof *limits; i++) {
        char path[64];
        snprintf(path, sizeof path, "sys/user/%s", limits[i].name);
        cleanup_fd int fd = openat(sweep_proc(), path, O_WRONLY | O_CLOEXEC);
        if (fd >= 0) (void)!write(fd, limits[i].value, strlen(limits[i].value)); /* a kernel without it has no such thing to limit */
    }
}

/* Nobody in the box may make one (see above), for the moment that it takes but us. */
static void permit(const char *count) {
    cleanup_fd int fd = box.namespaces && sweep_proc() >= 0 ? openat(sweep_proc(), "sys/user/max_user_namespaces", O_WRONLY | O_CLOEXEC) : -1;
    if (fd >= 0) (void)!write(fd, count, strlen(count));
}

/* Lives until the namespace is held by a descriptor. Its limit becomes that of the namespace, as a whole. Where programs have the
 * same uid they may signal it, and look into it once its maps can be written: by then it has nothing that they have not. */
static void __attribute__((noreturn)) live_in_it(int said) {
    struct fault f = {0};
    box.ncgroups = 0; /* not its to hold either */
    box.uid_lock = -1;
    close_all_but(said, -1);
    rlim_t most = (rlim_t)json_int(json_get(box.spec, "rlimits"), "nproc", 0, 0, MAX_INT);
    struct rlimit r = {most, most};
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (most) setrlimit(RLIMIT_NPROC, &r);
    int32_t err = unshare(CLONE_NEWUSER) ? errno : 0;
    if (!err && !confine_bystander(&f)) err = f.err;
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0); /* else its maps are not its parent's to write */
    (void)!write(said, &err, sizeof err);
    for (;;) pause();
}

static int take_hold(pid_t pid, int heard, struct fault *f) {
    char uids[32], gids[32], path[40];
    int32_t err = ECHILD;
    if (!readable_within(heard, PATIENCE)) return fault_set(f, ETIMEDOUT, "user namespace"), -1; /* somebody has stopped it */
    if (RETRY(read(heard, &err, sizeof err)) != sizeof err || err) return fault_set(f, err, "user namespace"), -1;
    snprintf(uids, sizeof uids, "0 %u 1\n", (unsigned)box.uid);
    snprintf(gids, sizeof gids, "0 %u 1\n", (unsigned)box.gid);
    if (!write_proc(pid, "setgroups", "deny", f) || !write_proc(pid, "gid_map", gids, f) || !write_proc(pid, "uid_map", uids, f)) return -1;
    snprintf(path, sizeof path, "/proc/%d/ns/user", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) fault_set(f, errno, "user namespace");
    return fd;
}

int root_namespace(struct fault *f) {
    int said[2];
    if (pipe2(said, O_CLOEXEC)) return fault_set(f, errno, "pipe"), -1;
    permit("1");
    pid_t pid = fork();
    if (!pid) live_in_it(said[1]);
    close(said[1]);
    int fd = pid < 0 ? (fault_set(f, errno, "fork"), -1) : take_hold(pid, said[0], f);
    close(said[0]);
    permit("0");
    if (pid > 0) {
        kill(pid, SIGKILL);
        RETRY(waitpid(pid, NULL, 0));
    }
    return fd;
}

static int held = -1;          /* pid 1's, for all programs of the box */
static struct fault none_held; /* why not, where it was tried before anybody ran */

void root_ahead(void) {
    held = root_namespace(&none_held);
    if (held < 0 && !none_held.err) none_held.err = EAGAIN;
}

int root_copy(struct fault *f) {
    *f = none_held;
    if (held < 0 && !f->err) held = root_namespace(f);
    return held < 0 ? -1 : lift_fd(held);
}

void root_let_go(void) { drop_fd(&held); }

void fault_root(struct fault *f) {
    char why[sizeof f->stage];
    snprintf(why, sizeof why, "%s", f->err ? strerror(f->err) : "no descriptor left");
    fault_set(f, f->err == ETIMEDOUT ? EAGAIN : EOPNOTSUPP, "no root here: %s", why);
}
