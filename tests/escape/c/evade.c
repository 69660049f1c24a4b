/* Runs on after its caller was killed, in as many ways as there are. evade HOW SECONDS: all begin as a daemon (two
 * forks, a session of their own), but those whose name ends in "-main". While one of it lives, the file `beat`
 * changes; it ends by itself after SECONDS, or when there is a file `stop`. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static double end, next_beat;
static int file;
static const char *slowly; /* outside of a sandbox, whose init may take its time to collect the dead */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void beat_once(void) {
    double at = now();
    if (at < next_beat) return;
    next_beat = at + 0.005;
    if (at > end || !access("stop", F_OK)) _exit(0);
    pwrite(file, &at, sizeof at, 0);
}

static pid_t insist(void) { /* others may use up the limit for a moment */
    pid_t pid;
    while ((pid = fork()) < 0) usleep(500);
    return pid;
}

static void beat(void) {
    for (;;) {
        beat_once();
        usleep(5000);
    }
}

static void *beat_in_thread(void *unused) {
    beat();
    return unused;
}

/* The first thread ends: the process looks dead, and is not. */
static void without_leader(void) {
    pthread_t t;
    pthread_create(&t, NULL, beat_in_thread, NULL);
    syscall(SYS_exit, 0);
}

/* Each process makes its successor and ends at once; they share memory, so that it takes microseconds. A stack is taken
 * again when the kernel has cleared its word: whoever was made to wait between clone and exit still stands on it. */
#define STACKS 64
#define STACK 16384
static char *stacks;
static volatile int taken[STACKS];
static int hop(void *unused) {
    int next = 0;
    beat_once();
    if (slowly) usleep(1000);
    while (taken[next]) next = (next + 1) % STACKS;
    taken[next] = 1;
    while (clone(hop, stacks + (next + 1) * STACK, CLONE_VM | CLONE_FILES | CLONE_FS | CLONE_CHILD_CLEARTID, unused, NULL, NULL, &taken[next]) < 0)
        beat_once();
    syscall(SYS_exit, 0);
    return 0;
}

static void hopping(void) {
    stacks = mmap(NULL, STACKS * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    hop(NULL);
}

static void unkillable(void) {
    sigset_t all;
    for (int s = 1; s < 65; s++) signal(s, SIG_IGN);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    beat();
}

/* Stopped most of the time; another one wakes it up. */
static void stopping(void) {
    signal(SIGCHLD, SIG_IGN);
    pid_t sleeper = insist();
    if (!sleeper)
        for (;;) {
            beat_once();
            raise(SIGSTOP);
        }
    for (;;) {
        beat_once();
        usleep(5000);
        if (kill(sleeper, SIGCONT)) _exit(0);
    }
}

/* A child of our parent: nobody's grandchild. */
static void sibling(void) {
    for (int i = 0; i < 8; i++)
        if (!syscall(SYS_clone, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0)) beat();
    _exit(0);
}

static void subreaper(void) {
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    for (int i = 0; i < 4; i++)
        if (!fork()) {
            setsid();
            if (fork()) _exit(0);
            beat();
        }
    beat();
}

static void chain(int depth) {
    if (depth && !fork()) {
        setsid();
        chain(depth - 1);
    }
    beat();
}

/* Twenty-four who look after each other: whoever was not seen for a while is replaced by a new one. */
#define HEADS 24
static void hydra(void) {
    volatile double *seen = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int me = 0;
    signal(SIGCHLD, SIG_IGN);
    for (int next = 0;; next = (next + 1) % HEADS) {
        seen[me] = now();
        if (next != me && seen[next] < seen[me] - 0.1) {
            seen[next] = seen[me];
            if (!fork()) {
                setsid();
                me = next;
            }
        }
        beat_once();
        usleep(500);
    }
}

static void disguised(char **argv) {
    memset(argv[0], 0, strlen(argv[0]));
    prctl(PR_SET_NAME, "kworker/0:0", 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0);
    for (int fd = 0; fd < 64; fd++)
        if (fd != file) close(fd);
    beat();
}

static void daemonise(void) {
    if (insist()) pause();
    setsid();
    if (insist()) _exit(0);
}

int main(int argc, char **argv) {
    const char *how = argv[1];
    size_t n = strlen(how);
    if (argc < 3) return 2;
    end = now() + atof(argv[2]);
    slowly = getenv("SLOWLY");
    file = open("beat", O_RDWR | O_CREAT, 0644);
    if (n < 5 || strcmp(how + n - 5, "-main")) daemonise();
    if (!strncmp(how, "no-leader", 9)) without_leader();
    if (!strncmp(how, "hopping", 7)) hopping();
    if (!strncmp(how, "unkillable", 10)) unkillable();
    if (!strncmp(how, "stopping", 8)) stopping();
    if (!strcmp(how, "vfork") && vfork()) _exit(0);
    if (!strcmp(how, "sibling")) sibling();
    if (!strcmp(how, "subreaper")) subreaper();
    if (!strcmp(how, "chain")) chain(20);
    if (!strcmp(how, "hydra")) hydra();
    if (!strcmp(how, "disguised")) disguised(argv);
    if (!strcmp(how, "unreadable")) execl("./hidden", "x", "daemon-main", argv[2], NULL); /* mode 0111 */
    beat();
}
