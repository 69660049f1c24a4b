/* A box that begins from layers: folders of the host, read-only and shared, over which its own disk lies. Nothing is copied.
 *
 * Layers hold files with the uids that programs have inside. As root each box has uids of its own on the host, so the keeper
 * mounts every layer over itself with the box's mapping (an idmapped mount), in its own mount namespace. pid 1 then mounts the
 * overlay, with no more rights than over its own uids. */
#include "agent.h"
#include "mounts.h"
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

enum { MAX_VOLUMES = 64 }; /* the server allows fewer */

static const struct json *layers(void) {
    const struct json *l = json_get(box.spec, "layers");
    return l && l->type == J_ARR ? l->child : NULL;
}

/* A user namespace in which nobody lives: only its mapping is wanted. */
int map_namespace(uint32_t base, uint32_t count, struct fault *f) {
    char map[64], path[64];
    int fd = -1;
    pid_t pid = (pid_t)syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0);
    if (!pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        for (;;) pause();
    }
    if (pid < 0) return fault_set(f, errno, "user namespace for layers"), -1;
    snprintf(map, sizeof map, "0 %u %u\n", base, count);
    if (write_proc(pid, "uid_map", map, f) && write_proc(pid, "gid_map", map, f)) {
        snprintf(path, sizeof path, "/proc/%d/ns/user", (int)pid);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0) fault_set(f, errno, "user namespace for layers");
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return fd;
}

int map_tree(const char *path, int userns, bool read_only) {
    uint64_t set = SET_IDMAP | SET_NOSUID | SET_NODEV | (read_only ? SET_RDONLY : 0);
    return mount_copy(path, 0, (struct attr){.set = set, .userns = (uint64_t)userns});
}

bool map_over_itself(const char *path, int userns, bool read_only, struct fault *f) {
    cleanup_fd int tree = map_tree(path, userns, read_only);
    if (tree < 0) return fault_set(f, errno, "map the uids of a layer");
    if (syscall(SYS_move_mount, tree, "", AT_FDCWD, path, FROM_EMPTY_PATH)) return fault_set(f, errno, "mount a layer");
    return true;
}

static const struct json *volumes(void) {
    const struct json *v = json_get(box.spec, "volumes");
    return v && v->type == J_ARR ? v->child : NULL;
}

/* The folders from `top`, which is there, down to `path`. */
static bool make_way(const char *top, const char *path, struct fault *f) {
    size_t n = strlen(top);
    cleanup_free char *way = strdup(path);
    if (!way || strncmp(path, top, n) || path[n] != '/') return fault_set(f, EINVAL, "launch: volumes");
    for (char *end = way + n; end;) {
        end = strchr(end + 1, '/');
        if (end) *end = 0;
        /* Our umask would close them. */
        if (mkdir(way, 0711) ? errno != EEXIST : chmod(way, 0711)) return fault_set(f, errno, "way to a volume");
        if (end) *end = '/';
    }
    return true;
}

static bool map_volume(const struct json *v, int userns, int *tree, struct fault *f) {
    const char *from = json_str(v, "from"), *image = json_str(v, "image"), *point = json_str(v, "point");
    if (!from || (image && !point)) return fault_set(f, EINVAL, "launch: volumes");
    if (image && !disk_mount_shared(image, point, f)) return false;
    *tree = map_tree(from, userns, false);
    return *tree >= 0 || fault_set(f, errno, "map the uids of a volume");
}

/* Volumes are below a folder that root alone may enter, so that no user of the host runs a set-uid file that a program has left
 * in one. pid 1 is another user: in this mount namespace it finds a folder over that one, with the box's own volumes at their paths. */
static bool map_volumes(int userns, struct fault *f) {
    const char *top = json_str(box.spec, "volumes_folder");
    int trees[MAX_VOLUMES], n = 0, moved = 0;
    bool ok = top || fault_set(f, EINVAL, "launch: volumes_folder");
    for (const struct json *v = volumes(); ok && v; v = v->next)
        ok = (n < MAX_VOLUMES || fault_set(f, E2BIG, "launch: volumes")) && map_volume(v, userns, &trees[n], f) && ++n;
    if (ok && mount("tmpfs", top, "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "mode=0711,size=64k")) ok = fault_set(f, errno, "hide volumes");
    for (const struct json *v = volumes(); ok && v; v = v->next, moved++) {
        const char *from = json_str(v, "from");
        ok = make_way(top, from, f);
        if (ok && syscall(SYS_move_mount, trees[moved], "", AT_FDCWD, from, FROM_EMPTY_PATH)) ok = fault_set(f, errno, "mount a volume");
    }
    while (n) close(trees[--n]);
    return ok;
}

bool layers_or_volumes(void) { return layers() || volumes(); }

bool layers_map(struct fault *f) {
    if (!layers_or_volumes() || box.user_mode != USER_RANGE) return true;
    cleanup_fd int userns = map_namespace(box.uid_base, box.uid_count, f);
    if (userns < 0) return false;
    for (const struct json *l = layers(); l; l = l->next)
        if (l->type != J_STR || !map_over_itself(l->str, userns, true, f)) return f->err ? false : fault_set(f, EINVAL, "launch: layers");
    return !volumes() || map_volumes(userns, f);
}

/* One component further down. The folder may be from a snapshot: no link is followed, and what is missing is made. */
static int descend(int dir, const char *name) {
    int flags = O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, fd = openat(dir, name, flags);
    if (fd >= 0 || errno != ENOENT) return fd;
    if (mkdirat(dir, name, 0755)) return -1;
    if (box.user_mode != USER_SINGLE && box.user_mode != USER_NONE && fchownat(dir, name, box.uid, box.gid, AT_SYMLINK_NOFOLLOW)) return -1;
    return openat(dir, name, flags);
}

static int make_point(const char *root, const struct json *v, struct fault *f) {
    const char *to = json_str(v, "to");
    cleanup_free char *path = to ? strdup(to) : NULL;
    char *rest = path;
    if (!path) return fault_set(f, EINVAL, "launch: volumes"), -1;
    cleanup_fd int dir = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    for (char *part; dir >= 0 && (part = strtok_r(rest, "/", &rest));) {
        int next = descend(dir, part);
        int err = errno;
        close(dir);
        dir = next;
        errno = err;
    }
    if (dir < 0) fault_set(f, errno, "mount point of a volume");
    return steal_fd(&dir);
}

bool volumes_make_points(const char *root, struct fault *f) {
    for (const struct json *v = volumes(); v; v = v->next) {
        cleanup_fd int point = make_point(root, v, f);
        if (point < 0) return false;
    }
    return true;
}

/* An engine makes what is missing on the way to a volume as root's, in a disk in memory that is still empty. */
void volumes_open_parents(void) {
    for (const struct json *v = volumes(); v; v = v->next) {
        const char *to = json_str(v, "to");
        cleanup_free char *path = NULL;
        if (!to || asprintf(&path, "/%s", to) < 0) continue;
        for (char *p = strchr(path + 1, '/'); p && (p = strchr(p + 1, '/')); *p = '/') {
            *p = 0;
            (void)!chmod(path, 0777); /* one that is the user's already is not ours to change */
        }
    }
}

static bool mount_volume(const char *root, const struct json *v, struct fault *f) {
    const char *from = json_str(v, "from");
    if (!from) return fault_set(f, EINVAL, "launch: volumes");
    cleanup_fd int dir = make_point(root, v, f);
    if (dir < 0) return false;
    uint64_t set = SET_NOSUID | SET_NODEV | (json_bool(v, "ro", false) ? SET_RDONLY : 0);
    cleanup_fd int tree = mount_copy(from, 0, (struct attr){.set = set});
    if (tree < 0) return fault_set(f, errno, "open a volume");
    if (syscall(SYS_move_mount, tree, "", dir, "", FROM_EMPTY_PATH | TO_EMPTY_PATH)) return fault_set(f, errno, "mount a volume");
    return true;
}

/* By pid 1, when its root stands. */
bool volumes_mount(const char *root, struct fault *f) {
    for (const struct json *v = volumes(); v; v = v->next)
        if (!mount_volume(root, v, f)) return false;
    return true;
}

/* What an overlay needs of the disk, instead of the folders themselves. */
bool layers_make_dirs(int disk, bool outside, struct fault *f) {
    static const char *const names[] = {"upper", "work"};
    for (int i = 0; i < 2; i++) {
        if (mkdirat(disk, names[i], 0755) && errno != EEXIST) return fault_set(f, errno, "make %s", names[i]);
        if (outside && fchownat(disk, names[i], box.uid_base, box.uid_base, AT_SYMLINK_NOFOLLOW)) return fault_set(f, errno, "own %s", names[i]);
    }
    return true;
}

static void add_path(struct buf *o, const char *path) {
    for (; *path; path++) {
        if (strchr("\\:,", *path)) buf_add(o, "\\", 1); /* they separate */
        buf_add(o, path, 1);
    }
}

/* By pid 1: over the disk itself, so that its folders are found where they always are. */
bool layers_mount(struct fault *f) {
    char point[4200];
    struct buf o = {0};
    if (!layers()) return true;
    snprintf(point, sizeof point, "%s/disk", box.stage);
    for (const struct json *l = layers(); l; l = l->next) {
        buf_printf(&o, o.n ? ":" : "lowerdir=");
        add_path(&o, l->str);
    }
    buf_printf(&o, ",upperdir=");
    add_path(&o, point);
    buf_printf(&o, "/upper,workdir=");
    add_path(&o, point);
    buf_printf(&o, "/work,userxattr");
    buf_add(&o, "", 1);
    int failed = o.n > 4096 ? (errno = E2BIG, -1) : mount("overlay", point, "overlay", MS_NOSUID | MS_NODEV, o.p);
    int err = errno;
    buf_free(&o);
    return !failed || fault_set(f, err, "overlay of layers");
}
