/* The relay: many connections to the agent's socket over one pair of pipes (spec/relay.md).
 *
 * Where no socket leads out of a container, an engine's exec starts us in it as root, and the host speaks to the agent
 * through our stdin and stdout. We end when stdin ends, or when nobody reads stdout; the agent only sees connections close.
 *
 * Who may wait for whom. What goes to the agent waits in its channel's buffer, at most WINDOW bytes; what goes to the host in
 * `out`. Nothing is read from the agent that has no credit, or while `out` is full, so a slow reader stops its own channel
 * only. The host always reads, so `out` empties: while it does not, we read no orders either, and are bounded whatever it does.
 *
 * With `lines` what we say is armoured: base64, a line for whatever there is to say at once. Some carriers take text only. */
#include "agent.h"
#include <arpa/inet.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

enum relay_kind { R_HELLO = 1, R_OPEN, R_DATA, R_EOF, R_CLOSE, R_WINDOW };
#define RELAY_VERSION 1
#define RELAY_HEAD 12
#define MAX_CHANNELS 1024
#define MAX_DATA (64u << 10)
#define WINDOW (256u << 10)
#define OUT_LIMIT (256u << 10)
#define PATIENCE 5000 /* ms, while the agent's queue of connections is full */
#define LINGER 10000  /* ms for the agent to take what is left, when the host has closed */

struct channel {
    enum { FREE, CONNECTING, OPEN, CLOSING, CLOSED } state; /* closing: the host has; closed: we have, the host has not yet */
    int fd;
    bool ended, deaf;     /* the agent says no more; takes no more */
    uint32_t credit;      /* what the host still takes from us */
    uint32_t room, owed;  /* what it may still send; what the agent took since we last said so */
    struct buf in;        /* from the host, not yet taken by the agent: from `at` on */
    size_t at;
    double deadline;      /* of CONNECTING and CLOSING */
};

static struct channel channels[MAX_CHANNELS];
static uint32_t top; /* one past the highest in use */
static struct buf out;
static struct buf wire; /* what is written to stdout: `out` itself, or that as lines */
static size_t wire_at;
static bool armoured;
static struct sockaddr_un agent = {.sun_family = AF_UNIX};

static void __attribute__((noreturn)) refuse(const char *why) {
    dprintf(STDERR_FILENO, "capsule-agent relay: %s\n", why);
    _exit(1);
}

static size_t waiting(void) { return out.n + wire.n - wire_at; }

static void say(const struct channel *c, enum relay_kind kind, uint32_t value) {
    uint32_t head[3] = {htonl((uint32_t)(c - channels)), htonl(kind), htonl(value)};
    buf_add(&out, head, sizeof head);
}

static void add_line(const unsigned char *p, size_t n) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        size_t left = n - i;
        uint32_t v = (uint32_t)p[i] << 16 | (left > 1 ? (uint32_t)p[i + 1] << 8 : 0) | (left > 2 ? p[i + 2] : 0);
        char four[4] = {letters[v >> 18], letters[v >> 12 & 63], left > 1 ? letters[v >> 6 & 63] : '=', left > 2 ? letters[v & 63] : '='};
        buf_add(&wire, four, sizeof four);
    }
    buf_add(&wire, "\n", 1);
}

static void stage(void) {
    if (!out.n) return;
    if (armoured) add_line((const unsigned char *)out.p, out.n);
    else if (wire.n) buf_add(&wire, out.p, out.n);
    else { /* nothing has to be copied */
        struct buf empty = wire;
        wire = out;
        out = empty;
    }
    out.n = 0;
}

static void flush(void) {
    stage();
    while (wire.n > wire_at) {
        ssize_t n = RETRY(write(STDOUT_FILENO, wire.p + wire_at, wire.n - wire_at));
        if (n < 0 && errno == EAGAIN) break;
        if (n <= 0) _exit(0); /* nobody reads us any more */
        wire_at += (size_t)n;
    }
    if (wire.n == wire_at) wire.n = wire_at = 0;
    else if (wire_at >= OUT_LIMIT) { /* never quite empty: what was written must not pile up */
        memmove(wire.p, wire.p + wire_at, wire.n -= wire_at);
        wire_at = 0;
    }
}

static void end(struct channel *c, int err) {
    say(c, R_CLOSE, (uint32_t)err);
    drop_fd(&c->fd);
    buf_free(&c->in);
    c->state = c->state == CLOSING ? FREE : CLOSED;
}

/* Towards the agent. When it has hung up, what it said before must still be heard: the rest is thrown away, and counts as taken. */
static void pass_on(struct channel *c) {
    size_t before = c->at;
    while (c->at < c->in.n) {
        ssize_t n = c->deaf ? -1 : RETRY(send(c->fd, c->in.p + c->at, c->in.n - c->at, MSG_NOSIGNAL | MSG_DONTWAIT));
        if (n < 0 && !c->deaf && errno == EAGAIN) break;
        c->deaf = n < 0;
        c->at = c->deaf ? c->in.n : c->at + (size_t)n;
    }
    c->owed += (uint32_t)(c->at - before);
    if (c->at == c->in.n) {
        buf_free(&c->in);
        c->at = 0;
        if (c->state == CLOSING) return end(c, 0);
    }
    if (c->owed < WINDOW / 2 || c->state != OPEN) return;
    say(c, R_WINDOW, c->owed);
    c->room += c->owed;
    c->owed = 0;
}

/* Towards the host: one piece, then it is the others' turn. One that has hung up is read to its end, which is near. */
static void pass_back(struct channel *c, bool hung_up) {
    static char p[MAX_DATA];
    do {
        if (!c->credit || waiting() >= OUT_LIMIT) return;
        ssize_t n = RETRY(recv(c->fd, p, c->credit < sizeof p ? c->credit : sizeof p, MSG_DONTWAIT));
        if (n < 0 && errno == EAGAIN) return;
        if (n < 0 || (n == 0 && hung_up)) return end(c, n < 0 ? errno : 0);
        if (n == 0) return c->ended = true, say(c, R_EOF, 0); /* it may still listen */
        say(c, R_DATA, (uint32_t)n);
        buf_add(&out, p, (size_t)n);
        c->credit -= (uint32_t)n;
    } while (hung_up);
}

static void try_connect(struct channel *c) {
    if (!connect(c->fd, (struct sockaddr *)&agent, sizeof agent)) {
        c->state = OPEN;
        pass_on(c);
    } else if (errno != EAGAIN || now_ms() > c->deadline) end(c, errno); /* EAGAIN: its queue is full just now */
}

static void open_channel(struct channel *c) {
    *c = (struct channel){.state = CONNECTING, .credit = WINDOW, .room = WINDOW, .deadline = now_ms() + PATIENCE};
    if (c - channels >= top) top = (uint32_t)(c - channels) + 1;
    c->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0) end(c, errno);
    else try_connect(c);
}

static void take_data(struct channel *c, const unsigned char *p, uint32_t n) {
    if (n > c->room) refuse("DATA beyond the window");
    c->room -= n;
    if (c->at) memmove(c->in.p, c->in.p + c->at, c->in.n -= c->at);
    c->at = 0;
    buf_add(&c->in, p, n);
    if (c->state == OPEN) pass_on(c);
}

static void take_frame(uint32_t kind, struct channel *c, uint32_t value, const unsigned char *payload) {
    bool fits = kind == R_OPEN ? c->state == FREE : c->state != FREE && c->state != CLOSING;
    if (!fits || (kind == R_DATA || kind == R_WINDOW) != (value > 0)) refuse("a frame that does not belong here");
    bool over = c->state == CLOSED; /* the host did not know yet */
    if (kind == R_OPEN) open_channel(c);
    else if (kind == R_CLOSE) {
        c->state = over ? FREE : CLOSING;
        c->deadline = now_ms() + LINGER;
        if (!over) pass_on(c);
    } else if (kind == R_DATA && !over) take_data(c, payload, value);
    else if (kind == R_WINDOW && !over && value <= WINDOW - c->credit) c->credit += value;
    else if (!over) refuse("an unknown kind of frame, or more credit than there can be");
}

static void hear(void) {
    static unsigned char p[RELAY_HEAD + MAX_DATA];
    static size_t n;
    static bool greeted;
    size_t at = 0;
    ssize_t got = RETRY(read(STDIN_FILENO, p + n, sizeof p - n));
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) _exit(0);
    for (n += (size_t)got; n - at >= RELAY_HEAD;) {
        uint32_t head[3];
        memcpy(head, p + at, sizeof head);
        uint32_t channel = ntohl(head[0]), kind = ntohl(head[1]), value = ntohl(head[2]);
        size_t whole = RELAY_HEAD + (kind == R_DATA ? value : 0);
        if (channel >= MAX_CHANNELS || whole > sizeof p) refuse("not a frame");
        if (greeted == (kind == R_HELLO) || (!greeted && (channel || !value))) refuse("HELLO comes first, and once");
        if (n - at < whole) break;
        if (greeted) take_frame(kind, channels + channel, value, p + at + RELAY_HEAD);
        greeted = true;
        at += whole;
    }
    memmove(p, p + at, n -= at);
}

static void serve(struct channel *c, short events) {
    if (c->state == CONNECTING) return try_connect(c);
    if (c->in.n && events) pass_on(c);
    if (c->state == CLOSING && now_ms() > c->deadline) end(c, 0);
    if (c->state != OPEN) return;
    if (c->ended) { if (events & (POLLHUP | POLLERR)) end(c, 0); }
    else if (events & (POLLIN | POLLHUP | POLLERR)) pass_back(c, events & POLLHUP);
}

/* What to wait for on a channel, if anything: poll tells of a peer that has hung up again and again, even while there is no
 * credit to read its last words with. */
static bool watch(const struct channel *c, struct pollfd *p, int *timeout) {
    if (c->state == FREE || c->state == CLOSED) return false;
    if (c->state == CONNECTING) *timeout = 2;
    if (c->state == CLOSING && *timeout < 0) *timeout = 1000;
    bool readable = c->state == OPEN && !c->ended && c->credit && waiting() < OUT_LIMIT;
    *p = (struct pollfd){c->fd, (short)((readable ? POLLIN : 0) | (c->in.n ? POLLOUT : 0)), 0};
    if (c->state == CONNECTING || (!p->events && !c->ended)) p->fd = -1;
    return true;
}

/* One at a time: an engine that was killed has not ended the stdin of the relay it had started, and knows it no more when it is
 * back. To own the file and to be the same user is all that this takes. */
static void take_over(void) {
    char path[sizeof agent.sun_path + sizeof ".relay"];
    struct flock ours = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    snprintf(path, sizeof path, "%s.relay", agent.sun_path);
    int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0600); /* never closed: the lock lasts as long as we do */
    for (double end = now_ms() + 1000; fd >= 0 && fcntl(fd, F_SETLK, &ours) && now_ms() < end;) {
        struct flock theirs = ours;
        if (!fcntl(fd, F_GETLK, &theirs) && theirs.l_type != F_UNLCK && theirs.l_pid > 1) kill(theirs.l_pid, SIGKILL);
        poll(NULL, 0, 1);
    }
}

int relay_main(char **argv) {
    static struct pollfd p[MAX_CHANNELS + 2];
    static struct channel *who[MAX_CHANNELS];
    struct rlimit files;
    if ((size_t)snprintf(agent.sun_path, sizeof agent.sun_path, "%s", argv[2]) >= sizeof agent.sun_path) refuse("the socket's path is too long");
    armoured = argv[3] && !strcmp(argv[3], "lines");
    hide_words(argv);
    hide_words(environ);
    prctl(PR_SET_NAME, "relay", 0, 0, 0);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    drop_capabilities(0); /* to own the socket's folder is enough */
    signal(SIGPIPE, SIG_IGN);
    if (!getrlimit(RLIMIT_NOFILE, &files)) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
    take_over();
    set_nonblocking(STDOUT_FILENO, true);
    say(channels, R_HELLO, RELAY_VERSION);
    for (unsigned first = 0;; first++) {
        nfds_t n = 0;
        int timeout = -1;
        flush();
        while (top && channels[top - 1].state == FREE) top--;
        for (uint32_t i = 0; i < top; i++)
            if (watch(channels + i, p + 2 + n, &timeout)) who[n++] = channels + i;
        bool listening = waiting() < 2 * OUT_LIMIT;
        p[0] = (struct pollfd){STDIN_FILENO, listening ? POLLIN : 0, 0};
        p[1] = (struct pollfd){STDOUT_FILENO, waiting() ? POLLOUT : 0, 0};
        if (poll(p, n + 2, timeout) < 0 && errno != EINTR) refuse("poll failed");
        for (nfds_t i = 0, k; i < n; i++) { /* whoever comes first finds the most room in `out`: that is each in turn */
            k = (first + i) % n;
            serve(who[k], p[2 + k].revents);
        }
        if (p[1].revents & (POLLERR | POLLHUP) || (!listening && p[0].revents)) _exit(0);
        if (p[0].revents) hear();
    }
}
