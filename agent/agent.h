/* capsule-agent: shared declarations. Each section names the file its functions live in. */
#ifndef CAPSULE_AGENT_H
#define CAPSULE_AGENT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#define PROTOCOL_VERSION 1
#define MAX_PAYLOAD (1u << 20)
#define LAST_FD 0x7fffffffu /* for close_range: gVisor refuses numbers that no descriptor can have */
#define DATA_CHUNK (64u << 10) /* payload of one outgoing DATA frame */
#define MAX_CGROUPS 8
#define MAX_MOUNTS 128
#ifndef SYS_close_range
#define SYS_close_range 436
#endif
#define RETRY(expr) ({ long r_; do r_ = (long)(expr); while (r_ < 0 && errno == EINTR); r_; })

static inline void closep(int *fd) { if (*fd >= 0) close(*fd); }
static inline void freep(void *p) { free(*(void **)p); }
#define cleanup_fd __attribute__((cleanup(closep)))
#define cleanup_free __attribute__((cleanup(freep)))
static inline int steal_fd(int *fd) { int f = *fd; *fd = -1; return f; }
static inline int lift_fd(int fd) { return fd < 0 ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, 10); } /* a copy out of the way of 0 to 3 */
static inline void drop_fd(int *fd) { if (*fd >= 0) close(*fd); *fd = -1; }

/* A failure on its way to the host: which step, which errno. `code` NULL: derived from err. */
struct fault { int err; char stage[48]; const char *code; };
bool fault_set(struct fault *f, int err, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
const char *fault_code(int err);

/* buffer.c: a growing byte buffer */
struct buf { char *p; size_t n, cap; };
void buf_add(struct buf *b, const void *p, size_t n);
void buf_printf(struct buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void buf_json_string(struct buf *b, const char *s, size_t n);
void buf_free(struct buf *b);
void *xrealloc(void *p, size_t n);
double now_ms(void);
bool readable_within(int fd, int ms);
struct rusage;
double cpu_ms(const struct rusage *u);

/* json.c: a small reader. Strings are decoded in place and NUL-terminated. */
enum json_type { J_NULL, J_BOOL, J_NUM, J_STR, J_ARR, J_OBJ };
struct json {
    enum json_type type;
    double num;            /* J_NUM, J_BOOL */
    const char *str;       /* J_STR */
    size_t len;
    const char *key;       /* inside an object */
    size_t key_len;
    struct json *child, *next;
};
struct json *json_parse(char *text, size_t n); /* NULL: not JSON. Free the result with free(). */
struct json *json_read(int fd);                /* a whole file, which is not changed */
struct json *json_get(const struct json *obj, const char *key);
const char *json_str(const struct json *obj, const char *key); /* NULL: missing, no string, or has a NUL inside */
double json_num(const struct json *obj, const char *key, double missing);
int64_t json_int(const struct json *obj, const char *key, int64_t missing, int64_t low, int64_t high); /* nearest in range */
#define MAX_INT ((int64_t)1 << 53) /* what a JSON number says exactly */
bool json_bool(const struct json *obj, const char *key, bool missing);

/* wire.c: frames (spec/agent-protocol.md) */
enum frame_type { F_HELLO = 1, F_REQUEST, F_REPLY, F_ERROR, F_DATA, F_EOF, F_EVENT, F_EXIT, F_CONTROL };
enum stream { S_STDIN = 0, S_STDOUT, S_STDERR, S_TTY, S_FILE, S_CARRY, S_DIAL };
#define HEADER_SIZE 16
struct header { uint32_t length; uint8_t type, stream; uint64_t offset; };
void header_pack(unsigned char out[HEADER_SIZE], const struct header *h);
void header_unpack(struct header *h, const unsigned char in[HEADER_SIZE]);
/* Blocking ends, used by the launcher and by file workers. false: the peer is gone or broke the protocol. */
bool read_full(int fd, void *p, size_t n);
bool write_full(int fd, const void *p, size_t n);
bool frame_read(int fd, struct header *h, char **payload); /* payload: malloc'ed, NUL-terminated */
bool frame_write(int fd, enum frame_type type, int stream, uint64_t offset, const void *p, size_t n);
bool frame_json(int fd, enum frame_type type, struct buf *b); /* sends and empties b */
void frame_error(int fd, const struct fault *f, const char *message);
void error_json(struct buf *b, const struct fault *f, const char *message);
bool send_fds(int sock, const void *msg, size_t n, const int *fds, int nfds);
ssize_t recv_fds(int sock, void *msg, size_t n, int *fds, int *nfds); /* nfds in: room, out: got */

/* box.c: what the launch request says, parsed once; read-only afterwards */
struct box {
    struct json *spec;
    const char *id, *dir, *stage, *spool, *disk_kind, *disk_path;
    bool namespaces;       /* of our own making */
    bool container;        /* of an engine's; neither: landlock level */
    enum { USER_RANGE, USER_SINGLE, USER_UID, USER_NONE } user_mode;
    uid_t uid; gid_t gid;  /* of programs, as they see it */
    uint32_t uid_base, uid_count;
    int uid_lock;          /* the abstract socket that claims the slot */
    int cgroup_version, ncgroups;
    const char *cgroups[MAX_CGROUPS];
    int cgroup_fds[MAX_CGROUPS]; /* cgroup.procs, open for writing */
    const char *usage_dirs[MAX_CGROUPS]; int nusage; /* where to read what it uses */
    int disk_stat;         /* what its disk's device counts, where cgroups do not; -1: none */
    const struct buf *filter; /* the seccomp program */
    uint32_t open_files;      /* the keeper: what programs may have open, 0: it is among the rlimits; in a program's process: its own */
    bool signal_resize;       /* the kernel, gVisor's, tells nobody that a terminal has another size */
    bool filter_ahead;        /* pid 1's stand-in has it too: to load one takes gVisor as long as to fork */
    uint32_t fork_answer;     /* what programs get for the calls that the forker keeps; 0: it has no filter, each program loads it all */
    const struct json *landlock;
    bool bare;                /* cloned from a mount namespace with nothing in it (nowhere.c) */
    int host, disk;           /* then: what pid 1 is to mount: the host's tree, if it needs that, and its disk; -1: none */
    int trees[MAX_MOUNTS];    /* otherwise: what each entry of `mounts` binds; 0: nothing */
    bool net_made;            /* the keeper is in a network namespace that was made for the box */
    double started;
};
extern struct box box;
bool box_parse(struct json *spec, struct fault *f);
bool box_claim_uids(struct fault *f);
bool box_bind_slot(int socket, uint32_t base);
bool box_map_user(pid_t init, struct fault *f);
bool box_make_cgroups(struct fault *f);
void box_remove(void);
bool write_proc(pid_t pid, const char *name, const char *text, struct fault *f); /* /proc/PID/name */
bool remove_cgroups(const char *const *dirs, int n); /* false: one is still there */
void thaw_cgroup(const char *dir);                   /* freeze.c */
bool get_rid_of(const char *path);                   /* false: some of the tree is still there */
const char *box_path(const char *path, char *out, size_t room); /* API path -> path as seen by the worker */

/* ahead.c: the next box's disk and network namespace, made while nobody waits */
int ahead_open(void);     /* the launcher polls it, for ahead_hear */
int ahead_patience(void);
bool ahead_due(void);
void __attribute__((noreturn)) ahead_make(void);
void ahead_given(void);
void ahead_hear(void);
int ahead_take_disk(const char *template, const char *dir); /* in a launch; -1: there is none */
int ahead_take_net(void);                                   /* likewise */
void ahead_let_go(void);

/* nowhere.c: the mount namespace that boxes are cloned from */
void nowhere_make(void);                              /* by the launcher */
bool nowhere_is(void);                                /* and this box may be cloned from it */
void nowhere_let_go(void);
int nowhere_enter(struct fault *f);                   /* by the keeper, to clone pid 1; returns the way back, or -1 */
bool nowhere_leave(int home, struct fault *f);
bool nowhere_furnish(struct fault *f);                /* by pid 1: what it is to build its root in; the host's files are at their paths if it needs them */
bool nowhere_move(const char *root, struct fault *f); /* likewise: nothing of the host is left but what the new root has of it */

/* disk.c */
int disk_make(const char *template, const char *dir, struct fault *f); /* a mount that is nowhere yet, or -1 */
bool disk_mount(struct fault *f);     /* by root: for pid 1, or in the keeper's mount namespace */
bool disk_prepare(struct fault *f);   /* likewise: the folders that pid 1 binds */
void disk_let_go(void);
int disk_main(char *text);
bool disk_mount_shared(const char *image, const char *point, struct fault *f); /* likewise */
bool disk_mount_own(struct fault *f);   /* by pid 1, in the box's own */
bool disk_make_missing(const char *root, struct fault *f); /* by pid 1, over layers */

/* layers.c: a disk over layers of the host */
int map_namespace(uint32_t base, uint32_t count, struct fault *f); /* -1: see f */
int map_tree(const char *path, int userns, bool read_only);        /* a mount that is nowhere yet; -1: see errno */
bool map_over_itself(const char *path, int userns, bool read_only, struct fault *f);
bool layers_or_volumes(void);
bool layers_map(struct fault *f);   /* by root, in the keeper's mount namespace */
bool layers_make_dirs(int disk, bool outside, struct fault *f);
bool layers_mount(struct fault *f); /* by pid 1 */
bool volumes_mount(const char *root, struct fault *f); /* likewise */
bool volumes_make_points(const char *root, struct fault *f); /* for an engine, which follows links */
void volumes_open_parents(void);                             /* in a container */

/* save.c: the worker that reads all that a box has written */
enum { SAVE_FULL = 1, SAVE_DIFFERENCE = 2, SAVE_ROW = 4, SAVE_WATCH = 8 };
void save_main(int disk, int conn, uint32_t how, double unchanged_since) __attribute__((noreturn));

/* track.c: what it will need to know the next time; by pid 1 */
void track_open(void);
void track_let_go(void);

/* fill.c: the other way round, by a file worker */
void fill_files(int conn) __attribute__((noreturn));

/* rootfs.c: the new root, made by pid 1 */
bool rootfs_needs_host(void);
int rootfs_copy(const char *path, uint64_t attrs); /* a mount that is nowhere yet; -1: see errno */
bool rootfs_open(struct fault *f);                 /* by the keeper */
void rootfs_close(void);
bool rootfs_make(int *disk_fd, int *proc_fd, struct fault *f); /* and leave the host's */
bool bring_up_loopback(struct fault *f);

/* userns.c: root of the box */
bool wants_root(const struct json *request);
int root_namespace(struct fault *f); /* -1: see f */
void root_ahead(void);               /* by pid 1, and the two below */
int root_copy(struct fault *f);      /* a descriptor of the one that all programs share; -1: see f */
void root_let_go(void);
void limit_namespace(void);          /* of the box, by pid 1 */
void fault_root(struct fault *f);    /* says that there is no root here, and why */

/* confine.c: what every program and file worker goes through before it may act */
extern int landlock_disk;                   /* pid 1's workers read it where no path leads; -1: none */
/* cgroups, limits, user, capabilities, Landlock, seccomp: in that order. `root`: as what (userns.c), -1: the sandbox's user */
bool confine(struct fault *f, bool filter, int root);
void forget_signals(void);
bool take_cgroups(struct fault *f);         /* of the keeper's, by pid 1 */
bool confine_ahead(struct fault *f);        /* as much of it as whoever forks may have, for all its children */
bool confine_bystander(struct fault *f);
bool confine_keeper(struct fault *f);
bool landlock_apply(struct fault *f);
bool drop_capabilities(uint64_t keep);
void hide_memory(void);
int landlock_abi(void);

/* init.c: pid 1 of the box. Reaps, forks, kills trees; parses nothing. */
enum ctl_command { C_GO = 1, C_DISK, C_CGROUPS, C_READY, C_FAILED, C_SPAWN, C_SPAWNED, C_EXITED, C_KILL, C_KILLED, C_SIGNAL, C_SIGNALED,
                   C_FORGET, C_SOCKET, C_SOCKETED, C_COUNT, C_COUNTED, C_FREEZE, C_FROZEN, C_THAW, C_SHEPHERD,
                   C_VISIT, C_REST, C_OOM };
enum spawn_kind { K_EXEC, K_FILE, K_SAVE, K_SUDO };
struct ctl {
    uint32_t command, no;
    int32_t kind, pid, status, signal, err;
    uint32_t root; /* a program that is to be root of the box: its descriptors end with the namespace */
    uint32_t port, slot, order; /* slot: where pid 1 notes the birth; order: which of them, as places are used again */
    double cpu_ms;
    uint64_t rss; /* K_SUDO: the tag of the exec that it belongs to */
    char stage[48];
};
void init_main(int ctl_fd) __attribute__((noreturn));
bool init_await(enum ctl_command word, int *fds, int *nfds, struct fault *f); /* of the keeper's, while the box is made */
void init_run(const struct ctl *m, const int *fds, int nfds) __attribute__((noreturn));
pid_t init_bear(const struct ctl *m, const int *fds, int nfds, unsigned long how);
void init_born(const struct ctl *order, const struct ctl *answer, const int *fds, int nfds);
void init_let_go(void);

/* forker.c: forks for pid 1, from within the box's cgroups */
bool forker_wanted(void);
bool forker_is(pid_t pid);
void forker_start(void);
int forker_fd(void);
bool forker_order(const struct ctl *m, const int *fds, int nfds);
void forker_hear(void);
bool forker_ended(pid_t pid);
void forker_let_go(void);

/* spare.c: a child of pid 1's, forked ahead of time */
bool spare_wanted(void);
void spare_start(void);
pid_t spare_order(const struct ctl *m, const int *fds, int nfds);
bool spare_ended(pid_t pid);
void spare_let_go(void);

/* visits.c: the sessions of sudo's, and whose they are */
#define WORKERS 256
#define VISITS 32       /* at once; who comes then waits at the door */
#define VISITS_LEFT 128 /* of a container's, ended but for what they have left running; who comes then is refused */
#define VISIT_OF_EXEC ((uint64_t)1 << 40) /* in a container, whose: below, the pid of a shepherd; with it, the number of an exec; */
#define VISIT_UNNAMED ((uint64_t)1 << 41) /* with this, the pid of a shepherd that has gone, until its exec's number is told */
void visit_note(int place, uint64_t whose);
uint64_t visit_whose(pid_t visitor); /* in a container; 0: nobody's */
bool visits_full(void);
bool visits_left_too_many(void);
void visits_pass_on(uint64_t from, uint64_t to);
bool visits_kill(uint64_t whose); /* false: there is none */
pid_t init_worker(int place);
bool init_lingers(int place); /* a session's shepherd whom nobody keeps but those that the session has left */
bool init_has_shepherd(pid_t pid);

/* door.c: sudo, pid 1's part of it */
struct visitor { int conn, uts; uint64_t tag; };
void door_open(void);
int door_fd(void);
void door_let_go(void);
int door_admit(struct visitor *v); /* 0: he is to have a session; -1: he was answered */
uint64_t init_exec_of(pid_t pid);  /* in a container: stands for the exec that it belongs to; 0: none */
void door_refuse(int conn, int err, const char *why);
void refuse_worker(int kind, int err, const int *fds, int nfds);
void door_main(const int *fds, int nfds, bool *over) __attribute__((noreturn));
/* sudo.c, sudo_session.c: the user's and root's part, as programs of their own */
int sudo_main(int argc, char **argv);
int sudo_session_main(void);

/* sweep.c: finding every process of an exec */
struct tally { int processes; double cpu_ms; uint64_t rss; };
void sweep_open(int proc_fd);
int sweep_proc(void);
void sweep_each(void fn(pid_t pid, void *arg), void *arg);
void sweep_each_thread(pid_t pid, void fn(pid_t tid, void *arg), void *arg);
void sweep_close(void);                               /* a child must not hold what pid 1 sees with */
bool sweep_works(void);
uint64_t sweep_own_tag(void);                         /* the UTS namespace an exec was born into; 0: unknown */
bool init_knows(pid_t pid);                           /* a child of pid 1 that is accounted for */
bool init_has_worker(pid_t pid);                      /* one that does a file operation */
void init_stop_workers(void);
enum sweep { SWEEP_NOBODY, SWEEP_UNSURE, SWEEP_SOMEBODY };
enum sweep sweep_signal(uint64_t tag, pid_t shepherd, int signal);
pid_t sweep_above(pid_t pid, bool is(pid_t));
void sweep_frozen(uint64_t tag);                      /* the last resort: stops the box for a moment */
bool sweep_descendants(void);                         /* kills and reaps all of the calling subreaper's */
void sweep_count(struct tally *t);
void sweep_programs(void fn(pid_t pid, void *arg), void *arg); /* all that run in the box and are not ours */
bool sweep_paused(void);
bool sweep_stop(void);                                /* everybody; false: not all of them stand still yet */
void sweep_continue(void);                            /* but for whoever had been stopped before */

/* memory.c: what a box uses, where no cgroup holds it; by pid 1 */
void memory_begin(void);
void memory_wake(void);
void memory_rest(bool rests);    /* the box stands still by its cgroup */
int memory_patience(void);       /* until memory_tick has something to do, in ms; -1: it has not */
void memory_tick(void);
void init_tell_oom(void);

/* program.c: the child that becomes the user's program */
enum { FD_REQUEST, FD_STATUS, FD_IN, FD_OUT, FD_ERR, FD_CARRY, FD_ROOT, FD_ROLES }; /* the last two: at times; the order counts */
struct program {
    struct json *request;
    char **argv, **envp, cwd[4200];
    const char *path;     /* to look for argv[0] in; NULL: the usual */
    bool tty;
    struct winsize size;
    int root; /* the namespace in which it is root; -1: it is not to be */
};
void program_main(const int fds[FD_ROLES], int nfds, int root) __attribute__((noreturn));
bool program_read(struct program *p, struct json *request, struct fault *f);
void program_free(struct program *p);
void program_become(const struct program *p, const int fds[3], int carry, int status, void ready(int status), struct fault *f);
int signal_number(const char *name); /* "KILL", "SIGKILL"; 0: unknown */
/* What a starting program tells the keeper. READY: all is done but execve, which closes the socket; only then is that no
 * sign of an early death. TERMINAL carries its descriptor. The others come from a shepherd: RUNNING, EXITED and IDLE. The first of
 * them has the pid, and as err why its execve was not reached. With `last` nobody is left below the shepherd. */
enum status_kind { ST_FAILED, ST_TERMINAL, ST_READY, ST_RUNNING, ST_EXITED, ST_IDLE };
struct status_message { int32_t kind, err, pid, status, last; char stage[48]; double cpu_ms; uint64_t rss; };

/* shepherd.c: stands above an exec's processes, where there are no namespaces */
#define ORDER_TEXT 8192
struct order_message { /* to a shepherd, with stdin, stdout, stderr, the request if it is large, and the carry */
    uint32_t size, open_files;
    bool large, carry;
    char text[ORDER_TEXT];
};
void shepherd_main(const int fds[FD_ROLES], int nfds) __attribute__((noreturn));
void shepherd_serve(int sock) __attribute__((noreturn));

/* files.c: the child that does one file operation and exits */
void file_main(int request_fd, int conn) __attribute__((noreturn));
/* watch.c: one that stays */
void watch_files(int conn, const char *path, bool recursive, void refuse(int err, const char *stage)) __attribute__((noreturn));
/* detail.c: what is told of a file beyond its stat, and given to it */
struct stat;
const char *type_name(mode_t m);
void detail_want(const struct json *request);
void detail_json(struct buf *b, int dir, const char *name, const struct stat *st);
bool attributes_set(int fd, const struct json *request); /* false: see errno */
/* tree.c: removal that survives any depth and follows nothing */
bool remove_tree(int dirfd, const char *name);
/* copy.c: modes and times are kept, hard links become copies. false: see errno, and remove what was made. */
bool copy_data(int from, int to);
bool copy_over(int from, int to);
bool copy_tree(const char *from, const char *to);
int rename_to(const char *from, const char *to, bool overwrite); /* -1: see errno */

/* output.c: what an exec has written, with offsets */
struct output {
    uint64_t total, limit; /* seen so far; kept at most */
    bool tail;             /* keep the last bytes rather than the first */
    uint64_t lost;         /* 0: nothing. Where the disk was full: nothing from there on is kept; with tail, nothing before */
    char *mem; size_t cap;
    int file;              /* -1: in memory */
};
void output_open(struct output *o, uint64_t limit, bool tail);
void output_add(struct output *o, const char *p, size_t n);
uint64_t output_first(const struct output *o); /* the first byte still kept */
uint64_t output_end(const struct output *o);   /* one past the last byte kept */
size_t output_read(const struct output *o, uint64_t at, char *p, size_t room);
void output_close(struct output *o);
uint64_t output_kept(const struct output *o);
bool output_truncated(const struct output *o, uint64_t total);

/* keeper.c, conn.c, exec.c: the process that serves the wire */
void keeper_run(int launcher_conn, int ctl_fd, pid_t init, int disk_fd) __attribute__((noreturn));

/* usage.c */
void usage_begin(void);
void usage_json(struct buf *b, int disk_fd, int processes, double proc_cpu_ms, uint64_t proc_rss);
uint64_t oom_kills(void);
void oom_told(void); /* pid 1 has ended a process (memory.c) */

/* launcher.c, probe.c, container.c, relay.c */
#define ALL_NAMESPACES (CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP)
int launcher_main(int listen_fd, int lifeline);
bool bind_socket(struct fault *f);
bool tell_init(int ctl, enum ctl_command word, const int *fds, int nfds, struct fault *f);
bool await_init(int ctl, int *disk_fd, struct fault *f); /* until the box stands */
int container_main(char **argv);
int relay_main(char **argv);
void hide_words(char **words);
void probe_serve(int conn, const struct json *request);

void set_nonblocking(int fd, bool on);
void close_all_but(int a, int b); /* -1: unused */

#endif
