/* What this kernel grants, tried for real in a child that is gone afterwards. */
#include "agent.h"
#include <linux/filter.h>
#include <linux/loop.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <sys/xattr.h>

struct finding { int ok, err, value; char stage[48]; };

static bool say(struct finding *f, const char *stage) {
    f->err = errno;
    snprintf(f->stage, sizeof f->stage, "%s", stage);
    return false;
}

static bool put(const char *path, const char *text) {
    cleanup_fd int fd = open(path, O_WRONLY | O_CLOEXEC);
    return fd >= 0 && write(fd, text, strlen(text)) >= 0;
}

static bool in_userns(struct finding *f, unsigned long flags) {
    char map[64];
    uid_t uid = geteuid();
    gid_t gid = getegid();
    if (unshare((int)flags)) return say(f, "unshare");
    if (!put("/proc/self/setgroups", "deny")) return say(f, "setgroups");
    snprintf(map, sizeof map, "0 %u 1", (unsigned)gid);
    if (!put("/proc/self/gid_map", map)) return say(f, "gid_map");
    snprintf(map, sizeof map, "0 %u 1", (unsigned)uid);
    return put("/proc/self/uid_map", map) || say(f, "uid_map");
}

/* Runs in a child; from here on a pid namespace's first process. */
static bool try_mounts(struct finding *f, bool overlay) {
    char options[256];
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) return say(f, "make private");
    if (mount("tmpfs", "/tmp", "tmpfs", 0, "size=1m,nr_inodes=64")) return say(f, "tmpfs");
    if (mkdir("/tmp/a", 0755) || mkdir("/tmp/b", 0755) || mkdir("/tmp/root", 0755) || mkdir("/tmp/proc", 0755)) return say(f, "mkdir");
    if (overlay) {
        snprintf(options, sizeof options, "lowerdir=/tmp/a:/tmp/b,userxattr");
        return !mount("overlay", "/tmp/root", "overlay", MS_RDONLY, options) || say(f, "overlay");
    }
    if (mount("proc", "/tmp/proc", "proc", 0, NULL)) return say(f, "proc");
    if (mount("/usr", "/tmp/a", NULL, MS_BIND | MS_REC, NULL)) return say(f, "bind");
    if (mount("/tmp", "/tmp", NULL, MS_BIND, NULL) || chdir("/tmp/root") || mount(".", ".", NULL, MS_BIND, NULL)) return say(f, "bind");
    return true;
}

/* A tmpfs to write on, over a layer: what a box's disk is without root. Deletions need extended attributes of users there. */
static bool try_upper(struct finding *f) {
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) return say(f, "make private");
    if (mount("tmpfs", "/tmp", "tmpfs", 0, "size=1m,nr_inodes=64")) return say(f, "tmpfs");
    if (mkdir("/tmp/a", 0755) || mkdir("/tmp/b", 0755) || mkdir("/tmp/c", 0755) || mkdir("/tmp/d", 0755)) return say(f, "mkdir");
    if (setxattr("/tmp/b", "user.overlay.probe", "y", 1, 0)) return say(f, "user xattr on tmpfs");
    return !mount("overlay", "/tmp/d", "overlay", 0, "lowerdir=/tmp/a,upperdir=/tmp/b,workdir=/tmp/c,userxattr") || say(f, "overlay");
}

/* As root the layers' uids are mapped to the box's, which the file system that they are on must be able to. */
static bool try_idmap(struct finding *f, const char *path) {
    struct fault fault = {0};
    cleanup_fd int userns = map_namespace(268435456, 65536, &fault);
    errno = fault.err;
    if (userns < 0) return say(f, "user namespace");
    cleanup_fd int tree = map_tree(path, userns, true);
    return tree >= 0 || say(f, "idmapped mount");
}

static bool try_seccomp(struct finding *f) {
    struct sock_filter allow = {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW};
    struct sock_fprog p = {1, &allow};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return say(f, "no_new_privs");
    return !syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &p) || say(f, "seccomp");
}

static bool try_loop(struct finding *f) {
    cleanup_fd int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    if (control < 0) return say(f, "open loop-control");
    f->value = ioctl(control, LOOP_CTL_GET_FREE);
    char path[32];
    snprintf(path, sizeof path, "/dev/loop%d", f->value);
    cleanup_fd int loop = f->value < 0 ? -1 : open(path, O_RDWR | O_CLOEXEC);
    return loop >= 0 || say(f, "open loop device");
}

static bool in_grandchild(struct finding *f, const char *what, int out) {
    pid_t pid = fork(); /* the first process of the new pid namespace, as mounting proc wants it */
    if (!pid) {
        f->ok = !strcmp(what, "layers") ? try_upper(f) : try_mounts(f, !strcmp(what, "overlay"));
        (void)!write(out, f, sizeof *f);
        _exit(0);
    }
    if (pid < 0) return say(f, "fork");
    waitpid(pid, NULL, 0);
    _exit(0);
}

static bool try_one(const char *what, const char *path, struct finding *f, int out) {
    if (!strcmp(what, "userns")) return in_userns(f, ALL_NAMESPACES);
    if (!strcmp(what, "layers") && path) return try_idmap(f, path);
    if (!strcmp(what, "mounts") || !strcmp(what, "overlay") || !strcmp(what, "layers"))
        return in_userns(f, ALL_NAMESPACES) && in_grandchild(f, what, out);
    if (!strcmp(what, "seccomp")) return try_seccomp(f);
    if (!strcmp(what, "loop")) return try_loop(f);
    if (!strcmp(what, "landlock")) {
        f->value = landlock_abi();
        return f->value > 0 || say(f, "landlock");
    }
    errno = EINVAL;
    return say(f, "unknown probe");
}

void probe_serve(int conn, const struct json *request) {
    const char *what = json_str(request, "what"), *path = json_str(request, "path");
    struct finding f = {0};
    struct buf b = {0};
    int p[2];
    signal(SIGCHLD, SIG_DFL);
    if (!what || pipe2(p, O_CLOEXEC)) _exit(1);
    pid_t pid = fork();
    if (!pid) {
        f.ok = try_one(what, path, &f, p[1]);
        (void)!write(p[1], &f, sizeof f);
        _exit(0);
    }
    close(p[1]);
    if (read(p[0], &f, sizeof f) != sizeof f) { f.err = ECHILD; snprintf(f.stage, sizeof f.stage, "the probe's process died"); }
    waitpid(pid, NULL, 0);
    buf_printf(&b, "{\"ok\":%s,\"errno\":%d,\"value\":%d,\"stage\":", f.ok ? "true" : "false", f.ok ? 0 : f.err, f.value);
    buf_json_string(&b, f.stage, strlen(f.stage));
    buf_add(&b, "}", 1);
    frame_json(conn, F_REPLY, &b);
    _exit(0);
}
