/* Where no memory cgroup holds what a box uses, pid 1 looks at it from time to time, as long as anybody runs: a watch and no wall.
 *
 * Each process is made to count for the kernel as much as its whole box, by its oom_score_adj: when the machine or the container that
 * we are in has no memory left, the box that has most of it loses a process, and no neighbour's, however small the pieces are. And what is
 * over the box's limit is ended, the largest process first, as the kernel does in a cgroup. */
#include "agent.h"
#include <linux/kcmp.h>
#include <signal.h>
#include <stdio.h>
#include <sys/fsuid.h>

#define QUIET 250.0  /* ms between two looks at a box in which nothing changes; */
#define BUSY 50.0    /* in which something does; */
#define AGAIN 5.0    /* that was over its limit: a child that vfork has made counts twice, and soon no more */
#define SHARE 20.0   /* of our time, one part in so many; but */
#define LONGEST 1000.0 /* without a look never for longer */
#define OURS (1 << 20) /* a process of ours, before it is a program, is smaller */

struct weight {
    pid_t pid, thread;           /* thread: one that has the memory */
    uint64_t anon, files, seen;  /* its own; of files in memory, which are limited together with the disk that is memory; both, at first */
    bool hides;
};
static struct weight *all;
static size_t n, room;
static uint64_t limit, disk, machine; /* disk: what files in memory may have besides; machine: what there is for all boxes together */
static uint64_t anon, sum;            /* of all; with files */
static double look_at;               /* 0: nobody runs */
static int empty;                    /* looks that have seen nobody, since somebody was to come */
static bool still, raised, over;
static int base = 500;    /* our own score, which all begin with: that of our container may be higher */
static char text[1 << 16]; /* of the file that was read last */

static uint64_t kib(const char *name) {
    const char *at = strstr(text, name);
    return at ? strtoull(at + strlen(name), NULL, 10) << 10 : 0;
}

static bool read_file(const struct weight *w, const char *name, const char *holds) {
    char path[64];
    snprintf(path, sizeof path, "%d/task/%d/%s", (int)w->pid, (int)w->thread, name);
    cleanup_fd int fd = openat(sweep_proc(), path, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : RETRY(read(fd, text, sizeof text - 1));
    text[got > 0 ? got : 0] = 0;
    return strstr(text, holds);
}

static void try_thread(pid_t thread, void *arg) {
    struct weight *w = arg;
    if (w->thread) return;
    w->thread = thread;
    if (!read_file(w, "status", "\nRssAnon:")) w->thread = 0;
}

/* With what it shares with others, in full. Who has been killed already counts no more. */
static void weigh(pid_t pid, void *unused) {
    struct weight w = {.pid = pid};
    (void)unused;
    try_thread(pid, &w);
    if (!w.thread) sweep_each_thread(pid, try_thread, &w); /* its first thread has ended, or all of it has */
    const char *pending = strstr(text, "\nSigPnd:");
    if (!w.thread || !pending || strtoull(pending + 8, NULL, 16) >> (SIGKILL - 1) & 1) return;
    w.anon = kib("\nRssAnon:") + kib("\nVmSwap:");
    w.files = kib("\nRssShmem:");
    w.seen = w.anon + w.files;
    if (n == room) all = xrealloc(all, (room = room ? room * 2 : 64) * sizeof *all);
    all[n++] = w;
    anon += w.anon;
    sum += w.seen;
}

static void forget(struct weight *w) {
    anon -= w->anon;
    sum -= w->anon + w->files;
    w->anon = w->files = 0;
}

/* It counts with its share of what it shares. Who does not let us see that counts in full. */
static void share(struct weight *w) {
    for (struct weight *v = all; v < w; v++) {
        uint64_t apart = v->seen > w->seen ? v->seen - w->seen : w->seen - v->seen;
        if (apart <= OURS && !syscall(SYS_kcmp, v->thread, w->thread, KCMP_VM, 0, 0)) return forget(w);
    }
    if (!read_file(w, "smaps_rollup", "\nPss_Anon:")) return;
    forget(w);
    anon += w->anon = kib("\nPss_Anon:") + kib("\nSwapPss:");
    sum += w->anon + (w->files = kib("\nPss_Shmem:"));
}

static void end(struct weight *w) {
    init_tell_oom();
    kill(w->pid, SIGKILL);
    forget(w);
}

/* false: it hides from us (PR_SET_DUMPABLE), so that we may not even open the file. */
static bool set_score(const struct weight *w, int score) {
    char path[64], value[16];
    snprintf(path, sizeof path, "%d/task/%d/oom_score_adj", (int)w->pid, (int)w->thread);
    int size = snprintf(value, sizeof value, "%d", score);
    cleanup_fd int fd = openat(sweep_proc(), path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return errno != EACCES;
    (void)!write(fd, value, (size_t)size); /* refused where it is higher already, by whoever may lower it */
    return true;
}

/* Who hides cannot be made to count for more. A little of that is harmless; where it is much of a box, it ends. */
static void raise_scores(void) {
    bool raise = false;
    uint64_t hidden = 0;
    for (struct weight *w = all; w < all + n; w++) {
        uint64_t more = (sum - w->seen) * 1000 / machine;
        if (!more && !raised) continue;
        raise |= more > 0;
        w->hides = !set_score(w, base + (more > (uint64_t)(1000 - base) ? 1000 - base : (int)more)) && w->seen > OURS;
        hidden += w->hides ? w->seen : 0;
    }
    for (struct weight *w = all; w < all + n && hidden > limit / 4; w++) {
        if (!w->hides) continue;
        hidden -= w->seen;
        end(w);
    }
    raised = raise;
}

static bool too_much(void) { return anon > limit || sum > limit + disk; }

static void hold_limit(void) {
    for (struct weight *w = all; w < all + n && too_much(); w++) share(w);
    bool twice = over;
    over = too_much();
    while (over && twice && too_much()) {
        struct weight *most = all;
        for (struct weight *w = all; w < all + n; w++)
            if (w->anon + w->files > most->anon + most->files) most = w;
        end(most);
    }
}

/* The launcher writes it when we are there already. */
static void read_base(void) {
    cleanup_fd int fd = openat(sweep_proc(), "self/oom_score_adj", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? -1 : RETRY(read(fd, text, sizeof text - 1));
    text[got > 0 ? got : 0] = 0;
    if (got > 0) base = (int)strtol(text, NULL, 10);
}

/* How long it is to the next. */
static double look(void) {
    static uint64_t before;
    static size_t many;
    bool other = box.user_mode == USER_UID;
    uid_t uid = box.uid + box.uid_base;
    gid_t gid = box.gid + box.uid_base;
    n = 0;
    anon = sum = 0;
    read_base();
    if (other) setfsgid(gid), setfsuid(uid); /* whose processes they are: no capability is needed to see into them */
    sweep_programs(weigh, NULL);
    uint64_t now = sum;
    raise_scores();
    hold_limit();
    if (other) setfsuid(geteuid()), setfsgid(getegid());
    bool changed = n != many || now > before + OURS || before > now + OURS;
    before = now;
    many = n;
    return over ? AGAIN : changed ? BUSY : QUIET;
}

void memory_begin(void) {
    const struct json *watch = json_get(box.spec, "memory_watch");
    limit = (uint64_t)json_int(watch, "limit", 0, 0, MAX_INT);
    disk = (uint64_t)json_int(watch, "disk", 0, 0, MAX_INT);
    machine = (uint64_t)json_int(watch, "of", 1, 1, MAX_INT);
}

/* Somebody is about to run. */
void memory_wake(void) {
    empty = 0;
    if (limit && look_at <= 0) look_at = now_ms() + BUSY;
}

void memory_rest(bool rests) { still = rests; }

int memory_patience(void) {
    double wait = look_at - now_ms();
    return look_at <= 0 || still || sweep_paused() ? -1 : wait < 0 ? 0 : (int)wait + 1;
}

void memory_tick(void) {
    double began = now_ms();
    if (look_at <= 0 || began < look_at || still || sweep_paused()) return;
    double wait = look(), now = now_ms(), cost = (now - began) * SHARE;
    empty = n ? 0 : empty + 1;
    if (over || cost < wait) cost = wait;
    look_at = empty < 10 ? now + (cost < LONGEST ? cost : LONGEST) : 0;
}
