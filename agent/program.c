/* From fork to execve: the user's program. Whatever goes wrong on the way is told to the keeper with its stage. */
#include "agent.h"
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <termios.h>

static int status_fd = -1;

static void __attribute__((noreturn)) fail(const struct fault *f) {
    struct status_message m = {.kind = ST_FAILED, .err = f->err ? f->err : EINVAL};
    memcpy(m.stage, f->stage, sizeof m.stage);
    (void)!write(status_fd, &m, sizeof m); /* write: the one call that every filter allows */
    _exit(127);
}

int signal_number(const char *name) {
    static const struct { const char *name; int number; } known[] = {
        {"HUP", SIGHUP}, {"INT", SIGINT}, {"QUIT", SIGQUIT}, {"ILL", SIGILL}, {"ABRT", SIGABRT}, {"KILL", SIGKILL},
        {"USR1", SIGUSR1}, {"SEGV", SIGSEGV}, {"USR2", SIGUSR2}, {"PIPE", SIGPIPE}, {"ALRM", SIGALRM}, {"TERM", SIGTERM},
        {"CHLD", SIGCHLD}, {"CONT", SIGCONT}, {"STOP", SIGSTOP}, {"TSTP", SIGTSTP}, {"TTIN", SIGTTIN}, {"TTOU", SIGTTOU},
        {"WINCH", SIGWINCH}};
    if (!name) return 0;
    if (!strncmp(name, "SIG", 3)) name += 3;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name)) return known[i].number;
    return 0;
}

/* Without a mount namespace /workspace and /tmp are other places on the host: words that name them are translated. */
static char *mapped(const char *word) {
    char out[4200];
    if (!json_get(box.spec, "paths") || word[0] != '/' || !box_path(word, out, sizeof out)) return (char *)word;
    return strdup(out);
}

static char **string_list(const struct json *array, struct fault *f) {
    size_t n = 0;
    for (const struct json *j = array ? array->child : NULL; j; j = j->next) n++;
    char **list = xrealloc(NULL, (n + 1) * sizeof *list), **p = list;
    for (const struct json *j = array ? array->child : NULL; j; j = j->next) {
        if (j->type != J_STR || strlen(j->str) != j->len) return fault_set(f, EINVAL, "argv"), NULL;
        *p++ = mapped(j->str);
    }
    *p = NULL;
    return list;
}

static char **environment(const struct json *env, struct fault *f) {
    size_t n = 0;
    for (const struct json *j = env ? env->child : NULL; j; j = j->next) n++;
    char **list = xrealloc(NULL, (n + 1) * sizeof *list), **p = list;
    for (const struct json *j = env ? env->child : NULL; j; j = j->next) {
        bool named = j->key && *j->key && strlen(j->key) == j->key_len && !strchr(j->key, '=');
        if (!named || j->type != J_STR || strlen(j->str) != j->len) return fault_set(f, EINVAL, "env"), NULL;
        const char *value = mapped(j->str);
        size_t room = strlen(j->key) + strlen(value) + 2;
        *p = xrealloc(NULL, room);
        snprintf(*p++, room, "%s=%s", j->key, value);
    }
    *p = NULL;
    return list;
}

/* A terminal from the box's own devpts; the keeper gets the other end. */
static bool open_terminal(const struct json *request, int stdio[3], struct fault *f) {
    int zero = 0, number;
    struct winsize size = {.ws_row = (unsigned short)json_int(request, "rows", 24, 0, UINT16_MAX)};
    size.ws_col = (unsigned short)json_int(request, "cols", 80, 0, UINT16_MAX);
    uid_t uid = box.uid + (box.user_mode == USER_UID ? box.uid_base : 0);
    bool other = box.user_mode == USER_RANGE || box.user_mode == USER_UID;
    if (other) setfsuid(uid); /* whose the terminal is */
    cleanup_fd int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
    char path[32];
    if (master < 0 || ioctl(master, TIOCSPTLCK, &zero) || ioctl(master, TIOCGPTN, &number))
        return fault_set(f, errno, "open terminal");
    snprintf(path, sizeof path, "/dev/pts/%d", number);
    int slave = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (slave < 0) return fault_set(f, errno, "open %s", path);
    if (other) setfsuid(geteuid());
    struct termios mode;
    if (!tcgetattr(slave, &mode)) {
        mode.c_iflag |= IUTF8;
        tcsetattr(slave, TCSANOW, &mode);
    }
    ioctl(slave, TIOCSWINSZ, &size);
    if (ioctl(slave, TIOCSCTTY, 0)) return fault_set(f, errno, "take terminal");
    struct status_message m = {.kind = ST_TERMINAL};
    if (!send_fds(status_fd, &m, sizeof m, &master, 1)) return fault_set(f, errno, "hand over terminal");
    stdio[0] = stdio[1] = stdio[2] = slave;
    return true;
}

static void exec_in_path(char **argv, char **envp, const char *path, struct fault *f) {
    int worst = ENOENT;
    char full[4200];
    if (strchr(argv[0], '/')) {
        execve(argv[0], argv, envp);
        worst = errno;
    } else
        for (const char *p = path ? path : "/usr/local/bin:/usr/bin:/bin"; *p;) {
            size_t n = strcspn(p, ":");
            if (n && n + strlen(argv[0]) + 2 < sizeof full) {
                snprintf(full, sizeof full, "%.*s/%s", (int)n, p, argv[0]);
                execve(full, argv, envp);
                if (errno != ENOENT && errno != ENOTDIR) worst = errno;
            }
            p += n + (p[n] == ':');
        }
    fault_set(f, worst, "exec");
}

void program_main(const int fds[FD_ROLES], int nfds) {
    struct fault f = {0};
    struct status_message ready = {.kind = ST_READY};
    char cwd[4200];
    status_fd = lift_fd(fds[FD_STATUS]);
    int request_fd = lift_fd(fds[FD_REQUEST]), carry = nfds > FD_CARRY ? lift_fd(fds[FD_CARRY]) : -1;
    int stdio[3] = {lift_fd(fds[FD_IN]), lift_fd(fds[FD_OUT]), lift_fd(fds[FD_ERR])};
    struct json *request = json_read(request_fd);
    if (!request) { fault_set(&f, EINVAL, "read request"); fail(&f); }
    char **argv = string_list(json_get(request, "argv"), &f), **envp = argv ? environment(json_get(request, "env"), &f) : NULL;
    if (!envp) fail(&f);
    if (!argv[0] || !*argv[0]) { fault_set(&f, EINVAL, "argv is empty"); fail(&f); }
    setsid();
    if (json_bool(request, "tty", false) && !open_terminal(request, stdio, &f)) fail(&f);
    for (int i = 0; i < 3; i++)
        if (dup2(stdio[i], i) < 0) { fault_set(&f, errno, "dup2"); fail(&f); }
    if (carry >= 0 && dup2(carry, 3) < 0) { fault_set(&f, errno, "dup2"); fail(&f); }
    syscall(SYS_close_range, carry < 0 ? 3 : 4, LAST_FD, 4 /* CLOEXEC */); /* they all are; this is for the one we forgot */
    const char *where = json_str(request, "cwd");
    if (!confine(&f, true)) fail(&f);
    if (!box_path(where ? where : "/workspace", cwd, sizeof cwd)) { fault_set(&f, EINVAL, "chdir"); fail(&f); }
    if (chdir(cwd)) { fault_set(&f, errno, "chdir"); fail(&f); }
    (void)!write(status_fd, &ready, sizeof ready);
    exec_in_path(argv, envp, json_str(json_get(request, "env"), "PATH"), &f);
    fail(&f);
}

/* Without namespaces: stands between pid 1's stand-in and the program, so that orphans come back to the right exec. */
void shepherd_main(const int fds[FD_ROLES], int nfds) {
    int status;
    struct rusage u = {0};
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    /* Our memory is lent to the child until it is a program or gone, and we wait: there is no copy to be made, which is
     * most of the cost under gVisor. It changes nothing we look at afterwards. */
    pid_t program = vfork();
    if (!program) {
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        program_main(fds, nfds);
    }
    if (program < 0) {
        struct fault f = {0};
        status_fd = fds[FD_STATUS];
        fault_set(&f, errno, "fork");
        fail(&f);
    }
    for (int i = 0; i < nfds; i++)
        if (i != FD_STATUS) close(fds[i]);
    struct status_message m = {.kind = ST_RUNNING, .status = program};
    send_fds(fds[FD_STATUS], &m, sizeof m, NULL, 0);
    for (pid_t pid; (pid = wait4(-1, &status, 0, &u)) > 0 || errno == EINTR;) {
        if (pid != program) continue;
        m = (struct status_message){.kind = ST_EXITED, .status = status, .cpu_ms = cpu_ms(&u), .rss = (uint64_t)u.ru_maxrss * 1024};
        send_fds(fds[FD_STATUS], &m, sizeof m, NULL, 0);
    }
    _exit(0);
}
