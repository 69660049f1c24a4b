/* The box's writable disk. As root: an ext4 image of exactly the size and inode count that was asked for, in a file
 * that has no name from birth, so that nothing is left however the keeper ends. Otherwise: a sized tmpfs. */
#include "agent.h"
#include "mounts.h"
#include <dirent.h>
#include <linux/loop.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

static int copy_image(const char *template, const char *dir, struct fault *f) {
    cleanup_fd int from = open(template, O_RDONLY | O_CLOEXEC);
    if (from < 0) return fault_set(f, errno, "open disk template"), -1;
    cleanup_fd int to = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (to < 0) return fault_set(f, errno, "disk image"), -1;
    if (!copy_data(from, to)) return fault_set(f, errno, "copy disk image"), -1;
    return steal_fd(&to);
}

/* The returned device detaches itself when its last user is gone (AUTOCLEAR). "Find a free one" and "take it" are two
 * calls: a hundred keepers at once would all find the same one, so they queue at a lock on the directory. */
static int attach_loop(int image, const char *dir, char *path, size_t room, struct fault *f) {
    cleanup_fd int queue = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (queue >= 0) (void)RETRY(flock(queue, LOCK_EX)); /* released with the descriptor */
    cleanup_fd int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    if (control < 0) return fault_set(f, errno, "open loop-control"), -1;
    for (int attempt = 0; attempt < 64; attempt++) {
        int n = ioctl(control, LOOP_CTL_GET_FREE);
        if (n < 0) return fault_set(f, errno, "find a loop device"), -1;
        snprintf(path, room, "/dev/loop%d", n);
        cleanup_fd int loop = open(path, O_RDWR | O_CLOEXEC);
        struct loop_config config = {.fd = (uint32_t)image, .block_size = 4096};
        config.info.lo_flags = LO_FLAGS_AUTOCLEAR;
        if (loop >= 0 && !ioctl(loop, LOOP_CONFIGURE, &config)) return steal_fd(&loop);
        if (errno != EBUSY && errno != ENXIO) return fault_set(f, errno, "configure loop device"), -1;
        usleep(200u << (attempt < 8 ? attempt : 8)); /* another box took it in between */
    }
    return fault_set(f, EBUSY, "configure loop device"), -1;
}

/* The device that a file has already; -1: none, or see f. The file's name is like no other's. */
static int find_loop(const char *image, char *path, size_t room, struct fault *f) {
    const char *slash = strrchr(image, '/'), *name = slash ? slash : image;
    struct stat st;
    DIR *all = opendir("/sys/block"); /* to attach it twice would destroy what is in it: no guess */
    if (!all || stat(image, &st)) fault_set(f, errno, "look for the device of a volume");
    for (struct dirent *e; !f->err && (e = readdir(all));) {
        char backing[4200] = "", at[300];
        struct loop_info64 info;
        if (strncmp(e->d_name, "loop", 4)) continue;
        snprintf(at, sizeof at, "/sys/block/%s/loop/backing_file", e->d_name);
        cleanup_fd int fd = open(at, O_RDONLY | O_CLOEXEC);
        if (fd < 0 || RETRY(read(fd, backing, sizeof backing - 1)) <= 0) continue;
        backing[strcspn(backing, "\n")] = 0;
        const char *tail = strrchr(backing, '/');
        if (!tail || strcmp(tail, name)) continue;
        snprintf(path, room, "/dev/%.20s", e->d_name);
        cleanup_fd int loop = open(path, O_RDWR | O_CLOEXEC); /* held, it is not let go */
        if (loop < 0 || ioctl(loop, LOOP_GET_STATUS64, &info) || info.lo_inode != st.st_ino) continue;
        closedir(all);
        return steal_fd(&loop);
    }
    if (all) closedir(all);
    return -1;
}

/* A volume with a size of its own: a file system that any number of boxes share, so all mount it from one device. Whoever
 * holds the lock finds the device that the others have, or is the first. The image's blocks are reserved: without discard,
 * and without writing zeros into inode tables, which are zero, the device gives none of them back. */
bool disk_mount_shared(const char *image, const char *point, struct fault *f) {
    char device[32];
    cleanup_fd int lock = open(image, O_RDONLY | O_CLOEXEC), fd = open(image, O_RDWR | O_CLOEXEC); /* the device keeps the second */
    if (lock < 0 || fd < 0 || RETRY(flock(lock, LOCK_EX))) return fault_set(f, errno, "open a volume");
    cleanup_fd int found = find_loop(image, device, sizeof device, f);
    if (f->err) return false;
    cleanup_fd int loop = found >= 0 ? steal_fd(&found) : attach_loop(fd, point, device, sizeof device, f);
    if (loop < 0) return false;
    if (mount(device, point, "ext4", MS_NOSUID | MS_NODEV, "noinit_itable,errors=remount-ro")) return fault_set(f, errno, "mount a volume");
    return true;
}

static const char *disk_point(char *path, size_t room) {
    snprintf(path, room, "%s/disk", box.stage);
    return path;
}

/* One that is there already, from a layer, stays as it is. */
static bool make_dirs(int d, bool outside, struct fault *f) {
    uid_t uid = box.uid + (outside ? box.uid_base : 0);
    gid_t gid = box.gid + (outside ? box.uid_base : 0);
    const struct json *dirs = json_get(box.spec, "disk_dirs");
    for (const struct json *j = dirs ? dirs->child : NULL; j; j = j->next) {
        const struct json *name = j->child, *mode = name ? name->next : NULL;
        if (!mode || name->type != J_STR || mode->type != J_NUM) return fault_set(f, EINVAL, "launch: disk_dirs");
        bool missing = !mkdirat(d, name->str, 0700);
        if (!missing && errno != EEXIST) return fault_set(f, errno, "make /%s", name->str);
        if (!missing && json_get(box.spec, "layers")) continue;
        if (box.user_mode != USER_NONE && fchownat(d, name->str, uid, gid, AT_SYMLINK_NOFOLLOW))
            return fault_set(f, errno, "own /%s", name->str);
        if (fchmodat(d, name->str, (mode_t)mode->num, 0)) return fault_set(f, errno, "mode of /%s", name->str);
    }
    return true;
}

static bool make_first_dirs(int disk, bool outside, struct fault *f) {
    return json_get(box.spec, "layers") ? layers_make_dirs(disk, outside, f) : make_dirs(disk, outside, f);
}

static int open_disk(const char *root, struct fault *f) {
    int d = box.disk >= 0 ? openat(box.disk, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC) : open(root, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (d < 0) fault_set(f, errno, "open disk");
    return d;
}

/* What the layers of an older version have not. */
bool disk_make_missing(const char *root, struct fault *f) {
    cleanup_fd int d = open_disk(root, f);
    return d >= 0 && make_dirs(d, false, f);
}

int disk_make(const char *template, const char *dir, struct fault *f) {
    char device[32];
    cleanup_fd int image = copy_image(template, dir, f);
    cleanup_fd int loop = image < 0 ? -1 : attach_loop(image, dir, device, sizeof device, f);
    cleanup_fd int fs = loop < 0 ? -1 : (int)syscall(SYS_fsopen, "ext4", FS_CLOEXEC);
    bool set = fs >= 0 && !syscall(SYS_fsconfig, fs, FS_SET_STRING, "source", device, 0) &&
               !syscall(SYS_fsconfig, fs, FS_SET_FLAG, "noinit_itable", NULL, 0) && !syscall(SYS_fsconfig, fs, FS_SET_FLAG, "nobarrier", NULL, 0) &&
               !syscall(SYS_fsconfig, fs, FS_SET_STRING, "errors", "continue", 0) && !syscall(SYS_fsconfig, fs, FS_CREATE, NULL, NULL, 0);
    cleanup_fd int made = set ? (int)syscall(SYS_fsmount, fs, FS_CLOEXEC, SET_NOSUID | SET_NODEV) : -1;
    if (loop >= 0 && made < 0) fault_set(f, errno, "mount disk");
    if (made >= 0 && !mkdirat(made, "first", 0700)) unlinkat(made, "first", AT_REMOVEDIR); /* it reads the tables, for 0.4 ms */
    return steal_fd(&made);
}

/* The keeper cannot open it later. Without it nobody knows what the box reads and writes. */
static void watch_device(int disk) {
    char path[64];
    struct stat st;
    if (fstat(disk, &st)) return;
    snprintf(path, sizeof path, "/sys/dev/block/%u:%u/stat", major(st.st_dev), minor(st.st_dev));
    box.disk_stat = open(path, O_RDONLY | O_CLOEXEC);
    usage_begin();
}

bool disk_mount(struct fault *f) {
    char point[4200], device[32];
    const struct json *disk = json_get(box.spec, "disk");
    if (!strcmp(box.disk_kind, "dir")) {
        if (!box.disk_path) return fault_set(f, EINVAL, "launch: disk.path is missing");
        if (mkdir(box.disk_path, 0700) && errno != EEXIST) return fault_set(f, errno, "make disk directory");
        /* others do not even learn what files there are, or run a setuid one */
        if (box.user_mode == USER_UID && (chown(box.disk_path, 0, box.gid + box.uid_base) || chmod(box.disk_path, 0710)))
            return fault_set(f, errno, "own disk directory");
        return true;
    }
    if (strcmp(box.disk_kind, "loop")) return true; /* tmpfs: pid 1 mounts it */
    const char *template = json_str(disk, "template"), *dir = json_str(disk, "dir");
    if (!template || !dir) return fault_set(f, EINVAL, "launch: disk.template or disk.dir is missing");
    cleanup_fd int ahead = ahead_take_disk(template, dir);
    if (box.bare) return (box.disk = ahead >= 0 ? steal_fd(&ahead) : disk_make(template, dir, f)) >= 0;
    if (ahead >= 0 && !syscall(SYS_move_mount, ahead, "", AT_FDCWD, disk_point(point, sizeof point), FROM_EMPTY_PATH)) return true;
    cleanup_fd int image = copy_image(template, dir, f);
    if (image < 0) return false;
    cleanup_fd int loop = attach_loop(image, dir, device, sizeof device, f);
    if (loop < 0) return false;
    if (mount(device, disk_point(point, sizeof point), "ext4", MS_NOSUID | MS_NODEV, "noinit_itable,nobarrier,errors=continue"))
        return fault_set(f, errno, "mount disk");
    return true;
}

bool disk_prepare(struct fault *f) {
    char point[4200];
    bool loop = !strcmp(box.disk_kind, "loop");
    if (!loop && strcmp(box.disk_kind, "dir")) return true;
    cleanup_fd int d = open_disk(loop ? disk_point(point, sizeof point) : box.disk_path, f);
    if (d < 0) return false;
    if (loop) watch_device(d);
    return make_first_dirs(d, true, f);
}

void disk_let_go(void) {
    char point[4200];
    drop_fd(&box.disk);
    if (box.bare) return;
    if (box.stage && box.disk_kind && !strcmp(box.disk_kind, "loop")) umount2(disk_point(point, sizeof point), MNT_DETACH);
}

bool disk_mount_own(struct fault *f) {
    char point[4200], options[128];
    const struct json *disk = json_get(box.spec, "disk");
    if (box.disk >= 0 && syscall(SYS_move_mount, box.disk, "", AT_FDCWD, disk_point(point, sizeof point), FROM_EMPTY_PATH))
        return fault_set(f, errno, "mount disk");
    drop_fd(&box.disk);
    if (strcmp(box.disk_kind, "tmpfs")) return true;
    snprintf(options, sizeof options, "size=%.0f,nr_inodes=%.0f,mode=0755", json_num(disk, "size", 1 << 30),
             json_num(disk, "inodes", 65536) + 8);
    if (mount("tmpfs", disk_point(point, sizeof point), "tmpfs", MS_NOSUID | MS_NODEV, options))
        return fault_set(f, errno, "mount disk");
    cleanup_fd int d = open_disk(point, f);
    return d >= 0 && make_first_dirs(d, false, f);
}

/* Over its layers, as pid 1 would mount it in a box of our own; `stage`/upper stays what is below the overlay. */
static bool mount_over_layers(const char *point, struct fault *f) {
    char from[4300], to[4200];
    snprintf(from, sizeof from, "%s/upper", point);
    snprintf(to, sizeof to, "%s/upper", box.stage);
    if (mount(from, to, NULL, MS_BIND, NULL)) return fault_set(f, errno, "bind the upper folder");
    if (!layers_mount(f)) return false;
    cleanup_fd int d = open_disk(point, f);
    return d >= 0 && make_dirs(d, true, f);
}

static bool mount_for_engine(struct fault *f) {
    char point[4200];
    disk_point(point, sizeof point);
    if (!disk_mount(f) || !disk_prepare(f)) return false;
    if (json_get(box.spec, "layers") && !mount_over_layers(point, f)) return false;
    return volumes_make_points(point, f);
}

/* `capsule-agent disk JSON`: for a box that an engine makes, where the whole host sees it. Whoever asked unmounts it there
 * once the container has it; then it goes with the container. */
int disk_main(char *text) {
    struct fault f = {0};
    box.spec = json_parse(text, strlen(text));
    box.stage = json_str(box.spec, "stage");
    box.disk_kind = json_str(json_get(box.spec, "disk"), "kind");
    box.uid = (uid_t)json_int(box.spec, "uid", 1000, 0, UINT32_MAX);
    box.gid = (gid_t)json_int(box.spec, "gid", 1000, 0, UINT32_MAX);
    box.user_mode = USER_UID;
    if (!box.stage || !box.disk_kind || strcmp(box.disk_kind, "loop")) fault_set(&f, EINVAL, "disk: stage or disk.kind");
    else if (mount_for_engine(&f)) return 0;
    fprintf(stderr, "%s: %s\n", f.stage, strerror(f.err));
    disk_let_go();
    return 1;
}
