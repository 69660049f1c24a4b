/* A disk and a network namespace that are there before a box asks for them. To copy an image, attach and mount it is a third of what a
 * launch takes, to make the namespace a fifth.
 *
 * The launcher holds one of each at most, the disk as a mount that is mounted nowhere: descriptors, with which the kernel takes them
 * back whatever becomes of the launcher. Whoever launches a box says which disk it is to have. When two in a row have said the same, and no
 * more come for a moment (in a rush there is nobody to do it meanwhile), a worker makes others. Each is one box's alone. */
#include "agent.h"
#include <sched.h>
#include <stdio.h>
#include <sys/socket.h>

#define QUIET 2.0     /* ms without a launch */
#define AGAIN 60000.0 /* ms after one that could not be made, or of which nothing was heard */

struct wish { char kind; char text[8400]; }; /* 'w': a box has this disk, 'd': here is one, 'f': it could not be made */
static int ears = -1, mouth = -1;            /* the launcher's end; its children's */
static int disk = -1;                        /* one as in `last` */
static int net = -1;
static struct wish last;
static double due, not_before;

int ahead_open(void) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair)) return -1;
    mouth = pair[1];
    return ears = pair[0];
}

static void say(char kind, const struct wish *w, const int *fds, int nfds) {
    struct wish m = *w;
    m.kind = kind;
    (void)send_fds(mouth, &m, offsetof(struct wish, text) + strlen(m.text) + 1, fds, nfds); /* if nobody hears it, none is made */
}

int ahead_take_disk(const char *template, const char *dir) {
    struct wish w = {0};
    if (mouth < 0 || (size_t)snprintf(w.text, sizeof w.text, "%s\n%s", template, dir) >= sizeof w.text) return -1;
    say('w', &w, NULL, 0);
    return strcmp(w.text, last.text) ? -1 : steal_fd(&disk);
}

int ahead_take_net(void) { return steal_fd(&net); }

void ahead_let_go(void) {
    drop_fd(&disk);
    drop_fd(&net);
    drop_fd(&mouth);
    drop_fd(&ears);
}

/* Its owner is a user namespace that nobody is in: no capability that a box's pid 1 has counts there. */
static int make_net(void) {
    struct fault f;
    if (unshare(CLONE_NEWUSER | CLONE_NEWNET) || !bring_up_loopback(&f)) return -1;
    return open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
}

/* In a child of the launcher. */
void ahead_make(void) {
    struct fault f = {0};
    struct wish w = last;
    char *dir = strchr(w.text, '\n');
    *dir++ = 0;
    int made[2] = {disk_make(w.text, dir, &f), -1};
    if (made[0] >= 0) made[1] = make_net();
    say(made[0] >= 0 ? 'd' : 'f', &last, made, made[0] < 0 ? 0 : made[1] < 0 ? 1 : 2);
    _exit(0);
}

/* For the launcher's poll: how long until there is something to do, in ms. -1: nothing is. */
int ahead_patience(void) {
    double left = due - now_ms();
    return due <= 0 ? -1 : left > 0 ? (int)left + 1 : 0;
}

/* Whether one is to be made now; whoever asks does it. */
bool ahead_due(void) {
    double now = now_ms();
    if (due <= 0 || now < due) return false;
    due = 0;
    if (disk >= 0 || now < not_before) return false;
    not_before = now + AGAIN; /* until it is heard of */
    return true;
}

/* A child has been forked for a request: what there was is its, though it may not be for a launch. */
void ahead_given(void) {
    if (due > 0 || disk >= 0) due = now_ms() + QUIET;
    drop_fd(&disk);
    drop_fd(&net);
}

void ahead_hear(void) {
    struct wish m = {0};
    int fds[2];
    for (int nfds = 2; recv_fds(ears, &m, sizeof m, fds, &nfds) > 0; nfds = 2) {
        cleanup_fd int got = nfds > 0 ? fds[0] : -1, got_net = nfds > 1 ? fds[1] : -1;
        m.text[sizeof m.text - 1] = 0;
        bool same = !strcmp(m.text, last.text);
        if (m.kind == 'd') not_before = 0;
        if (m.kind == 'd' && same && disk < 0) disk = steal_fd(&got);
        if (m.kind == 'd' && net < 0) net = steal_fd(&got_net);
        if (m.kind != 'w') continue;
        if (!same) drop_fd(&disk);
        last = m;
        due = same && disk < 0 ? now_ms() + QUIET : 0;
    }
}
