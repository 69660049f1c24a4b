/* What every program and every file worker goes through between fork and its first own instruction. The order
 * matters: cgroups need our privileges, seccomp comes last because it takes away the calls used before it. */
#include "agent.h"
#include <grp.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#ifndef SYS_landlock_create_ruleset
#define SYS_landlock_create_ruleset 444
#define SYS_landlock_add_rule 445
#define SYS_landlock_restrict_self 446
#endif
enum { LL_EXECUTE = 1, LL_WRITE_FILE = 2, LL_READ_FILE = 4, LL_READ_DIR = 8, LL_MAKE_ANY = 0x1ff0,
       LL_REFER = 1 << 13, LL_TRUNCATE = 1 << 14, LL_IOCTL_DEV = 1 << 15 };
#ifdef __x86_64__
#define NATIVE_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define NATIVE_ARCH AUDIT_ARCH_AARCH64
#endif
struct ll_ruleset { uint64_t fs, net, scoped; };
struct ll_rule { uint64_t access; int32_t fd; } __attribute__((packed));

int landlock_disk = -1;

int landlock_abi(void) {
    static int abi; /* 0: not asked yet */
    if (!abi) abi = (int)syscall(SYS_landlock_create_ruleset, NULL, 0, 1);
    return abi;
}

static uint64_t rule_access(const char *kind, uint64_t handled, bool directory) {
    uint64_t read = LL_READ_FILE | LL_READ_DIR, write = LL_WRITE_FILE | LL_MAKE_ANY | LL_REFER | LL_TRUNCATE, a = read;
    if (!strcmp(kind, "rx")) a = read | LL_EXECUTE;
    else if (!strcmp(kind, "rw")) a = read | write | LL_EXECUTE | LL_IOCTL_DEV;
    else if (!strcmp(kind, "keep")) a = read | write;
    else if (!strcmp(kind, "dev")) a = LL_READ_FILE | LL_WRITE_FILE | LL_TRUNCATE | LL_IOCTL_DEV | LL_READ_DIR;
    if (!directory) a &= LL_EXECUTE | LL_WRITE_FILE | LL_READ_FILE | LL_TRUNCATE | LL_IOCTL_DEV;
    return a & handled;
}

/* -1: none is to be had. Version 1 forbids renames between directories altogether. */
static int new_ruleset(uint64_t *handled, bool scope) {
    int abi = landlock_abi();
    if (abi < 2) return errno = EOPNOTSUPP, -1;
    *handled = 0x1fff | LL_REFER | (abi >= 3 ? LL_TRUNCATE : 0) | (abi >= 5 ? LL_IOCTL_DEV : 0);
    struct ll_ruleset set = {.fs = *handled, .scoped = scope && abi >= 6 ? 3 : 0 /* abstract sockets, signals */};
    return (int)syscall(SYS_landlock_create_ruleset, &set, abi >= 6 ? sizeof set : abi >= 4 ? 16 : 8, 0);
}

static bool allow(int ruleset, uint64_t handled, const char *path, const char *kind, struct fault *f) {
    struct stat st;
    cleanup_fd int fd = open(path, O_PATH | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st)) return true; /* a path this host does not have */
    struct ll_rule rule = {rule_access(kind, handled, S_ISDIR(st.st_mode)), fd};
    return !syscall(SYS_landlock_add_rule, ruleset, 1, &rule, 0) || fault_set(f, errno, "landlock rule %.30s", path);
}

static bool enforce(int ruleset, struct fault *f) {
    if (!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !syscall(SYS_landlock_restrict_self, ruleset, 0)) return true;
    return fault_set(f, errno, "landlock");
}

bool landlock_apply(struct fault *f) {
    uint64_t handled;
    cleanup_fd int ruleset = box.landlock ? new_ruleset(&handled, json_bool(box.landlock, "scope", true)) : -1;
    if (ruleset < 0) return box.namespaces || box.container || fault_set(f, errno, "landlock ruleset"); /* else it is all there is */
    if (box.namespaces) { /* pid 1 must go on seeing its processes; where its procfs is the programs' own, /proc is theirs to write by the rules as well */
        struct ll_rule rule = {LL_READ_FILE | LL_READ_DIR | LL_WRITE_FILE, sweep_proc()}; /* to write: see userns.c */
        if (syscall(SYS_landlock_add_rule, ruleset, 1, &rule, 0)) return fault_set(f, errno, "landlock rule for procfs");
        rule.access = LL_READ_FILE | LL_READ_DIR;
        rule.fd = landlock_disk;
        if (rule.fd >= 0 && syscall(SYS_landlock_add_rule, ruleset, 1, &rule, 0)) return fault_set(f, errno, "landlock rule for the disk");
    }
    const struct json *rules = json_get(box.landlock, "rules");
    for (const struct json *r = rules ? rules->child : NULL; r; r = r->next) {
        const struct json *path = r->child, *kind = path ? path->next : NULL;
        if (!kind || path->type != J_STR || kind->type != J_STR) return fault_set(f, EINVAL, "launch: landlock.rules");
        if (!allow(ruleset, handled, path->str, kind->str, f)) return false;
    }
    return enforce(ruleset, f);
}

/* The box's cgroups, for those who are to enter them. */
bool take_cgroups(struct fault *f) {
    box.ncgroups = MAX_CGROUPS;
    if (!init_await(C_CGROUPS, box.cgroup_fds, &box.ncgroups, f)) return false;
    for (int i = 0; i < box.ncgroups; i++) { /* a program's descriptors are put in place before it enters */
        int low = box.cgroup_fds[i];
        box.cgroup_fds[i] = lift_fd(low);
        close(low);
    }
    return true;
}

/* For programs, whatever was ignored by those who started us: also the two that a C library keeps for itself, and make ignores. */
void forget_signals(void) {
    static const uint64_t by_default[4]; /* the kernel's struct sigaction */
    for (int s = 1; s < NSIG; s++) syscall(SYS_rt_sigaction, s, by_default, NULL, sizeof(uint64_t));
}

static bool enter_cgroups(struct fault *f) {
    static bool inside;
    for (int i = 0; !inside && i < box.ncgroups; i++)
        if (write(box.cgroup_fds[i], "0", 1) < 0) return fault_set(f, errno, "enter cgroup");
    if (!inside && box.ncgroups && box.namespaces && unshare(CLONE_NEWCGROUP)) return fault_set(f, errno, "cgroup namespace");
    return inside = true;
}

static bool limit(int resource, const char *name, struct fault *f) {
    rlim_t v = (rlim_t)json_int(json_get(box.spec, "rlimits"), name, 0, 0, MAX_INT);
    struct rlimit now;
#ifdef __SANITIZE_ADDRESS__
    if (resource == RLIMIT_DATA) return true; /* what the sanitizer keeps beside our memory would count, and is terabytes */
#endif
    if (!v && resource != RLIMIT_CORE) return true;
    if (!getrlimit(resource, &now) && v > now.rlim_max) v = now.rlim_max;
    struct rlimit r = {v, v};
    return !setrlimit(resource, &r) || fault_set(f, errno, "limit %s", name);
}

/* Where it may still be changed it is no limit of the forker's: what somebody has is the most that those it bears may have. */
static bool limit_files(struct fault *f) {
    struct rlimit now, r = {box.open_files, box.open_files};
    if (!box.open_files) return true;
    if (!getrlimit(RLIMIT_NOFILE, &now) && r.rlim_max > now.rlim_max) r.rlim_cur = r.rlim_max = now.rlim_max;
    return !setrlimit(RLIMIT_NOFILE, &r) || fault_set(f, errno, "limit nofile");
}

static bool set_limits(struct fault *f) {
    static bool set_already;
    cpu_set_t set;
    int n = 0;
    if (set_already) return true;
    CPU_ZERO(&set);
    const struct json *cpus = json_get(box.spec, "cpus");
    for (const struct json *c = cpus ? cpus->child : NULL; c; c = c->next, n++)
        if (c->num >= 0 && c->num < CPU_SETSIZE) CPU_SET((size_t)c->num, &set);
    if (n && sched_setaffinity(0, sizeof set, &set)) return fault_set(f, errno, "cpu affinity");
    return set_already = limit(RLIMIT_NOFILE, "nofile", f) && limit(RLIMIT_CORE, "core", f) && limit(RLIMIT_FSIZE, "fsize", f) &&
           limit(RLIMIT_DATA, "data", f) && limit(RLIMIT_SIGPENDING, "sigpending", f) && limit(RLIMIT_MSGQUEUE, "msgqueue", f) &&
           limit(RLIMIT_MEMLOCK, "memlock", f);
}

/* All that root of the box has, over files that are the sandbox's: what nobody else owns there is out of its reach. */
#define ROOT_CAPS (1 << CAP_CHOWN | 1 << CAP_DAC_OVERRIDE | 1 << CAP_FOWNER | 1 << CAP_FSETID)

/* What a capability could come back from at execve. To look first is cheap; each drop makes new credentials. */
static void empty_bounding_set(void) {
    static bool empty;
    for (int cap = 0, held; !empty && (held = prctl(PR_CAPBSET_READ, cap, 0, 0, 0)) >= 0; cap++) /* beyond the last: EINVAL */
        if (held) prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
    empty = true;
}

static void clear_ambient_set(void) {
    static bool clear;
    if (!clear) prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    clear = true;
}

static bool keep_capabilities(uint64_t keep) {
    struct __user_cap_header_struct h = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct d[2] = {{0}};
    if (keep && syscall(SYS_capget, &h, d)) return false;
    for (int i = 0; i < 2; i++) {
        d[i].effective = d[i].permitted &= (uint32_t)(keep >> 32 * i);
        d[i].inheritable = 0;
    }
    return !syscall(SYS_capset, &h, d);
}

bool drop_capabilities(uint64_t keep) {
    clear_ambient_set();
    empty_bounding_set();
    return keep_capabilities(keep);
}

static bool cut_bounding_set(uint64_t keep, struct fault *f) {
    for (int cap = 0, held; (held = prctl(PR_CAPBSET_READ, cap, 0, 0, 0)) >= 0; cap++)
        if (held && !(keep >> cap & 1) && prctl(PR_CAPBSET_DROP, cap, 0, 0, 0)) return fault_set(f, errno, "bounding set");
    return true;
}

/* By the namespace (userns.c) we have every capability over it, and a full bounding set: both are cut down to the few. */
static bool become_root(int namespace, struct fault *f) {
    if (box.user_mode != USER_SINGLE && setgroups(0, NULL)) return fault_set(f, errno, "setgroups");
    if (syscall(SYS_setns, namespace, CLONE_NEWUSER)) return fault_set(f, errno, "enter root's namespace");
    close(namespace);
    if (setresgid(0, 0, 0) || setresuid(0, 0, 0)) return fault_set(f, errno, "become root");
    if (!cut_bounding_set(ROOT_CAPS, f)) return false;
    return keep_capabilities(ROOT_CAPS) || fault_set(f, errno, "drop capabilities");
}

/* From programs, which may be our own user. A procfs that hides what one may not look at would hide us from each other, too; Landlock
 * keeps programs from the memory of whoever is not confined as they are. */
void hide_memory(void) {
    bool shown = box.container && box.user_mode == USER_NONE && box.landlock && landlock_abi() >= 2;
    prctl(PR_SET_DUMPABLE, shown, 0, 0, 0);
}

static bool become_user(struct fault *f) {
    uid_t uid = box.uid + (box.user_mode == USER_UID ? box.uid_base : 0);
    gid_t gid = box.gid + (box.user_mode == USER_UID ? box.uid_base : 0);
    clear_ambient_set();
    empty_bounding_set(); /* with the change of user we lose the capability that this takes */
    if (box.user_mode == USER_RANGE || box.user_mode == USER_UID) {
        if (setgroups(0, NULL)) return fault_set(f, errno, "setgroups");
        if (setresgid(gid, gid, gid) || setresuid(uid, uid, uid)) return fault_set(f, errno, "setuid");
    }
    return drop_capabilities(0) || fault_set(f, errno, "drop capabilities");
}

static bool become(int root, struct fault *f) {
    if (!(root < 0 ? become_user(f) : become_root(root, f))) return false;
    hide_memory(); /* until execve: it is not the program's to read; and it may be a shepherd's, who lends it */
    return limit(RLIMIT_NPROC, "nproc", f); /* now, so that it is counted for the user in its own namespace */
}

static bool load_filter(const struct sock_filter *filter, size_t n, struct fault *f) {
    struct sock_fprog p = {(unsigned short)n, (struct sock_filter *)filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return fault_set(f, errno, "no_new_privs");
    return !syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &p) || fault_set(f, errno, "seccomp");
}

static bool load_own_filter(struct fault *f) {
    return load_filter((const struct sock_filter *)box.filter->p, box.filter->n / sizeof(struct sock_filter), f);
}

/* For whoever only has to be there. */
bool confine_bystander(struct fault *f) {
    return cut_bounding_set(0, f) && (keep_capabilities(0) || fault_set(f, errno, "drop capabilities")) && load_own_filter(f);
}

/* To load the box's program takes the kernel 0.16 ms, a third of what fork and execve take. So the forker has it, but for two
 * calls that it needs, and each program loads no more than what forbids these. */
static bool have_all_but_last;

static bool load_forkers_filter(struct fault *f) {
    enum { HEAD = 8 };
    size_t n = box.filter->n / sizeof(struct sock_filter);
    cleanup_free struct sock_filter *p = xrealloc(NULL, (HEAD + n) * sizeof *p);
    const struct sock_filter head[HEAD] = {
        {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, arch)},
        {BPF_JMP | BPF_JEQ | BPF_K, 0, 6, NATIVE_ARCH},
        {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, nr)},
        {BPF_JMP | BPF_JEQ | BPF_K, 3, 0, SYS_setns},
        {BPF_JMP | BPF_JEQ | BPF_K, 0, 3, SYS_clone},
        {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, args)},
        {BPF_JMP | BPF_JSET | BPF_K, 0, 1, CLONE_NEWUTS},
        {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW}};
    memcpy(p, head, sizeof head);
    memcpy(p + HEAD, box.filter->p, n * sizeof *p);
    return have_all_but_last = load_filter(p, HEAD + n, f);
}

static bool load_last_filter(struct fault *f) {
    const struct sock_filter p[] = { /* another architecture than ours does not come so far */
        {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, nr)},
        {BPF_JMP | BPF_JEQ | BPF_K, 4, 0, SYS_setns},
        {BPF_JMP | BPF_JEQ | BPF_K, 0, 2, SYS_clone},
        {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, args)},
        {BPF_JMP | BPF_JSET | BPF_K, 1, 0, CLONE_NEWUTS},
        {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW},
        {BPF_RET | BPF_K, 0, 0, box.fork_answer}};
    return load_filter(p, sizeof p / sizeof *p, f);
}

bool confine_ahead(struct fault *f) {
    if (!enter_cgroups(f) || !set_limits(f)) return false;
    empty_bounding_set();
    clear_ambient_set();
    if (box.namespaces && box.fork_answer) return load_forkers_filter(f);
    return !box.filter_ahead || load_own_filter(f);
}

bool confine(struct fault *f, bool filter, int root) {
    sigset_t none;
    umask(022);
    if (!enter_cgroups(f) || !set_limits(f) || !limit_files(f) || !become(root, f)) return false;
    if (!box.namespaces && !landlock_apply(f)) return false; /* with namespaces, pid 1 did it for all */
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (have_all_but_last) return load_last_filter(f);
    return !filter || box.filter_ahead || load_own_filter(f);
}

/* No program, no network, nobody's memory: whatever else a keeper might be made to do. */
static bool filter_keeper(struct fault *f) {
    static const unsigned denied[] = {SYS_execve, SYS_execveat, SYS_socket, SYS_connect, SYS_ptrace, SYS_process_vm_writev};
    enum { N = sizeof denied / sizeof *denied };
    struct sock_filter p[N + 7] = {
        {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, arch)},
        {BPF_JMP | BPF_JEQ | BPF_K, 1, 0, NATIVE_ARCH},
        {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_KILL_PROCESS},
        {BPF_LD | BPF_W | BPF_ABS, 0, 0, offsetof(struct seccomp_data, nr)},
        {BPF_JMP | BPF_JGE | BPF_K, N + 1, 0, 0x40000000}}; /* x32 */
    for (unsigned i = 0; i < N; i++) p[5 + i] = (struct sock_filter){BPF_JMP | BPF_JEQ | BPF_K, (unsigned char)(N - i), 0, denied[i]};
    p[5 + N] = (struct sock_filter){BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW};
    p[6 + N] = (struct sock_filter){BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ERRNO | EPERM};
    return load_filter(p, N + 7, f);
}

static bool allow_parent(int ruleset, uint64_t handled, const char *path, struct fault *f) {
    cleanup_free char *parent = path ? strdup(path) : NULL;
    char *slash = parent ? strrchr(parent, '/') : NULL;
    if (!slash || slash == parent) return true;
    *slash = 0;
    return allow(ruleset, handled, parent, "keep", f);
}

/* The keeper once its box stands: to write output to the spool, to signal, and to remove the box is all it still does. */
bool confine_keeper(struct fault *f) {
    uint64_t handled, caps = 1 << CAP_KILL | 1 << CAP_DAC_OVERRIDE | 1 << CAP_FOWNER | 1 << CAP_SYS_RESOURCE /* large pipes */;
    cleanup_fd int ruleset = new_ruleset(&handled, false);
    bool ok = drop_capabilities(caps) || fault_set(f, errno, "drop the keeper's capabilities");
    if (ruleset >= 0) {
        ok = ok && allow_parent(ruleset, handled, box.dir, f) && allow_parent(ruleset, handled, box.disk_path, f);
        ok = ok && (!box.spool || allow(ruleset, handled, box.spool, "keep", f));
        for (int i = 0; i < box.ncgroups; i++) ok = ok && allow_parent(ruleset, handled, box.cgroups[i], f);
        ok = ok && (!box.container || (allow(ruleset, handled, "/sys/fs/cgroup", "r", f) && allow(ruleset, handled, box.dir, "keep", f)));
        ok = ok && allow(ruleset, handled, "/dev/null", "dev", f) && allow(ruleset, handled, "/proc", "r", f) && enforce(ruleset, f);
    }
    return ok && filter_keeper(f);
}
