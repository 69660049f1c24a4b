/* What the kernel itself costs: the yardstick of the benchmark. Prints one duration in ms per line.
 *
 *   raw box N               clone into all namespaces, map the user, build a small root, pivot into it, exit
 *   raw spawn N [PROGRAM]   vfork + exec of PROGRAM, or of this static binary (mode `true`), wait
 */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ALL (CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)

static char stack[256 * 1024];
static char root[] = "/tmp/capsule-bench-XXXXXX";
static int mapped[2];

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static void put(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) err(1, "%s", path);
    close(fd);
}

static void must(int result, const char *what)
{
    if (result < 0) err(1, "%s", what);
}

static int box(void *unused)
{
    (void)unused;
    char go;
    close(mapped[1]);
    if (read(mapped[0], &go, 1) != 1) return 1;
    must(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "private");
    must(mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755"), "tmpfs");
    must(chdir(root), "chdir");
    static const char *const dirs[] = {"usr", "proc", "dev", "tmp", "workspace", "old"};
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) must(mkdir(dirs[i], 0755), dirs[i]);
    must(mount("/usr", "usr", NULL, MS_BIND | MS_REC, NULL), "bind /usr");
    must(mount(NULL, "usr", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL), "remount /usr");
    must(mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "proc");
    must(mount("tmpfs", "dev", "tmpfs", MS_NOSUID, "size=64k"), "dev");
    must(mount("tmpfs", "tmp", "tmpfs", MS_NOSUID | MS_NODEV, "size=16m"), "tmp");
    must(mount("tmpfs", "workspace", "tmpfs", MS_NOSUID | MS_NODEV, "size=16m"), "workspace");
    must((int)syscall(SYS_pivot_root, ".", "old"), "pivot_root");
    must(umount2("/old", MNT_DETACH), "umount");
    return 0;
}

static double one_box(void)
{
    char path[64], map[64];
    uid_t uid = getuid();
    gid_t gid = getgid();
    double start = now_ms();
    must(pipe2(mapped, O_CLOEXEC), "pipe");
    pid_t pid = clone(box, stack + sizeof stack, ALL | SIGCHLD, NULL);
    must(pid, "clone");
    snprintf(path, sizeof path, "/proc/%d/setgroups", pid);
    put(path, "deny");
    snprintf(path, sizeof path, "/proc/%d/uid_map", pid);
    snprintf(map, sizeof map, "0 %u 1", uid);
    put(path, map);
    snprintf(path, sizeof path, "/proc/%d/gid_map", pid);
    snprintf(map, sizeof map, "0 %u 1", gid);
    put(path, map);
    if (write(mapped[1], "g", 1) != 1) err(1, "go");
    int status;
    must(waitpid(pid, &status, 0), "waitpid");
    double taken = now_ms() - start;
    close(mapped[0]);
    close(mapped[1]);
    if (status) errx(1, "the box failed with status %d", status);
    return taken;
}

static double one_spawn(char *self)
{
    char *argv[] = {self, "true", NULL}, *env[] = {NULL};
    pid_t pid;
    int status;
    double start = now_ms();
    if ((errno = posix_spawn(&pid, self, NULL, NULL, argv, env))) err(1, "spawn");
    must(waitpid(pid, &status, 0), "waitpid");
    return now_ms() - start;
}

int main(int argc, char **argv)
{
    if (argc == 2 && !strcmp(argv[1], "true")) return 0;
    if (argc < 3) errx(2, "usage: raw box N | raw spawn N [PROGRAM]");
    int n = atoi(argv[2]);
    int boxes = !strcmp(argv[1], "box");
    if (boxes && !mkdtemp(root)) err(1, "mkdtemp");
    for (int i = 0; i < n; i++) printf("%.4f\n", boxes ? one_box() : one_spawn(argc > 3 ? argv[3] : "/proc/self/exe"));
    if (boxes) rmdir(root);
    return 0;
}
