/* Files that programs have open to write to, or mapped. To write through a mapping is no event, nor, but for the first time,
 * anything that a file's times tell; and kernels before 6.8 tell nothing of splice. So they are looked at in every save, those that
 * are mapped in the one after it, too: over layers it is no event either when a mapping goes.
 *
 * The name that a file was opened by may be gone while it has another (linkat): nobody hears of what is written to it then. Such a
 * file is noted when it is told, and looked at in each save. Of a mapping one does not see how many names its file has. */
#include "agent.h"
#include "track.h"
#include <dirent.h>
#include <limits.h>
#include <linux/kcmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>

#define MOST_TEXT (64u << 20) /* of /proc: we are not in the box's cgroup */
#define MOST_PATHS (8u << 20)
#define MOST 65536u
#define MOST_LOST 1024u

static struct held { char *path; bool mapped; ino_t ino; } *held; /* path "": it is known by its inode alone */
static size_t nheld, room, paths, texts;
static ino_t *unmarked;
static size_t nunmarked, unmarked_room;
static bool sorted;
static struct lost { ino_t ino; struct timespec changed; off_t size; } lost[MOST_LOST]; /* open or mapped under a name that is gone; it may have others */
static size_t nlost;
static bool too_many;

bool held_too_many(void) { return too_many; }

static void add_lost(const struct lost *one) {
    if (nlost && !memcmp(&lost[nlost - 1], one, sizeof *one)) return;
    if (nlost < MOST_LOST) lost[nlost++] = *one;
    else too_many = true;
}

static void add(const char *path, bool mapped, ino_t ino) {
    for (size_t i = nheld; i && i + 8 > nheld; i--) /* mostly one has many mappings of a file */
        if (!strcmp(held[i - 1].path, path) && held[i - 1].ino == ino) return (void)(held[i - 1].mapped |= mapped);
    if (nheld == MOST || paths > MOST_PATHS) return (void)(too_many = true);
    if (nheld == room) held = xrealloc(held, (room = room ? room * 2 : 64) * sizeof *held);
    char *copy = strdup(path);
    if (!copy) return (void)(too_many = true);
    paths += strlen(path);
    held[nheld++] = (struct held){copy, mapped, ino};
}

/* As programs see it, to what is on the disk. */
static bool find_on_disk(const char *path, char rest[PATH_MAX]) {
    const struct json *mounts = json_get(box.spec, "mounts");
    for (const struct json *m = mounts ? mounts->child : NULL; m; m = m->next) {
        const char *type = json_str(m, "type"), *from = json_str(m, "from"), *to = json_str(m, "to");
        size_t n = to ? strlen(to) : 0;
        if (!type || strcmp(type, "disk") || !from || !to || strncmp(path, to, n) || path[n] != '/') continue;
        if ((size_t)snprintf(rest, PATH_MAX, "%s%s", from, path + n) < PATH_MAX) return true;
        return too_many = true, false;
    }
    return false;
}

/* Or it has such a name. */
static bool seems_deleted(const char *path) {
    static const char mark[] = " (deleted)";
    size_t n = strlen(path);
    return n >= sizeof mark && !strcmp(path + n - (sizeof mark - 1), mark);
}

/* Whether the program may write through it, now or after mprotect: it opened the file so. */
static bool may_write(int process, const char *line) {
    unsigned long from, to;
    char name[64];
    struct stat st;
    if (sscanf(line, "%lx-%lx", &from, &to) != 2) return true;
    snprintf(name, sizeof name, "map_files/%lx-%lx", from, to);
    return fstatat(process, name, &st, AT_SYMLINK_NOFOLLOW) || st.st_mode & S_IWUSR;
}

/* START-END rw-s OFFSET DEVICE INODE    PATH */
static void take_mapping(int process, char *line) {
    char *rights = strchr(line, ' '), *path = rights, rest[PATH_MAX];
    unsigned long long ino;
    if (!rights || strlen(rights) < 5 || rights[4] != 's') return;
    for (int i = 0; path && i < 4; i++) path = strchr(path + 1, ' ');
    if (!path || path[strspn(path, " ")] != '/' || !find_on_disk(path + strspn(path, " ") + 1, rest)) return;
    if (rights[2] != 'w' && !may_write(process, line)) return;
    if (strstr(rest, "\\012")) return (void)(too_many = true); /* this, or a newline */
    add(rest, true, 0);
    if (!seems_deleted(rest)) return;
    if (sscanf(rights, " %*s %*s %*s %llu", &ino) != 1) return (void)(too_many = true);
    add("", true, (ino_t)ino);
    add_lost(&(struct lost){.ino = (ino_t)ino});
}

static bool look_at_mappings(int process) {
    static char text[64u << 10];
    size_t n = 0, before = texts;
    cleanup_fd int fd = openat(process, "maps", O_RDONLY | O_CLOEXEC);
    for (ssize_t more; fd >= 0 && (more = RETRY(read(fd, text + n, sizeof text - 1 - n))) > 0;) {
        char *line = text, *end;
        n += (size_t)more;
        texts += (size_t)more;
        text[n] = 0;
        for (; (end = strchr(line, '\n')); line = end + 1) {
            *end = 0;
            take_mapping(process, line);
        }
        n -= (size_t)(line - text);
        memmove(text, line, n);
        if (n < sizeof text - 1 && texts < MOST_TEXT) continue; /* no path is so long */
        too_many = true;
        break;
    }
    return texts > before;
}

static void take_open(int dir, const char *name) {
    char path[PATH_MAX], rest[PATH_MAX];
    struct stat st;
    ssize_t n = readlinkat(dir, name, path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    texts += (size_t)(n > 0 ? n : 0);
    if (texts > MOST_TEXT) return (void)(too_many = true);
    if (*path != '/' || !find_on_disk(path + 1, rest)) return;
    add(rest, false, 0);
    if (!seems_deleted(rest)) return;
    if (!fstatat(dir, name, &st, 0) && S_ISREG(st.st_mode) && st.st_nlink) add_lost(&(struct lost){.changed = st.st_ctim, .size = st.st_size});
}

static void look_at_open(int process) {
    struct stat st;
    int dir = openat(process, "fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *d = dir < 0 ? NULL : fdopendir(dir);
    for (struct dirent *e; d && (e = readdir(d));)
        if (*e->d_name != '.' && !fstatat(dir, e->d_name, &st, AT_SYMLINK_NOFOLLOW) && st.st_mode & S_IWUSR) take_open(dir, e->d_name);
    if (d) closedir(d);
    else if (dir >= 0) close(dir);
}

struct looked { pid_t pid, last; bool mappings; };

/* Its threads have one memory, and mostly the same files; who has ended has neither, while others of its threads go on. */
static void look_at_thread(pid_t tid, void *arg) {
    struct looked *l = arg;
    char name[48];
    bool same = l->last && !syscall(SYS_kcmp, l->last, tid, KCMP_FILES, 0, 0);
    if (same && l->mappings) return;
    snprintf(name, sizeof name, "%d/task/%d", (int)l->pid, (int)tid);
    cleanup_fd int thread = openat(sweep_proc(), name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (thread < 0) return;
    if (!l->mappings) l->mappings = look_at_mappings(thread);
    if (!same) look_at_open(thread);
    l->last = tid;
}

static void look_at(pid_t pid, void *unused) {
    (void)unused;
    if (pid != 1 && pid != getpid()) sweep_each_thread(pid, look_at_thread, &(struct looked){.pid = pid});
}

void held_look(void) { sweep_each(look_at, NULL); }

void held_unmark(ino_t ino) {
    if (nunmarked == unmarked_room) unmarked = xrealloc(unmarked, (unmarked_room = unmarked_room ? unmarked_room * 2 : 64) * sizeof *unmarked);
    unmarked[nunmarked++] = ino;
    sorted = false;
}

void held_was_mapped(const char *path, size_t n, ino_t ino) {
    char copy[PATH_MAX];
    memcpy(copy, path, n);
    copy[n] = 0;
    if (n) add(copy, false, 0);
    if (ino) held_unmark(ino);
}

/* A page that goes to the disk is no longer the program's to write to until it asks again, which touches the file. What is in memory
 * goes nowhere. */
static bool mark(int fd) { return !saving.memory && !sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE); }

void held_mark(void) {
    struct stat st;
    for (struct held *h = held; h < held + nheld; h++) {
        if (h->ino) held_unmark(h->ino);
        cleanup_fd int fd = h->mapped && *h->path ? save_open(h->path, O_RDONLY | O_NONBLOCK) : -1;
        if (fd < 0 || fstat(fd, &st) || !S_ISREG(st.st_mode)) continue;
        if (!mark(fd)) held_unmark(h->ino = st.st_ino);
    }
}

static int by_number(const void *a, const void *b) {
    ino_t x = *(const ino_t *)a, y = *(const ino_t *)b;
    return (x > y) - (x < y);
}

bool held_unmarked(const struct stat *st) {
    if (!nunmarked) return false;
    if (!sorted) qsort(unmarked, nunmarked, sizeof *unmarked, by_number);
    sorted = true;
    return bsearch(&st->st_ino, unmarked, nunmarked, sizeof *unmarked, by_number);
}

/* An overlay shows what it has copied up under another inode than the disk, so what is open is known by its times. */
bool held_lost(const struct stat *st) {
    for (const struct lost *l = lost; l < lost + nlost; l++)
        if (l->ino ? l->ino == st->st_ino
                   : l->size == st->st_size && l->changed.tv_sec == st->st_ctim.tv_sec && l->changed.tv_nsec == st->st_ctim.tv_nsec) return true;
    return false;
}

void held_found(int fd, const struct stat *st) {
    if (held_unmarked(st)) mark(fd);
}

bool held_next(size_t *i, const char **path, ino_t *ino, bool *mapped) {
    if (*i == nheld) return false;
    const struct held *h = &held[(*i)++];
    *path = h->path;
    *ino = h->ino;
    *mapped = h->mapped;
    return true;
}
