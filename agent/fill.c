/* What `save` has told of one box becomes the files of another: for a box whose disk cannot lie over layers. In a file worker,
 * as the sandbox's user, before the first program runs; so nothing that the stream says leads further than that user may go. */
#include "agent.h"
#include <limits.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#define CHUNK (256u << 10)

struct entry { char kind; mode_t mode; struct timespec time; uint64_t size; size_t name, target; };
struct folder { char *path; mode_t mode; struct timespec time; };

static int conn;
static uint32_t left; /* of the current frame */
static bool ended;    /* the stream is */
static char data[CHUNK];
static char noted[64u << 10]; /* attributes of the file that comes, as `save` tells them */
static char path[PATH_MAX + 64], target[PATH_MAX + 64]; /* as they are in the box */
static dev_t device; /* of the folder that is filled; a volume in it is another */
static char volume[PATH_MAX + 64]; /* the one that is passed: what would be below it is no part of the box */
static struct folder *folders; /* each gets its mode and time at the end: one may close itself to its owner */
static size_t nfolders;
static uint64_t files;

static void __attribute__((noreturn)) finish(void) {
    shutdown(conn, SHUT_WR);
    for (int i = 0; i < 4096 && RETRY(read(conn, data, sizeof data)) > 0; i++) {} /* so that our answer is read, and no reset */
    _exit(0);
}

static void __attribute__((noreturn)) refuse(int err, const char *stage) {
    struct fault f;
    fault_set(&f, err, "%s", stage);
    frame_error(conn, &f, NULL);
    finish();
}

static void __attribute__((noreturn)) refuse_name(int err, const char *stage) {
    struct fault f;
    if (err != EEXIST) refuse(err, stage);
    fault_set(&f, err, "%s", stage);
    frame_error(conn, &f, "the mount point of a volume is something else than a folder");
    finish();
}

static void next_frame(void) {
    unsigned char raw[HEADER_SIZE];
    struct header h;
    if (!read_full(conn, raw, sizeof raw)) _exit(0); /* the client left */
    header_unpack(&h, raw);
    if (h.length > MAX_PAYLOAD || (h.type != F_DATA && h.type != F_EOF)) refuse(EPROTO, "fill");
    ended = h.type == F_EOF;
    left = ended ? 0 : h.length;
}

/* false: the stream has ended, which it may before an entry only. */
static bool take(void *p, size_t n, bool may_end) {
    for (size_t part; n; n -= part, left -= (uint32_t)part, p = (char *)p + part) {
        while (!left && !ended) next_frame();
        if (ended && may_end) return false;
        if (ended) refuse(EPROTO, "fill");
        may_end = false;
        part = n < left ? n : left;
        if (!read_full(conn, p, part)) _exit(0);
    }
    return true;
}

static uint64_t number(const unsigned char *p, int n) {
    uint64_t v = 0;
    for (int i = 0; i < n; i++) v = v << 8 | p[i];
    return v;
}

static bool take_entry(struct entry *e) {
    unsigned char raw[27];
    if (!take(raw, sizeof raw, true)) return false;
    *e = (struct entry){.kind = (char)raw[0], .mode = (mode_t)number(raw + 1, 2) & 01777, .size = number(raw + 15, 8)};
    e->time = (struct timespec){(time_t)number(raw + 3, 8), (long)number(raw + 11, 4)};
    e->name = number(raw + 23, 2);
    e->target = number(raw + 25, 2);
    return true;
}

/* The disk's folders have another name in the stream than in the box. true: it is one of them. */
static bool take_path(char *out, size_t n) {
    char name[PATH_MAX + 1];
    if (n > PATH_MAX - 16) refuse(ENAMETOOLONG, "fill");
    take(name, n, false);
    name[n] = 0;
    size_t first = strcspn(name, "/");
    const struct json *mounts = json_get(box.spec, "mounts");
    for (const struct json *m = mounts ? mounts->child : NULL; m; m = m->next) {
        const char *from = json_str(m, "from"), *to = json_str(m, "to");
        if (!from || !to || strlen(from) != first || memcmp(from, name, first)) continue;
        if (strlen(name) == n && (size_t)snprintf(out, PATH_MAX, "/%s%s", to, name + first) < PATH_MAX) return !name[first];
    }
    refuse(EINVAL, "fill: a path");
}

static void put_content(int fd, const struct entry *e) {
    if (fd >= 0 && ftruncate(fd, (off_t)e->size)) refuse(errno, "write");
    for (;;) {
        unsigned char raw[12];
        take(raw, sizeof raw, false);
        uint64_t at = number(raw, 8);
        size_t n = number(raw + 8, 4);
        if (!n) return;
        for (size_t part; n; n -= part, at += part) {
            part = n < CHUNK ? n : CHUNK;
            take(data, part, false);
            for (size_t done = 0; fd >= 0 && done < part;) {
                ssize_t put = RETRY(pwrite(fd, data + done, part - done, (off_t)(at + done)));
                if (put <= 0) refuse(put ? errno : ENOSPC, "write");
                done += (size_t)put;
            }
        }
    }
}

/* What a cloud's template has there, and was saved with the rest, gives way; a folder, which may be a mount point, does not. */
static bool made_way(void) {
    if (errno != EEXIST) return false;
    bool gone = !unlink(path);
    errno = EEXIST;
    return gone;
}

/* A file system that has none of them, or no room, leaves them out. */
static void put_attributes(int fd, size_t all) {
    char name[256];
    for (size_t i = 0; i + 3 <= all;) {
        size_t length = (unsigned char)noted[i];
        if (i + length + 3 > all) refuse(EINVAL, "fill: an attribute");
        memcpy(name, noted + i + 1, length);
        name[length] = 0;
        i += 1 + length;
        size_t size = number((const unsigned char *)noted + i, 2);
        if ((i += 2) + size > all) refuse(EINVAL, "fill: an attribute");
        if (fsetxattr(fd, name, noted + i, size, 0)) {}
        i += size;
    }
}

static void put_file(const struct entry *e, bool skip) {
    static const int how = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
    cleanup_fd int fd = skip ? -1 : open(path, how, 0600);
    if (!skip && fd < 0 && made_way()) fd = open(path, how, 0600);
    if (!skip && fd < 0) refuse_name(errno, "write");
    put_content(fd, e);
    if (!skip) put_attributes(fd, e->target);
    struct timespec times[2] = {e->time, e->time};
    if (!skip && (fchmod(fd, e->mode & 0777) || futimens(fd, times))) refuse(errno, "write");
}

static void put_folder(const struct entry *e, bool top) {
    struct stat st;
    bool made = !mkdir(path, 0700);
    if (!made && errno != EEXIST) refuse(errno, "mkdir");
    if (lstat(path, &st)) refuse(errno, "mkdir");
    if (!S_ISDIR(st.st_mode)) refuse(ENOTDIR, "mkdir");
    if (top) device = st.st_dev;
    if (st.st_dev != device) return (void)strcpy(volume, path);
    folders = xrealloc(folders, (nfolders + 1) * sizeof *folders);
    folders[nfolders] = (struct folder){strdup(path), e->mode, e->time};
    if (!folders[nfolders++].path) refuse(ENOMEM, "mkdir");
}

static void put_symlink(const struct entry *e) {
    struct timespec times[2] = {e->time, e->time};
    if (symlink(target, path) && (!made_way() || symlink(target, path))) refuse_name(errno, "symlink");
    if (utimensat(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW)) refuse(errno, "symlink");
}

static void put_entry(const struct entry *e) {
    bool top = take_path(path, e->name);
    size_t n = strlen(volume);
    bool skip = n && !strncmp(path, volume, n) && path[n] == '/';
    if (e->kind == 'l') {
        if (e->target >= PATH_MAX) refuse(ENAMETOOLONG, "symlink");
        take(target, e->target, false);
        target[e->target] = 0;
    } else if (e->kind == 'f') take(noted, e->target, false);
    else if (e->target) take_path(target, e->target);
    files++;
    if (e->kind == 'f') return put_file(e, skip);
    if (skip) return;
    switch (e->kind) {
    case 'd': case 'D': put_folder(e, top); break;
    case 'l': put_symlink(e); break;
    case 'h': if (link(target, path)) refuse_name(errno, "link"); break;
    default: refuse(EINVAL, "fill: an entry");
    }
}

/* Those that are not ours (mount points that an engine made) stay as they are. */
static void close_folders(void) {
    while (nfolders--) {
        const struct folder *f = &folders[nfolders];
        struct timespec times[2] = {f->time, f->time};
        cleanup_fd int fd = open(f->path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        bool ok = fd >= 0 && !fchmod(fd, f->mode) && !futimens(fd, times);
        if (!ok && errno != EPERM) refuse(errno, "mkdir");
    }
}

void fill_files(int conn_fd) {
    struct entry e;
    struct buf b = {0};
    conn = conn_fd;
    umask(0);
    while (take_entry(&e)) put_entry(&e);
    close_folders();
    buf_printf(&b, "{\"files\":%llu}", (unsigned long long)files);
    frame_json(conn, F_REPLY, &b);
    finish();
}
