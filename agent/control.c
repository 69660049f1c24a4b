/* What clients say to an exec that runs: input, a terminal's size, signals. */
#include "keeper.h"
#include <signal.h>
#include <sys/ioctl.h>

static void add_input(struct exec *e, const void *p, size_t n) {
    if (e->state == E_ENDED || (e->in < 0 && !e->tty && e->state != E_STARTING)) return;
    buf_add(&e->input, p, n);
    if (e->in >= 0) exec_flush_input(e);
}

static void end_input(struct exec *e) {
    if (e->tty) add_input(e, "\004", 1);
    else {
        e->stdin_eof = true;
        exec_flush_input(e);
    }
}

static unsigned short side(double v) { return v < 0 ? 0 : v > UINT16_MAX ? UINT16_MAX : (unsigned short)v; }

static void resize(struct exec *e, double rows, double cols) {
    struct winsize w = {.ws_row = side(rows), .ws_col = side(cols)};
    if (e->tty && e->out[0] >= 0) ioctl(e->out[0], TIOCSWINSZ, &w);
    if (e->tty && box.signal_resize) exec_tell(e, C_SIGNAL, 1, SIGWINCH);
}

static void obey_control(struct conn *c, struct exec *e, const struct json *r) {
    const struct json *size = json_get(r, "resize");
    const char *name = json_str(r, "signal");
    int signal = signal_number(name);
    if (name && !signal) return conn_error(c, "invalid", 0, "signal", "unknown signal");
    if (size && size->child && size->child->next) resize(e, size->child->num, size->child->next->num);
    if (!signal || e->state == E_ENDED) return;
    bool tree = json_bool(r, "tree", false);
    bool typed = signal == SIGINT || signal == SIGQUIT || signal == SIGTSTP; /* as if by the terminal itself */
    if (signal == SIGKILL) exec_end(e, "cancelled", SIGKILL);
    else if (!tree && e->tty && typed && e->out[0] >= 0) ioctl(e->out[0], TIOCSIG, signal);
    else exec_tell(e, C_SIGNAL, tree, signal);
}

void exec_frame(struct conn *c) {
    struct exec *e = c->exec;
    if (!e || !c->may_input) return conn_error(c, "protocol", 0, "frame", "this connection only listens");
    if (c->h.type == F_DATA) add_input(e, c->payload, c->h.length);
    else if (c->h.type == F_EOF && c->role == ROLE_INPUT && c->h.stream == S_FILE) conn_reply(c);
    else if (c->h.type == F_EOF) end_input(e);
    else if (c->h.type == F_CONTROL) {
        cleanup_free struct json *r = json_parse(c->payload, c->h.length);
        if (!r) return conn_error(c, "protocol", 0, "control", "not JSON");
        obey_control(c, e, r);
    } else conn_error(c, "protocol", 0, "frame", "unexpected frame type");
}

void exec_kill_request(struct conn *c, const struct json *r) {
    struct exec *e = exec_by_id(json_str(r, "id"));
    const char *name = json_str(r, "signal");
    int signal = name ? signal_number(name) : SIGKILL;
    double grace = json_num(r, "grace", 0);
    if (!e) return conn_error(c, "not_found", 0, "kill", "no exec with this id is remembered");
    if (!signal) return conn_error(c, "invalid", 0, "kill", "unknown signal");
    c->was_running = e->state <= E_RUNNING;
    exec_end(e, signal == SIGKILL || grace > 0 ? "cancelled" : NULL, signal);
    if (signal == SIGKILL) { /* answered when nobody is left */
        c->role = ROLE_KILL;
        c->exec = e;
        return;
    }
    if (grace > 0) {
        e->graceful = true;
        e->grace_at = now_ms() + grace * 1000;
    }
    exec_killed_reply(c);
}

void exec_input_request(struct conn *c, const struct json *r) {
    struct exec *e = exec_by_id(json_str(r, "id"));
    const struct json *data = json_get(r, "data");
    if (!e) return conn_error(c, "not_found", 0, "input", "no exec with this id is remembered");
    if (e->state == E_ENDED) return conn_error(c, "gone", 0, "input", "the exec has ended");
    if (e->in < 0 && e->state != E_STARTING) return conn_error(c, "invalid", 0, "input", "the exec has no open stdin");
    if (!data && !json_bool(r, "eof", false)) { /* it follows in DATA frames */
        c->role = ROLE_INPUT;
        c->exec = e;
        c->may_input = true;
        return;
    }
    if (data && data->type == J_STR) {
        if (e->input.n + data->len > 2 * MAX_STDIN) return conn_error(c, "busy", 0, "input", "the program does not read its stdin");
        add_input(e, data->str, data->len);
    }
    if (json_bool(r, "eof", false)) end_input(e);
    conn_reply(c);
}

void exec_resize_request(struct conn *c, const struct json *r) {
    struct exec *e = exec_by_id(json_str(r, "id"));
    if (!e) return conn_error(c, "not_found", 0, "resize", "no exec with this id is remembered");
    if (!e->tty) return conn_error(c, "invalid", 0, "resize", "the exec has no terminal");
    resize(e, json_num(r, "rows", 24), json_num(r, "cols", 80));
    conn_reply(c);
}
