/* Removes a tree that a hostile program made: by descriptors, following nothing, at any depth. */
#include "agent.h"
#include <dirent.h>
#include <stdio.h>
#include <sys/stat.h>

#define DEEPEST 64

static int counter;

/* Empties the directory. What lies deeper than DEEPEST is moved up to `top` first, so descriptors stay few. */
static bool empty_dir(int dir, int top, int depth, bool *moved) {
    DIR *d = fdopendir(dir); /* owns dir */
    if (!d) { close(dir); return false; }
    bool ok = true;
    for (struct dirent *e; (e = readdir(d));) {
        if (!strcmp(e->d_name, ".") || !strcmp(e->d_name, "..")) continue;
        if (!unlinkat(dirfd(d), e->d_name, 0)) continue;
        if (errno == EACCES && !fchmod(dirfd(d), 0700) && !unlinkat(dirfd(d), e->d_name, 0)) continue; /* a directory closed by its owner */
        if (errno != EISDIR && errno != EPERM) { ok = false; continue; }
        if (depth >= DEEPEST) {
            char name[40];
            snprintf(name, sizeof name, ".capsule-rm-%d-%d", (int)getpid(), counter++);
            bool up = !renameat(dirfd(d), e->d_name, top, name);
            if (!up && errno == EACCES && !fchmodat(dirfd(d), e->d_name, 0700, 0)) up = !renameat(dirfd(d), e->d_name, top, name);
            if (up) *moved = true;
            else ok = false;
            continue;
        }
        int sub = openat(dirfd(d), e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (sub < 0 && errno == EACCES) {
            fchmodat(dirfd(d), e->d_name, 0700, 0);
            sub = openat(dirfd(d), e->d_name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        }
        if (sub < 0 || !empty_dir(sub, top, depth + 1, moved)) ok = false;
        if (unlinkat(dirfd(d), e->d_name, AT_REMOVEDIR) && errno != ENOENT) ok = false;
    }
    closedir(d);
    return ok;
}

bool remove_tree(int dirfd, const char *name) {
    if (!unlinkat(dirfd, name, 0)) return true;
    if (errno != EISDIR && errno != EPERM) return false;
    cleanup_fd int top = openat(dirfd, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (top < 0) return false;
    for (bool moved = true; moved;) {
        moved = false;
        int dir = openat(top, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (dir < 0) return false;
        if (!empty_dir(dir, top, 0, &moved) && !moved) break;
    }
    return !unlinkat(dirfd, name, AT_REMOVEDIR);
}
