/* capsule-agent
 *
 * Theory of operation. Four kinds of process, one binary, no execve between them:
 *
 *   launcher   started once by the server, host namespaces. Forks a keeper per launch. Ends with the server.
 *   keeper     one per box, outside of it. Sets up uids, cgroups and disk, clones pid 1, gives up what it needs no more
 *              (see confine_keeper), then serves the box's socket: reads programs' pipes, keeps output, enforces
 *              timeouts. No child of the server: it lives on. Byte streams into the box have a child of it each (net.c).
 *   pid 1      one per box, inside: user, pid, mount, net, ipc, uts and cgroup namespaces of its own. Builds the root,
 *              enters it, then only forks, reaps, and kills trees, as the keeper says over a socketpair (ctl); and it watches the
 *              memory of the box where no cgroup does (memory.c).
 *   children   of pid 1: programs (fork, confine, execve) and file workers (fork, confine, one file operation).
 *
 * Who is who on the host. As root: each box has a range of uids of its own; pid 1 is its first, programs its 1000th,
 * so programs may not signal or trace anything of ours. Rootless: everything has the server's uid; what protects us
 * is the pid namespace (the keeper is outside, pid 1 takes no signals from inside), PR_SET_DUMPABLE and seccomp.
 *
 * Who ends whom. Keeper dies: its end of ctl closes and pid 1 gets SIGKILL, the kernel kills the pid namespace, the
 * mount namespaces fall away, and with them the disk, which had no name. pid 1 dies: the keeper removes what is left
 * and exits. Program's client leaves: nothing. Timeout: pid 1 kills every process of the exec (see sweep.c).
 *
 * Without namespaces (level landlock) pid 1 is an ordinary process, each program has a shepherd above it, and
 * Landlock is applied per program. All three of ours are subreapers: what loses its parent comes to one of them, and
 * whoever of them is left when the box ends hunts down the rest.
 *
 * In a container of an engine's (container.c) the keeper is its pid 1, and all else is as without namespaces; but the keeper
 * has shepherds of its own to give execs to, one after the other (flock.c).
 * Where the host cannot reach its socket, a relay in the container carries the host's connections to it (relay.c).
 *
 * sudo is this binary under another name: it asks pid 1 at a door for a session as root (door.c).
 *
 * The wire is described in spec/agent-protocol.md, the launch in spec/launch.md.
 */
#include "agent.h"
#include <stdio.h>
#include <string.h>

static const char *called(const char *path) {
    const char *slash = path ? strrchr(path, '/') : NULL;
    return slash ? slash + 1 : path ? path : "";
}

/* Inside a box a sanitizer may not look for leaks, as it does at an exit; nor is there anything to give back. */
static void __attribute__((noreturn)) leave(int code) {
    fflush(NULL);
    _exit(code);
}

int main(int argc, char **argv) {
    if (!strcmp(called(argv[0]), "sudo")) leave(sudo_main(argc, argv));
    if (!strcmp(called(argv[0]), "sudo-session")) leave(sudo_session_main());
    if (argc == 4 && !strcmp(argv[1], "launcher")) return launcher_main(atoi(argv[2]), atoi(argv[3]));
    if (argc == 2 && !strcmp(argv[1], "container")) return container_main(argv);
    if (argc == 3 && !strcmp(argv[1], "disk")) return disk_main(argv[2]);
    if ((argc == 3 || argc == 4) && !strcmp(argv[1], "relay")) return relay_main(argv);
    if (argc == 2 && !strcmp(argv[1], "version")) {
        printf("capsule-agent protocol %d\n", PROTOCOL_VERSION);
        return 0;
    }
    fprintf(stderr, "usage: capsule-agent launcher LISTEN_FD LIFELINE_FD | container | disk JSON | relay SOCKET [lines] | version\n");
    return 2;
}
