/* Files that programs have open to write to, or mapped. To write through a mapping is no event, nor, but for the first time,
 * anything that a file's times tell; and kernels before 6.8 tell nothing of splice. So they are looked at in every save. */
#include "agent.h"
#include "track.h"
#include <dirent.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <sys/vfs.h>

static struct held { char *path; bool writable, unmarked; ino_t ino; } *held;
static size_t nheld, room;
static struct lost { ino_t ino; struct timespec changed; off_t size; } *lost; /* open or mapped under a name that is gone; it may have others */
static size_t nlost, lost_room;

static void add(const char *path, bool writable) {
    for (size_t i = nheld; i && i + 8 > nheld; i--) /* mostly one has many mappings of a file */
        if (!strcmp(held[i - 1].path, path)) return (void)(held[i - 1].writable |= writable);
    if (nheld == room) held = xrealloc(held, (room = room ? room * 2 : 64) * sizeof *held);
    char *copy = strdup(path);
    if (copy) held[nheld++] = (struct held){.path = copy, .writable = writable};
}

static void add_lost(struct lost one) {
    if (nlost == lost_room) lost = xrealloc(lost, (lost_room = lost_room ? lost_room * 2 : 16) * sizeof *lost);
    lost[nlost++] = one;
}

static bool is_deleted(const char *path) {
    const char end[] = " (deleted)";
    size_t n = strlen(path), m = sizeof end - 1;
    return n > m && !strcmp(path + n - m, end);
}

/* As programs see it, to what is on the disk. */
static void take(const char *path, bool writable) {
    char rest[PATH_MAX];
    const struct json *mounts = json_get(box.spec, "mounts");
    for (const struct json *m = mounts ? mounts->child : NULL; m; m = m->next) {
        const char *type = json_str(m, "type"), *from = json_str(m, "from"), *to = json_str(m, "to");
        size_t n = to ? strlen(to) : 0;
        if (!type || strcmp(type, "disk") || !from || !to || strncmp(path, to, n) || path[n] != '/') continue;
        if ((size_t)snprintf(rest, sizeof rest, "%s%s", from, path + n) < sizeof rest) add(rest, writable);
        return;
    }
}

/* START-END rw-s OFFSET DEVICE INODE    PATH */
static void take_mapping(char *line) {
    char *rights = strchr(line, ' '), *path = rights;
    if (!rights || strlen(rights) < 5 || rights[4] != 's') return;
    for (int i = 0; path && i < 3; i++) path = strchr(path + 1, ' ');
    ino_t ino = path ? (ino_t)strtoull(path, &path, 10) : 0;
    if (!path || path[strspn(path, " ")] != '/') return;
    path += strspn(path, " ") + 1;
    if (rights[2] == 'w' && is_deleted(path)) add_lost((struct lost){.ino = ino});
    take(path, rights[2] == 'w');
    char *to = path;
    for (const char *p = path; *p; p++) { /* a newline in it: this or that */
        bool escaped = !strncmp(p, "\\012", 4);
        *to++ = escaped ? '\n' : *p;
        if (escaped) p += 3;
    }
    bool other = *to;
    *to = 0;
    if (other) take(path, rights[2] == 'w');
}

static void look_at_mappings(int process) {
    static char text[64u << 10];
    size_t n = 0;
    cleanup_fd int fd = openat(process, "maps", O_RDONLY | O_CLOEXEC);
    for (ssize_t more; fd >= 0 && (more = RETRY(read(fd, text + n, sizeof text - 1 - n))) > 0;) {
        char *line = text, *end;
        n += (size_t)more;
        text[n] = 0;
        for (; (end = strchr(line, '\n')); line = end + 1) {
            *end = 0;
            take_mapping(line);
        }
        n -= (size_t)(line - text);
        memmove(text, line, n);
        if (n == sizeof text - 1) return; /* no path is so long */
    }
}

static void look_at_open(int process) {
    char path[PATH_MAX];
    struct stat st;
    int dir = openat(process, "fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = dir < 0 ? NULL : fdopendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        if (*e->d_name == '.' || fstatat(dir, e->d_name, &st, AT_SYMLINK_NOFOLLOW) || !(st.st_mode & S_IWUSR)) continue;
        ssize_t n = readlinkat(dir, e->d_name, path, sizeof path - 1);
        path[n > 0 ? n : 0] = 0;
        if (*path != '/') continue;
        if (is_deleted(path) && !fstatat(dir, e->d_name, &st, 0) && S_ISREG(st.st_mode) && st.st_nlink)
            add_lost((struct lost){.changed = st.st_ctim, .size = st.st_size});
        take(path + 1, false);
    }
    if (d) closedir(d);
    else if (dir >= 0) close(dir);
}

static void look_at(pid_t pid, void *unused) {
    (void)unused;
    char name[16];
    snprintf(name, sizeof name, "%d", (int)pid);
    cleanup_fd int process = pid == 1 || pid == getpid() ? -1 : openat(sweep_proc(), name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (process < 0) return;
    look_at_mappings(process);
    look_at_open(process);
}

void held_look(void) { sweep_each(look_at, NULL); }

/* A page that goes to the disk is no longer the program's to write to until it asks again, which touches the file. What is in memory
 * goes nowhere. */
void held_mark(void) {
    struct statfs fs;
    struct stat st;
    bool memory = fstatfs(saving.disk, &fs) || fs.f_type == TMPFS_MAGIC;
    for (struct held *h = held; h < held + nheld; h++) {
        cleanup_fd int fd = h->writable ? save_open(h->path, O_RDONLY | O_NONBLOCK) : -1;
        if (fd < 0 || fstat(fd, &st) || !S_ISREG(st.st_mode)) continue;
        h->unmarked = memory || sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE);
        h->ino = st.st_ino;
    }
}

bool held_unmarked(const struct stat *st) {
    for (const struct lost *l = lost; l < lost + nlost; l++)
        if (l->ino && l->ino == st->st_ino) return true;
    for (const struct held *h = held; h < held + nheld; h++)
        if (h->unmarked && h->ino == st->st_ino) return true;
    return false;
}

/* An overlay shows what it has copied up under another inode than the disk, so what is open is known by its times. */
bool held_lost(const struct stat *st) {
    for (const struct lost *l = lost; l < lost + nlost; l++)
        if (l->ino ? l->ino == st->st_ino
                   : l->size == st->st_size && l->changed.tv_sec == st->st_ctim.tv_sec && l->changed.tv_nsec == st->st_ctim.tv_nsec) return true;
    return false;
}

void held_each(void fn(const char *path, bool changes)) {
    for (const struct held *h = held; h < held + nheld; h++) fn(h->path, h->unmarked);
}
