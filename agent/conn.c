/* Connections: one operation each. Frames are read exactly, never a byte further, because a file operation's
 * connection is handed to the worker that carries it out. */
#include "keeper.h"
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>

void conn_free(struct conn *c) {
    for (struct conn **p = &keeper.conns; *p; p = &(*p)->next)
        if (*p == c) { *p = c->next; break; }
    keeper.nconns--;
    drop_fd(&c->fd);
    drop_fd(&c->listener);
    drop_fd(&c->peer);
    buf_free(&c->out);
    free(c->payload);
    free(c);
}

/* In a container programs share our file system: the socket's folder is closed to them, and this is the second lock. Where all are
 * one user neither holds, and a program can ask for what it could do itself. */
static bool is_program(int fd) {
    struct ucred peer;
    socklen_t n = sizeof peer;
    if (!box.container || box.user_mode == USER_NONE) return false;
    return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) && peer.uid == box.uid;
}

void conn_accept(void) {
    for (;;) {
        int fd = accept4(keeper.listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE) usleep(5000); /* rather wait than spin on a listener we cannot serve */
            return;
        }
        if (keeper.nconns >= MAX_CONNS || is_program(fd)) { close(fd); continue; }
        struct conn *c = xrealloc(NULL, sizeof *c);
        *c = (struct conn){.fd = fd, .listener = -1, .peer = -1, .next = keeper.conns};
        keeper.conns = c;
        keeper.nconns++;
        conn_readable(c); /* the request is there already, most of the time */
        if (c->dead) conn_free(c);
        if (box.container) return; /* to find nobody else is as dear as to find somebody, under gVisor; poll knows */
    }
}

void conn_flush(struct conn *c) {
    while (c->out_at < c->out.n) {
        ssize_t n = RETRY(send(c->fd, c->out.p + c->out_at, c->out.n - c->out_at, MSG_NOSIGNAL | MSG_DONTWAIT));
        if (n < 0 && errno == EAGAIN) { c->full = true; return; }
        if (n <= 0) { c->dead = true; return; }
        c->out_at += (size_t)n;
    }
    c->out.n = c->out_at = 0;
    if (c->closing) c->dead = true;
}

void conn_send(struct conn *c, enum frame_type type, int stream, uint64_t offset, const void *p, size_t n) {
    unsigned char raw[HEADER_SIZE];
    struct header h = {(uint32_t)n, (uint8_t)type, (uint8_t)stream, offset};
    header_pack(raw, &h);
    buf_add(&c->out, raw, sizeof raw);
    buf_add(&c->out, p, n);
}

void conn_printf(struct conn *c, enum frame_type type, const char *fmt, ...) {
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    conn_send(c, type, 0, 0, text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1);
}

void conn_finish(struct conn *c, enum frame_type type, struct buf *b) {
    conn_send(c, type, 0, 0, b->p, b->n);
    buf_free(b);
    c->exec = NULL;
    c->closing = true;
    conn_flush(c);
}

void conn_error(struct conn *c, const char *code, int err, const char *stage, const char *message) {
    struct fault f = {.err = err, .code = code};
    struct buf b = {0};
    snprintf(f.stage, sizeof f.stage, "%s", stage);
    error_json(&b, &f, message);
    conn_finish(c, F_ERROR, &b);
}

void conn_reply(struct conn *c) {
    struct buf b = {0};
    buf_add(&b, "{}", 2);
    conn_finish(c, F_REPLY, &b);
}

/* One stream's next bytes as a frame; false: nothing to send now. */
static bool pump_stream(struct conn *c, int i) {
    static char p[DATA_CHUNK];
    struct output *o = &c->exec->output[i];
    int stream = c->exec->tty ? S_TTY : S_STDOUT + i;
    uint64_t first = output_first(o);
    if (c->sent[i] < first) {
        conn_printf(c, F_EVENT, "{\"gap\":%d,\"from\":%" PRIu64 ",\"to\":%" PRIu64 "}", stream, c->sent[i], first);
        c->sent[i] = first;
    }
    size_t n = output_read(o, c->sent[i], p, sizeof p);
    if (!n) return false;
    conn_send(c, F_DATA, stream, c->sent[i], p, n);
    c->sent[i] += n;
    return true;
}

static void send_begun(struct conn *c) {
    const struct exec *e = c->exec;
    conn_printf(c, F_REPLY, "{\"id\":\"%s\",\"pid\":%d,\"tty\":%s}", e->id, (int)e->pid, e->tty ? "true" : "false");
    c->begun = true;
}

static void send_end(struct conn *c) {
    struct buf b = {0};
    if (c->exec->carry.n) conn_send(c, F_DATA, S_CARRY, 0, c->exec->carry.p, c->exec->carry.n);
    exec_exit_json(&b, c->exec);
    conn_finish(c, F_EXIT, &b);
}

/* A client that does not take the last frames gets no new ones: what waits for it is at most one frame per stream,
 * however many clients there are and however slow. The end comes after all that was written until then, even while a
 * process that was left behind writes on. */
void conn_pump(struct conn *c) {
    c->more = false;
    if (c->full || conn_holds_back(c)) return;
    if (c->role == ROLE_EXEC && c->exec && !c->begun) send_begun(c);
    conn_flush(c);
    for (int turns = 0; !c->dead && !c->full && c->role == ROLE_EXEC && c->exec; turns++) {
        const struct exec *e = c->exec;
        if (turns == 32) { c->more = true; return; }
        bool out = pump_stream(c, 0), err = pump_stream(c, 1), sent = out || err;
        if (e->state == E_ENDED && (!sent || (c->sent[0] >= e->final[0] && c->sent[1] >= e->final[1]))) return send_end(c);
        conn_flush(c);
        if (!sent) return;
    }
}

int memfd_with(const char *text, size_t n) {
    cleanup_fd int fd = memfd_create("request", MFD_CLOEXEC);
    return fd >= 0 && write_full(fd, text, n) ? steal_fd(&fd) : -1;
}

static void hand_to_worker(struct conn *c) {
    cleanup_fd int request = memfd_with(c->payload, c->h.length);
    if (request < 0) return conn_error(c, NULL, errno, "prepare", NULL);
    conn_flush(c); /* our HELLO, before the worker writes: it always fits an empty socket */
    int fds[2] = {request, c->fd};
    if (!ctl_tell(&(struct ctl){.command = C_SPAWN, .kind = K_FILE}, fds, 2)) return conn_error(c, "limit", errno, "prepare", NULL);
    c->dead = true; /* our copy; the worker has its own */
}

static void answer_ping(struct conn *c) {
    struct buf b = {0};
    buf_printf(&b, "{\"id\":");
    buf_json_string(&b, box.id, strlen(box.id));
    buf_printf(&b, ",\"version\":%d,\"pid\":%d,\"uptime_ms\":%.0f,\"execs_running\":%d,\"frozen\":%s}", PROTOCOL_VERSION, (int)getpid(),
               now_ms() - box.started, execs_running(), keeper.frozen && !keeper.brief && !keeper.freeze_look ? "true" : "false");
    conn_finish(c, F_REPLY, &b);
}

static void ask_usage(struct conn *c) {
    c->role = ROLE_USAGE;
    c->ticket = ++keeper.next_no;
    ctl_tell(&(struct ctl){.command = C_COUNT, .no = c->ticket}, NULL, 0);
}

static bool is_file_op(const char *op) {
    static const char *const names[] = {"read", "write", "list", "stat", "mkdir", "move", "remove", "chmod", "symlink", "watch", "fill"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(op, names[i])) return true;
    return false;
}

/* What a program or a file worker would have to do. A program's input and output are kept for it as ever. */
static bool needs_motion(const char *op) {
    return is_file_op(op) || !strcmp(op, "exec") || !strcmp(op, "kill") || !strcmp(op, "dial");
}

/* For programs that begin later. */
static void adjust(struct conn *c, const struct json *r) {
    double n = json_num(r, "open_files", 0);
    if (!box.open_files) return conn_error(c, "unsupported", 0, "adjust", "the box was not made to be given other limits");
    if (!(n >= 1 && n <= INT32_MAX)) return conn_error(c, "invalid", 0, "adjust", "open_files is not a number of files");
    box.open_files = (uint32_t)n;
    conn_reply(c);
}

static void dispatch(struct conn *c) {
    cleanup_free char *copy = malloc((size_t)c->h.length + 1); /* parsing decodes in place; workers get the original */
    if (!copy) return conn_error(c, NULL, ENOMEM, "request", NULL);
    memcpy(copy, c->payload, c->h.length);
    cleanup_free struct json *r = json_parse(copy, c->h.length);
    const char *op = json_str(r, "op");
    if (!op) return conn_error(c, "protocol", 0, "request", "not a JSON object with an op");
    if (keeper.frozen && !keeper.brief && needs_motion(op)) return conn_error(c, "frozen", 0, "request", "the box is paused");
    if (!strcmp(op, "exec")) exec_start(c, r, c->payload, c->h.length);
    else if (is_file_op(op)) hand_to_worker(c);
    else if (!strcmp(op, "attach")) exec_attach(c, r);
    else if (!strcmp(op, "execs")) exec_list(c);
    else if (!strcmp(op, "kill")) exec_kill_request(c, r);
    else if (!strcmp(op, "input")) exec_input_request(c, r);
    else if (!strcmp(op, "resize")) exec_resize_request(c, r);
    else if (!strcmp(op, "dial")) net_dial(c, r);
    else if (!strcmp(op, "listen")) net_listen(c, r);
    else if (!strcmp(op, "take")) net_take(c, r);
    else if (!strcmp(op, "usage")) ask_usage(c);
    else if (!strcmp(op, "adjust")) adjust(c, r);
    else if (!strcmp(op, "freeze")) freeze_request(c);
    else if (!strcmp(op, "thaw")) thaw_request(c);
    else if (!strcmp(op, "save")) save_request(c, r);
    else if (!strcmp(op, "ping")) answer_ping(c);
    else if (!strcmp(op, "shutdown")) c->role = ROLE_SHUTDOWN; /* the loop sees it */
    else conn_error(c, "unsupported", 0, "request", "unknown operation");
}

static void greet(struct conn *c) {
    cleanup_free struct json *r = json_parse(c->payload, c->h.length);
    if (json_num(r, "version", 0) < 1) return conn_error(c, "version", 0, "hello", "this agent speaks version 1");
    conn_printf(c, F_HELLO, "{\"version\":%d}", PROTOCOL_VERSION); /* leaves with the answer */
    c->greeted = true;
}

static void frame_arrived(struct conn *c) {
    if (!c->greeted) {
        if (c->h.type != F_HELLO) return conn_error(c, "protocol", 0, "hello", "the first frame must be HELLO");
        greet(c);
    } else if (!c->asked) {
        if (c->h.type != F_REQUEST) return conn_error(c, "protocol", 0, "request", "the second frame must be REQUEST");
        c->asked = true;
        dispatch(c);
    } else if (c->role == ROLE_EXEC || c->role == ROLE_INPUT) exec_frame(c);
    else conn_error(c, "protocol", 0, "frame", "unexpected frame");
}

/* Backpressure: a program that does not read its stdin stops the client, not us. What follows a dial is not ours to read. */
bool conn_wants_input(const struct conn *c) {
    return !c->closing && !c->dead && c->role != ROLE_SHUTDOWN && c->role != ROLE_DIAL && !(c->exec && c->exec->input.n >= MAX_STDIN);
}

/* There is only our HELLO to send, which leaves with the answer. */
bool conn_holds_back(const struct conn *c) {
    if (c->role != ROLE_EXEC || c->begun || c->closing || !c->exec) return false;
    return c->exec->state == E_STARTING || (c->exec->state == E_RUNNING && !c->exec->pid); /* pid 1's word may come after the program's */
}

static bool read_some(struct conn *c, void *p, size_t want) {
    ssize_t n = RETRY(recv(c->fd, (char *)p + c->got, want - c->got, MSG_DONTWAIT));
    if (n < 0 && errno == EAGAIN) return false;
    if (n <= 0) { c->dead = true; return false; }
    c->got += (size_t)n;
    return c->got == want;
}

static void arrive(struct conn *c, const char *payload) {
    c->payload = xrealloc(NULL, (size_t)c->h.length + 1);
    memcpy(c->payload, payload, c->h.length);
    c->payload[c->h.length] = 0;
    frame_arrived(c);
    free(c->payload);
    c->payload = NULL;
}

/* HELLO and REQUEST, which mostly come together, in two calls instead of five. false: nothing more is there to read. */
static bool read_opening(struct conn *c) {
    static char p[4096];
    struct header h[2];
    ssize_t n = RETRY(recv(c->fd, p, sizeof p, MSG_PEEK | MSG_DONTWAIT));
    size_t at[3] = {0};
    for (int i = 0; i < 2; i++) {
        if (n < (ssize_t)(at[i] + HEADER_SIZE)) return true;
        header_unpack(&h[i], (unsigned char *)p + at[i]);
        at[i + 1] = at[i] + HEADER_SIZE + h[i].length;
        if (n < (ssize_t)at[i + 1]) return true;
    }
    c->dead = RETRY(recv(c->fd, p, at[2], MSG_DONTWAIT)) != (ssize_t)at[2];
    for (int i = 0; i < 2 && conn_wants_input(c); i++) {
        c->h = h[i];
        arrive(c, p + at[i] + HEADER_SIZE);
    }
    return n > (ssize_t)at[2];
}

void conn_readable(struct conn *c) {
    if (!c->greeted && c->reading == CONN_HEADER && !c->got && !read_opening(c)) return;
    for (int frames = 0; frames < 16 && conn_wants_input(c); frames++) { /* then the others' turn */
        if (c->reading == CONN_HEADER) {
            if (!read_some(c, c->head, HEADER_SIZE)) return;
            header_unpack(&c->h, c->head);
            c->got = 0;
            if (c->h.length > MAX_PAYLOAD) return conn_error(c, "protocol", 0, "frame", "a frame is at most 1 MiB");
            c->payload = xrealloc(NULL, (size_t)c->h.length + 1);
            c->reading = CONN_PAYLOAD;
        }
        if (c->h.length && !read_some(c, c->payload, c->h.length)) return;
        c->payload[c->h.length] = 0;
        c->got = 0;
        c->reading = CONN_HEADER;
        frame_arrived(c);
        free(c->payload);
        c->payload = NULL;
    }
}
