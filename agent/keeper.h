/* The keeper's own nouns: execs and connections. Private to keeper.c, exec.c, conn.c and net.c. */
#ifndef CAPSULE_KEEPER_H
#define CAPSULE_KEEPER_H

#include "agent.h"

#define MAX_EXECS 256             /* remembered */
#define MAX_KEPT (64u << 20)      /* bytes of output of finished execs */
#define MAX_CONNS 1024
#define MAX_PUMPS 256             /* streams into and out of the box, a process each */
#define MAX_CARRY (256u << 10)
#define MAX_STDIN (1u << 20)      /* accepted from clients, not yet taken by the program */

struct exec {
    struct exec *next;
    char id[65];
    uint32_t no;
    pid_t pid;                    /* of the program, as pid 1 sees it; 0: not known yet */
    pid_t shepherd;               /* in a container: who has it; 0: nobody yet, or nobody any more */
    struct buf order; int order_fds[FD_ROLES]; /* likewise: what waits for one */
    bool noted;                   /* likewise: pid 1's stand-in knows of it */
    enum { E_STARTING, E_RUNNING, E_EXITED, E_ENDED } state; /* exited: its main process is; ended: the exit is final */
    bool tty, ready, killing, graceful, kill_on_limit, stdin_eof; /* graceful: a signal with a grace was sent */
    bool flow;                    /* waits for readers rather than lose what they have not read */
    const char *cause;            /* why we killed it; NULL: we did not */
    int status_fd, in, out[2], carry_fd; /* tty: in == out[0] == the terminal's master */
    struct output output[2];
    struct buf input, carry, argv;
    double started, deadline, grace_at, look_at; /* ms; 0: none */
    uint32_t signals;             /* that pid 1 was told of and has not sent yet */
    uint64_t oom_before;
    uint64_t final[2];            /* bytes of output when it ended; what it left behind may write on */
    int status;                   /* as wait(2) gave it */
    double cpu_ms, duration_ms;
    uint64_t rss;
    const char *reason;
};

struct conn {
    struct conn *next;
    int fd;
    enum { CONN_HEADER, CONN_PAYLOAD } reading;
    unsigned char head[HEADER_SIZE];
    struct header h;
    char *payload; size_t got;
    bool greeted, asked, closing, dead, full; /* full: the socket takes no more just now */
    enum { ROLE_NONE, ROLE_EXEC, ROLE_KILL, ROLE_INPUT, ROLE_LISTEN, ROLE_DIAL, ROLE_USAGE, ROLE_FREEZE, ROLE_SAVE, ROLE_THAW, ROLE_SHUTDOWN } role;
    struct exec *exec;            /* ROLE_EXEC, ROLE_KILL, ROLE_INPUT */
    bool begun, may_input, was_running;
    bool more;                    /* output waits, and it is the others' turn */
    uint64_t sent[2];
    struct buf out; size_t out_at; /* frames on their way */
    uint32_t ticket;              /* for answers of pid 1 */
    int listener, peer; int port; /* ROLE_LISTEN, ROLE_DIAL */
    bool connecting;
    double since;                 /* ROLE_SAVE */
};

struct keeper {
    int listener, ctl, signals, disk_fd, launcher;
    pid_t init;
    struct exec *execs;
    struct conn *conns;
    uint32_t next_no;
    int nconns, npumps;
    bool init_dead, frozen, brief; /* brief: only while the box is saved */
    int saving;                   /* ends when the worker that saves it does; -1: none */
    double frozen_at, freeze_by, freeze_look; /* ms; look 0: nobody waits for it */
    struct { int fd; uint32_t id; double expires; } pending[64]; /* accepted inside, not yet taken */
    uint32_t next_stream;
};
extern struct keeper keeper;

/* exec.c */
void exec_start(struct conn *c, const struct json *request, const char *raw, size_t n);
void exec_attach(struct conn *c, const struct json *request);
void exec_list(struct conn *c);
struct exec *exec_by_id(const char *id);
struct exec *exec_by_no(uint32_t no);
void exec_tell(struct exec *e, enum ctl_command command, int kind, int signal);
void exec_killed_reply(struct conn *c);
void exec_spawned(const struct ctl *m);
void exec_not_started(struct exec *e, int err, const char *stage); /* e is gone */
void exec_exited(const struct ctl *m);
void exec_killed(const struct ctl *m);
void exec_signaled(const struct ctl *m);
void exec_readable(struct exec *e, int which); /* 0, 1: output; 2: status; 3: carry */
bool exec_waits(const struct exec *e, int which); /* for who reads its output too slowly */
bool exec_has_input(const struct exec *e);
void exec_flush_input(struct exec *e);
void exec_tick(struct exec *e, double now);
void exec_end(struct exec *e, const char *cause, int signal);
int execs_running(void);
void exec_exit_json(struct buf *b, const struct exec *e);

/* control.c */
void exec_kill_request(struct conn *c, const struct json *request);
void exec_input_request(struct conn *c, const struct json *request);
void exec_resize_request(struct conn *c, const struct json *request);
void exec_frame(struct conn *c);          /* DATA, EOF or CONTROL on an attached connection */

/* flock.c */
void flock_start(void);
bool flock_order(struct exec *e, const char *raw, size_t n, int fds[FD_ROLES]); /* takes the descriptors; false: see errno */
void flock_arrived(const struct ctl *m, int fd);
void flock_visited(pid_t shepherd);       /* somebody below it asks for root: pid 1's stand-in is told whose it is */
void flock_go_on(void);                   /* the box stood still */
void flock_back(struct exec *e);          /* nobody is left below its shepherd */
void flock_leave(struct exec *e);         /* its shepherd is not to serve again */
void flock_tick(double now);
double flock_next(void);                  /* when flock_tick has something to do; 0: never */
void flock_watch(void add(int fd, int which));
void flock_readable(int which);           /* one that waits is gone */

/* conn.c */
void conn_accept(void);
int memfd_with(const char *text, size_t n); /* -1: see errno */
void conn_readable(struct conn *c);
void conn_flush(struct conn *c);          /* writes what waits */
void conn_pump(struct conn *c);           /* moves output towards the client as far as it takes it */
void conn_send(struct conn *c, enum frame_type type, int stream, uint64_t offset, const void *p, size_t n);
void conn_printf(struct conn *c, enum frame_type type, const char *fmt, ...) __attribute__((format(printf, 3, 4))); /* short */
void conn_finish(struct conn *c, enum frame_type type, struct buf *b); /* the last frame; frees b */
void conn_error(struct conn *c, const char *code, int err, const char *stage, const char *message);
void conn_reply(struct conn *c);          /* REPLY {} and close */
void conn_free(struct conn *c);
bool conn_wants_input(const struct conn *c);
bool conn_holds_back(const struct conn *c);
bool ctl_tell(const struct ctl *m, const int *fds, int nfds);

/* freeze.c */
void freeze_request(struct conn *c);
void freeze_tick(double now);
void freeze_heard(const struct ctl *m);
void thaw_request(struct conn *c);
void save_request(struct conn *c, const struct json *request);
void save_ended(void);
void freeze_end(void);

/* net.c */
void net_dial(struct conn *c, const struct json *request);
void net_listen(struct conn *c, const struct json *request);
void net_take(struct conn *c, const struct json *request);
void net_socketed(const struct ctl *m, int fd);
void net_connected(struct conn *c);
void net_accept(struct conn *c);
void net_tick(double now);
void net_pump(int a, int b) __attribute__((noreturn)); /* carries bytes both ways until both are done */

#endif
