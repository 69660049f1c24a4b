/* The forker lives in the box's cgroups, so that what it forks is born in them, and has their filter but for two calls. A process
 * that is moved into a cgroup waits until every CPU has come to rest once (the kernel's RCU), 10 to 20 ms on an idle machine,
 * against 1 for all the rest of an exec; but for the first version's, which a thread may enter by itself (box.c). Whoever is not answered here is forked by pid 1 and moved. */
#include "agent.h"
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#define ORDERS 64
struct order { bool open; struct ctl m; int fds[FD_ROLES], nfds; }; /* given to the forker, not answered yet */

static struct order orders[ORDERS];
static int sock = -1;
static pid_t forker;

/* Programs must not be able to stop it: they have another uid, where root started the box. */
bool forker_wanted(void) { return box.ncgroups > 0 && box.user_mode == USER_RANGE; }

static void __attribute__((noreturn)) forker_main(int fd) {
    struct ctl m;
    struct fault f;
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    if (!confine_ahead(&f)) _exit(1); /* what is ordered meanwhile waits in the socket */
    for (;;) {
        int fds[FD_ROLES], nfds = FD_ROLES;
        if (recv_fds(fd, &m, sizeof m, fds, &nfds) != sizeof m) _exit(0);
        pid_t pid = init_bear(&m, fds, nfds, CLONE_PARENT);
        m.err = pid < 0 ? errno : 0;
        m.pid = pid;
        for (int i = 0; i < nfds; i++) close(fds[i]);
        if (!send_fds(fd, &m, sizeof m, NULL, 0)) _exit(0);
    }
}

void forker_start(void) {
    int pair[2];
    if (forker || !forker_wanted() || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) return;
    forker = fork();
    if (!forker) {
        init_let_go();
        forker_main(lift_fd(pair[1]));
    }
    close(pair[1]);
    if (forker < 0) {
        forker = 0;
        close(pair[0]);
        return;
    }
    sock = pair[0];
    set_nonblocking(sock, true);
}

int forker_fd(void) { return sock; }

bool forker_is(pid_t pid) { return forker > 0 && forker == pid; }

void forker_let_go(void) {
    drop_fd(&sock);
    for (struct order *o = orders; o < orders + ORDERS; o++)
        for (; o->nfds > 0; o->nfds--) close(o->fds[o->nfds - 1]);
}

/* true: the descriptors are ours now, and the answer comes later. */
bool forker_order(const struct ctl *m, const int *fds, int nfds) {
    struct order *o = orders;
    while (o < orders + ORDERS && o->open) o++;
    if (sock < 0 || o == orders + ORDERS || !send_fds(sock, m, sizeof *m, fds, nfds)) return false;
    *o = (struct order){.open = true, .m = *m, .nfds = nfds};
    memcpy(o->fds, fds, (size_t)nfds * sizeof *fds);
    return true;
}

static void close_order(struct order *o, const struct ctl *answer) {
    struct order done = *o;
    *o = (struct order){0};
    init_born(&done.m, answer, done.fds, done.nfds);
    for (int i = 0; i < done.nfds; i++) close(done.fds[i]);
}

void forker_hear(void) {
    struct ctl m;
    while (sock >= 0 && recv_fds(sock, &m, sizeof m, NULL, NULL) == sizeof m)
        for (struct order *o = orders; o < orders + ORDERS; o++)
            if (o->open && o->m.order == m.order) close_order(o, &m);
}

/* The kernel may have ended it when the box was out of memory: pid 1 does what it was asked for, and starts another. */
bool forker_ended(pid_t pid) {
    if (!forker_is(pid)) return false;
    forker_hear();
    drop_fd(&sock);
    forker = 0;
    for (struct order *o = orders; o < orders + ORDERS; o++)
        if (o->open) close_order(o, &(struct ctl){.err = ECHILD});
    return true;
}
