/* The box as the launch request describes it: who its programs are on the host, and what limits them. */
#include "agent.h"
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>

struct box box = {.disk_stat = -1, .host = -1, .disk = -1};

static bool parse_user(const struct json *user, struct fault *f) {
    const char *mode = json_str(user, "mode");
    if (!mode) return fault_set(f, EINVAL, "launch: user.mode is missing");
    if (!strcmp(mode, "range")) box.user_mode = USER_RANGE;
    else if (!strcmp(mode, "single")) box.user_mode = USER_SINGLE;
    else if (!strcmp(mode, "uid")) box.user_mode = USER_UID;
    else if (!strcmp(mode, "none")) box.user_mode = USER_NONE;
    else return fault_set(f, EINVAL, "launch: user.mode is unknown");
    return true;
}

bool box_parse(struct json *spec, struct fault *f) {
    box.spec = spec;
    box.id = json_str(box.spec, "id");
    box.dir = json_str(box.spec, "dir");
    box.stage = json_str(box.spec, "stage");
    box.spool = json_str(box.spec, "spool");
    const char *isolation = json_str(box.spec, "isolation");
    if (!box.id || !box.dir || !isolation) return fault_set(f, EINVAL, "launch: id, dir or isolation is missing");
    box.namespaces = !strcmp(isolation, "namespaces");
    box.container = !strcmp(isolation, "container");
    box.open_files = (uint32_t)json_int(box.spec, "open_files", 0, 0, INT32_MAX);
    box.signal_resize = json_bool(box.spec, "signal_resize", false);
    box.filter_ahead = box.container && json_bool(box.spec, "filter_ahead", false);
    box.fork_answer = (uint32_t)json_int(box.spec, "fork_answer", 0, 0, UINT32_MAX);
    box.uid = (uid_t)json_int(box.spec, "uid", 1000, 0, UINT32_MAX);
    box.gid = (gid_t)json_int(box.spec, "gid", 1000, 0, UINT32_MAX);
    box.uid_lock = -1;
    box.cgroup_version = (int)json_int(box.spec, "cgroup_version", 0, 0, 2);
    const struct json *disk = json_get(box.spec, "disk");
    box.disk_kind = json_str(disk, "kind");
    box.disk_path = json_str(disk, "path");
    box.landlock = json_get(box.spec, "landlock");
    if (box.landlock && box.landlock->type != J_OBJ) box.landlock = NULL;
    if (!box.disk_kind && !box.container) return fault_set(f, EINVAL, "launch: disk.kind is missing");
    if (!box.namespaces && !box.container && !box.landlock) return fault_set(f, EINVAL, "launch: landlock is missing");
    if (!box.filter->n || box.filter->n % 8 || box.filter->n / 8 > 4096) return fault_set(f, EINVAL, "launch: no seccomp program");
    if (box.namespaces && !box.stage) return fault_set(f, EINVAL, "launch: stage is missing");
    return parse_user(json_get(box.spec, "user"), f);
}

/* A slot of host uids is claimed by binding an abstract socket: atomic, for all who share our network namespace, and
 * released by the kernel when the last process of ours in the box dies, however it dies. */
bool box_bind_slot(int socket, uint32_t base) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int n = snprintf(a.sun_path + 1, sizeof a.sun_path - 1, "capsule-uid-%u", base);
    return !bind(socket, (struct sockaddr *)&a, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)n));
}

bool box_claim_uids(struct fault *f) {
    if (box.user_mode != USER_RANGE && box.user_mode != USER_UID) return true;
    const struct json *user = json_get(box.spec, "user");
    uint32_t base = (uint32_t)json_int(user, "base", 268435456, 1, UINT32_MAX);
    uint32_t slots = (uint32_t)json_int(user, "slots", 1, 1, UINT16_MAX);
    box.uid_count = (uint32_t)json_int(user, "count", 65536, 1, 65536);
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    uint32_t start = ((uint32_t)t.tv_nsec ^ (uint32_t)getpid() * 2654435761u) % slots;
    box.uid_lock = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (box.uid_lock < 0) return fault_set(f, errno, "socket for the uid range");
    for (uint32_t i = 0; i < slots; i++) {
        box.uid_base = base + (start + i) % slots * box.uid_count;
        if (box_bind_slot(box.uid_lock, box.uid_base)) return true;
        if (errno != EADDRINUSE) return fault_set(f, errno, "bind for the uid range");
    }
    return fault_set(f, EAGAIN, "no free uid range");
}

bool write_proc(pid_t pid, const char *name, const char *text, struct fault *f) {
    char path[64];
    bool own = sweep_proc() >= 0; /* pid 1's: the programs' is read-only */
    snprintf(path, sizeof path, "%s%d/%s", own ? "" : "/proc/", (int)pid, name);
    cleanup_fd int fd = openat(own ? sweep_proc() : AT_FDCWD, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) < 0) return fault_set(f, errno, "%s", name);
    return true;
}

bool box_map_user(pid_t init, struct fault *f) {
    char uids[64], gids[64];
    if (box.user_mode == USER_RANGE) {
        snprintf(uids, sizeof uids, "0 %u %u\n", box.uid_base, box.uid_count);
        memcpy(gids, uids, sizeof gids);
    } else {
        snprintf(uids, sizeof uids, "%u %u 1\n", (unsigned)box.uid, (unsigned)geteuid());
        snprintf(gids, sizeof gids, "%u %u 1\n", (unsigned)box.gid, (unsigned)getegid());
        /* an unprivileged gid map is only taken once setgroups is off: a group could be dropped to gain access */
        if (!write_proc(init, "setgroups", "deny", f)) return false;
    }
    return write_proc(init, "gid_map", gids, f) && write_proc(init, "uid_map", uids, f);
}

static bool write_setting(int dir, const char *name, const char *value) {
    cleanup_fd int fd = openat(dir, name, O_WRONLY | O_CLOEXEC);
    return fd >= 0 && write(fd, value, strlen(value)) >= 0;
}

bool box_make_cgroups(struct fault *f) {
    const struct json *list = json_get(box.spec, "cgroups");
    for (const struct json *c = list ? list->child : NULL; c && box.ncgroups < MAX_CGROUPS; c = c->next) {
        const char *dir = json_str(c, "dir");
        if (!dir) return fault_set(f, EINVAL, "launch: cgroups[].dir is missing");
        if (mkdir(dir, 0755)) return fault_set(f, errno, "mkdir cgroup");
        box.cgroup_fds[box.ncgroups] = -1;
        box.usage_dirs[box.nusage++] = box.cgroups[box.ncgroups++] = dir;
        cleanup_fd int d = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
        const struct json *set = json_get(c, "set");
        for (const struct json *s = set ? set->child : NULL; s; s = s->next) {
            const struct json *name = s->child, *value = name ? name->next : NULL;
            if (!value || name->type != J_STR || value->type != J_STR) return fault_set(f, EINVAL, "launch: cgroups[].set");
            if (!write_setting(d, name->str, value->str)) return fault_set(f, errno, "cgroup %s", name->str);
        }
        /* We have one thread. For a thread that moves itself the kernel (5.4) waits for no other CPU; for a process it does, 10 ms. */
        const char *name = box.cgroup_version == 1 ? "tasks" : "cgroup.procs";
        cleanup_fd int procs = openat(d, name, O_WRONLY | O_CLOEXEC);
        if (procs < 0) return fault_set(f, errno, "%s", name);
        box.cgroup_fds[box.ncgroups - 1] = steal_fd(&procs);
    }
    return true;
}

static int kill_members(const char *dir) {
    char path[4200], text[8192];
    snprintf(path, sizeof path, "%s/cgroup.procs", dir);
    cleanup_fd int fd = open(path, O_RDONLY | O_CLOEXEC);
    int killed = 0;
    ssize_t n = fd < 0 ? 0 : RETRY(read(fd, text, sizeof text - 1));
    if (n <= 0) return 0;
    text[n] = 0;
    for (char *p = text; *p;) {
        pid_t pid = (pid_t)strtol(p, &p, 10);
        if (pid > 1 && !kill(pid, SIGKILL)) killed++;
        while (*p == '\n') p++;
    }
    return killed;
}

/* A cgroup is freed a moment after its last member is gone: try again for two seconds. */
bool remove_cgroups(const char *const *dirs, int n) {
    struct timespec pause = {0, 200000};
    double deadline = now_ms() + 2000;
    bool all = true;
    for (int i = 0; i < n; i++) {
        bool gone;
        while (!(gone = !rmdir(dirs[i]) || errno == ENOENT) && errno == EBUSY && now_ms() < deadline) {
            kill_members(dirs[i]);
            for (int j = 0; j < n; j++) thaw_cgroup(dirs[j]); /* what is frozen does not die */
            nanosleep(&pause, NULL);
            if (pause.tv_nsec < 10000000) pause.tv_nsec *= 2;
        }
        all = all && gone;
    }
    return all;
}

static bool is_below(const char *path, const struct json *dir) {
    return !strncmp(path, dir->str, dir->len) && (!path[dir->len] || path[dir->len] == '/');
}

bool get_rid_of(const char *path) {
    return !path || remove_tree(AT_FDCWD, path) || errno == ENOENT;
}

/* All that is not a process. Our directory comes last: while anything is left, it tells the server what to look for. */
void box_remove(void) {
    bool disk = box.disk_kind && !strcmp(box.disk_kind, "dir");
    if (remove_cgroups(box.cgroups, box.ncgroups) && (!disk || get_rid_of(box.disk_path))) get_rid_of(box.dir);
}

const char *box_path(const char *path, char *out, size_t room) {
    if (strlen(path) >= room - 16) return NULL;
    for (const char *p = path; (p = strstr(p, "..")); p += 2) {
        bool starts = p == path || p[-1] == '/', ends = !p[2] || p[2] == '/';
        if (starts && ends) return NULL;
    }
    if (path[0] == '/') snprintf(out, room, "%s", path);
    else snprintf(out, room, "/workspace/%s", path);
    const struct json *maps = json_get(box.spec, "paths");
    for (const struct json *m = maps ? maps->child : NULL; m; m = m->next) {
        const struct json *to = m->child ? m->child->next : NULL;
        if (to && is_below(out, to)) return out; /* what a program said of itself, such as its working directory: translated already */
    }
    for (const struct json *m = maps ? maps->child : NULL; m; m = m->next) {
        const struct json *from = m->child, *to = from ? from->next : NULL;
        if (!to || !is_below(out, from)) continue;
        size_t rest = strlen(out + from->len);
        if (to->len + rest + 1 > room) return NULL;
        memmove(out + to->len, out + from->len, rest + 1);
        memcpy(out, to->str, to->len);
        break;
    }
    return out;
}
