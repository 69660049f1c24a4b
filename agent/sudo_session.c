/* A session of sudo's, as root of the box: reads what its client wants, starts it, and tells how it ended. It has no rights but
 * those that the client asks for, so it checks none; what it reads is bounded all the same. When the client is gone so is the
 * program. Its exit status says to a shepherd whether the program has ended by itself. */
#include "sudo.h"
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define PATIENCE 5000 /* ms until the client has said what it wants */
#define GRACE 500     /* ms between the signals that ask and the one that does not */

static void tell(enum sudo_kind kind, int value, const int *fd) {
    struct sudo_message m = {.kind = (int32_t)kind, .value = value};
    send_fds(SUDO_CONN, &m, sizeof m, fd, fd ? 1 : 0);
}

static int refuse(const char *what, int err) {
    struct sudo_message m = {.kind = SU_REFUSED, .value = err};
    snprintf(m.text, sizeof m.text, "%s%s%s", what, err ? ": " : "", err ? strerror(err) : "");
    send_fds(SUDO_CONN, &m, sizeof m, NULL, 0);
    return 1;
}

struct job {
    struct sudo_request r;
    int fds[SUDO_FDS];
    char *text, **argv, **envp;
    const char *dir;
};

static bool split(struct job *j) {
    char *word = j->text, *end = j->text + j->r.size;
    uint32_t n = 0;
    j->argv = calloc(j->r.words + 2, sizeof *j->argv); /* both lists end with a NULL */
    if (!j->argv || !j->r.size || end[-1]) return false;
    j->dir = word;
    j->envp = j->argv + j->r.argc + 1;
    for (; (word += strlen(word) + 1) < end && n < j->r.words; n++) j->argv[n < j->r.argc ? n : n + 1] = word;
    return word == end && n == j->r.words;
}

static bool read_job(struct job *j) {
    int n = SUDO_FDS;
    if (!readable_within(SUDO_CONN, PATIENCE)) return false;
    if (recv_fds(SUDO_CONN, &j->r, sizeof j->r, j->fds, &n) != sizeof j->r || n != SUDO_FDS) return false;
    if (j->r.size > SUDO_MOST || j->r.words > SUDO_WORDS || j->r.argc > j->r.words) return false;
    j->r.name[sizeof j->r.name - 1] = 0;
    j->text = malloc(j->r.size + 1);
    return j->text && pread(j->fds[SUDO_TEXT], j->text, j->r.size, 0) == (ssize_t)j->r.size && split(j);
}

/* The client gets the end that it copies from and to; with it the terminal goes. */
static int open_terminal(const struct job *j, int *master) {
    char path[32];
    int zero = 0, number;
    *master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (*master < 0 || ioctl(*master, TIOCSPTLCK, &zero) || ioctl(*master, TIOCGPTN, &number)) return -1;
    snprintf(path, sizeof path, "/dev/pts/%d", number);
    int slave = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (slave < 0) return -1;
    tcsetattr(slave, TCSANOW, &j->r.mode);
    ioctl(slave, TIOCSWINSZ, &j->r.window);
    return ioctl(slave, TIOCSCTTY, 0) ? -1 : slave;
}

static void run_script(struct job *j) {
    size_t n = j->r.argc;
    char **argv = calloc(n + 2, sizeof *argv);
    if (!argv) return;
    argv[0] = "sh";
    memcpy(argv + 1, j->argv, n * sizeof *argv);
    execve("/bin/sh", argv, j->envp);
    errno = ENOEXEC;
}

static const int ours[] = {SIGHUP, SIGPIPE, SIGTSTP, SIGTTIN, SIGTTOU}; /* the terminal's, and not for us */

static void set_signals(void (*to)(int)) {
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++) signal(ours[i], to);
}

/* Between fork and execve. `said`: where errno goes when it does not come to that. A group of its own in our session: a group
 * that nobody of its session stands above cannot be stopped from its terminal. */
static void __attribute__((noreturn)) become(struct job *j, int terminal, int said) {
    sigset_t none;
    char *path = j->argv[0];
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    bool ok = !setpgid(0, 0) && (terminal < 0 || !tcsetpgrp(terminal, getpid()));
    for (int i = 0; ok && i < 3; i++) ok = dup2(j->r.terminal >> i & 1 ? terminal : j->fds[SUDO_IN + i], i) >= 0;
    syscall(SYS_close_range, 3, LAST_FD, 4 /* CLOEXEC */);
    signal(SIGCHLD, SIG_DFL);
    set_signals(SIG_DFL);
    for (int s = 1; s < NSIG; s++)
        if (j->r.ignored >> (s - 1) & 1) signal(s, SIG_IGN);
    umask(j->r.mask & 0777);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (ok && *j->r.name) j->argv[0] = j->r.name;
    if (ok) execve(path, j->argv, j->envp);
    j->argv[0] = path;
    if (ok && errno == ENOEXEC) run_script(j);
    int err = errno;
    (void)!write(said, &err, sizeof err);
    _exit(127);
}

static pid_t start(struct job *j, int *err) {
    int said[2], master = -1, terminal = -1;
    if (j->r.terminal && (terminal = open_terminal(j, &master)) < 0) return *err = errno, -1;
    if (pipe2(said, O_CLOEXEC)) return *err = errno, -1;
    pid_t pid = fork();
    if (!pid) become(j, terminal, lift_fd(said[1]));
    *err = pid < 0 ? errno : 0;
    close(said[1]);
    if (pid > 0 && RETRY(read(said[0], err, sizeof *err)) == sizeof *err) {
        RETRY(waitpid(pid, NULL, 0));
        pid = -1;
    }
    close(said[0]);
    if (pid > 0 && master >= 0) tell(SU_TERMINAL, 0, &master);
    for (int i = 0; i < SUDO_FDS; i++) close(j->fds[i]);
    if (master >= 0) close(master);
    if (terminal >= 0) close(terminal);
    return pid;
}

static void noticed(int signal) { (void)signal; }

/* Whether the client has gone. */
static bool heed(pid_t pid) {
    struct sudo_message m;
    ssize_t n = recv_fds(SUDO_CONN, &m, sizeof m, NULL, NULL);
    bool known = n == sizeof m && m.kind == SU_SIGNAL && m.value > 0 && m.value < NSIG;
    if (known) kill(-pid, m.value);
    return n <= 0;
}

static int hang_up(pid_t pid, const sigset_t *unblocked) {
    static const int asking[] = {SIGHUP, SIGTERM, SIGCONT};
    struct timespec grace = {0, GRACE * 1000000L};
    for (size_t i = 0; i < sizeof asking / sizeof *asking; i++) kill(-pid, asking[i]);
    if (!waitpid(pid, NULL, WNOHANG)) ppoll(NULL, 0, &grace, unblocked);
    kill(-pid, SIGKILL);
    return 1;
}

static int tend(pid_t pid, const sigset_t *unblocked) {
    for (;;) {
        struct pollfd p = {SUDO_CONN, POLLIN, 0};
        int status, ready = ppoll(&p, 1, NULL, unblocked);
        while (waitpid(pid, &status, WNOHANG | WUNTRACED) > 0) {
            if (WIFSTOPPED(status)) {
                tell(SU_STOPPED, WSTOPSIG(status), NULL);
                continue;
            }
            tell(SU_ENDED, status, NULL);
            return 0;
        }
        if (ready > 0 && heed(pid)) return hang_up(pid, unblocked);
    }
}

int sudo_session_main(void) {
    static struct job job;
    sigset_t child, before;
    struct sigaction notice = {.sa_handler = noticed};
    int err;
    fcntl(SUDO_CONN, F_SETFD, FD_CLOEXEC);
    set_signals(SIG_IGN);
    sigaction(SIGCHLD, &notice, NULL);
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, &before);
    if (!read_job(&job)) return refuse("what was asked for cannot be read", 0);
    struct pollfd gone = {SUDO_CONN, 0, 0};
    if (poll(&gone, 1, 0) > 0) return 1; /* its exec may have been killed before we belonged to it */
    if (!job.r.argc) return tell(SU_ENDED, 0, NULL), 0;
    if (*job.dir ? chdir(job.dir) : fchdir(job.fds[SUDO_CWD])) {
        char what[sizeof((struct sudo_message){0}).text - 40];
        snprintf(what, sizeof what, "unable to change directory to %s", *job.dir ? job.dir : "where you are");
        return refuse(what, errno);
    }
    tell(SU_BEGUN, 0, NULL);
    pid_t pid = start(&job, &err);
    if (pid < 0) return tell(SU_FAILED, err, NULL), 0;
    return tend(pid, &before);
}
