/* What a box has written, as a stream: the worker that reads it while everybody stands still. It follows nothing, and tells
 * names, modes, times, links, holes and, for a box that began from layers, what was deleted of them (spec/agent-protocol.md). */
#include "agent.h"
#include "track.h"
#include <dirent.h>
#include <limits.h>
#include <linux/capability.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <time.h>

#define CHUNK (256u << 10)
#define BLOCK 4096u
#define DEEPEST 200

struct first { dev_t dev; ino_t ino; char *path; }; /* of a file with several names; an overlay shows files of several devices */

static int conn;
static struct stat own; /* the folder with the agent's socket */
struct saving saving;
static char out[CHUNK], data[CHUNK];
static size_t filled;
static uint64_t sent, files, bytes, left_out, kept;
static struct first *firsts;
static size_t nfirsts, room;
static struct { int fd; mode_t mode; } lent[DEEPEST + 1]; /* folders that their owner had closed to itself, while we are in them */
static int nlent;

static void __attribute__((noreturn)) leave(void) {
    while (nlent) nlent--, fchmod(lent[nlent].fd, lent[nlent].mode);
    _exit(0);
}

static void flush_out(void) {
    if (filled && !frame_write(conn, F_DATA, S_FILE, sent, out, filled)) leave(); /* the client left */
    sent += filled;
    filled = 0;
}

static void put(const void *p, size_t n) {
    for (size_t part; n; n -= part, p = (const char *)p + part) {
        if (filled == CHUNK) flush_out();
        part = n < CHUNK - filled ? n : CHUNK - filled;
        memcpy(out + filled, p, part);
        filled += part;
    }
}

void save_give_up(int err, const char *code, const char *message) {
    struct fault f = {.err = err, .code = code};
    snprintf(f.stage, sizeof f.stage, "save");
    frame_error(conn, &f, message);
    leave();
}

/* A container's root may not read what its owner may not: there we are the owner, and lend ourselves the right. */
static int open_own(int dir, const char *name, const struct stat *st, int flags) {
    mode_t wanted = S_ISDIR(st->st_mode) ? 0500 : 0400, mode = st->st_mode & 07777;
    bool closed = box.container && (mode & wanted) != wanted;
    if (closed && fchmodat(dir, name, mode | wanted, 0)) return -1; /* no link: it was looked at, and nobody moves */
    int fd = openat(dir, name, flags | O_NOFOLLOW | O_CLOEXEC);
    if (!closed) return fd;
    if (fd < 0 || !S_ISDIR(st->st_mode)) {
        int err = errno;
        fchmodat(dir, name, mode, 0);
        errno = err;
        return fd;
    }
    lent[nlent].fd = fd;
    lent[nlent++].mode = mode;
    return fd;
}

static void put_number(uint64_t v, int n) {
    unsigned char raw[8];
    for (int i = 0; i < n; i++) raw[i] = (unsigned char)(v >> 8 * (n - 1 - i));
    put(raw, (size_t)n);
}

void save_entry(char kind, const struct stat *st, const char *target, size_t n) {
    put(&kind, 1);
    put_number(st->st_mode & 07777, 2);
    put_number((uint64_t)st->st_mtim.tv_sec, 8);
    put_number((uint64_t)st->st_mtim.tv_nsec, 4);
    put_number(kind == 'f' ? (uint64_t)st->st_size : S_ISDIR(st->st_mode) ? (uint64_t)st->st_ino : 0, 8);
    put_number(saving.path.n, 2);
    put_number(n, 2);
    put(saving.path.p, saving.path.n);
    put(target, n);
    files++;
}

static size_t place_of(dev_t dev, ino_t ino) {
    size_t at = (size_t)(ino * 0x9e3779b97f4a7c15u) & (room - 1);
    while (firsts[at].path && (firsts[at].ino != ino || firsts[at].dev != dev)) at = (at + 1) & (room - 1);
    return at;
}

/* The name under which it was told before; NULL: this is the first. */
static const char *known_as(dev_t dev, ino_t ino) {
    if (nfirsts * 2 >= room) {
        struct first *old = firsts;
        size_t n = room;
        room = room ? room * 2 : 256;
        firsts = calloc(room, sizeof *firsts);
        if (!firsts) save_give_up(ENOMEM, NULL, NULL);
        for (size_t i = 0; i < n; i++)
            if (old[i].path) firsts[place_of(old[i].dev, old[i].ino)] = old[i];
        free(old);
    }
    struct first *f = &firsts[place_of(dev, ino)];
    if (f->path) return f->path;
    *f = (struct first){dev, ino, strndup(saving.path.p, saving.path.n)};
    if (!f->path) save_give_up(ENOMEM, NULL, NULL);
    nfirsts++;
    return NULL;
}

static void put_extent(off_t at, const char *p, size_t n) {
    put_number((uint64_t)at, 8);
    put_number((uint64_t)n, 4);
    put(p, n);
    bytes += n;
}

static bool is_zero(const char *p, size_t n) { return !*p && !memcmp(p, p + 1, n - 1); }

/* Without its blocks of zeros: gVisor has holes, but does not tell where. */
static void put_dense(off_t at, size_t n) {
    for (size_t from = 0, to; from < n; from = to) {
        bool zero = is_zero(data + from, n - from < BLOCK ? n - from : BLOCK);
        for (to = from; to < n && is_zero(data + to, n - to < BLOCK ? n - to : BLOCK) == zero;) to += n - to < BLOCK ? n - to : BLOCK;
        if (!zero) put_extent(at + (off_t)from, data + from, to - from);
    }
}

static void put_content(int fd, off_t size) {
    bool hidden = box.filter_ahead; /* it is gVisor */
    for (off_t at = 0; at < size;) {
        off_t start = lseek(fd, at, SEEK_DATA);
        if ((start < 0 && errno == ENXIO) || start >= size) break; /* nothing but a hole */
        if (start < 0) start = at, hidden = true;
        off_t end = lseek(fd, start, SEEK_HOLE);
        if (end < 0 || end > size) end = size;
        for (at = start; at < end;) {
            size_t want = end - at < (off_t)CHUNK ? (size_t)(end - at) : CHUNK;
            ssize_t n = RETRY(pread(fd, data, want, at));
            if (n <= 0) save_give_up(n ? errno : EIO, NULL, NULL);
            if (hidden) put_dense(at, (size_t)n);
            else put_extent(at, data, (size_t)n);
            at += n;
        }
    }
    put_number(0, 8);
    put_number(0, 4);
}

static bool is_older(const struct stat *st, double time) { return (double)st->st_ctim.tv_sec + (double)st->st_ctim.tv_nsec / 1e9 < time; }
bool save_changed(const struct stat *st) { return !is_older(st, saving.since) || held_unmarked(st); }

/* Nobody moves, but a folder that was noted may have become something else. */
int save_open(const char *path, int flags) {
    struct open_how how = {0};
    char at[PATH_MAX];
    bool fits = (size_t)snprintf(at, sizeof at, "%s%s", saving.upper ? "upper/" : "", path) < sizeof at;
    how.flags = (uint64_t)(flags | O_NOFOLLOW | O_CLOEXEC);
    how.resolve = RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH;
    return fits ? (int)syscall(SYS_openat2, saving.disk, *at ? at : ".", &how, sizeof how) : (errno = ENAMETOOLONG, -1);
}

/* As programs see it, over layers; -1: it is as it is on the disk. */
static bool open_shown(int *shown) {
    struct stat top, st;
    const struct json *mounts = json_get(box.spec, "mounts");
    cleanup_free char *path = strndup(saving.path.p, saving.path.n);
    for (const struct json *m = mounts && path ? mounts->child : NULL; m; m = m->next) {
        const char *type = json_str(m, "type"), *from = json_str(m, "from"), *to = json_str(m, "to");
        char at[PATH_MAX];
        size_t n = from ? strlen(from) : 0;
        if (!type || strcmp(type, "disk") || !from || !to || json_bool(m, "again", false) || strncmp(path, from, n) || (path[n] && path[n] != '/')) continue;
        if ((size_t)snprintf(at, sizeof at, "/%s%s", to, path + n) < sizeof at) *shown = open(at, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (*shown < 0) return false;
        at[strlen(to) + 1] = 0;
        if (stat(at, &top) || fstat(*shown, &st)) return false;
        if (st.st_dev != top.st_dev) drop_fd(shown); /* a volume lies over it */
        return true;
    }
    return false;
}

size_t save_watch(int fd) {
    cleanup_fd int shown = -1;
    size_t n;
    if (!track_is_on()) return 0;
    if (saving.upper && saving.path.n && !open_shown(&shown)) return track_give_up(), 0;
    const struct folder *noted = track_folder(saving.path.p, saving.path.n, fd, shown);
    return noted ? (size_t)(noted - track_folders(&n)) + 1 : 0;
}

/* What programs have noted on a file: a length (1), the name, a length (2), the value, for each of its `user.` attributes. Not an
 * overlay's own: in a layer they would rule what is seen of those below. What is more than `most` is left out. */
static size_t attributes_of(int fd, char *to, size_t most) {
    static char names[16u << 10], value[4096];
    ssize_t all = flistxattr(fd, names, sizeof names);
    size_t n = 0;
    for (ssize_t i = 0; i < all; i += (ssize_t)strlen(names + i) + 1) {
        size_t length = strlen(names + i);
        if (strncmp(names + i, "user.", 5) || !strncmp(names + i, "user.overlay.", 13)) continue;
        ssize_t size = fgetxattr(fd, names + i, value, sizeof value);
        if (size < 0 || n + length + (size_t)size + 3 > most) continue;
        to[n++] = (char)length;
        memcpy(to + n, names + i, length);
        n += length;
        to[n++] = (char)(size >> 8);
        to[n++] = (char)size;
        memcpy(to + n, value, (size_t)size);
        n += (size_t)size;
    }
    return n;
}

/* One that came with its folder, which does not touch its times. */
static bool put_moved(const char *name, const struct stat *st) {
    char old[PATH_MAX];
    size_t n;
    if (!saving.was || st->st_nlink > 1 || !is_older(st, saving.part_since) || held_unmarked(st) || track_touched(saving.was - 1, name)) return false;
    struct path folder = track_folders(&n)[saving.was - 1].path;
    n = (size_t)snprintf(old, sizeof old, "%.*s/%s", (int)folder.n, track_text(folder), name);
    if (n >= sizeof old) return false;
    save_entry('m', st, old, n);
    return true;
}

static void put_file(int dir, const char *name, const struct stat *st) {
    const char *first = st->st_nlink > 1 ? known_as(st->st_dev, st->st_ino) : NULL;
    if (first) return save_entry('h', st, first, strlen(first));
    if (!save_changed(st)) return save_entry('u', st, "", 0);
    if (put_moved(name, st)) return;
    cleanup_fd int fd = open_own(dir, name, st, O_RDONLY | O_NONBLOCK);
    if (fd < 0) save_give_up(errno, NULL, NULL);
    held_found(fd, st);
    static char attributes[32u << 10];
    save_entry('f', st, attributes, attributes_of(fd, attributes, sizeof attributes));
    put_content(fd, st->st_size);
}

static void put_folder(int fd, int depth, bool same);

bool save_opaque(int fd) {
    char value[2];
    return saving.upper && fgetxattr(fd, "user.overlay.opaque", value, sizeof value) == 1 && *value == 'y';
}

static void enter_folder(int dir, const char *name, const struct stat *st, int depth) {
    if (depth == DEEPEST) save_give_up(0, "too_large", "a folder is more than 200 levels deep");
    bool same = saving.brief && !save_changed(st);
    if (st->st_dev != saving.device) return save_entry(same ? 'e' : 'd', st, "", 0); /* a volume */
    int before = nlent, fd = open_own(dir, name, st, O_RDONLY | O_DIRECTORY);
    if (fd < 0) save_give_up(errno, NULL, NULL);
    save_entry(save_opaque(fd) ? (same ? 'E' : 'D') : (same ? 'e' : 'd'), st, "", 0);
    size_t above = saving.was;
    saving.was = save_watch(fd);
    int walked = nlent > before ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : fd;
    if (walked < 0) save_give_up(errno, NULL, NULL);
    put_folder(walked, depth + 1, same);
    saving.was = above;
    if (nlent > before) {
        nlent--;
        fchmod(fd, lent[nlent].mode);
        close(fd);
    }
}

/* Without its holes, as a file is told. */
static off_t content_of(const struct stat *st) { return st->st_blocks * 512 < st->st_size ? st->st_blocks * 512 : st->st_size; }

/* What has several names has not changed under any of them. In a folder that is the same nothing came, and nothing went. */
static void put_same(const struct stat *st, bool same) {
    if (S_ISREG(st->st_mode) && (st->st_nlink == 1 || !known_as(st->st_dev, st->st_ino))) kept += (uint64_t)content_of(st);
    if (!same) save_entry('u', st, "", 0);
}

void save_one(int dir, const char *name, int depth, bool same) {
    struct stat st;
    char target[PATH_MAX];
    if (saving.path.n > PATH_MAX - 1) save_give_up(0, "too_large", "a path is longer than 4095 bytes");
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW)) save_give_up(errno, NULL, NULL);
    if (st.st_dev == own.st_dev && st.st_ino == own.st_ino) return; /* the agent's own folder: a cloud's box has it where programs write */
    if (box.container && !saving.upper && st.st_uid != box.uid) return (void)left_out++; /* what a machine's own services keep in /tmp */
    saving.changed += save_changed(&st);
    if (S_ISDIR(st.st_mode)) return enter_folder(dir, name, &st, depth);
    if (S_ISREG(st.st_mode) && (st.st_nlink > 1 || held_lost(&st))) track_link(saving.path.p, saving.path.n);
    if (saving.brief && !save_changed(&st) && (same || S_ISREG(st.st_mode) || S_ISLNK(st.st_mode))) return put_same(&st, same);
    if (S_ISREG(st.st_mode)) return put_file(dir, name, &st);
    ssize_t n = S_ISLNK(st.st_mode) ? readlinkat(dir, name, target, sizeof target) : -1;
    if (n > 0) return save_entry('l', &st, target, (size_t)n);
    bool whiteout = S_ISCHR(st.st_mode) && !st.st_rdev;
    if (!(saving.upper && whiteout)) left_out++;
    if (saving.upper) save_entry('w', &st, "", 0); /* what is left out must not bring back what is below it */
}

static void put_folder(int fd, int depth, bool same) {
    DIR *d = fdopendir(fd); /* owns fd */
    if (!d) save_give_up(errno, NULL, NULL);
    size_t before = saving.path.n;
    for (struct dirent *e; (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        buf_printf(&saving.path, "/");
        buf_add(&saving.path, e->d_name, strlen(e->d_name));
        save_one(fd, e->d_name, depth, same);
        saving.path.n = before;
    }
    closedir(d);
}

/* One of the folders that the disk is bound into the box by. */
static void put_root(int disk, const struct json *m, bool full) {
    char at[PATH_MAX];
    struct stat st;
    const char *from = json_str(m, "from"), *to = json_str(m, "to");
    if (!from || !to) return;
    if (full) snprintf(at, sizeof at, "/%s", to);
    else snprintf(at, sizeof at, "%s%s", saving.upper && !box.container ? "upper/" : "", from);
    int dir = full ? AT_FDCWD : disk;
    if (fstatat(dir, at, &st, AT_SYMLINK_NOFOLLOW)) {
        if (errno == ENOENT) return; /* nothing of it has changed */
        save_give_up(errno, NULL, NULL);
    }
    saving.path.n = 0;
    buf_add(&saving.path, from, strlen(from));
    saving.changed += save_changed(&st);
    saving.device = st.st_dev;
    if (S_ISDIR(st.st_mode)) enter_folder(dir, at, &st, 0);
}

/* In a container we are its user, whose files they are; the engine has put an overlay's upper folder where only root may go. */
static void become_owner(int *disk, bool *full) {
    char at[PATH_MAX];
    struct fault f = {0};
    snprintf(at, sizeof at, "%s/upper", box.dir);
    if (saving.upper && (*disk = open(at, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)) < 0) save_give_up(errno, NULL, NULL);
    *full = !saving.upper;
    if (!confine(&f, true, -1)) save_give_up(f.err, NULL, NULL);
}

/* Everything, or with `brief` a look at everything. */
static void put_disk(bool full) {
    const struct json *mounts = json_get(box.spec, "mounts");
    saving.path.n = 0;
    if (saving.upper && track_is_on()) {
        cleanup_fd int fd = save_open("", O_RDONLY | O_DIRECTORY);
        if (fd < 0) save_give_up(errno, NULL, NULL);
        save_watch(fd);
    }
    for (const struct json *m = mounts ? mounts->child : NULL; m; m = m->next) {
        const char *type = json_str(m, "type");
        if (type && !strcmp(type, "disk") && !json_bool(m, "again", false)) put_root(saving.disk, m, full);
    }
}

/* One of a row: what the one before noted is enough to tell what changed since. */
static bool put_part(void) {
    struct stat st;
    struct statfs fs;
    saving.memory = fstatfs(saving.disk, &fs) || fs.f_type == TMPFS_MAGIC;
    bool noted = track_begin(saving.since), part = noted && saving.brief && !fstat(saving.disk, &st);
    if (part) saving.device = st.st_dev;
    held_mark();
    part = part && part_save();
    if (!part) track_forget_all();
    return part;
}

void save_main(int disk, int conn_fd, uint32_t how, double unchanged_since) {
    bool full = how & SAVE_FULL, row = how & SAVE_ROW && !full && !box.container, part = false;
    struct timeval patience = {60, 0};
    struct timespec at;
    clock_gettime(CLOCK_REALTIME_COARSE, &at); /* the clock of files: whatever changes later is not older */
    saving.brief = how & SAVE_DIFFERENCE;
    saving.since = unchanged_since;
    saving.disk = disk;
    struct buf b = {0};
    conn = conn_fd;
    set_nonblocking(conn, false);
    setsockopt(conn, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    signal(SIGPIPE, SIG_IGN);
    saving.upper = !full && json_get(box.spec, "layers");
    if (box.container) stat(box.dir, &own);
    if (row) held_look();
    else track_let_go();
    if (box.container) become_owner(&saving.disk, &full);
    else if (!drop_capabilities(1 << CAP_DAC_READ_SEARCH)) save_give_up(errno, NULL, NULL); /* a file that nobody may read is saved, too */
    if (row) part = put_part();
    if (!part) put_disk(full);
    flush_out();
    buf_printf(&b, "{\"files\":%llu,\"bytes\":%llu,\"left_out\":%llu,\"changed\":%llu,\"kept\":%llu,\"at\":%lld.%09ld}",
               (unsigned long long)files, (unsigned long long)bytes, (unsigned long long)left_out, (unsigned long long)saving.changed,
               (unsigned long long)kept, (long long)at.tv_sec, at.tv_nsec);
    track_end((double)at.tv_sec + (double)at.tv_nsec / 1e9);
    frame_json(conn, F_REPLY, &b);
    leave();
}
