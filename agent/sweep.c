/* Which processes belong to an exec, whatever they did to get away.
 *
 * With namespaces every exec is born into a UTS namespace of its own. It is inherited by all that is forked,
 * cannot be left without a capability no program has, costs a few microseconds, and changes nothing a program
 * could notice; so its inode number is the tree's name. setsid, double forks and reparenting do not matter.
 *
 * Without namespaces each exec has a shepherd, which is a subreaper: orphans come back to it, so that a
 * descendant stays a descendant. */
#include "agent.h"
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>

static int proc = -1;

struct entry { uint64_t ino; int64_t off; unsigned short reclen; unsigned char type; char name[]; };
typedef void visit(pid_t pid, void *arg);

void sweep_open(int proc_fd) {
    proc = proc_fd >= 0 ? proc_fd : open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

int sweep_proc(void) { return proc; }

static void each_process(visit *fn, void *arg) {
    char space[16384] __attribute__((aligned(8)));
    cleanup_fd int dir = openat(proc, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    long n;
    while (dir >= 0 && (n = syscall(SYS_getdents64, dir, space, sizeof space)) > 0)
        for (long at = 0; at < n;) {
            struct entry *e = (struct entry *)(space + at);
            at += e->reclen;
            pid_t pid = (pid_t)strtol(e->name, NULL, 10);
            if (pid > 0) fn(pid, arg);
        }
}

uint64_t sweep_own_tag(void) {
    struct stat st;
    return stat("/proc/self/ns/uts", &st) ? 0 : (uint64_t)st.st_ino;
}

/* 0: it is gone. UINT64_MAX: we may not look. That is so for our own children until their execve, because their
 * memory still belongs to the host's user namespace, and for a program that executes a file nobody may read. */
static uint64_t tag_of(pid_t pid) {
    char path[40];
    struct stat st;
    snprintf(path, sizeof path, "%d/ns/uts", (int)pid);
    if (!fstatat(proc, path, &st, 0)) return (uint64_t)st.st_ino;
    return errno == EACCES || errno == EPERM ? UINT64_MAX : 0;
}

static bool read_stat(pid_t pid, char *state, pid_t *parent, unsigned long *ticks, long *pages) {
    char path[40], text[1024];
    snprintf(path, sizeof path, "%d/stat", (int)pid);
    cleanup_fd int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : RETRY(read(fd, text, sizeof text - 1));
    if (n <= 0) return false;
    text[n] = 0;
    char *p = strrchr(text, ')'); /* the name before it may hold anything */
    unsigned long user, sys;
    int ppid;
    if (!p || sscanf(p + 1, " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu %*d %*d %*d %*d %*d %*d %*u %*u %ld", state, &ppid, &user, &sys, pages) != 5)
        return false;
    *parent = ppid;
    *ticks = user + sys;
    return true;
}

static void notice(pid_t pid, void *arg) {
    char state;
    pid_t parent;
    unsigned long ticks;
    long pages;
    if (pid == getpid() && read_stat(pid, &state, &parent, &ticks, &pages)) *(bool *)arg = true;
}

/* A sweep that sees nobody looks like one that found nobody: so see ourselves before anything depends on it. */
bool sweep_works(void) {
    bool seen = false;
    each_process(notice, &seen);
    return seen;
}

struct search { uint64_t tag; int signal, found; };

static void signal_if_tagged(pid_t pid, void *arg) {
    struct search *s = arg;
    if (pid == 1) return;
    uint64_t tag = tag_of(pid);
    /* what hides its tag ends with whichever exec is killed: only a hostile program has a reason to hide */
    bool ours = tag == s->tag || (tag == UINT64_MAX && s->signal == SIGKILL && !init_knows(pid));
    if (ours && !kill(pid, s->signal)) s->found++;
}

struct kin { pid_t pid, parent; bool ours; };
struct family { struct kin *all; size_t n, cap; };

static void note_kin(pid_t pid, void *arg) {
    struct family *f = arg;
    char state;
    pid_t parent;
    unsigned long ticks;
    long pages;
    if (!read_stat(pid, &state, &parent, &ticks, &pages) || state == 'Z' || state == 'X') return;
    if (f->n == f->cap) f->all = xrealloc(f->all, (f->cap = f->cap ? f->cap * 2 : 256) * sizeof *f->all);
    f->all[f->n++] = (struct kin){pid, parent, false};
}

static struct kin *find_kin(const struct family *f, pid_t pid) {
    size_t low = 0, high = f->n; /* procfs lists pids in ascending order */
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (f->all[mid].pid < pid) low = mid + 1;
        else high = mid;
    }
    return low < f->n && f->all[low].pid == pid ? &f->all[low] : NULL;
}

static int signal_descendants(pid_t shepherd, int signal) {
    struct family f = {0};
    int found = 0;
    each_process(note_kin, &f);
    for (bool more = true; more;) { /* one round, but for pids that wrapped around */
        more = false;
        for (size_t i = 0; i < f.n; i++) {
            struct kin *k = &f.all[i], *parent = k->ours ? NULL : find_kin(&f, k->parent);
            if (k->ours || (k->parent != shepherd && !(parent && parent->ours))) continue;
            k->ours = more = true;
        }
    }
    for (size_t i = 0; i < f.n; i++)
        if (f.all[i].ours && !kill(f.all[i].pid, signal)) found++;
    free(f.all);
    return found;
}

int sweep_signal(uint64_t tag, pid_t shepherd, int signal) {
    if (!box.namespaces) return shepherd > 0 ? signal_descendants(shepherd, signal) : 0;
    struct search s = {tag, signal, 0};
    if (tag) each_process(signal_if_tagged, &s);
    return s.found;
}

static void count(pid_t pid, void *arg) {
    struct tally *t = arg;
    char state;
    pid_t parent;
    unsigned long ticks;
    long pages;
    if (pid == 1 || !read_stat(pid, &state, &parent, &ticks, &pages) || state == 'Z') return;
    t->processes++;
    t->cpu_ms += (double)ticks * 1000.0 / (double)sysconf(_SC_CLK_TCK);
    t->rss += (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

void sweep_count(struct tally *t) {
    *t = (struct tally){0};
    if (box.namespaces) each_process(count, t);
}
