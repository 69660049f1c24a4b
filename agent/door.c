/* The door at which a program asks to be root: sudo without a set-uid bit, which no_new_privs would make void.
 *
 * Root of the box is the sandbox's user to the kernel (userns.c) and has nothing that this user must not have; so nobody is
 * asked who he is. pid 1 only sees that somebody has come, and starts a session as root, confined as every program; what the
 * visitor says is read there (sudo_session.c), with no more rights than he gets anyway. With namespaces the session is born into
 * the UTS namespace of the visitor: it belongs to his exec, and ends with it. In a container it has a shepherd of its own, of which
 * pid 1's stand-in knows whose exec it is for. */
#include "sudo.h"
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#define WAITING 64 /* visitors nobody has seen yet */
#define TEXT(n) TEXT_OF(n)
#define TEXT_OF(n) #n
#define TOO_MANY_LEFT TEXT(VISITS_LEFT) " of its commands have left programs running; end some of these, or the execs that they are of"

static int listener = -1;

static bool bind_door(int s) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    size_t n = offsetof(struct sockaddr_un, sun_path);
    if (box.container) n += (size_t)snprintf(a.sun_path, sizeof a.sun_path, "%s", SUDO_PATH) + 1;
    else n += (size_t)snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "%s", SUDO_DOOR) + 1;
    mode_t mask = umask(0111);
    bool bound = !bind(s, (struct sockaddr *)&a, (socklen_t)n);
    umask(mask);
    return bound && !listen(s, WAITING);
}

/* Where it cannot be had the box is as one without it, and sudo says so. */
void door_open(void) {
    if (!json_bool(box.spec, "sudo", false) || (!box.namespaces && !box.container)) return;
    cleanup_fd int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (s < 0 || !bind_door(s)) return;
    listener = steal_fd(&s);
    if (box.namespaces && box.user_mode == USER_SINGLE) root_ahead();
}

int door_fd(void) { return listener; }
void door_let_go(void) { drop_fd(&listener); }

void door_refuse(int conn, int err, const char *stage) {
    struct sudo_message m = {.kind = SU_REFUSED, .value = err};
    snprintf(m.text, sizeof m.text, "%s", stage);
    send(conn, &m, sizeof m, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* A worker that could not be forked, for a visitor or for a file: nobody else will answer this connection. */
void refuse_worker(int kind, int err, const int *fds, int nfds) {
    struct fault f;
    fault_set(&f, err, "fork");
    if (kind == K_SUDO) door_refuse(fds[0], err, "no process left for it in this sandbox");
    else if (nfds > 1) frame_error(fds[1], &f, NULL);
}

/* Who has come, and by which exec: the kernel's word, not his. The tag 0: nobody any more, or nobody's. */
int door_admit(struct visitor *v) {
    struct ucred who;
    struct stat st;
    socklen_t n = sizeof who;
    char path[40];
    const char *why = json_str(box.spec, "no_root");
    *v = (struct visitor){.conn = accept4(listener, NULL, NULL, SOCK_CLOEXEC), .uts = -1};
    if (v->conn < 0) return -1;
    if (why) return door_refuse(v->conn, 0, why), close(v->conn), -1;
    if (visits_left_too_many()) return door_refuse(v->conn, 0, TOO_MANY_LEFT), close(v->conn), -1;
    if (getsockopt(v->conn, SOL_SOCKET, SO_PEERCRED, &who, &n)) who.pid = 0;
    if (box.container && (v->tag = init_exec_of(who.pid))) return 0;
    if (box.namespaces && who.pid > 1) {
        snprintf(path, sizeof path, "%d/ns/uts", (int)who.pid);
        v->uts = openat(sweep_proc(), path, O_RDONLY | O_CLOEXEC);
    }
    if (v->uts >= 0 && !fstat(v->uts, &st) && (uint64_t)st.st_ino != sweep_own_tag()) return v->tag = (uint64_t)st.st_ino, 0;
    door_refuse(v->conn, ESRCH, "whoever asked is no program of this sandbox's any more");
    drop_fd(&v->uts);
    close(v->conn);
    return -1;
}

static void __attribute__((noreturn)) refuse(int conn, const struct fault *f) {
    char text[96];
    snprintf(text, sizeof text, "%s: %s", f->stage, strerror(f->err));
    door_refuse(conn, f->err, f->err == EOPNOTSUPP ? f->stage : text);
    _exit(1);
}

/* From here on it is root of the box, and after execve nothing of ours is in its memory. */
static void __attribute__((noreturn)) become_session(int conn, int root) {
    static char *const argv[] = {SUDO_SESSION, NULL}, *const none[] = {NULL};
    struct fault f = {0};
    cleanup_fd int mine = lift_fd(conn), as = lift_fd(root);
    if (mine < 0 || as < 0) fault_set(&f, errno, "descriptors"), refuse(conn, &f);
    setsid();
    if (!confine(&f, true, as)) refuse(mine, &f);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int i = 0; i < SUDO_CONN; i++)
        if (dup2(null, i) < 0) fault_set(&f, errno, "/dev/null"), refuse(mine, &f);
    if (dup2(mine, SUDO_CONN) < 0) fault_set(&f, errno, "descriptors"), refuse(mine, &f);
    syscall(SYS_close_range, SUDO_CONN + 1, LAST_FD, 4 /* CLOEXEC */);
    if (!chdir("/")) execve(SUDO_PROGRAM, argv, none);
    fault_set(&f, errno, "%s", SUDO_PROGRAM);
    refuse(SUDO_CONN, &f);
}

/* A shepherd: when the session does not end well, its visitor is gone or it was killed, nobody below it is left. Otherwise what
 * it started goes on, as after any other program. */
static void __attribute__((noreturn)) tend_session(int conn, bool *over) {
    struct fault f = {0};
    int status = 0;
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    int root = root_namespace(&f);
    if (root < 0) fault_root(&f), refuse(conn, &f);
    pid_t session = fork();
    if (session < 0) fault_set(&f, errno, "fork"), refuse(conn, &f);
    if (!session) {
        sweep_close();
        become_session(conn, root);
    }
    close(root);
    close(conn);
    for (pid_t pid = 0; pid != session && pid >= 0;) pid = (pid_t)RETRY(waitpid(-1, &status, __WALL));
    if (status) sweep_descendants();
    *over = true;
    while (RETRY(waitpid(-1, &status, __WALL)) > 0) {}
    _exit(0);
}

void door_main(const int *fds, int nfds, bool *over) {
    struct fault f = {0};
    if (box.container) tend_session(fds[0], over);
    sweep_close();
    if (nfds < 3 || syscall(SYS_setns, fds[1], CLONE_NEWUTS)) fault_set(&f, nfds < 3 ? EINVAL : errno, "join the exec"), refuse(fds[0], &f);
    close(fds[1]);
    become_session(fds[0], fds[2]);
}
