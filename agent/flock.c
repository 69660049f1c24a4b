/* The shepherds of a container, as the keeper has them: one for each exec that runs, and some that wait for the next. Pid 1's
 * stand-in forks them; what they are to do they hear from us, and pid 1's stand-in has no part in an exec that nobody kills.
 *
 * A shepherd that has somebody below it is its exec's alone. One of which pid 1's stand-in was told is not used again: a signal
 * that is under way must not reach the next exec. */
#include "keeper.h"
#include <signal.h>

#define MOST_IDLE 2       /* under gVisor, where a fork takes long; else one */
#define AHEAD_AFTER 100.0 /* ms; a short exec brings its shepherd back before */

static struct shepherd { int fd; pid_t pid; } idle[MOST_IDLE];
static int nidle, asked;
static double ahead_at; /* when one more is asked for, though nobody waits; 0: not */

static void ask(void) {
    if (ctl_tell(&(struct ctl){.command = C_SHEPHERD}, NULL, 0)) asked++;
}

void flock_start(void) { asked = box.container; } /* the first comes unasked */

/* While the box stands still no program begins. */
static struct exec *first_waiting(int *count) {
    struct exec *first = NULL;
    *count = 0;
    for (struct exec *e = keeper.frozen ? NULL : keeper.execs; e; e = e->next) /* new ones are put in front */
        if (e->order.n) { first = e; ++*count; }
    return first;
}

static int ordered_fds(const int fds[FD_ROLES], int request, int *out) {
    int n = 0;
    for (int i = FD_IN; i <= FD_ERR; i++) out[n++] = fds[i];
    if (request >= 0) out[n++] = request;
    if (fds[FD_CARRY] >= 0) out[n++] = fds[FD_CARRY];
    return n;
}

static bool give(struct exec *e, const struct shepherd *s, const char *raw, size_t n, const int fds[FD_ROLES]) {
    static struct order_message m;
    int out[FD_ROLES];
    m.open_files = box.open_files;
    m.large = n > sizeof m.text;
    m.carry = fds[FD_CARRY] >= 0;
    m.size = m.large ? 0 : (uint32_t)n;
    memcpy(m.text, raw, m.size);
    cleanup_fd int request = m.large ? memfd_with(raw, n) : -1;
    if (m.large && request < 0) return false;
    if (!send_fds(s->fd, &m, offsetof(struct order_message, text) + m.size, out, ordered_fds(fds, request, out))) return false;
    e->status_fd = s->fd;
    e->shepherd = s->pid;
    return true;
}

bool flock_order(struct exec *e, const char *raw, size_t n, int fds[FD_ROLES]) {
    while (nidle > 0 && !keeper.frozen) {
        struct shepherd s = idle[--nidle];
        if (give(e, &s, raw, n, fds)) {
            if (!nidle && box.filter_ahead) ahead_at = now_ms() + AHEAD_AFTER;
            return true;
        }
        int err = errno;
        close(s.fd); /* whether or not it is gone: the next is asked for */
        if (err != EPIPE && err != ECONNRESET) return errno = err, false;
    }
    int waiting;
    buf_add(&e->order, raw, n);
    for (int i = 0; i < FD_ROLES; i++) e->order_fds[i] = steal_fd(&fds[i]);
    first_waiting(&waiting);
    if (waiting > asked) ask();
    return true;
}

static void stop_waiting(struct exec *e) {
    buf_free(&e->order);
    for (int i = 0; i < FD_ROLES; i++) drop_fd(&e->order_fds[i]);
}

static void hand(struct exec *e, struct shepherd s) {
    if (!give(e, &s, e->order.p, e->order.n, e->order_fds)) {
        int err = errno;
        close(s.fd);
        return exec_not_started(e, err, "prepare exec");
    }
    stop_waiting(e);
    if (!e->killing) return;
    e->killing = false; /* it was to be killed before anybody had it */
    exec_end(e, e->cause, SIGKILL);
}

/* It is free: for who waits longest, or for who comes. */
static void welcome(struct shepherd s) {
    int waiting;
    struct exec *e = first_waiting(&waiting);
    if (e) hand(e, s);
    else if (nidle < (box.filter_ahead ? MOST_IDLE : 1)) idle[nidle++] = s;
    else close(s.fd);
}

void flock_arrived(const struct ctl *m, int fd) {
    int waiting;
    struct exec *e = first_waiting(&waiting);
    asked--;
    if (m->err || fd < 0) {
        if (e && waiting > asked) exec_not_started(e, m->err ? m->err : EMFILE, "fork");
        return;
    }
    set_nonblocking(fd, true);
    welcome((struct shepherd){fd, m->pid});
}

void flock_visited(pid_t shepherd) {
    for (struct exec *e = keeper.execs; e; e = e->next)
        if (e->shepherd == shepherd) exec_tell(e, C_VISIT, 0, 0);
}

void flock_go_on(void) {
    int waiting;
    struct exec *e;
    while ((e = first_waiting(&waiting)) && nidle > 0) hand(e, idle[--nidle]);
    for (int more = waiting - asked; more > 0; more--) ask();
}

void flock_leave(struct exec *e) {
    stop_waiting(e);
    drop_fd(&e->status_fd);
    e->shepherd = 0;
}

void flock_back(struct exec *e) {
    if (!box.container || e->status_fd < 0) return;
    if (e->noted) return flock_leave(e);
    struct shepherd s = {steal_fd(&e->status_fd), e->shepherd};
    e->shepherd = 0;
    ahead_at = 0;
    welcome(s);
}

double flock_next(void) { return ahead_at; }

void flock_tick(double now) {
    if (ahead_at <= 0 || now < ahead_at) return;
    ahead_at = 0;
    if (!nidle && !asked) ask();
}

void flock_watch(void add(int fd, int which)) {
    for (int i = 0; i < nidle; i++) add(idle[i].fd, i);
}

void flock_readable(int which) {
    struct status_message m;
    if (which >= nidle || (recv_fds(idle[which].fd, &m, sizeof m, NULL, NULL) < 0 && errno == EAGAIN)) return;
    close(idle[which].fd);
    idle[which] = idle[--nidle];
    if (!nidle && !asked) ask();
}
