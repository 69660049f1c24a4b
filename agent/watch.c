/* A file worker that stays: it tells what changes in a folder until its client leaves. */
#include "agent.h"
#include <dirent.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <sys/inotify.h>
#include <sys/stat.h>

#define DEEPEST 128 /* levels of folders */
#define MAX_WATCHES 8192
#define CHANGES (IN_CREATE | IN_CLOSE_WRITE | IN_MODIFY | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB | IN_DELETE_SELF)

static int conn;
static void (*refuse)(int err, const char *stage); /* as file workers do */
static char chunk[256u << 10] __attribute__((aligned(8)));
static struct watch { int wd; char *path; } watches[MAX_WATCHES]; /* no path: a free place */

static struct watch *find_watch(int wd) {
    for (struct watch *w = watches; w < watches + MAX_WATCHES; w++)
        if (wd < 0 ? !w->path : w->path && w->wd == wd) return w;
    return NULL;
}

/* Opened first: Landlock does not check what is watched, but what is opened. */
static int watch_path(int fd, const char *real, bool follow) {
    char path[40];
    cleanup_fd int at = open(real, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | (follow ? 0 : O_NOFOLLOW));
    if (at < 0) return -1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", at);
    return inotify_add_watch(fd, path, CHANGES | IN_EXCL_UNLINK);
}

static void add_watch(int fd, const char *real, const char *shown, bool recursive, int depth) {
    struct watch *free_place = find_watch(-1), *w;
    int wd = free_place ? watch_path(fd, real, !depth) : -1;
    if (wd < 0) {
        if (!depth) refuse(errno, "watch");
        return;
    }
    if (!(w = find_watch(wd))) w = free_place; /* there already: it was moved */
    free(w->path);
    *w = (struct watch){wd, strdup(shown)};
    DIR *d = recursive && depth < DEEPEST ? opendir(real) : NULL;
    for (struct dirent *e; d && (e = readdir(d));) {
        char sub[PATH_MAX], name[PATH_MAX];
        struct stat st;
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (fstatat(dirfd(d), e->d_name, &st, AT_SYMLINK_NOFOLLOW) || !S_ISDIR(st.st_mode)) continue;
        if (snprintf(sub, sizeof sub, "%s/%s", real, e->d_name) >= PATH_MAX) continue;
        if (snprintf(name, sizeof name, "%s%s/", shown, e->d_name) < PATH_MAX) add_watch(fd, sub, name, true, depth + 1);
    }
    if (d) closedir(d);
}

static const char *change_name(uint32_t mask) {
    return mask & IN_Q_OVERFLOW ? "overflow" : mask & IN_CREATE ? "create" : mask & (IN_CLOSE_WRITE | IN_MODIFY) ? "write"
         : mask & (IN_DELETE | IN_DELETE_SELF) ? "remove" : mask & (IN_MOVED_FROM | IN_MOVED_TO) ? "rename" : "chmod";
}

static void report_change(int fd, const char *root, const struct inotify_event *e, bool recursive) {
    struct buf b = {0};
    char shown[PATH_MAX], real[PATH_MAX];
    struct watch *w = e->wd >= 0 ? find_watch(e->wd) : NULL;
    if (e->mask & IN_IGNORED) { /* what was watched is gone; its place is free */
        if (w) free(w->path), w->path = NULL;
        return;
    }
    if (snprintf(shown, sizeof shown, "%s%s", w ? w->path : "", e->len ? e->name : "") >= PATH_MAX) return;
    buf_printf(&b, "{\"change\":\"%s\",\"path\":", change_name(e->mask));
    buf_json_string(&b, shown, strlen(shown));
    buf_printf(&b, ",\"dir\":%s,\"arrived\":%s}", e->mask & IN_ISDIR ? "true" : "false", e->mask & IN_MOVED_TO ? "true" : "false");
    if (!frame_json(conn, F_EVENT, &b)) _exit(0);
    buf_free(&b);
    if (!recursive || !(e->mask & IN_ISDIR) || !(e->mask & (IN_CREATE | IN_MOVED_TO))) return;
    if (snprintf(real, sizeof real, "%s/%s", root, shown) < PATH_MAX && strlen(shown) + 2 < PATH_MAX)
        add_watch(fd, real, strcat(shown, "/"), true, 1);
}

static void report_changes(int fd, const char *root, bool recursive, int turns) {
    ssize_t n;
    while (turns-- && (n = read(fd, chunk, sizeof chunk)) > 0)
        for (ssize_t at = 0; at < n;) {
            const struct inotify_event *e = (const struct inotify_event *)(chunk + at);
            report_change(fd, root, e, recursive);
            at += (ssize_t)(sizeof *e + e->len);
        }
}

/* The client asks for a sync, or leaves. What was done before it asked is in the kernel's queue by then. */
static void answer_watcher(int fd, const char *root, bool recursive) {
    unsigned char raw[HEADER_SIZE];
    struct header h;
    struct buf b = {0};
    if (!read_full(conn, raw, sizeof raw)) _exit(0);
    header_unpack(&h, raw);
    if (h.type != F_CONTROL || h.length > sizeof chunk || !read_full(conn, chunk, h.length)) _exit(0);
    report_changes(fd, root, recursive, 64); /* all that the kernel keeps, and no flood for ever */
    buf_printf(&b, "{\"change\":\"sync\",\"path\":\"\",\"dir\":false}");
    bool sent = frame_json(conn, F_EVENT, &b);
    buf_free(&b);
    if (!sent) _exit(0);
}

void watch_files(int to, const char *path, bool recursive, void refusal(int err, const char *stage)) {
    struct buf b = {0};
    int fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    conn = to;
    refuse = refusal;
    if (fd < 0) refuse(errno, "watch");
    add_watch(fd, path, "", recursive, 0);
    buf_add(&b, "{}", 2);
    if (!frame_json(conn, F_REPLY, &b)) _exit(0);
    for (;;) {
        struct pollfd p[2] = {{fd, POLLIN, 0}, {conn, POLLIN | POLLRDHUP, 0}};
        if (poll(p, 2, -1) < 0 && errno != EINTR) _exit(0);
        if (p[1].revents) answer_watcher(fd, path, recursive);
        else report_changes(fd, path, recursive, 1);
    }
}
