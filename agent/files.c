/* One file operation, in a process of its own, as the sandbox's user, with the sandbox's limits and filter. A planted
 * symlink leads where that user could go anyway; a FIFO or a huge directory delays this process and no other. */
#include "agent.h"
#include <dirent.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/time.h>

#define CHUNK (256u << 10)
#define BATCH (192u << 10) /* bytes of JSON per EVENT of a listing */
#define DEEPEST 128        /* levels of a recursive listing */

static int conn = -1;
static char chunk[CHUNK] __attribute__((aligned(8)));

/* After an error the client may still be sending: reading on lets it see our answer instead of a reset. */
static void finish(void) {
    shutdown(conn, SHUT_WR);
    for (int i = 0; i < 4096 && RETRY(read(conn, chunk, sizeof chunk)) > 0; i++) {}
    _exit(0);
}

static void refuse(int err, const char *stage) {
    struct fault f;
    fault_set(&f, err, "%s", stage);
    frame_error(conn, &f, NULL);
    finish();
}

static void refuse_as(const char *code, const char *stage, const char *message) {
    struct fault f = {.err = 0, .code = code};
    snprintf(f.stage, sizeof f.stage, "%s", stage);
    frame_error(conn, &f, message);
    finish();
}

static void reply(struct buf *b) {
    if (!b->n) buf_add(b, "{}", 2);
    frame_json(conn, F_REPLY, b);
    finish();
}

static const char *path_of(const struct json *request, const char *key, char out[PATH_MAX]) {
    const char *given = json_str(request, key);
    if (!given || !*given) refuse_as("invalid", "path", "the path is missing, empty or has a NUL byte");
    if (strlen(given) >= PATH_MAX - 64) refuse(ENAMETOOLONG, "path");
    if (!box_path(given, out, PATH_MAX)) refuse_as("invalid", "path", "the path has a '..' component");
    for (size_t n = strlen(out); n > 1 && out[n - 1] == '/'; n--) out[n - 1] = 0;
    return out;
}

static void stat_json(struct buf *b, int dir, const char *name, const char *shown_name, const char *shown_path, const struct stat *st) {
    char target[PATH_MAX];
    buf_printf(b, "{\"name\":");
    buf_json_string(b, shown_name, strlen(shown_name));
    buf_printf(b, ",\"path\":");
    buf_json_string(b, shown_path, strlen(shown_path));
    buf_printf(b, ",\"type\":\"%s\",\"size\":%lld,\"mode\":%u,\"mtime\":%.6f,", type_name(st->st_mode), (long long)st->st_size,
               (unsigned)(st->st_mode & 07777), (double)st->st_mtim.tv_sec + (double)st->st_mtim.tv_nsec / 1e9);
    buf_printf(b, "\"uid\":%u,\"gid\":%u,\"target\":", (unsigned)st->st_uid, (unsigned)st->st_gid);
    ssize_t n = S_ISLNK(st->st_mode) ? readlinkat(dir, name, target, sizeof target) : -1;
    if (n >= 0) buf_json_string(b, target, (size_t)n);
    else buf_printf(b, "null");
    detail_json(b, dir, name, st);
    buf_add(b, "}", 1);
}

static const char *last_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

static void reply_stat(const char *path, const char *shown, bool follow) {
    struct stat st;
    struct buf b = {0};
    if (fstatat(AT_FDCWD, path, &st, follow ? 0 : AT_SYMLINK_NOFOLLOW)) refuse(errno, "stat");
    stat_json(&b, AT_FDCWD, path, last_name(shown), shown, &st);
    reply(&b);
}

/* Nothing of procfs: there, /proc/self is not the program's but ours. */
static bool is_plain(int fd, const struct stat *st) {
    struct statfs fs;
    return S_ISREG(st->st_mode) && !fstatfs(fd, &fs) && fs.f_type != 0x9fa0;
}

static void op_read(const struct json *r) {
    char path[PATH_MAX];
    struct stat st;
    struct buf b = {0};
    uint64_t sent = 0;
    int64_t offset = json_int(r, "offset", 0, 0, MAX_INT), left = json_int(r, "length", -1, -1, MAX_INT);
    if (left < 0) left = INT64_MAX;
    int fd = open(path_of(r, "path", path), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) refuse(errno == ENXIO ? EINVAL : errno, "open");
    if (fstat(fd, &st)) refuse(errno, "stat");
    if (S_ISDIR(st.st_mode)) refuse(EISDIR, "open");
    if (!is_plain(fd, &st)) refuse_as("invalid", "open", "not a regular file");
    if (lseek(fd, offset, SEEK_SET) < 0) refuse(errno, "seek");
    buf_printf(&b, "{\"size\":%lld,\"mode\":%u,\"mtime\":%.6f}", (long long)st.st_size, (unsigned)(st.st_mode & 07777),
               (double)st.st_mtim.tv_sec + (double)st.st_mtim.tv_nsec / 1e9);
    if (!frame_json(conn, F_EVENT, &b)) _exit(0);
    for (ssize_t n; left > 0; left -= n) {
        n = RETRY(read(fd, chunk, left < CHUNK ? (size_t)left : CHUNK));
        if (n < 0) refuse(errno, "read");
        if (!n) break;
        if (!frame_write(conn, F_DATA, S_FILE, (uint64_t)offset + sent, chunk, (size_t)n)) _exit(0);
        sent += (uint64_t)n;
    }
    buf_printf(&b, "{\"bytes\":%llu}", (unsigned long long)sent);
    reply(&b);
}

static bool make_parents(char *path) {
    for (char *p = path + 1; (p = strchr(p, '/')); p++) {
        *p = 0;
        bool ok = !mkdir(path, 0755) || errno == EEXIST;
        *p = '/';
        if (!ok) return false;
    }
    return true;
}

/* A file that was written in place and did not become whole: `made` is its path if it is new. No half of it stays, unless
 * somebody else has written it meanwhile. */
struct rewritten { const char *made; struct stat last; };

static void note_written(struct rewritten *w, int fd) {
    if (w && fstat(fd, &w->last)) w->last.st_size = -1;
}

static void forget_file(int fd, const char *temporary, const struct rewritten *w) {
    struct stat st, at;
    if (temporary) unlink(temporary);
    if (!w || fstat(fd, &st) || st.st_size != w->last.st_size) return;
    if (st.st_mtim.tv_sec != w->last.st_mtim.tv_sec || st.st_mtim.tv_nsec != w->last.st_mtim.tv_nsec) return;
    if (!w->made) (void)!ftruncate(fd, 0);
    else if (!lstat(w->made, &at) && at.st_dev == st.st_dev && at.st_ino == st.st_ino) unlink(w->made);
}

/* Copies DATA frames to fd until EOF. A client that leaves before EOF leaves no file. */
static void receive_file(int fd, const char *temporary, struct rewritten *w) {
    struct header h;
    note_written(w, fd);
    for (;;) {
        unsigned char raw[HEADER_SIZE];
        bool ok = read_full(conn, raw, sizeof raw);
        if (ok) header_unpack(&h, raw);
        if (!ok || h.length > MAX_PAYLOAD || (h.type != F_DATA && h.type != F_EOF)) {
            forget_file(fd, temporary, w);
            if (!ok) _exit(0);
            refuse_as("protocol", "write", "expected data");
        }
        if (h.type == F_EOF) return;
        for (uint32_t left = h.length; left;) {
            ssize_t n = RETRY(read(conn, chunk, left < CHUNK ? left : CHUNK));
            if (n <= 0) {
                forget_file(fd, temporary, w);
                _exit(0);
            }
            left -= (uint32_t)n;
            for (ssize_t at = 0; at < n;) {
                ssize_t put = RETRY(write(fd, chunk + at, (size_t)(n - at)));
                if (put < 0) {
                    int err = errno;
                    note_written(w, fd);
                    forget_file(fd, temporary, w);
                    refuse(err, "write");
                }
                at += put;
            }
            note_written(w, fd);
        }
    }
}

static void give_attributes(int fd, const struct json *r, const char *temporary) {
    if (attributes_set(fd, r)) return;
    int err = errno;
    if (temporary) unlink(temporary);
    if (err == EOPNOTSUPP) refuse_as("unsupported", "attributes", "the file system of this path has no attributes");
    refuse(err, "attributes");
}

static void append_file(const struct json *r, const char *path, mode_t mode) {
    struct stat st;
    int exclusive = json_bool(r, "exclusive", false) ? O_EXCL : 0;
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | exclusive | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, mode);
    if (fd < 0) refuse(errno == ENXIO ? EINVAL : errno, "open");
    if (fstat(fd, &st) || !is_plain(fd, &st)) refuse_as("invalid", "open", "not a regular file");
    receive_file(fd, NULL, NULL);
    give_attributes(fd, r, NULL);
    close(fd); /* before the answer: nobody can execute a file that is open for writing */
    reply_stat(path, json_str(r, "path"), true);
}

/* A name of our own in the same folder, to be renamed or removed. */
static void beside(const char *path, const char *what, char out[PATH_MAX + 40]) {
    snprintf(out, PATH_MAX + 40, "%.*s/.capsule-%s-%d", (int)(strrchr(path, '/') - path), path, what, (int)getpid());
}

/* A file without a name, for what is to come into the one at `path`; it is gone with us. -1: not in this folder. */
static int nameless(const char *path) {
    char name[PATH_MAX + 40];
    snprintf(name, sizeof name, "%.*s/", (int)(strrchr(path, '/') - path), path);
    int fd = open(name, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return fd;
    beside(path, "write", name);
    unlink(name);
    fd = open(name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd >= 0) unlink(name);
    return fd;
}

/* The same file with other content, as `>` of a shell does it: whoever watches it, or has another name for it, sees that.
 * What is there stays until all of the new has come, if its folder lets us keep that; a file that is new begins at once. */
static void rewrite_file(const struct json *r, const char *path, mode_t mode) {
    struct stat st;
    int flags = O_WRONLY | O_CREAT | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, fd = open(path, flags | O_EXCL, mode), kept = -1;
    struct rewritten w = {.made = fd < 0 ? NULL : path};
    if (fd < 0 && errno == EEXIST) fd = open(path, flags, mode);
    if (fd < 0) refuse(errno == ENXIO ? EINVAL : errno, "open");
    if (fstat(fd, &st) || !is_plain(fd, &st)) refuse_as("invalid", "open", "not a regular file");
    if (st.st_size && (kept = nameless(path)) >= 0) {
        receive_file(kept, NULL, NULL);
        if (!copy_over(kept, fd)) refuse(errno, "write");
    } else if (st.st_size && ftruncate(fd, 0)) refuse(errno, "truncate");
    if (fchown(fd, geteuid(), getegid())) {} /* may be somebody else's, who lets us write */
    if (kept < 0) receive_file(fd, NULL, &w);
    give_attributes(fd, r, NULL);
    close(fd); /* before the answer: nobody can execute a file that is open for writing */
    reply_stat(path, json_str(r, "path"), true);
}

/* As open(2) goes: to the end of the links, where a file may be still to be made. */
static void follow_links(char path[PATH_MAX]) {
    char target[PATH_MAX], next[2 * PATH_MAX];
    for (int links = 0;; links++) {
        ssize_t n = readlink(path, target, sizeof target - 1);
        if (n < 0) return;
        target[n] = 0;
        int folder = *target == '/' ? 0 : (int)(strrchr(path, '/') + 1 - path);
        if (snprintf(next, sizeof next, "%.*s%s", folder, path, target) >= PATH_MAX) refuse(ENAMETOOLONG, "open");
        if (links == 40) refuse(ELOOP, "open");
        strcpy(path, next);
    }
}

static void op_write(const struct json *r) {
    char path[PATH_MAX], temporary[PATH_MAX + 40];
    struct stat st;
    int64_t given = json_int(r, "mode", -1, -1, 07777);
    mode_t mode = given < 0 ? 0644 : (mode_t)given & 0777;
    path_of(r, "path", path);
    if (json_bool(r, "parents", true) && !make_parents(path)) refuse(errno, "mkdir");
    if (json_bool(r, "append", false)) append_file(r, path, mode);
    if (json_bool(r, "in_place", false)) rewrite_file(r, path, mode);
    bool exists = !lstat(path, &st);
    if (exists && json_bool(r, "exclusive", false)) refuse(EEXIST, "open");
    if (exists && S_ISLNK(st.st_mode)) { /* replace what it points to, not the link */
        follow_links(path);
        exists = !lstat(path, &st);
    }
    if (exists && S_ISDIR(st.st_mode)) refuse(EISDIR, "open");
    if (exists && !S_ISREG(st.st_mode)) refuse_as("invalid", "open", "not a regular file");
    if (exists && given < 0) mode = st.st_mode & 0777;
    beside(path, "write", temporary);
    unlink(temporary);
    int fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0) refuse(errno, "open");
    receive_file(fd, temporary, NULL);
    give_attributes(fd, r, temporary);
    bool exclusive = json_bool(r, "exclusive", false);
    if (fchmod(fd, mode) || (exclusive ? link(temporary, path) || unlink(temporary) : rename(temporary, path))) {
        int err = errno;
        unlink(temporary);
        refuse(err, "rename");
    }
    close(fd); /* before the answer: nobody can execute a file that is open for writing */
    reply_stat(path, json_str(r, "path"), false);
}

struct listing { struct buf b; double left; bool truncated; int depth, count; };

static void flush_entries(struct listing *l) {
    if (!l->count) return;
    buf_add(&l->b, "]}", 2);
    if (!frame_json(conn, F_EVENT, &l->b)) _exit(0);
    l->count = 0;
}

static void list_dir(struct listing *l, int dir, const char *prefix, int depth) {
    DIR *d = fdopendir(dir);
    if (!d) { close(dir); l->truncated = true; return; }
    for (struct dirent *e; (e = readdir(d));) {
        char shown[PATH_MAX];
        struct stat st;
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (l->left < 1) { l->truncated = true; break; }
        if (fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW)) continue; /* gone meanwhile */
        if ((size_t)snprintf(shown, sizeof shown, "%s%s", prefix, e->d_name) >= sizeof shown - 2) { l->truncated = true; continue; }
        buf_printf(&l->b, l->count++ ? "," : "{\"entries\":[");
        stat_json(&l->b, dirfd(d), e->d_name, e->d_name, shown, &st);
        l->left--;
        if (l->b.n > BATCH) flush_entries(l);
        if (depth >= l->depth || !S_ISDIR(st.st_mode)) continue;
        int sub = depth < DEEPEST ? openat(dirfd(d), e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC) : -1;
        if (sub < 0) { l->truncated = true; continue; }
        strcat(shown, "/");
        list_dir(l, sub, shown, depth + 1);
    }
    closedir(d);
}

static void op_list(const struct json *r) {
    char path[PATH_MAX];
    int depth = json_bool(r, "recursive", false) ? (int)json_int(r, "depth", INT_MAX, 1, INT_MAX) : 1;
    struct listing l = {.left = json_num(r, "limit", 100000), .depth = depth - 1};
    int dir = open(path_of(r, "path", path), O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK);
    if (dir < 0) refuse(errno, "open");
    list_dir(&l, dir, "", 0);
    flush_entries(&l);
    buf_printf(&l.b, "{\"truncated\":%s}", l.truncated ? "true" : "false");
    reply(&l.b);
}

/* Where programs share the server's uid, seccomp refuses to change a mode by path, which Landlock does not check; to open
 * the file first is something it does check. */
static bool set_mode(const char *path, mode_t mode) {
    if (!chmod(path, mode)) return true;
    cleanup_fd int fd = errno == EPERM ? open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC) : -1;
    return fd >= 0 && !fchmod(fd, mode);
}

static void op_mkdir(const struct json *r) {
    char path[PATH_MAX];
    struct stat st;
    bool parents = json_bool(r, "parents", true);
    mode_t mode = (mode_t)json_int(r, "mode", 0755, 0, 07777) & 0777;
    path_of(r, "path", path);
    if (parents && !make_parents(path)) refuse(errno, "mkdir");
    struct buf b = {0};
    bool made = !mkdir(path, mode);
    if (!made) {
        int err = errno;
        if (!parents || stat(path, &st) || !S_ISDIR(st.st_mode)) refuse(err, "mkdir");
    } else if (!set_mode(path, mode)) refuse(errno, "chmod");
    buf_printf(&b, "{\"made\":%s}", made ? "true" : "false");
    reply(&b);
}

/* Between two mounts, which /workspace and /tmp are, there is no rename(2). The copy is made beside the target, and both names
 * change by renames: nobody sees half a result, and a failure leaves the source as it was. */
static void move_by_copy(const char *from, const char *to, bool overwrite) {
    char made[PATH_MAX + 40], aside[PATH_MAX + 40];
    struct stat st, there;
    if (lstat(from, &st)) refuse(errno, "rename");
    if (!lstat(to, &there)) {
        if (!overwrite) refuse(EEXIST, "rename");
        if (st.st_dev == there.st_dev && st.st_ino == there.st_ino) return; /* one file by two names: rename(2) leaves both */
        if (S_ISDIR(st.st_mode) != S_ISDIR(there.st_mode)) refuse(S_ISDIR(there.st_mode) ? EISDIR : ENOTDIR, "rename");
    }
    beside(to, "move", made);
    beside(from, "moved", aside);
    remove_tree(AT_FDCWD, made);
    const char *stage = copy_tree(from, made) ? NULL : "copy";
    if (!stage && rename(from, aside)) stage = "rename";
    if (!stage && rename_to(made, to, overwrite)) {
        int err = errno;
        rename(aside, from);
        errno = err;
        stage = "rename";
    }
    if (stage) {
        int err = errno;
        remove_tree(AT_FDCWD, made);
        if (err == E2BIG) refuse_as("too_large", stage, "a copy of more than 128 levels of folders");
        refuse(err, stage);
    }
    if (!remove_tree(AT_FDCWD, aside)) refuse(errno, "remove");
}

static void op_move(const struct json *r) {
    char from[PATH_MAX], to[PATH_MAX];
    bool overwrite = json_bool(r, "overwrite", true);
    path_of(r, "from", from);
    path_of(r, "to", to);
    if (json_bool(r, "parents", false) && !access(from, F_OK) && !make_parents(to)) refuse(errno, "mkdir");
    if (rename_to(from, to, overwrite)) {
        if (errno != EXDEV) refuse(errno, "rename");
        move_by_copy(from, to, overwrite);
    }
    reply(&(struct buf){0});
}

static void op_remove(const struct json *r) {
    char path[PATH_MAX];
    struct stat st;
    path_of(r, "path", path);
    if (lstat(path, &st)) refuse(errno, "remove");
    bool ok = S_ISDIR(st.st_mode) ? (json_bool(r, "recursive", false) ? remove_tree(AT_FDCWD, path) : !rmdir(path)) : !unlink(path);
    if (!ok) refuse(errno, "remove");
    reply(&(struct buf){0});
}

static void op_chmod(const struct json *r) {
    char path[PATH_MAX];
    if (!set_mode(path_of(r, "path", path), (mode_t)json_int(r, "mode", 0644, 0, 07777) & 0777)) refuse(errno, "chmod");
    reply(&(struct buf){0});
}

static void op_symlink(const struct json *r) {
    char path[PATH_MAX];
    const char *target = json_str(r, "target");
    if (!target || !*target) refuse_as("invalid", "symlink", "the target is missing, empty or has a NUL byte");
    if (symlink(target, path_of(r, "path", path))) refuse(errno, "symlink");
    reply(&(struct buf){0});
}

static void op_watch(const struct json *r) {
    char path[PATH_MAX];
    watch_files(conn, path_of(r, "path", path), json_bool(r, "recursive", false), refuse);
}

void file_main(int request_fd, int conn_fd) {
    static const struct { const char *name; void (*run)(const struct json *); } ops[] = {
        {"read", op_read}, {"write", op_write}, {"list", op_list}, {"mkdir", op_mkdir}, {"move", op_move},
        {"remove", op_remove}, {"chmod", op_chmod}, {"symlink", op_symlink}, {"watch", op_watch}};
    struct fault f = {0};
    struct timeval patience = {60, 0};
    char path[PATH_MAX];
    conn = conn_fd;
    close_all_but(conn, request_fd);
    set_nonblocking(conn, false);
    setsockopt(conn, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(conn, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); /* a file beyond the limit is EFBIG, not our death */
    struct json *r = json_read(request_fd);
    close(request_fd); /* a path may be /proc/self/fd/N */
    if (!r) _exit(1);
    const char *op = json_str(r, "op");
    /* without namespaces programs have no inotify, as it would tell them the names of the host's files */
    if (!confine(&f, box.namespaces || box.container || strcmp(op, "watch"), -1)) { frame_error(conn, &f, NULL); finish(); }
    for (int i = 0; i < box.ncgroups; i++) drop_fd(&box.cgroup_fds[i]);
    if (chdir("/")) _exit(1);
    detail_want(r);
    if (!strcmp(op, "stat")) reply_stat(path_of(r, "path", path), json_str(r, "path"), json_bool(r, "follow", false));
    if (!strcmp(op, "fill")) fill_files(conn);
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (!strcmp(op, ops[i].name)) ops[i].run(r);
    refuse_as("unsupported", "op", "unknown operation");
    _exit(0);
}
