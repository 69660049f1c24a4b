/* Copies what a hostile program made: by descriptors, following nothing, holes as holes. */
#include "agent.h"
#include <dirent.h>
#include <stdio.h>
#include <sys/stat.h>

#define DEEPEST 128 /* levels; each takes two descriptors */

static ssize_t copy_chunk(int from, int to, off_t at, size_t n) {
    static char p[256u << 10];
    ssize_t done = RETRY(pread(from, p, n < sizeof p ? n : sizeof p, at));
    return done > 0 ? RETRY(pwrite(to, p, (size_t)done, at)) : done;
}

/* The kernel copies by itself within one file system; how many bytes, or -1. */
static ssize_t copy_some(int from, int to, off_t at, size_t n) {
    loff_t in = at, out = at;
    ssize_t done = RETRY(copy_file_range(from, &in, to, &out, n, 0));
    if (done >= 0 || (errno != EXDEV && errno != EINVAL && errno != EOPNOTSUPP && errno != ENOSYS)) return done;
    return copy_chunk(from, to, at, n);
}

bool copy_data(int from, int to) {
    struct stat st;
    if (fstat(from, &st) || ftruncate(to, st.st_size)) return false;
    for (off_t at = 0, end; (at = lseek(from, at, SEEK_DATA)) >= 0;) {
        if ((end = lseek(from, at, SEEK_HOLE)) < 0) return false;
        for (ssize_t n; at < end; at += n)
            if ((n = copy_some(from, to, at, (size_t)(end - at))) <= 0) return errno = n ? errno : EIO, false; /* 0: it shrinks under us */
    }
    return errno == ENXIO; /* no more data */
}

/* Instead of what is in `to`, whose room is taken first: a disk that is too full leaves the old as it is. */
bool copy_over(int from, int to) {
    struct stat st, old;
    if (fstat(from, &st) || fstat(to, &old)) return false;
    if (st.st_size && fallocate(to, FALLOC_FL_KEEP_SIZE, 0, st.st_size) && errno != EOPNOTSUPP && errno != ENOSYS && errno != EPERM) {
        int err = errno;
        if (ftruncate(to, old.st_size)) {} /* gives back what it took */
        return errno = err, false;
    }
    for (off_t at = 0, n; at < st.st_size; at += n)
        if ((n = copy_chunk(from, to, at, (size_t)(st.st_size - at))) <= 0) return errno = n ? errno : EIO, false;
    return !ftruncate(to, st.st_size);
}

static bool copy_attributes(int fd, const struct stat *st) {
    const struct timespec times[2] = {st->st_atim, st->st_mtim};
    return !fchmod(fd, st->st_mode & 07777) && !futimens(fd, times);
}

static bool copy_file(int from, const char *name, int to, const char *as) {
    struct stat st;
    cleanup_fd int in = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    cleanup_fd int out = in < 0 ? -1 : openat(to, as, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    return out >= 0 && copy_data(in, out) && !fstat(in, &st) && copy_attributes(out, &st);
}

static bool copy_other(int from, const char *name, int to, const char *as, const struct stat *st) {
    char target[4096];
    const struct timespec times[2] = {st->st_atim, st->st_mtim};
    ssize_t n = S_ISLNK(st->st_mode) ? readlinkat(from, name, target, sizeof target - 1) : 0;
    if (n < 0) return false;
    target[n] = 0;
    if (S_ISLNK(st->st_mode) ? symlinkat(target, to, as) : mknodat(to, as, st->st_mode, st->st_rdev)) return false;
    return !utimensat(to, as, times, AT_SYMLINK_NOFOLLOW);
}

static bool copy_entry(int from, const char *name, int to, const char *as, struct stat *top, int depth);

static bool copy_dir(int from, const char *name, int to, const char *as, struct stat *top, int depth) {
    struct stat st;
    if (depth == DEEPEST) return errno = E2BIG, false;
    cleanup_fd int in = openat(from, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (in < 0 || fstat(in, &st) || mkdirat(to, as, 0700)) return false;
    cleanup_fd int out = openat(to, as, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (out < 0 || (!depth && fstat(out, top))) return false;
    DIR *d = fdopendir(in);
    if (!d) return false;
    steal_fd(&in);
    bool ok = true;
    for (struct dirent *e; ok && (errno = 0, e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) ok = copy_entry(dirfd(d), e->d_name, out, e->d_name, top, depth + 1);
    int err = errno; /* 0: the end of the folder, not a folder that could not be read to its end */
    closedir(d);
    errno = err;
    return ok && !err && copy_attributes(out, &st);
}

/* `top` is the first folder that was made: to come upon it means to copy a folder into itself. */
static bool copy_entry(int from, const char *name, int to, const char *as, struct stat *top, int depth) {
    struct stat st;
    if (fstatat(from, name, &st, AT_SYMLINK_NOFOLLOW)) return false;
    if (depth && st.st_dev == top->st_dev && st.st_ino == top->st_ino) return errno = EINVAL, false;
    if (S_ISDIR(st.st_mode)) return copy_dir(from, name, to, as, top, depth);
    return S_ISREG(st.st_mode) ? copy_file(from, name, to, as) : copy_other(from, name, to, as, &st);
}

bool copy_tree(const char *from, const char *to) {
    struct stat top;
    return copy_entry(AT_FDCWD, from, AT_FDCWD, to, &top, 0);
}

/* For file systems that know no NOREPLACE, as gVisor's mounted folders: a second name must be a new one. A folder can have
 * only one; there a look must do. */
static int rename_by_link(const char *from, const char *to) {
    struct stat st;
    if (!linkat(AT_FDCWD, from, AT_FDCWD, to, 0)) return unlink(from);
    if (errno != EPERM) return -1;
    if (!lstat(to, &st)) return errno = EEXIST, -1;
    return rename(from, to);
}

int rename_to(const char *from, const char *to, bool overwrite) { /* older musl has no function for it */
    int done = (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, overwrite ? 0 : 1 /* NOREPLACE */);
    return done && !overwrite && errno == EINVAL ? rename_by_link(from, to) : done;
}
