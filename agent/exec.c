/* Execs: one run of a program, what it wrote, how it ended. All of it outlives the connection that asked for it. */
#include "keeper.h"
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

struct exec *exec_by_id(const char *id) {
    for (struct exec *e = keeper.execs; e; e = e->next)
        if (id && !strcmp(e->id, id)) return e;
    return NULL;
}

struct exec *exec_by_no(uint32_t no) {
    for (struct exec *e = keeper.execs; e; e = e->next)
        if (e->no == no) return e;
    return NULL;
}

int execs_running(void) {
    int n = 0;
    for (struct exec *e = keeper.execs; e; e = e->next) n += e->state != E_ENDED;
    return n;
}

static void release(struct exec *e) {
    for (struct conn *c = keeper.conns; c; c = c->next)
        if (c->exec == e) { c->exec = NULL; c->closing = true; }
    for (struct exec **p = &keeper.execs; *p; p = &(*p)->next)
        if (*p == e) { *p = e->next; break; }
    if (!e->tty) drop_fd(&e->in);
    drop_fd(&e->out[0]);
    drop_fd(&e->out[1]);
    flock_leave(e);
    drop_fd(&e->carry_fd);
    output_close(&e->output[0]);
    output_close(&e->output[1]);
    buf_free(&e->input);
    buf_free(&e->carry);
    buf_free(&e->argv);
    if (!box.container || e->noted) ctl_tell(&(struct ctl){.command = C_FORGET, .no = e->no}, NULL, 0);
    free(e);
}

static bool watched(const struct exec *e) {
    for (struct conn *c = keeper.conns; c; c = c->next)
        if (c->exec == e) return true;
    return false;
}

/* Room for one more: the oldest finished exec goes first. */
static bool make_room(void) {
    int n = 0;
    uint64_t kept = 0;
    struct exec *oldest = NULL;
    for (struct exec *e = keeper.execs; e; e = e->next, n++) {
        if (e->state != E_ENDED || e->killing || e->grace_at > 0 || watched(e)) continue;
        kept += output_kept(&e->output[0]) + output_kept(&e->output[1]) + e->carry.n;
        oldest = e; /* new ones are put in front */
    }
    if (n < MAX_EXECS && kept < MAX_KEPT) return true;
    if (!oldest) return n < MAX_EXECS;
    release(oldest);
    return make_room();
}

static bool valid_id(const char *id) {
    size_t n = id ? strlen(id) : 0;
    return n && n <= 64 && strspn(id, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") == n;
}

static void remember_argv(struct exec *e, const struct json *argv) {
    buf_add(&e->argv, "[", 1);
    for (const struct json *a = argv ? argv->child : NULL; a && e->argv.n < 4096; a = a->next) {
        if (a != argv->child) buf_add(&e->argv, ",", 1);
        buf_json_string(&e->argv, a->str, a->len < 1024 ? a->len : 1024); /* no string: empty */
    }
    buf_add(&e->argv, "]", 1);
}

/* Programs open their pipes by name, too (/dev/stderr), and the pipes' owner is our user, not theirs. Who is not theirs has no name for them. */
static bool make_pipe(int p[2]) {
    if (pipe2(p, O_CLOEXEC)) return false;
    fchmod(p[0], 0666); /* of both ends */
    return true;
}

/* The program's ends go into fds, ours into e. */
static bool make_pipes(struct exec *e, int fds[FD_ROLES], bool with_stdin, bool with_carry) {
    int p[2];
    if (!box.container) { /* there the shepherd has one */
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, p)) return false;
        e->status_fd = p[0];
        fds[FD_STATUS] = p[1];
        set_nonblocking(e->status_fd, true);
    }
    for (int i = 0; i < 2 && !e->tty; i++) {
        if (!make_pipe(p)) return false;
        e->out[i] = p[0];
        fds[FD_OUT + i] = p[1];
        fcntl(p[0], F_SETFL, O_NONBLOCK); /* it has no other flags */
    }
    if (with_stdin && !e->tty) {
        if (!make_pipe(p)) return false;
        e->in = p[1];
        fds[FD_IN] = p[0];
        fcntl(p[1], F_SETFL, O_NONBLOCK);
    }
    if (with_carry) {
        if (pipe2(p, O_CLOEXEC)) return false;
        e->carry_fd = p[0];
        fds[FD_CARRY] = p[1];
        fcntl(p[0], F_SETFL, O_NONBLOCK);
    }
    for (int i = FD_IN; i <= FD_ERR; i++)
        if (fds[i] < 0 && (fds[i] = open("/dev/null", O_RDWR | O_CLOEXEC)) < 0) return false;
    return true;
}

static struct exec *new_exec(const char *id, const struct json *r) {
    struct exec *e = xrealloc(NULL, sizeof *e);
    *e = (struct exec){.status_fd = -1, .in = -1, .out = {-1, -1}, .carry_fd = -1, .no = ++keeper.next_no};
    for (int i = 0; i < FD_ROLES; i++) e->order_fds[i] = -1;
    snprintf(e->id, sizeof e->id, "%s", id);
    const char *keep = json_str(r, "keep"), *on_limit = json_str(r, "on_limit");
    uint64_t limit = (uint64_t)json_int(r, "limit", 10 << 20, 1, MAX_INT);
    double timeout = json_num(r, "timeout", 0);
    e->flow = keep && !strcmp(keep, "flow");
    for (int i = 0; i < 2; i++) output_open(&e->output[i], limit, e->flow || (keep && !strcmp(keep, "tail")));
    e->tty = json_bool(r, "tty", false);
    e->kill_on_limit = on_limit && !strcmp(on_limit, "kill");
    e->started = now_ms();
    if (timeout > 0) e->deadline = e->started + timeout * 1000;
    e->oom_before = oom_kills();
    remember_argv(e, json_get(r, "argv"));
    e->next = keeper.execs;
    keeper.execs = e;
    return e;
}

static bool spawn(const struct exec *e, bool root, const char *raw, size_t n, int fds[FD_ROLES], int nfds) {
    struct ctl m = {.command = C_SPAWN, .no = e->no, .kind = K_EXEC, .port = box.open_files, .root = root};
    fds[FD_REQUEST] = memfd_with(raw, n);
    return fds[FD_REQUEST] >= 0 && ctl_tell(&m, fds, nfds);
}

static bool may_be(struct conn *c, const struct json *r) {
    const char *user = json_str(r, "user"), *why = json_str(box.spec, "no_root");
    if (!user) return true;
    if (!wants_root(r)) conn_error(c, "invalid", 0, "user", "no such user, there is root");
    else if (why) conn_error(c, "unsupported", 0, "user", why);
    return wants_root(r) && !why;
}

void exec_start(struct conn *c, const struct json *r, const char *raw, size_t n) {
    const char *id = json_str(r, "id");
    int fds[FD_ROLES] = {-1, -1, -1, -1, -1, -1, -1};
    if (!may_be(c, r)) return;
    if (!valid_id(id)) return conn_error(c, "invalid", 0, "id", "an exec's id is 1 to 64 of A-Z a-z 0-9 _ -");
    if (exec_by_id(id)) return conn_error(c, "conflict", 0, "id", "an exec with this id exists");
    if (!make_room()) return conn_error(c, "limit", 0, "execs", "256 execs are running in this sandbox already");
    struct exec *e = new_exec(id, r);
    bool carry = json_bool(r, "carry", false), ok = make_pipes(e, fds, json_bool(r, "stdin", false), carry);
    if (ok && (box.container ? flock_order(e, raw, n, fds) : spawn(e, wants_root(r), raw, n, fds, carry ? FD_ROOT : FD_CARRY))) {
        c->role = ROLE_EXEC;
        c->exec = e;
        c->may_input = true;
    } else {
        int err = errno;
        release(e);
        conn_error(c, err == ETOOMANYREFS ? "limit" : NULL, err, "prepare exec", NULL);
    }
    for (int i = 0; i < FD_ROLES; i++) drop_fd(&fds[i]);
}

void exec_attach(struct conn *c, const struct json *r) {
    struct exec *e = exec_by_id(json_str(r, "id"));
    if (!e) return conn_error(c, "not_found", 0, "attach", "no exec with this id is remembered");
    double at[2] = {json_num(r, "stdout", 0), json_num(r, "stderr", 0)};
    for (int i = 0; i < 2; i++) {
        if (at[i] < 0 || at[i] > (double)output_end(&e->output[i]))
            return conn_error(c, "invalid", 0, "attach", "the offset is beyond what was written");
        c->sent[i] = (uint64_t)at[i];
    }
    c->role = ROLE_EXEC;
    c->exec = e;
    c->may_input = json_bool(r, "input", false);
    conn_pump(c);
}

void exec_killed_reply(struct conn *c) {
    struct buf b = {0};
    buf_printf(&b, "{\"running\":%s}", c->was_running ? "true" : "false");
    conn_finish(c, F_REPLY, &b);
}

void exec_not_started(struct exec *e, int err, const char *stage) {
    for (struct conn *c = keeper.conns; c; c = c->next) {
        if (c->exec != e) continue;
        if (c->role == ROLE_KILL) exec_killed_reply(c);
        else conn_error(c, NULL, err, stage, err == EOPNOTSUPP ? stage : NULL); /* its own words, with the reason */
    }
    release(e);
}

/* Its execve has happened, unless it ended before it came to that: then e is gone. What we killed so early has an exit. */
static bool started(struct exec *e) {
    bool ok = e->state != E_STARTING || e->ready || e->cause;
    if (!ok) exec_not_started(e, ECHILD, "start");
    else if (e->state == E_STARTING) e->state = E_RUNNING;
    return ok;
}

void exec_spawned(const struct ctl *m) {
    struct exec *e = exec_by_no(m->no);
    if (!e) return;
    if (m->err) exec_not_started(e, m->err, *m->stage ? m->stage : "fork");
    else if (box.namespaces) e->pid = m->pid; /* else it is the shepherd's */
}

static const char *reason_of(const struct exec *e) {
    bool signaled = WIFSIGNALED(e->status), by_kill = signaled && WTERMSIG(e->status) == SIGKILL;
    if (e->cause && (by_kill || e->graceful)) return e->cause;
    bool like_kill = by_kill || (WIFEXITED(e->status) && WEXITSTATUS(e->status) == 128 + SIGKILL); /* a shell's word for it */
    if (like_kill && oom_kills() > e->oom_before) return "oom_killed";
    return signaled ? "signaled" : "exited";
}

/* Final once the main process is reaped and, if we set out to kill the tree, nobody of it is left. */
static void settle(struct exec *e) {
    if (e->state != E_EXITED || e->killing) return;
    exec_readable(e, 0); /* all it wrote is in the pipes by now */
    exec_readable(e, 1);
    exec_readable(e, 3);
    drop_fd(&e->carry_fd);
    buf_free(&e->input);
    for (int i = 0; i < 2; i++) e->final[i] = e->output[i].total;
    e->reason = reason_of(e);
    e->state = E_ENDED;
    e->deadline = e->look_at = 0;
    if (!e->tty) drop_fd(&e->in);
}

static void exited(struct exec *e, int status, double cpu_ms, uint64_t rss) {
    if (e->state == E_EXITED || e->state == E_ENDED) return;
    e->status = status;
    e->cpu_ms = cpu_ms;
    e->rss = rss;
    e->duration_ms = now_ms() - e->started;
    e->state = E_EXITED;
    settle(e);
}

void exec_exited(const struct ctl *m) {
    struct exec *e = exec_by_no(m->no);
    if (!e) return;
    exec_readable(e, 2); /* it may have failed before it became the program */
    if (!(e = exec_by_no(m->no))) return;
    /* a shepherd's status is not its program's, which came before; only its violent end took the program along */
    if (!box.namespaces && e->state <= E_RUNNING && !WIFSIGNALED(m->status)) exec_not_started(e, ECHILD, "wait");
    else exited(e, m->status, m->cpu_ms, m->rss);
}

void exec_killed(const struct ctl *m) {
    struct exec *e = exec_by_no(m->no);
    if (!e) return;
    e->killing = false;
    settle(e);
    for (struct conn *c = keeper.conns; c; c = c->next)
        if (c->role == ROLE_KILL && c->exec == e) exec_killed_reply(c);
}

void exec_signaled(const struct ctl *m) {
    struct exec *e = exec_by_no(m->no);
    if (!e) return;
    e->signals--;
    exec_flush_input(e);
}

/* What pid 1, or its stand-in, is to do to an exec's processes. */
void exec_tell(struct exec *e, enum ctl_command command, int kind, int signal) {
    e->noted |= e->shepherd > 0;
    e->signals += command == C_SIGNAL;
    ctl_tell(&(struct ctl){.command = command, .no = e->no, .pid = e->shepherd, .kind = kind, .signal = signal}, NULL, 0);
}

/* Ends the whole tree. `cause` is what the exit will say, unless the program was quicker. */
void exec_end(struct exec *e, const char *cause, int signal) {
    if (e->state != E_ENDED && e->state != E_EXITED && !e->cause) e->cause = cause;
    if (signal != SIGKILL) {
        exec_tell(e, C_SIGNAL, 1, signal);
        return;
    }
    e->deadline = e->grace_at = 0;
    if (e->killing) return;
    e->killing = true;
    if (!e->order.n) exec_tell(e, C_KILL, 0, SIGKILL); /* else it is told once a shepherd has it */
}

void exec_tick(struct exec *e, double now) {
    if (e->deadline > 0 && now >= e->deadline && e->state <= E_RUNNING) exec_end(e, "timed_out", SIGKILL);
    if (e->look_at > 0 && now >= e->look_at) e->look_at = 0;
    if (e->grace_at > 0 && now >= e->grace_at) exec_end(e, "cancelled", SIGKILL);
}

/* The socket was closed: by execve or an early end of what was to be the program, or with its shepherd. */
static void lost_status(struct exec *e) {
    drop_fd(&e->status_fd);
    e->shepherd = 0;
    if (started(e) && box.container) exited(e, SIGKILL, 0, 0); /* a violent end, which took the program along */
}

static void read_status(struct exec *e) {
    while (e->status_fd >= 0) {
        struct status_message m;
        int fd = -1, nfds = 1;
        ssize_t n = recv_fds(e->status_fd, &m, sizeof m, &fd, &nfds);
        if (n < 0 && errno == EAGAIN) return;
        if (n != sizeof m) return lost_status(e);
        m.stage[sizeof m.stage - 1] = 0;
        if (m.last) flock_back(e);
        if (m.kind == ST_FAILED) return exec_not_started(e, m.err, m.stage);
        if (m.pid) e->pid = m.pid;
        if (m.kind == ST_READY || (m.pid && !m.err)) e->ready = true;
        if (m.pid && !started(e)) return;
        if (m.kind == ST_EXITED) exited(e, m.status, m.cpu_ms, m.rss);
        if (m.kind == ST_TERMINAL && nfds) {
            set_nonblocking(fd, true);
            e->in = e->out[0] = fd;
        }
    }
}

static void read_carry(struct exec *e) {
    char p[16384];
    for (size_t turns = 0; turns <= MAX_CARRY / sizeof p; turns++) { /* as much as is kept, then the others' turn */
        ssize_t n = RETRY(read(e->carry_fd, p, sizeof p));
        if (n > 0 && e->carry.n + (size_t)n <= MAX_CARRY) buf_add(&e->carry, p, (size_t)n);
        if (!n) drop_fd(&e->carry_fd);
        if (n <= 0) return;
    }
}

/* Half of what is kept is for what the pipe still holds at the end, which has to be taken at once. */
bool exec_waits(const struct exec *e, int which) {
    const struct output *o = &e->output[which];
    if (!e->flow || o->total < o->limit / 2) return false;
    for (const struct conn *c = keeper.conns; c; c = c->next)
        if (c->exec == e && c->role == ROLE_EXEC && !c->dead && o->total - c->sent[which] >= o->limit / 2) return true;
    return false;
}

void exec_readable(struct exec *e, int which) {
    static char p[65536];
    if ((which < 2 ? e->out[which] : which == 2 ? e->status_fd : e->carry_fd) < 0) return;
    if (which == 2) return read_status(e);
    if (which == 3) return read_carry(e);
    for (int turns = 0; turns < 16; turns++) { /* a flood gets its turn, not the whole loop */
        if (e->state != E_EXITED && exec_waits(e, which)) return;
        ssize_t n = RETRY(read(e->out[which], p, sizeof p));
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) {
            if (e->tty && e->state <= E_RUNNING) {
                /* EIO: nobody holds the terminal just now, as when a program closes its files before it exits. To let
                 * go of our end would be a hangup, and kill it; so look again a little later. */
                e->look_at = now_ms() + 20;
                return;
            }
            if (e->tty) e->in = -1;
            drop_fd(&e->out[which]);
            return;
        }
        struct output *o = &e->output[which];
        output_add(o, p, (size_t)n);
        if (e->kill_on_limit && o->total > o->limit && e->state <= E_RUNNING) exec_end(e, "output_limit", SIGKILL);
    }
}

/* Input that comes after a signal reaches the program after it: an interrupt must not hit the run that follows. */
bool exec_has_input(const struct exec *e) { return e->input.n && !e->signals; }

void exec_flush_input(struct exec *e) {
    while (exec_has_input(e) && e->in >= 0) {
        ssize_t n = RETRY(write(e->in, e->input.p, e->input.n));
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) { e->input.n = 0; break; } /* it does not read any more; what it did not take is lost, as in a pipe */
        memmove(e->input.p, e->input.p + n, e->input.n - (size_t)n);
        e->input.n -= (size_t)n;
    }
    if (e->stdin_eof && !e->input.n && !e->tty) drop_fd(&e->in);
}

void exec_exit_json(struct buf *b, const struct exec *e) {
    int signal = WIFSIGNALED(e->status) ? WTERMSIG(e->status) : 0;
    const char *cut[2];
    for (int i = 0; i < 2; i++) cut[i] = output_truncated(&e->output[i], e->final[i]) ? "true" : "false";
    buf_printf(b, "{\"reason\":\"%s\",\"exit_code\":%d,\"signal\":%d,", e->reason, signal ? 128 + signal : WEXITSTATUS(e->status), signal);
    buf_printf(b, "\"duration_ms\":%.3f,\"cpu_ms\":%.3f,\"max_rss_bytes\":%" PRIu64 ",", e->duration_ms, e->cpu_ms, e->rss);
    buf_printf(b, "\"stdout_bytes\":%" PRIu64 ",\"stderr_bytes\":%" PRIu64 ",", e->final[0], e->final[1]);
    buf_printf(b, "\"stdout_truncated\":%s,\"stderr_truncated\":%s}", cut[0], cut[1]);
}

void exec_list(struct conn *c) {
    struct buf b = {0};
    double now = now_ms();
    buf_printf(&b, "{\"execs\":[");
    for (struct exec *e = keeper.execs; e && b.n < MAX_PAYLOAD - 16384; e = e->next) {
        bool ended = e->state == E_ENDED;
        buf_printf(&b, "%s{\"id\":\"%s\",\"pid\":%d,\"argv\":", e == keeper.execs ? "" : ",", e->id, (int)e->pid);
        buf_add(&b, e->argv.p, e->argv.n);
        buf_printf(&b, ",\"tty\":%s,\"running\":%s,\"started_ms_ago\":%.3f,\"exit\":", e->tty ? "true" : "false", ended ? "false" : "true",
                   now - e->started);
        if (ended) exec_exit_json(&b, e);
        else buf_printf(&b, "null");
        buf_printf(&b, ",\"stdout_bytes\":%" PRIu64 ",\"stderr_bytes\":%" PRIu64 "}", e->output[0].total, e->output[1].total);
    }
    buf_printf(&b, "]}");
    conn_finish(c, F_REPLY, &b);
}
