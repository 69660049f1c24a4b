/* A child of pid 1's that was forked ahead of time, and waits to be told which file operation it is for. Under gVisor a fork takes
 * 3 to 9 ms, most of what that would take; so it is done while nobody waits. */
#include "agent.h"
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>

static int sock = -1;
static pid_t spare;

static void __attribute__((noreturn)) spare_main(int fd) {
    struct ctl m;
    int fds[FD_ROLES], nfds = FD_ROLES;
    if (recv_fds(fd, &m, sizeof m, fds, &nfds) != sizeof m) _exit(0);
    close(fd);
    init_run(&m, fds, nfds);
}

bool spare_wanted(void) { return box.container && !spare; }

void spare_start(void) {
    int pair[2];
    if (!spare_wanted() || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) return;
    spare = fork();
    if (!spare) {
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        init_let_go();
        close(pair[0]);
        spare_main(pair[1]);
    }
    close(pair[1]);
    if (spare > 0) sock = pair[0];
    else {
        spare = 0;
        close(pair[0]);
    }
}

void spare_let_go(void) { drop_fd(&sock); }

/* Its pid, or 0: there is none. */
pid_t spare_order(const struct ctl *m, const int *fds, int nfds) {
    pid_t pid = sock >= 0 && send_fds(sock, m, sizeof *m, fds, nfds) ? spare : 0;
    spare_let_go();
    spare = 0;
    return pid;
}

bool spare_ended(pid_t pid) {
    if (!spare || pid != spare) return false;
    spare_let_go();
    spare = 0;
    return true;
}
