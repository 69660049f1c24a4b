/* The root a program sees. Made by pid 1, in the box's own mount namespace, with capabilities over that namespace
 * only; what it binds of the host the keeper may have opened for it. The provider's table says what goes where (spec/launch.md); nothing is decided here. */
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
static int own_proc = -1; /* -1: there is only /proc */

static const struct json *first_mount(void) {
    const struct json *mounts = json_get(box.spec, "mounts");
    return mounts ? mounts->child : NULL;
}

static bool is_type(const struct json *m, const char *type) {
    const char *has = json_str(m, "type");
    return has && !strcmp(has, type);
}

static uint64_t attributes(const struct json *m) {
    uint64_t attrs = SET_NOSUID;
    if (is_type(m, "mask")) return SET_RDONLY | SET_NOSUID | SET_NODEV | SET_NOEXEC;
    if (json_bool(m, "ro", false)) attrs |= SET_RDONLY;
    if (!json_bool(m, "dev", false)) attrs |= SET_NODEV;
    if (!json_bool(m, "exec", true)) attrs |= SET_NOEXEC;
    return attrs;
}

/* Layers and volumes are named by their paths. */
bool rootfs_needs_host(void) {
    for (const struct json *m = first_mount(); m; m = m->next)
        if (is_type(m, "overlay")) return true;
    return layers_or_volumes();
}

int mount_copy(const char *path, unsigned below, struct attr a) {
    cleanup_fd int tree = (int)syscall(SYS_open_tree, AT_FDCWD, path, TREE_CLONE | below | O_CLOEXEC);
    if (tree < 0 || syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH | below, &a, sizeof a)) return -1;
    return steal_fd(&tree);
}

/* Nobody's peers: what is mounted on them does not show on the host. */
int rootfs_copy(const char *path, uint64_t attrs) {
    return mount_copy(path, AT_RECURSIVE, (struct attr){.set = attrs, .propagation = MS_PRIVATE});
}

bool rootfs_open(struct fault *f) {
    int place = 0;
    for (const struct json *m = first_mount(); m && place < MAX_MOUNTS; m = m->next, place++) {
        const char *from = json_str(m, "from"), *to = json_str(m, "to");
        bool mask = is_type(m, "mask");
        if (!from || !to || !(mask || is_type(m, "bind"))) continue;
        int tree = rootfs_copy(from, attributes(m));
        if (tree < 0) return fault_set(f, errno, "%s %.40s", mask ? "mask" : "bind", mask ? to : from);
        box.trees[place] = tree;
    }
    return true;
}

void rootfs_close(void) {
    for (int i = 0; i < MAX_MOUNTS; i++)
        if (box.trees[i]) close(box.trees[i]), box.trees[i] = 0;
}

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
    if (mount(from, to, NULL, MS_BIND | MS_REC, NULL)) return fault_set(f, errno, "bind %.40s", from);
    return restrict_mount(to, attributes(m)) || fault_set(f, errno, "restrict %.36s", from);
}

static bool do_move(int tree, const char *to, struct fault *f) {
    return !syscall(SYS_move_mount, tree, "", AT_FDCWD, to, FROM_EMPTY_PATH) || fault_set(f, errno, "mount %.40s", to);
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

/* Without hidepid, and attached nowhere. */
static int make_proc(void) {
    cleanup_fd int fs = (int)syscall(SYS_fsopen, "proc", FS_CLOEXEC);
    if (fs < 0 || syscall(SYS_fsconfig, fs, FS_SET_STRING, "hidepid", "0", 0)) return -1;
    if (syscall(SYS_fsconfig, fs, FS_CREATE, NULL, NULL, 0)) return -1;
    return (int)syscall(SYS_fsmount, fs, FS_CLOEXEC, SET_NOSUID | SET_NODEV | SET_NOEXEC);
}

/* pid 1 has one of his own, which no program can reach, with nothing masked and nobody hidden: a program that executes an unreadable
 * file would otherwise vanish from his sight, and outlive a kill. Where he is in a group that no program is in, it is the
 * same file system by another mount. Only his can be written to: a program that lowers its oom_score_adj has the kernel kill its
 * neighbours. (Before Linux 5.2 there is but one.) */
static bool do_proc(const char *to, struct fault *f) {
    bool grouped = box.user_mode == USER_RANGE;
    if (mount("proc", to, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, grouped ? "hidepid=2,gid=0" : "hidepid=2")) return fault_set(f, errno, "mount proc");
    own_proc = grouped ? (int)syscall(SYS_open_tree, AT_FDCWD, to, TREE_CLONE | O_CLOEXEC) : make_proc();
    return own_proc < 0 || restrict_mount(to, SET_RDONLY | SET_NOSUID | SET_NODEV | SET_NOEXEC) || fault_set(f, errno, "ro proc");
}

/* By the box's own /dev/null, or the empty folder `from`. Every kernel has its own set of what is masked, and modules come and go. */
static bool do_mask(const struct json *m, int tree, const char *from, const char *to, struct fault *f) {
    if (tree ? do_move(tree, to, f) : from ? do_bind(m, from, to, f) : !mount("dev/null", to, NULL, MS_BIND, NULL)) return true;
    int err = tree || from ? f->err : errno;
    *f = (struct fault){0};
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
static bool do_mount(const struct json *m, int tree, struct fault *f) {
    const char *type = json_str(m, "type"), *to = json_str(m, "to"), *from = json_str(m, "from");
    if (!type || !to) return fault_set(f, EINVAL, "launch: mounts[] needs type and to");
    if (!*to) to = root;
    if (!strcmp(type, "bind") && from) return tree ? do_move(tree, to, f) : do_bind(m, from, to, f);
    if (!strcmp(type, "disk") && from) return do_disk(m, from, to, f);
    if (!strcmp(type, "overlay")) return do_overlay(m, to, f);
    if (!strcmp(type, "tmpfs")) return do_tmpfs(m, to, f);
    if (!strcmp(type, "proc")) return do_proc(to, f);
    if (!strcmp(type, "devpts"))
        return !mount("devpts", to, "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620,max=64") ||
               fault_set(f, errno, "mount devpts");
    if (!strcmp(type, "mask")) return do_mask(m, tree, from, to, f);
    if (!strcmp(type, "ro")) return do_read_only(to, f);
    return fault_set(f, EINVAL, "launch: mount type %.20s", type);
}

static bool make_root(struct fault *f) {
    int place = 0;
    snprintf(root, sizeof root, "%s/root", box.stage);
    for (const struct json *m = first_mount(); m; m = m->next, place++) {
        if (place == MAX_MOUNTS) return fault_set(f, E2BIG, "launch: mounts");
        if (!do_mount(m, box.trees[place], f)) return false;
        if (!place && chdir(root)) return fault_set(f, errno, "chdir to the new root");
    }
    rootfs_close();
    return volumes_mount(root, f);
}

bool bring_up_loopback(struct fault *f) {
    cleanup_fd int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct ifreq r = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
    return (s >= 0 && !ioctl(s, SIOCSIFFLAGS, &r)) || fault_set(f, errno, "bring up lo");
}

static bool take_host(struct fault *f) {
    if (box.bare) return nowhere_furnish(f);
    return !mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || fault_set(f, errno, "make mounts private");
}

static bool enter_root(struct fault *f) {
    if (box.bare) return nowhere_move(root, f);
    if (chdir(root)) return fault_set(f, errno, "chdir to the new root");
    if (syscall(SYS_pivot_root, ".", ".")) return fault_set(f, errno, "pivot_root");
    if (umount2(".", MNT_DETACH)) return fault_set(f, errno, "leave the old root");
    if (chdir("/")) return fault_set(f, errno, "chdir /");
    return true;
}

bool rootfs_make(int *disk_fd, int *proc_fd, struct fault *f) {
    char point[4200];
    const char *hostname = json_str(box.spec, "hostname");
    if (!take_host(f) || !disk_mount_own(f)) return false;
    snprintf(point, sizeof point, "%s/disk", box.stage);
    *disk_fd = open(point, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (json_get(box.spec, "layers") && !(disk_is_ready(f) && layers_mount(f) && disk_make_missing(point, f))) return false;
    if (!make_root(f)) return false;
    if (hostname && sethostname(hostname, strlen(hostname))) return fault_set(f, errno, "sethostname");
    if (!box.net_made && !bring_up_loopback(f)) return false;
    *proc_fd = steal_fd(&own_proc);
    return enter_root(f);
}
