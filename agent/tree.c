/* Removes a tree that a hostile program made: by descriptors, following nothing, at any depth. */
#include "agent.h"
#include <dirent.h>
#include <stdio.h>
#include <sys/stat.h>

#define DEEPEST 64

static int counter, trouble; /* errno of what could not be removed, the first of it */

static bool failed(void) {
    if (!trouble) trouble = errno;
    return false;
}

/* Gives its owner the rights to a folder; never through a link, for which there is no call before Linux 6.6. */
static bool reopen(int dir, const char *name) {
    char path[40];
    cleanup_fd int fd = openat(dir, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return fd >= 0 && !chmod(path, 0700);
}

static int open_dir(int dir, const char *name) {
    int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, fd = openat(dir, name, flags);
    return fd < 0 && errno == EACCES && reopen(dir, name) ? openat(dir, name, flags) : fd;
}

/* Empties the directory. What lies deeper than DEEPEST is moved up to `top` first, so descriptors stay few. */
static bool empty_dir(int dir, int top, int depth, bool *moved) {
    DIR *d = fdopendir(dir); /* owns dir */
    if (!d) { failed(); close(dir); return false; }
    bool ok = true;
    for (struct dirent *e; (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (!unlinkat(dirfd(d), e->d_name, 0)) continue;
        if (errno == EACCES && !fchmod(dirfd(d), 0700) && !unlinkat(dirfd(d), e->d_name, 0)) continue; /* a directory closed by its owner */
        if (errno != EISDIR && errno != EPERM) { ok = failed(); continue; }
        if (depth >= DEEPEST) {
            char name[40];
            snprintf(name, sizeof name, ".capsule-rm-%d-%d", (int)getpid(), counter++);
            bool up = !renameat(dirfd(d), e->d_name, top, name);
            if (!up && errno == EACCES && reopen(dirfd(d), e->d_name)) up = !renameat(dirfd(d), e->d_name, top, name);
            if (up) *moved = true;
            else ok = failed();
            continue;
        }
        int sub = open_dir(dirfd(d), e->d_name);
        if (sub < 0) ok = failed();
        else if (!empty_dir(sub, top, depth + 1, moved)) ok = false;
        if (unlinkat(dirfd(d), e->d_name, AT_REMOVEDIR) && errno != ENOENT) ok = failed();
    }
    closedir(d);
    return ok;
}

bool remove_tree(int dirfd, const char *name) {
    if (!unlinkat(dirfd, name, 0)) return true;
    if (errno != EISDIR && errno != EPERM) return false;
    cleanup_fd int top = open_dir(dirfd, name);
    if (top < 0) return false;
    for (bool moved = true; moved;) {
        moved = false;
        trouble = 0;
        int dir = openat(top, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (dir < 0) return false;
        if (!empty_dir(dir, top, 0, &moved) && !moved) break;
    }
    if (!unlinkat(dirfd, name, AT_REMOVEDIR)) return true;
    if (errno == ENOTEMPTY && trouble) errno = trouble;
    return false;
}
