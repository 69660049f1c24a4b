/* What is left in the foreground while a session of sudo's runs: passes signals on and, on a terminal, copies between it and the
 * session's own, as a program there must have a terminal that it controls. */
#include "sudo.h"
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#define AT_THE_DOOR 60 /* s until it is given up there; counted one by one, so that a pause of the sandbox does not count */
#define LOOK 250 /* ms; a shell that brings us to the foreground tells nobody but who was stopped */
#define DRAIN 200 /* ms for what is still on its way through a terminal that somebody else has open, too */

static const int passed_on[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGTSTP, SIGCONT, SIGWINCH};

static int conn = -1, master = -1;
static bool begun, raw, ended_input;
static bool foreign_mode; /* what we said of the terminal was how a shell has it that we are in the background of */
static struct termios before;

static int say_there_is_no_door(void) {
    return sudo_fail("nobody in this sandbox starts programs as root: its template does not say `sudo: true`, or its provider cannot;"
                     " where root is to be had, user=\"root\" on the exec gives it");
}

static bool reach(const struct sockaddr_un *a, size_t n) {
    conn = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (conn >= 0 && !RETRY(connect(conn, (const struct sockaddr *)a, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n)))) return true;
    drop_fd(&conn);
    return false;
}

static bool find_door(void) {
    struct sockaddr_un a = {.sun_family = AF_UNIX, .sun_path = SUDO_PATH};
    if (reach(&a, sizeof SUDO_PATH)) return true;
    a = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(a.sun_path + 1, SUDO_DOOR, sizeof SUDO_DOOR - 1);
    return reach(&a, sizeof SUDO_DOOR);
}

/* As after nohup: they are not passed on, and the program ignores them, too. */
static bool is_ignored(int signal) {
    struct sigaction now;
    return !sigaction(signal, NULL, &now) && now.sa_handler == SIG_IGN;
}

static uint64_t ignored_signals(void) {
    uint64_t all = 0;
    for (int s = 1; s < NSIG; s++) all |= (uint64_t)is_ignored(s) << (s - 1);
    return all;
}

static uint32_t add_words(struct buf *b, char *const *words) {
    uint32_t n = 0;
    for (; words[n]; n++) buf_add(b, words[n], strlen(words[n]) + 1);
    return n;
}

/* 0, or why it cannot be said. */
static int say(const struct sudo_wish *w, bool terminal) {
    struct sudo_request r = {0};
    struct buf text = {0};
    const char *dir = w->dir ? w->dir : "";
    buf_add(&text, dir, strlen(dir) + 1);
    r.argc = add_words(&text, w->argv);
    r.words = r.argc + add_words(&text, w->envp);
    r.size = (uint32_t)text.n;
    if (text.n > SUDO_MOST || r.words > SUDO_WORDS) return E2BIG;
    r.ignored = ignored_signals();
    umask((mode_t)(r.mask = umask(0)));
    if (w->name) snprintf(r.name, sizeof r.name, "%s", w->name);
    for (int i = 0; terminal && i < 3; i++) r.terminal |= (uint32_t)(isatty(i) << i);
    foreign_mode = terminal && tcgetpgrp(0) != getpgrp();
    if (terminal && (ioctl(0, TIOCGWINSZ, &r.window) || tcgetattr(0, &r.mode))) return errno;
    cleanup_fd int words = memfd_create("sudo", MFD_CLOEXEC), cwd = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (words < 0 || cwd < 0 || !write_full(words, text.p, text.n)) return errno;
    int fds[SUDO_FDS] = {words, cwd, 0, 1, 2};
    buf_free(&text);
    return send_fds(conn, &r, sizeof r, fds, SUDO_FDS) ? 0 : errno;
}

static void restore(void) {
    if (raw) tcsetattr(0, TCSADRAIN, &before);
    raw = false;
}

/* Only in the foreground: who is not is stopped when it touches the terminal. */
static void take_terminal(void) {
    struct termios mode;
    if (master < 0 || raw || tcgetpgrp(0) != getpgrp() || tcgetattr(0, &before)) return;
    if (foreign_mode) tcsetattr(master, TCSANOW, &before);
    foreign_mode = false;
    mode = before;
    cfmakeraw(&mode);
    raw = !tcsetattr(0, TCSADRAIN, &mode);
}

static void follow_size(void) {
    struct winsize w;
    if (master >= 0 && !ioctl(0, TIOCGWINSZ, &w)) ioctl(master, TIOCSWINSZ, &w);
}

static void pass_on(int signal) {
    struct sudo_message m = {.kind = SU_SIGNAL, .value = signal};
    send_fds(conn, &m, sizeof m, NULL, 0);
}

/* As if nobody had kept it from us. */
static void suffer(int signal) {
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, signal);
    raise(signal);
    sigprocmask(SIG_UNBLOCK, &one, NULL);
    sigprocmask(SIG_BLOCK, &one, NULL);
}

static void heed_signal(int signals) {
    struct signalfd_siginfo s;
    if (read(signals, &s, sizeof s) != sizeof s) return;
    if (!begun) return suffer((int)s.ssi_signo);
    if (s.ssi_signo == SIGCONT) take_terminal();
    if (s.ssi_signo == SIGWINCH && master >= 0) follow_size();
    else pass_on((int)s.ssi_signo);
}

/* With the program, as if it were of our process group. Where nobody could continue us the kernel does not stop us. */
static void stop(void) {
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, SIGTSTP);
    restore();
    kill(0, SIGTSTP);
    sigprocmask(SIG_UNBLOCK, &one, NULL);
    sigprocmask(SIG_BLOCK, &one, NULL);
    take_terminal();
    pass_on(SIGCONT);
}

/* false: there is nothing more to come. */
static bool copy_output(void) {
    char bytes[16384];
    ssize_t n = RETRY(read(master, bytes, sizeof bytes));
    return n > 0 && write_full(1, bytes, (size_t)n);
}

static void copy_input(void) {
    char bytes[1024]; /* what the terminal takes without a wait: we were told that it has room */
    ssize_t n = RETRY(read(0, bytes, sizeof bytes));
    ended_input = n <= 0 || !write_full(master, bytes, (size_t)n);
}

static void drain(void) {
    struct pollfd p = {master, POLLIN, 0};
    while (master >= 0 && RETRY(poll(&p, 1, DRAIN)) > 0 && copy_output()) {}
    restore();
}

static int finish(int status) {
    sigset_t all;
    if (WIFEXITED(status)) return WEXITSTATUS(status);
    signal(WTERMSIG(status), SIG_DFL); /* as if it had been us */
    raise(WTERMSIG(status));
    sigfillset(&all);
    sigprocmask(SIG_UNBLOCK, &all, NULL);
    return 128 + WTERMSIG(status);
}

/* -1: it goes on. */
static int hear(const char *program) {
    struct sudo_message m = {0};
    int fd = -1, n = 1;
    ssize_t got = recv_fds(conn, &m, sizeof m, &fd, &n);
    if (got < 0 && errno == ECONNRESET) n = 1, got = recv_fds(conn, &m, sizeof m, &fd, &n); /* told first; what was said is there all the same */
    m.text[sizeof m.text - 1] = 0;
    if (got == sizeof m && m.kind == SU_TERMINAL && n == 1) {
        master = fd;
        follow_size();
        take_terminal();
        return -1;
    }
    if (n == 1) close(fd);
    if (got == sizeof m && m.kind == SU_BEGUN) return begun = true, -1;
    if (got == sizeof m && m.kind == SU_STOPPED) return stop(), -1;
    drain();
    if (got == sizeof m && m.kind == SU_ENDED) return finish(m.value);
    if (got == sizeof m && m.kind == SU_FAILED) return sudo_fail("unable to execute %s: %s", program, strerror(m.value));
    if (got == sizeof m && m.kind == SU_REFUSED) return sudo_fail("%s", m.text);
    return sudo_fail("its session has been ended, and the program with it");
}

static int listen_to_signals(void) {
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < sizeof passed_on / sizeof *passed_on; i++)
        if (!is_ignored(passed_on[i])) sigaddset(&set, passed_on[i]);
    sigprocmask(SIG_BLOCK, &set, NULL);
    return signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
}

static int relay(int signals, const char *program) {
    for (int code = -1, room = 0, waited = 0;;) {
        bool typing = raw && !ended_input;
        struct pollfd p[] = {{conn, POLLIN, 0}, {signals, POLLIN, 0}, {master, (short)(POLLIN | (typing && !room ? POLLOUT : 0)), 0},
                             {typing && room ? 0 : -1, POLLIN, 0}};
        int ready = (int)RETRY(poll(p, 4, !begun ? 1000 : master >= 0 && !raw ? LOOK : -1));
        if (ready < 0) return sudo_fail("poll: %s", strerror(errno));
        if (!ready && begun) take_terminal();
        if (!ready && !begun && ++waited == AT_THE_DOOR) return sudo_fail("nobody has answered for %d s: too many commands of it run already", waited);
        if (p[0].revents && !begun) { /* before a signal, which is the program's if that can have begun */
            if ((code = hear(program)) >= 0) return code;
            continue;
        }
        room = room || p[2].revents & POLLOUT;
        if (p[1].revents) heed_signal(signals);
        if (p[3].revents) copy_input(), room = 0;
        if (p[2].revents & (POLLIN | POLLHUP) && !copy_output()) drop_fd(&master);
        if (p[0].revents && (code = hear(program)) >= 0) return code;
    }
}

int sudo_ask(const struct sudo_wish *w) {
    bool terminal = isatty(0) && isatty(1); /* a part of a pipeline has what it was given, and leaves the terminal to the others */
    int signals = listen_to_signals();
    if (signals < 0) return sudo_fail("signalfd: %s", strerror(errno));
    if (!find_door()) return say_there_is_no_door();
    int err = say(w, terminal);
    const char *program = w->argv[0] ? w->argv[0] : "root";
    if (err && err != EPIPE && err != ECONNRESET) return sudo_fail("cannot ask for %s: %s", program, strerror(err));
    return relay(signals, program); /* who does not listen may have said why */
}
