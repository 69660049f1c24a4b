/* Byte streams into and out of the box's network namespace. Sockets are made by pid 1, which lives in it; the bytes
 * are moved by a child of ours per stream, so that a slow one delays nobody. */
#include "keeper.h"
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#define LINGER 10000 /* ms for one side to take what is left, when the other has gone */

struct pipe_half { int from, to; char p[65536]; size_t n, at; bool done; };

static void move_bytes(struct pipe_half *h) {
    if (!h->n && !h->done) {
        ssize_t n = read(h->from, h->p, sizeof h->p);
        if (n > 0) { h->n = (size_t)n; h->at = 0; }
        else if (!(n < 0 && errno == EAGAIN)) h->done = true;
    }
    while (h->n) {
        ssize_t n = send(h->to, h->p + h->at, h->n, MSG_NOSIGNAL);
        if (n < 0 && errno == EAGAIN) return;
        if (n <= 0) { h->done = true; h->n = 0; return; }
        h->at += (size_t)n;
        h->n -= (size_t)n;
    }
    if (h->done) shutdown(h->to, SHUT_WR);
}

/* A side that has hung up takes nothing more, but what it sent before is still passed on. Once that is so, we look at it no
 * more: poll would say it again and again. */
void net_pump(int a, int b) {
    static struct pipe_half h[2];
    bool gone[2] = {false, false};
    h[0].from = h[1].to = a;
    h[0].to = h[1].from = b;
    set_nonblocking(a, true);
    set_nonblocking(b, true);
    while (!h[0].done || !h[1].done || h[0].n || h[1].n) {
        struct pollfd p[2] = {{a, 0, 0}, {b, 0, 0}};
        for (int i = 0; i < 2; i++) {
            if (!h[i].n && !h[i].done) p[i].events |= POLLIN;
            if (h[i].n) p[1 - i].events |= POLLOUT;
        }
        for (int i = 0; i < 2; i++)
            if (gone[i] && !p[i].events) p[i].fd = -1;
        int ready = poll(p, 2, gone[0] || gone[1] ? LINGER : -1);
        if (ready == 0 || (ready < 0 && errno != EINTR)) break;
        for (int i = 0; i < 2; i++) {
            if (!(p[i].revents & (POLLHUP | POLLERR))) continue;
            gone[i] = h[1 - i].done = true;
            h[1 - i].n = 0;
        }
        for (int i = 0; i < 2; i++)
            if (h[i].n || (!h[i].done && p[i].revents)) move_bytes(&h[i]);
    }
    _exit(0);
}

/* REPLY, then both ends belong to a child. */
static void start_pump(struct conn *c) {
    pid_t pid = keeper.npumps < MAX_PUMPS ? fork() : (errno = EAGAIN, -1);
    if (pid < 0) return conn_error(c, "limit", errno, "connect", NULL);
    if (!pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        close_all_but(c->fd, c->peer);
        set_nonblocking(c->fd, false);
        conn_send(c, F_REPLY, 0, 0, "{}", 2);
        if (!write_full(c->fd, c->out.p + c->out_at, c->out.n - c->out_at)) _exit(0);
        net_pump(c->fd, c->peer);
    }
    keeper.npumps++;
    c->dead = true;
}

static void ask_socket(struct conn *c, int kind) {
    c->ticket = ++keeper.next_no;
    ctl_tell(&(struct ctl){.command = C_SOCKET, .no = c->ticket, .kind = kind, .port = (uint32_t)c->port}, NULL, 0);
}

static bool read_port(struct conn *c, const struct json *r) {
    c->port = (int)json_int(r, "port", 0, 0, 65536);
    if (c->port >= 1 && c->port <= 65535) return true;
    conn_error(c, "invalid", 0, "port", "a port is 1 to 65535");
    return false;
}

void net_dial(struct conn *c, const struct json *r) {
    const char *host = json_str(r, "host");
    if (!read_port(c, r)) return;
    if (host && strcmp(host, "127.0.0.1") && strcmp(host, "localhost") && strcmp(host, "::1"))
        return conn_error(c, "invalid", 0, "host", "only the sandbox's own loopback can be dialled");
    c->role = ROLE_DIAL;
    ask_socket(c, host && !strcmp(host, "::1") ? 2 : 0);
}

void net_listen(struct conn *c, const struct json *r) {
    if (!read_port(c, r)) return;
    c->role = ROLE_LISTEN;
    ask_socket(c, 1);
}

void net_socketed(const struct ctl *m, int fd) {
    struct conn *c = keeper.conns;
    while (c && (c->ticket != m->no || (c->role != ROLE_DIAL && c->role != ROLE_LISTEN))) c = c->next;
    if (!c) { if (fd >= 0) close(fd); return; }
    if (!m->err && fd < 0) return conn_error(c, "limit", EMFILE, "connect", NULL); /* it came, and there was no room for it */
    if (m->err) return conn_error(c, m->err == EADDRINUSE ? "busy" : NULL, m->err, m->kind == 1 ? "listen" : "connect", NULL);
    if (m->kind == 1) {
        c->listener = fd;
        conn_send(c, F_REPLY, 0, 0, "{}", 2);
        conn_pump(c);
    } else {
        c->peer = fd;
        c->connecting = true;
    }
}

void net_connected(struct conn *c) {
    int err = 0;
    socklen_t n = sizeof err;
    getsockopt(c->peer, SOL_SOCKET, SO_ERROR, &err, &n);
    c->connecting = false;
    if (err) conn_error(c, NULL, err, "connect", NULL);
    else start_pump(c);
}

void net_accept(struct conn *c) {
    int fd = accept4(c->listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) return;
    for (size_t i = 0; i < sizeof keeper.pending / sizeof *keeper.pending; i++) {
        if (keeper.pending[i].expires > 0) continue;
        keeper.pending[i].fd = fd;
        keeper.pending[i].id = ++keeper.next_stream;
        keeper.pending[i].expires = now_ms() + 10000;
        conn_printf(c, F_EVENT, "{\"stream\":%u}", keeper.next_stream);
        return conn_pump(c);
    }
    close(fd); /* 64 wait already: the host does not keep up */
}

void net_take(struct conn *c, const struct json *r) {
    double id = json_num(r, "stream", 0);
    for (size_t i = 0; i < sizeof keeper.pending / sizeof *keeper.pending; i++) {
        if (keeper.pending[i].expires <= 0 || keeper.pending[i].id != id) continue;
        keeper.pending[i].expires = 0;
        c->peer = keeper.pending[i].fd;
        start_pump(c);
        return;
    }
    conn_error(c, "not_found", 0, "take", "no such stream waits; it may have been closed after 10 s");
}

void net_tick(double now) {
    for (size_t i = 0; i < sizeof keeper.pending / sizeof *keeper.pending; i++)
        if (keeper.pending[i].expires > 0 && now > keeper.pending[i].expires) {
            keeper.pending[i].expires = 0;
            close(keeper.pending[i].fd);
        }
}
