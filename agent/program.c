/* From fork to execve: the user's program. Whatever goes wrong on the way is told to the keeper with its stage. */
#include "agent.h"
#include <signal.h>
#include <stdio.h>
#include <sys/fsuid.h>
#include <termios.h>

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

static size_t count(const struct json *list) {
    size_t n = 0;
    for (const struct json *j = list ? list->child : NULL; j; j = j->next) n++;
    return n;
}

static bool read_argv(struct program *p, const struct json *argv, struct fault *f) {
    char **at = p->argv = xrealloc(NULL, (count(argv) + 1) * sizeof *at);
    for (const struct json *j = argv ? argv->child : NULL; j; j = j->next) {
        if (j->type != J_STR || strlen(j->str) != j->len) return fault_set(f, EINVAL, "argv");
        *at++ = mapped(j->str);
    }
    *at = NULL;
    return (p->argv[0] && *p->argv[0]) || fault_set(f, EINVAL, "argv is empty");
}

static bool read_environment(struct program *p, const struct json *env, struct fault *f) {
    size_t n = count(env);
    char **at = p->envp = xrealloc(NULL, (n + 1) * sizeof *at);
    memset(at, 0, (n + 1) * sizeof *at);
    for (const struct json *j = env ? env->child : NULL; j; j = j->next) {
        bool named = j->key && *j->key && strlen(j->key) == j->key_len && !strchr(j->key, '=');
        if (!named || j->type != J_STR || strlen(j->str) != j->len) return fault_set(f, EINVAL, "env");
        const char *value = mapped(j->str);
        size_t room = strlen(j->key) + strlen(value) + 2;
        *at = xrealloc(NULL, room);
        snprintf(*at++, room, "%s=%s", j->key, value);
    }
    p->path = json_str(env, "PATH");
    return true;
}

/* What the request says, before there is a child: here memory can be had, and given back. */
bool program_read(struct program *p, struct json *request, struct fault *f) {
    *p = (struct program){.request = request, .root = -1};
    if (!request) return fault_set(f, EINVAL, "read request");
    if (!read_argv(p, json_get(request, "argv"), f) || !read_environment(p, json_get(request, "env"), f)) return false;
    const char *where = json_str(request, "cwd"), *home = json_str(box.spec, "home");
    if (!where || !*where) where = wants_root(request) ? "/root" : home ? home : "/workspace";
    if (!box_path(where, p->cwd, sizeof p->cwd)) return fault_set(f, EINVAL, "chdir");
    p->tty = json_bool(request, "tty", false);
    p->size.ws_row = (unsigned short)json_int(request, "rows", 24, 0, UINT16_MAX);
    p->size.ws_col = (unsigned short)json_int(request, "cols", 80, 0, UINT16_MAX);
    return true;
}

void program_free(struct program *p) {
    for (char **e = p->envp; e && *e; e++) free(*e);
    free(p->envp);
    free(p->argv);
    free(p->request);
}

/* A terminal from the box's own devpts; the keeper gets the other end. */
static bool open_terminal(const struct program *p, int status, int stdio[3], struct fault *f) {
    int zero = 0, number;
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
    ioctl(slave, TIOCSWINSZ, &p->size);
    if (ioctl(slave, TIOCSCTTY, 0)) return fault_set(f, errno, "take terminal");
    struct status_message m = {.kind = ST_TERMINAL};
    if (!send_fds(status, &m, sizeof m, &master, 1)) return fault_set(f, errno, "hand over terminal");
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

/* Returns only when it could not. System calls and nothing else: it may run in memory that it was lent, and be killed
 * at any time. `ready` is told when all is done but execve. */
void program_become(const struct program *p, const int fds[3], int carry, int status, void ready(int status), struct fault *f) {
    int stdio[3] = {fds[0], fds[1], fds[2]};
    setsid();
    if (p->tty && !open_terminal(p, status, stdio, f)) return;
    for (int i = 0; i < 3; i++)
        if (dup2(stdio[i], i) < 0) return (void)fault_set(f, errno, "dup2");
    if (carry >= 0 && dup2(carry, 3) < 0) return (void)fault_set(f, errno, "dup2");
    int root = p->root < 0 ? -1 : carry < 0 ? 3 : 4;
    if (root >= 0 && root != p->root && dup3(p->root, root, O_CLOEXEC) < 0) return (void)fault_set(f, errno, "dup2");
    /* On execve they all are closed; this is for the one we forgot. In a container none is needed on the way there, and no
     * descriptor of a shepherd's is to be left when the child is no longer root's. */
    syscall(SYS_close_range, root >= 0 ? root + 1 : carry < 0 ? 3 : 4, LAST_FD, box.container ? 0 : 4 /* CLOEXEC */);
    if (!confine(f, true, root)) return;
    if (chdir(p->cwd)) return (void)fault_set(f, errno, "chdir");
    ready(status);
    exec_in_path(p->argv, p->envp, p->path, f);
}

static void __attribute__((noreturn)) fail(int status, const struct fault *f) {
    struct status_message m = {.kind = ST_FAILED, .err = f->err ? f->err : EINVAL};
    memcpy(m.stage, f->stage, sizeof m.stage);
    (void)!write(status, &m, sizeof m); /* write: the one call that every filter allows */
    _exit(127);
}

static void tell_ready(int status) {
    struct status_message ready = {.kind = ST_READY};
    (void)!write(status, &ready, sizeof ready);
}

void program_main(const int fds[FD_ROLES], int nfds, int root) {
    struct fault f = {0};
    struct program p;
    int status = lift_fd(fds[FD_STATUS]), request = lift_fd(fds[FD_REQUEST]), carry = nfds > FD_CARRY ? lift_fd(fds[FD_CARRY]) : -1;
    int stdio[3] = {lift_fd(fds[FD_IN]), lift_fd(fds[FD_OUT]), lift_fd(fds[FD_ERR])};
    if (program_read(&p, json_read(request), &f)) {
        p.root = lift_fd(root);
        if (root >= 0 && p.root < 0) fault_set(&f, errno, "root's namespace"), fail(status, &f);
        program_become(&p, stdio, carry, status, tell_ready, &f);
    }
    fail(status, &f);
}
