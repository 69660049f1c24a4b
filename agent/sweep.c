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
#include <sys/wait.h>

static int proc = -1;

struct entry { uint64_t ino; int64_t off; unsigned short reclen; unsigned char type; char name[]; };
typedef void visit(pid_t pid, void *arg);

void sweep_open(int proc_fd) {
    proc = proc_fd >= 0 ? proc_fd : open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

int sweep_proc(void) { return proc; }
void sweep_close(void) { drop_fd(&proc); }

/* Every number that is a name in this directory of procfs: processes, or threads of one. In ascending order, and few at
 * a time: what is listed is looked at before it can go far. */
static void each_number(const char *path, visit *fn, void *arg) {
    char space[128] __attribute__((aligned(8)));
    cleanup_fd int dir = openat(proc, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    long n;
    while (dir >= 0 && (n = syscall(SYS_getdents64, dir, space, sizeof space)) > 0)
        for (long at = 0; at < n;) {
            struct entry *e = (struct entry *)(space + at);
            at += e->reclen;
            pid_t pid = (pid_t)strtol(e->name, NULL, 10);
            if (pid > 0) fn(pid, arg);
        }
}

void sweep_each(visit *fn, void *arg) { each_number(".", fn, arg); }

void sweep_each_thread(pid_t pid, visit *fn, void *arg) {
    char path[32];
    snprintf(path, sizeof path, "%d/task", (int)pid);
    each_number(path, fn, arg);
}

static uint64_t tag_at(const char *path) {
    struct stat st;
    if (!fstatat(proc, path, &st, 0)) return (uint64_t)st.st_ino;
    return errno == EACCES || errno == EPERM ? UINT64_MAX : 0;
}

static bool each_child_of_thread(pid_t parent, pid_t thread, visit *fn, void *arg) {
    static char text[1 << 16];
    char path[64];
    size_t n = 0;
    ssize_t got = 1;
    snprintf(path, sizeof path, "%d/task/%d/children", (int)parent, (int)thread);
    cleanup_fd int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    for (; fd >= 0 && n < sizeof text - 1 && (got = RETRY(read(fd, text + n, sizeof text - 1 - n))) > 0; n += (size_t)got) {}
    if (n == sizeof text - 1) while (n && text[n - 1] != ' ') n--; /* half a number would be another process */
    text[n] = 0;
    for (char *p = text; *p;) {
        pid_t pid = (pid_t)strtol(p, &p, 10);
        if (pid > 1) fn(pid, arg);
        while (*p == ' ') p++;
    }
    return n > 0;
}

/* Quicker than a look at all of /proc: what hops from process to process is caught here, as each hop comes back to the
 * reaper above it. false: nobody. Needs CONFIG_PROC_CHILDREN; without it the searches below do what they can. */
static bool each_child(pid_t parent, visit *fn, void *arg) { return each_child_of_thread(parent, parent, fn, arg); }

/* The pid given last in this pid namespace, or 0. If it is the same before and after a look at all processes, nobody
 * was born meanwhile, and nobody was missed. */
static long last_pid(void) {
    char text[128];
    cleanup_fd int fd = openat(proc, "loadavg", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : RETRY(read(fd, text, sizeof text - 1));
    text[n > 0 ? n : 0] = 0;
    char *word = strrchr(text, ' ');
    return word ? strtol(word, NULL, 10) : 0;
}

uint64_t sweep_own_tag(void) { return tag_at("self/ns/uts"); }

struct thread_search { pid_t pid; uint64_t tag; };

static void tag_of_thread(pid_t thread, void *arg) {
    struct thread_search *s = arg;
    char path[64];
    snprintf(path, sizeof path, "%d/task/%d/ns/uts", (int)s->pid, (int)thread);
    if (!s->tag) s->tag = tag_at(path);
}

/* 0: it is gone. UINT64_MAX: we may not look. That is so for our own children until their execve, because their
 * memory still belongs to the host's user namespace, and for a program that executes a file nobody may read.
 * When a process's first thread has ended it looks dead, but its other threads may run on: then they have the tag. */
static uint64_t tag_of(pid_t pid) {
    struct thread_search s = {pid, 0};
    char path[40];
    snprintf(path, sizeof path, "%d/ns/uts", (int)pid);
    if ((s.tag = tag_at(path))) return s.tag;
    snprintf(path, sizeof path, "%d/task", (int)pid);
    each_number(path, tag_of_thread, &s);
    return s.tag;
}

/* What /proc/PID/stat says. */
struct seen { char state; pid_t parent; unsigned long ticks; long threads, pages; };

static bool read_stat(pid_t pid, struct seen *p) {
    char path[40], text[1024];
    snprintf(path, sizeof path, "%d/stat", (int)pid);
    cleanup_fd int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : RETRY(read(fd, text, sizeof text - 1));
    if (n <= 0) return false;
    text[n] = 0;
    char *rest = strrchr(text, ')'); /* the name before it may hold anything */
    unsigned long user, sys;
    int parent;
    static const char form[] = " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu %*d %*d %*d %*d %ld %*d %*u %*u %ld";
    if (!rest || sscanf(rest + 1, form, &p->state, &parent, &user, &sys, &p->threads, &p->pages) != 6) return false;
    p->parent = parent;
    p->ticks = user + sys;
    return true;
}

/* A zombie with threads is a process whose first thread has ended: it runs. */
static bool is_dead(const struct seen *p) { return p->state == 'X' || (p->state == 'Z' && p->threads <= 1); }

static void notice(pid_t pid, void *arg) {
    struct seen p;
    if (pid == getpid() && read_stat(pid, &p)) *(bool *)arg = true;
}

/* A sweep that sees nobody looks like one that found nobody: so see ourselves before anything depends on it. */
bool sweep_works(void) {
    bool seen = false;
    sweep_each(notice, &seen);
    return seen;
}

/* A child of the forker that has not said its number yet: no program is root. */
static bool is_newborn(pid_t pid) {
    char path[40], text[1024];
    snprintf(path, sizeof path, "%d/status", (int)pid);
    cleanup_fd int fd = forker_wanted() ? openat(proc, path, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t n = fd < 0 ? -1 : RETRY(read(fd, text, sizeof text - 1));
    text[n > 0 ? n : 0] = 0;
    return strstr(text, "\nUid:\t0\t0\t0\t0\n");
}

struct search { uint64_t tag; int signal; enum sweep result; };

static void signal_if_tagged(pid_t pid, void *arg) {
    struct search *s = arg;
    struct seen p;
    if (pid == 1) return;
    uint64_t tag = tag_of(pid);
    /* what hides its tag ends with whichever exec is killed: only a hostile program has a reason to hide */
    bool ours = tag == s->tag || (tag == UINT64_MAX && s->signal == SIGKILL && !init_knows(pid) && !is_newborn(pid));
    if (ours && !kill(pid, s->signal)) s->result = SWEEP_SOMEBODY;
    /* It was listed, and gone when we looked: it may have gone on in a child that came after the end of the list. A
     * zombie that waits for another parent than us has not: its parent lives, and would be found. */
    bool lost = ours || (!tag && (!read_stat(pid, &p) || !is_dead(&p) || p.parent == 1));
    if (lost && s->result == SWEEP_NOBODY) s->result = SWEEP_UNSURE;
}

struct kin { pid_t pid, parent; bool ours; };
struct family { struct kin *all; size_t n, cap; };

static void note_kin(pid_t pid, void *arg) {
    struct family *f = arg;
    struct seen p;
    if (!read_stat(pid, &p) || is_dead(&p)) return;
    if (f->n == f->cap) f->all = xrealloc(f->all, (f->cap = f->cap ? f->cap * 2 : 256) * sizeof *f->all);
    f->all[f->n++] = (struct kin){pid, p.parent, false};
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

static void kill_child(pid_t pid, void *unused) {
    (void)unused;
    kill(pid, SIGKILL);
}

/* Everyone below `ancestor` is marked as ours. */
static void find_descendants(struct family *f, pid_t ancestor) {
    sweep_each(note_kin, f);
    for (bool more = true; more;) { /* one round, but for pids that wrapped around */
        more = false;
        for (size_t i = 0; i < f->n; i++) {
            struct kin *k = &f->all[i], *parent = k->ours ? NULL : find_kin(f, k->parent);
            if (k->ours || (k->parent != ancestor && !(parent && parent->ours))) continue;
            k->ours = more = true;
        }
    }
}

static enum sweep signal_descendants(pid_t shepherd, int signal) {
    struct family f = {0};
    enum sweep result = SWEEP_NOBODY;
    for (int i = 0; signal == SIGKILL && i < 20 && each_child(shepherd, kill_child, NULL); i++) {}
    find_descendants(&f, shepherd);
    for (size_t i = 0; i < f.n; i++)
        if (f.all[i].ours && !kill(f.all[i].pid, signal)) result = SWEEP_SOMEBODY;
    free(f.all);
    return result;
}

enum sweep sweep_signal(uint64_t tag, pid_t shepherd, int signal) {
    struct search s = {tag, signal, SWEEP_NOBODY};
    if (!box.namespaces) return shepherd > 0 ? signal_descendants(shepherd, signal) : SWEEP_NOBODY;
    if (!tag) return SWEEP_NOBODY;
    long before = last_pid();
    for (int i = 0; signal == SIGKILL && i < 20; i++) { /* as long as somebody is born, to catch who hops */
        long then = last_pid();
        each_child(1, signal_if_tagged, &s);
        if (then == last_pid()) break;
    }
    sweep_each(signal_if_tagged, &s);
    return s.result == SWEEP_NOBODY && last_pid() != before ? SWEEP_UNSURE : s.result;
}

static void note_stopped(pid_t pid, void *arg) {
    struct seen p;
    if (read_stat(pid, &p) && p.state == 'T') note_kin(pid, arg);
}

/* For a box in which somebody is born all the time. A stop signal to all of a pid namespace is one step for the kernel,
 * and a fork does not get past a signal that waits: so what is seen now is all there is. Who had stopped before stays so, and
 * the youngest go on first, so that no shell sees its job stopped. */
void sweep_frozen(uint64_t tag) {
    struct search s = {tag, SIGKILL, SWEEP_SOMEBODY};
    struct family before = {0}, now = {0};
    if (!box.namespaces || !tag) return;
    sweep_each(note_stopped, &before);
    kill(-1, SIGSTOP);
    for (int pass = 0; s.result == SWEEP_SOMEBODY && pass < 100; pass++) { /* a fork that was under way may still end */
        s.result = SWEEP_NOBODY;
        sweep_each(signal_if_tagged, &s);
    }
    sweep_each(note_kin, &now);
    for (size_t i = now.n; i-- > 0;)
        if (!find_kin(&before, now.all[i].pid)) kill(now.all[i].pid, SIGCONT);
    free(before.all);
    free(now.all);
}

static struct family stopped_before; /* while the box is paused */
static bool paused;

bool sweep_paused(void) { return paused; }

static int looks; /* since they were told to stop */

static void see_stopped(pid_t pid, void *arg) {
    struct seen p;
    if (read_stat(pid, &p) && p.state == 'T') *(bool *)arg = true;
}

/* Who has called vfork waits for its child, and no stop reaches it before that goes on. On a tmpfs nothing else takes as long. */
static bool awaits_child(pid_t pid, const struct seen *p) {
    bool stopped = false;
    if (p->state == 'D' && looks > 20) each_child(pid, see_stopped, &stopped);
    return stopped;
}

static void see_moving_thread(pid_t tid, void *arg) {
    struct seen p;
    if (read_stat(tid, &p) && !strchr("TtZX", p.state)) *(bool *)arg = true;
}

/* The first thread has ended, and has no other state any more: the others stand still. */
static bool rests_in_threads(pid_t pid, const struct seen *p) {
    bool moving = p->state != 'Z';
    if (!moving) sweep_each_thread(pid, see_moving_thread, &moving);
    return !moving;
}

/* In a container we are not pid 1, and not alone as root: whatever else runs is the sandbox's user. */
static bool is_user(pid_t pid) {
    char path[40], text[1024], uid[32];
    snprintf(path, sizeof path, "%d/status", (int)pid);
    snprintf(uid, sizeof uid, "\nUid:\t%u\t", (unsigned)box.uid);
    cleanup_fd int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : RETRY(read(fd, text, sizeof text - 1));
    text[n > 0 ? n : 0] = 0;
    return strstr(text, uid);
}

static void see_moving(pid_t pid, void *arg) {
    struct seen p;
    if (box.container && !is_user(pid) && !init_has_worker(pid)) return;
    if (pid == 1 || !read_stat(pid, &p) || p.state == 'T' || p.state == 't' || is_dead(&p)) return;
    if (!awaits_child(pid, &p) && !rests_in_threads(pid, &p)) *(bool *)arg = true;
}

/* One step for the kernel, too: the signal goes to whomever its sender may signal, and that is the user's processes alone. */
static void stop_user(void) {
    int status;
    pid_t pid = fork();
    if (!pid) {
        bool other = setresgid(box.gid, box.gid, box.gid) || setresuid(box.uid, box.uid, box.uid);
        if (!other) kill(-1, SIGSTOP);
        _exit(other);
    }
    if (pid > 0) while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {}
    init_stop_workers();
}

/* Whoever is below a child of ours: a program, or one of its. Our children are shepherds and workers. */
static bool is_below_child(const struct kin *k) { return k->ours && k->parent != getpid(); }

/* Where programs are our own user, a signal to all would reach us. One pass after the other, until two see nobody move: who was seen
 * to stand still in the first may have been let go by somebody who does so in the second. */
static bool stop_below(void) {
    static int quiet;
    struct family f = {0};
    struct seen p;
    bool moving = false;
    find_descendants(&f, getpid());
    for (size_t i = 0; i < f.n; i++) {
        if (!is_below_child(&f.all[i]) && !init_has_worker(f.all[i].pid)) continue;
        if (!read_stat(f.all[i].pid, &p) || p.state == 'T' || is_dead(&p) || awaits_child(f.all[i].pid, &p) || rests_in_threads(f.all[i].pid, &p)) continue;
        kill(f.all[i].pid, SIGSTOP);
        moving = true;
    }
    free(f.all);
    quiet = moving ? 0 : quiet + 1;
    if (quiet < 2) return false;
    quiet = 0;
    return true;
}

/* As above: nobody in here is born past a signal that waits, and nobody who could send SIGCONT moves. */
bool sweep_stop(void) {
    bool moving = false;
    if (!paused) sweep_each(note_stopped, &stopped_before);
    looks = paused ? looks + 1 : 0;
    paused = true;
    if (box.container && box.user_mode == USER_NONE) return stop_below();
    if (box.container) stop_user();
    else kill(-1, SIGSTOP);
    sweep_each(see_moving, &moving);
    return !moving;
}

void sweep_continue(void) {
    struct family now = {0};
    if (!paused) return;
    sweep_each(note_kin, &now);
    for (size_t i = now.n; i-- > 0;)
        if (now.all[i].pid != 1 && !find_kin(&stopped_before, now.all[i].pid)) kill(now.all[i].pid, SIGCONT);
    free(now.all);
    free(stopped_before.all);
    stopped_before = (struct family){0};
    paused = false;
}

/* The nearest above a process, or itself, for which this is so; 0: nobody. */
pid_t sweep_above(pid_t pid, bool is(pid_t)) {
    struct seen p;
    for (int steps = 0; pid > 1 && steps < 100000 && !is(pid); steps++) pid = read_stat(pid, &p) ? p.parent : 0;
    return pid > 1 ? pid : 0;
}

/* As a subreaper we inherit every orphan: without a child of our own there is nobody left. false: somebody may be. */
bool sweep_descendants(void) {
    for (int pass = 0; pass < 5000; pass++) {
        pid_t dead;
        signal_descendants(getpid(), SIGKILL);
        while ((dead = waitpid(-1, NULL, WNOHANG)) > 0) {}
        if (dead < 0 && errno == ECHILD) return true;
        usleep(1000);
    }
    return false;
}

static void count(pid_t pid, void *arg) {
    struct tally *t = arg;
    struct seen p;
    if (pid == 1 || forker_is(pid) || !read_stat(pid, &p) || is_dead(&p)) return;
    t->processes += p.threads > 1 ? (int)p.threads : 1; /* as a cgroup counts them, and the limit */
    t->cpu_ms += (double)p.ticks * 1000.0 / (double)sysconf(_SC_CLK_TCK);
    t->rss += (uint64_t)p.pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

void sweep_count(struct tally *t) {
    *t = (struct tally){0};
    if (box.namespaces) return sweep_each(count, t);
    struct family f = {0};
    find_descendants(&f, getpid());
    for (size_t i = 0; i < f.n; i++)
        if (f.all[i].ours && f.all[i].parent != getpid()) count(f.all[i].pid, t); /* not the shepherds */
    free(f.all);
}

struct line { pid_t *pids, of; size_t n, room; };

static void join_line(pid_t pid, void *arg) {
    struct line *l = arg;
    if (l->n == l->room) l->pids = xrealloc(l->pids, (l->room = l->room ? l->room * 2 : 64) * sizeof *l->pids);
    l->pids[l->n++] = pid;
}

static void join_children(pid_t thread, void *arg) {
    struct line *l = arg;
    each_child_of_thread(l->of, thread, join_line, l);
}

/* By way of their parents: where /proc is the host's that costs what the box has, and not what the host has. */
static void each_below_shepherds(visit *fn, void *arg) {
    struct line l = {0};
    each_child(getpid(), join_line, &l);
    for (size_t i = 0, shepherds = l.n; i < l.n; i++) {
        l.of = l.pids[i];
        sweep_each_thread(l.of, join_children, &l);
        if (i >= shepherds) fn(l.pids[i], arg);
    }
    free(l.pids);
}

struct programs { visit *fn; void *arg; };

static void pass_on(pid_t pid, void *arg) {
    struct programs *p = arg;
    if (pid != 1 && !forker_is(pid) && !init_has_worker(pid)) p->fn(pid, p->arg);
}

void sweep_programs(visit *fn, void *arg) {
    if (box.namespaces) sweep_each(pass_on, &(struct programs){fn, arg});
    else each_below_shepherds(fn, arg);
}
