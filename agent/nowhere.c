/* A mount namespace in which there is nothing but empty folders, read-only. Boxes are cloned from it.
 *
 * pid 1 mounts its disk and what the keeper has opened of the host there, makes the box's root out of them and moves it over the empty
 * one. Where a path of the host is needed it has a copy of the host's tree for that long. What pivot_root does is the same, and it
 * is what a box does where this cannot be had: as an ordinary user, and before Linux 5.12. But that makes the kernel look at every
 * process of the machine, under a lock that forks and mounts wait for: with a thousand boxes it was half of what a launch took. And
 * to unmount the host afterwards waits for every CPU: on a busy machine a millisecond. */
#include "agent.h"
#include "mounts.h"
#include <linux/magic.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/wait.h>

static int nowhere = -1;

enum { FLAGS = MS_NOSUID | MS_NODEV | MS_NOEXEC };

/* The kernel lets a box have a procfs where there is one already. Nobody is in this one: its only process ends here. */
static bool mount_deserted_proc(void) {
    pid_t pid = (pid_t)syscall(SYS_clone, CLONE_NEWPID | CLONE_VFORK | SIGCHLD, 0, 0, 0, 0);
    if (!pid) _exit(mount("proc", "proc", "proc", FLAGS, NULL) != 0);
    struct statfs fs;
    while (pid > 0 && waitpid(pid, NULL, 0) < 0 && errno == EINTR); /* a zombie would still be seen in it */
    return pid > 0 && !statfs("proc", &fs) && fs.f_type == PROC_SUPER_MAGIC;
}

static bool empty_out(void) {
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("tmpfs", "/proc", "tmpfs", FLAGS, "size=4k,mode=0755")) return false;
    if (chdir("/proc") || mkdir("host", 0755) || mkdir("root", 0755) || mkdir("disk", 0755) || mkdir("proc", 0755)) return false;
    if (!mount_deserted_proc() || mount(NULL, ".", NULL, FLAGS | MS_REMOUNT | MS_RDONLY, NULL)) return false;
    return !syscall(SYS_pivot_root, ".", ".") && !umount2(".", MNT_DETACH);
}

/* To enter a mount namespace is to be at its root: in a chroot neither the way there nor the way back leads where it should. */
static bool leads_to(int namespace, const struct stat *root) {
    struct stat st;
    return !setns(namespace, CLONE_NEWNS) && !stat("/", &st) && st.st_dev == root->st_dev && st.st_ino == root->st_ino;
}

/* In a child: whatever it does not get back from. */
static int make(void) {
    struct stat here, there;
    cleanup_fd int home = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC), tried = rootfs_copy("/", 0);
    if (home < 0 || tried < 0 || stat("/", &here) || unshare(CLONE_NEWNS)) return -1;
    cleanup_fd int made = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
    if (made < 0 || !empty_out() || stat("/", &there) || !leads_to(made, &there) || !leads_to(home, &here)) return -1;
    return steal_fd(&made);
}

void nowhere_make(void) {
    int pair[2], n = 1;
    char told = 0;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair)) return;
    pid_t pid = fork();
    if (!pid) {
        int made = make();
        send_fds(pair[1], &told, 1, &made, made >= 0);
        _exit(0);
    }
    close(pair[1]);
    if (recv_fds(pair[0], &told, 1, &nowhere, &n) != 1 || !n) nowhere = -1;
    close(pair[0]);
}

/* What is mounted so can be unmounted by whoever may mount at all, where pivot_root's way the kernel forbids it. Landlock does then. */
bool nowhere_is(void) { return nowhere >= 0 && box.landlock && landlock_abi() >= 2; }

void nowhere_let_go(void) { drop_fd(&nowhere); }

int nowhere_enter(struct fault *f) {
    if (rootfs_needs_host() && (box.host = rootfs_copy("/", 0)) < 0) return fault_set(f, errno, "copy the host's tree"), -1;
    cleanup_fd int home = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
    if (home < 0 || setns(nowhere, CLONE_NEWNS)) return fault_set(f, errno, "leave the host's files"), -1;
    return steal_fd(&home);
}

bool nowhere_leave(int home, struct fault *f) {
    rootfs_close();
    drop_fd(&box.host);
    return !setns(home, CLONE_NEWNS) || fault_set(f, errno, "go back to the host's files");
}

static int bottom = -1; /* what the box's root is moved over */
static bool with_host;

bool nowhere_furnish(struct fault *f) {
    bottom = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (bottom < 0) return fault_set(f, errno, "open the empty root");
    with_host = box.host >= 0;
    if (!with_host) return box.stage = "", true; /* the folders for root and disk are here */
    if (syscall(SYS_move_mount, box.host, "", AT_FDCWD, "/host", FROM_EMPTY_PATH)) return fault_set(f, errno, "mount the host's tree");
    drop_fd(&box.host);
    return (!chroot("/host") && !chdir("/")) || fault_set(f, errno, "enter the host's tree");
}

bool nowhere_move(const char *root, struct fault *f) {
    cleanup_fd int top = open(root, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (top < 0 || syscall(SYS_move_mount, top, "", bottom, "", FROM_EMPTY_PATH | TO_EMPTY_PATH)) return fault_set(f, errno, "move the new root");
    if (with_host && (fchdir(bottom) || umount2("host", MNT_DETACH))) return fault_set(f, errno, "leave the host's tree");
    drop_fd(&bottom);
    return (!fchdir(top) && !chroot(".")) || fault_set(f, errno, "enter the new root");
}
