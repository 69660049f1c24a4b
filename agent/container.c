/* The box is a container that an engine made: it has its namespaces, cgroups and root already, and we are its pid 1.
 *
 * So the keeper is inside, as root of the container with the few capabilities it was left. What keeps programs away from
 * it: another uid, no capabilities, seccomp, memory nobody may look at (PR_SET_DUMPABLE), and a socket in a folder that
 * only root may enter. Everything else is as at the landlock level: a stand-in for pid 1 and a shepherd above each exec, but
 * one that serves the next exec afterwards (shepherd.c).
 *
 * Where nobody can become another user (a sandbox of a cloud's that has no root) programs are our own: "user": {"mode": "none"}.
 * Then Landlock keeps them from our memory and from signalling us, where the kernel has it; else nothing does.
 *
 * What the box is comes as JSON in the environment variable CAPSULE_BOX (spec/launch.md): it takes no file, and we erase it
 * there before a program runs. */
#include "agent.h"
#include "keeper.h"
#include <linux/capability.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

/* Two hexadecimal digits a byte. */
static bool read_filter(const char *hex, struct buf *filter) {
    for (; hex && *hex; hex += 2) {
        unsigned byte;
        if (!hex[1] || sscanf(hex, "%2x", &byte) != 1) return false;
        buf_add(filter, &(unsigned char){(unsigned char)byte}, 1);
    }
    return filter->n > 0;
}

/* Where the engine shows a container its own cgroup, read-only. */
static bool counts(const char *dir) {
    static const char *const names[] = {"memory.usage_in_bytes", "cpuacct.usage", "pids.current", "blkio.throttle.io_service_bytes"};
    char path[128];
    bool found = false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        found |= !access(path, R_OK);
    }
    return found;
}

static void find_cgroups(void) {
    static const char *const v1[] = {"/sys/fs/cgroup/memory", "/sys/fs/cgroup/cpuacct", "/sys/fs/cgroup/pids", "/sys/fs/cgroup/blkio"};
    if (!access("/sys/fs/cgroup/memory.current", R_OK)) {
        box.cgroup_version = 2;
        box.usage_dirs[box.nusage++] = "/sys/fs/cgroup";
        return;
    }
    for (size_t i = 0; i < sizeof v1 / sizeof *v1; i++)
        if (counts(v1[i])) box.usage_dirs[box.nusage++] = v1[i];
    box.cgroup_version = box.nusage ? 1 : 0;
}

static bool describe(struct buf *filter, struct fault *f) {
    const char *text = getenv("CAPSULE_BOX");
    char *copy = text ? strdup(text) : NULL;
    struct json *spec = copy ? json_parse(copy, strlen(copy)) : NULL;
    if (!spec) return fault_set(f, EINVAL, "CAPSULE_BOX is missing, or no JSON");
    if (!read_filter(json_str(spec, "filter"), filter)) return fault_set(f, EINVAL, "CAPSULE_BOX: no seccomp program");
    return box_parse(spec, f);
}

static bool start(int ctl[2], pid_t *init, int *disk_fd, struct fault *f) {
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ctl)) return fault_set(f, errno, "socketpair");
    *init = fork();
    if (!*init) init_main(ctl[1]);
    if (*init < 0) return fault_set(f, errno, "fork");
    drop_fd(&ctl[1]);
    return tell_init(ctl[0], C_GO, NULL, 0, f) && await_init(ctl[0], disk_fd, f);
}

/* There may be no log to write to: whoever shares the folder finds the reason in it. */
static int give_up(const struct fault *f) {
    char path[4200], text[256];
    int n = snprintf(text, sizeof text, "%s: %s\n", f->stage, strerror(f->err));
    snprintf(path, sizeof path, "%s/error", box.dir ? box.dir : "/");
    cleanup_fd int fd = box.dir ? open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) (void)!write(fd, text, (size_t)n);
    (void)!write(STDERR_FILENO, text, (size_t)n);
    return 1;
}

/* Arguments, which every list of processes shows, and an environment: gVisor shows it to every user, too. */
void hide_words(char **words) {
    for (; *words; words++) memset(*words, 0, strlen(*words));
}

/* What an engine leaves us. The root of a machine has more, and no use for it. */
static bool keep_few(struct fault *f) {
    uint64_t few = 1 << CAP_KILL | 1 << CAP_SETGID | 1 << CAP_SETUID | 1 << CAP_SETPCAP;
    return drop_capabilities(few) || fault_set(f, errno, "drop capabilities");
}

int container_main(char **argv) {
    struct buf filter = {0};
    struct fault f = {0};
    struct rlimit files;
    int ctl[2] = {-1, -1}, disk_fd = -1;
    pid_t init = -1;
    box.started = now_ms();
    box.filter = &filter;
    hide_words(argv);
    prctl(PR_SET_NAME, "init", 0, 0, 0);
    hide_memory();
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    if (!getrlimit(RLIMIT_NOFILE, &files)) { /* for ourselves; programs get their own limit */
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    bool described = describe(&filter, &f);
    hide_words(environ);
    hide_memory();
    if (!described || !keep_few(&f) || !bind_socket(&f) || !start(ctl, &init, &disk_fd, &f)) return give_up(&f);
    find_cgroups();
    volumes_open_parents();
    const char *home = json_str(box.spec, "home");
    disk_fd = open(home ? home : "/workspace", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (listen(keeper.listener, 256)) return fault_set(&f, errno, "listen"), give_up(&f);
    if (!confine_keeper(&f)) return give_up(&f);
    keeper_run(-1, ctl[0], init, disk_fd);
}
