/* The root a program sees. Runs in pid 1, in the box's own mount namespace, with capabilities over that namespace
 * only. The provider's table says what goes where (spec/launch.md); nothing is decided here. */
#include "agent.h"
#include "mounts.h"
#include <net/if.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>

static char root[4096];

static bool restrict_mount(const char *path, uint64_t attrs) {
    struct attr a = {.set = attrs};
    if (!syscall(SYS_mount_setattr, AT_FDCWD, path, AT_RECURSIVE, &a, sizeof a)) return true;
    if (errno != ENOSYS) return false;
    struct statvfs now;
    unsigned long flags = MS_BIND | MS_REMOUNT; /* before 5.12: the top mount only, and what is set must be said again */
    if (!statvfs(path, &now)) flags |= now.f_flag & (ST_RDONLY | ST_NOSUID | ST_NODEV | ST_NOEXEC);
    if (attrs & SET_RDONLY) flags |= MS_RDONLY;
    if (attrs & SET_NOSUID) flags |= MS_NOSUID;
    if (attrs & SET_NODEV) flags |= MS_NODEV;
    if (attrs & SET_NOEXEC) flags |= MS_NOEXEC;
    return !mount(NULL, path, NULL, flags, NULL);
}

static bool do_bind(const struct json *m, const char *from, const char *to, struct fault *f) {
    uint64_t attrs = SET_NOSUID;
    if (json_bool(m, "ro", false)) attrs |= SET_RDONLY;
    if (!json_bool(m, "dev", false)) attrs |= SET_NODEV;
    if (!json_bool(m, "exec", true)) attrs |= SET_NOEXEC;
    if (mount(from, to, NULL, MS_BIND | MS_REC, NULL)) return fault_set(f, errno, "bind %.40s", from);
    return restrict_mount(to, attrs) || fault_set(f, errno, "restrict %.36s", from);
}

static bool do_overlay(const struct json *m, const char *to, struct fault *f) {
    struct buf o = {0};
    const struct json *lower = json_get(m, "lower");
    const char *extra = json_str(m, "options");
    for (const struct json *l = lower ? lower->child : NULL; l; l = l->next)
        if (l->type == J_STR) buf_printf(&o, "%s%s", o.n ? ":" : "lowerdir=", l->str);
    if (extra) buf_printf(&o, ",%s", extra);
    int failed = o.p ? mount("overlay", to, "overlay", MS_NOSUID | MS_NODEV | MS_RDONLY, o.p) : (errno = EINVAL, -1);
    buf_free(&o);
    return !failed || fault_set(f, errno, "overlay");
}

static bool do_tmpfs(const struct json *m, const char *to, struct fault *f) {
    char options[128];
    snprintf(options, sizeof options, "size=%.0f,nr_inodes=%.0f,mode=%o", json_num(m, "size", 1 << 20), json_num(m, "inodes", 1024),
             (unsigned)json_num(m, "mode", 0755));
    unsigned long flags = MS_NOSUID | MS_NODEV | (json_bool(m, "ro", false) ? MS_RDONLY : 0);
    return !mount("tmpfs", to, "tmpfs", flags, options) || fault_set(f, errno, "tmpfs %.40s", to);
}

/* By /dev/null, or the empty folder `from`. Every kernel has its own set of what is masked, and modules come and go. */
static bool do_mask(const char *from, const char *to, struct fault *f) {
    if (!mount(from ? from : "/dev/null", to, NULL, MS_BIND, NULL))
        return !from || restrict_mount(to, SET_RDONLY | SET_NOSUID | SET_NODEV | SET_NOEXEC) || fault_set(f, errno, "restrict %.36s", to);
    int err = errno;
    return (err == ENOENT && access(to, F_OK)) || fault_set(f, err, "mask %.40s", to);
}

/* The keeper makes the folders of the disk while we are busy with the rest. */
static bool disk_is_ready(struct fault *f) {
    static bool told;
    return told || (told = init_await(C_DISK, NULL, NULL, f));
}

static bool do_disk(const struct json *m, const char *name, const char *to, struct fault *f) {
    char from[4200];
    snprintf(from, sizeof from, "%s/disk/%s", box.stage, name);
    return disk_is_ready(f) && do_bind(m, from, to, f);
}

static bool do_read_only(const char *to, struct fault *f) {
    if (mount(to, to, NULL, MS_BIND | MS_REC, NULL)) return errno == ENOENT || fault_set(f, errno, "bind %.40s", to);
    return restrict_mount(to, SET_RDONLY | SET_NOSUID | SET_NODEV | SET_NOEXEC) ||
           fault_set(f, errno, "ro %.40s", to);
}

/* We are in the new root, but for the entry that makes it. No component of `to` is a symlink a program could have planted: the box
 * is still empty. */
static bool do_mount(const struct json *m, struct fault *f) {
    const char *type = json_str(m, "type"), *to = json_str(m, "to"), *from = json_str(m, "from");
    if (!type || !to) return fault_set(f, EINVAL, "launch: mounts[] needs type and to");
    if (!*to) to = root;
    if (!strcmp(type, "bind") && from) return do_bind(m, from, to, f);
    if (!strcmp(type, "disk") && from) return do_disk(m, from, to, f);
    if (!strcmp(type, "overlay")) return do_overlay(m, to, f);
    if (!strcmp(type, "tmpfs")) return do_tmpfs(m, to, f);
    if (!strcmp(type, "proc"))
        return !mount("proc", to, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2") || fault_set(f, errno, "mount proc");
    if (!strcmp(type, "devpts"))
        return !mount("devpts", to, "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,max=64") ||
               fault_set(f, errno, "mount devpts");
    if (!strcmp(type, "mask")) return do_mask(from, to, f);
    if (!strcmp(type, "ro")) return do_read_only(to, f);
    return fault_set(f, EINVAL, "launch: mount type %.20s", type);
}

static bool make_root(struct fault *f) {
    const struct json *mounts = json_get(box.spec, "mounts");
    snprintf(root, sizeof root, "%s/root", box.stage);
    for (const struct json *m = mounts ? mounts->child : NULL; m; m = m->next) {
        if (!do_mount(m, f)) return false;
        if (m == mounts->child && chdir(root)) return fault_set(f, errno, "chdir to the new root");
    }
    return volumes_mount(root, f);
}

bool bring_up_loopback(struct fault *f) {
    cleanup_fd int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq r = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    return (s >= 0 && !ioctl(s, SIOCSIFFLAGS, &r)) || fault_set(f, errno, "bring up lo");
}

/* A procfs of our own, attached nowhere: without hidepid, and no program can reach it. A program that executes an
 * unreadable file would otherwise vanish from pid 1's sight, and outlive a kill. -1: use /proc. */
static int private_proc(void) {
    cleanup_fd int fs = (int)syscall(SYS_fsopen, "proc", FS_CLOEXEC);
    if (fs < 0 || syscall(SYS_fsconfig, fs, FS_SET_STRING, "hidepid", "0", 0)) return -1;
    if (syscall(SYS_fsconfig, fs, FS_CREATE, NULL, NULL, 0)) return -1;
    return (int)syscall(SYS_fsmount, fs, FS_CLOEXEC, SET_NOSUID | SET_NODEV | SET_NOEXEC);
}

bool rootfs_make(int *disk_fd, int *proc_fd, struct fault *f) {
    char point[4200];
    const char *hostname = json_str(box.spec, "hostname");
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL)) return fault_set(f, errno, "make mounts private");
    if (!disk_mount_tmpfs(f)) return false;
    *proc_fd = private_proc();
    snprintf(point, sizeof point, "%s/disk", box.stage);
    *disk_fd = open(point, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (json_get(box.spec, "layers") && !(disk_is_ready(f) && layers_mount(f) && disk_make_missing(point, f))) return false;
    if (!make_root(f)) return false;
    if (hostname && sethostname(hostname, strlen(hostname))) return fault_set(f, errno, "sethostname");
    return box.net_made || bring_up_loopback(f);
}

/* The kernel looks at every process of the machine. */
bool rootfs_enter(struct fault *f) {
    if (chdir(root)) return fault_set(f, errno, "chdir to the new root");
    if (syscall(SYS_pivot_root, ".", ".")) return fault_set(f, errno, "pivot_root");
    if (umount2(".", MNT_DETACH)) return fault_set(f, errno, "leave the old root");
    if (chdir("/")) return fault_set(f, errno, "chdir /");
    return true;
}
