/* A paused box: everybody in it stands still and keeps what they have. By the freezer of the box's cgroups where there is
 * one; else pid 1 stops everybody in its namespace, where nobody is left who could let them go on. The keeper and pid 1 are
 * not members: they go on answering. While the box stands still, so do the clocks of its execs. */
#include "keeper.h"
#include <stdio.h>

#define FREEZE_WITHIN 5000.0 /* ms; a program in the middle of a long disk access takes its time */
#define LOOK_EVERY 1.0

static bool write_in(const char *dir, const char *name, const char *text) {
    char path[4200];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    cleanup_fd int fd = open(path, O_WRONLY | O_CLOEXEC);
    return fd >= 0 && write(fd, text, strlen(text)) > 0;
}

static bool says(const char *dir, const char *name, const char *word) {
    char path[4200], text[512];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    cleanup_fd int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : RETRY(read(fd, text, sizeof text - 1));
    text[n > 0 ? n : 0] = 0;
    return strstr(text, word);
}

/* Both spellings are tried where it does not matter: a directory has one of these files, or none. */
void thaw_cgroup(const char *dir) {
    if (!write_in(dir, "freezer.state", "THAWED")) write_in(dir, "cgroup.freeze", "0");
}

static const char *freezer(void) {
    char path[4200];
    for (int i = 0; i < box.ncgroups; i++) {
        snprintf(path, sizeof path, "%s/%s", box.cgroups[i], box.cgroup_version == 2 ? "cgroup.freeze" : "freezer.state");
        if (!access(path, W_OK)) return box.cgroups[i];
    }
    return NULL;
}

static bool freeze_cgroup(const char *dir) { /* asked again, version 1 takes up who was born meanwhile */
    if (box.cgroup_version == 2) return write_in(dir, "cgroup.freeze", "1") && says(dir, "cgroup.events", "frozen 1");
    return write_in(dir, "freezer.state", "FROZEN") && says(dir, "freezer.state", "FROZEN");
}

/* pid 1, who is no member, need not look at what nobody changes. */
static void tell_rest(bool rests) {
    if (json_get(box.spec, "memory_watch")) ctl_tell(&(struct ctl){.command = C_REST, .status = rests}, NULL, 0);
}

static void let_go(void) {
    const char *dir = freezer();
    if (dir) thaw_cgroup(dir), tell_rest(false);
    else ctl_tell(&(struct ctl){.command = C_THAW}, NULL, 0);
    double stood = now_ms() - keeper.frozen_at;
    for (struct exec *e = keeper.execs; e; e = e->next) {
        if (e->deadline > 0) e->deadline += stood;
        if (e->grace_at > 0) e->grace_at += stood;
    }
    keeper.frozen = keeper.brief = false;
    keeper.freeze_look = 0;
    flock_go_on();
}

/* The worker reads while everybody stands still; when it is done, or its client gone, they go on. */
static void begin_save(struct conn *c) {
    int p[2];
    if (pipe2(p, O_CLOEXEC)) return conn_error(c, NULL, errno, "save", NULL);
    conn_flush(c); /* our HELLO, before the worker writes */
    int fds[3] = {keeper.disk_fd, c->fd, p[1]};
    bool told = ctl_tell(&(struct ctl){.command = C_SPAWN, .kind = K_SAVE, .port = c->ticket, .cpu_ms = c->since}, fds, 3);
    close(p[1]);
    keeper.saving = p[0];
    if (told) c->dead = true; /* our copy; the worker has its own */
    else conn_error(c, "limit", errno, "save", NULL);
}

static struct conn *waiting(int role) {
    struct conn *c = keeper.conns;
    while (c && ((int)c->role != role || c->closing || c->dead)) c = c->next;
    return c;
}

/* Who came while it was saved: the next who wants it saved, or who wants it to go on. */
void save_ended(void) {
    struct conn *c;
    drop_fd(&keeper.saving);
    if ((c = waiting(ROLE_SAVE)) && keeper.frozen) return begin_save(c);
    if (keeper.brief || waiting(ROLE_THAW)) let_go();
    while ((c = waiting(ROLE_THAW))) conn_reply(c);
}

static void answer(bool ok) {
    for (struct conn *c = keeper.conns; c; c = c->next) {
        if ((c->role != ROLE_FREEZE && c->role != ROLE_SAVE) || c->closing || c->dead) continue;
        if (ok && c->role == ROLE_SAVE && keeper.saving >= 0) continue; /* its turn comes */
        if (ok && c->role == ROLE_SAVE) begin_save(c);
        else if (ok) conn_reply(c);
        else conn_error(c, "busy", 0, "freeze", "not every process of the box could be stopped");
    }
    keeper.freeze_look = 0;
    if (ok && keeper.brief && keeper.saving < 0) let_go(); /* who wanted it saved has left */
}

static void ask_freeze(void) {
    if (!keeper.freeze_look) keeper.freeze_by = now_ms() + FREEZE_WITHIN;
    keeper.freeze_look = now_ms();
}

void freeze_request(struct conn *c) {
    if (box.container || (!freezer() && !box.namespaces))
        return conn_error(c, "unsupported", 0, "freeze", "this host gives boxes no freezer");
    c->role = ROLE_FREEZE;
    keeper.brief = false;
    if (keeper.frozen && !keeper.freeze_look) return conn_reply(c);
    ask_freeze();
}

/* Of a paused box, which stays so, or of one that is stopped for it. */
void save_request(struct conn *c, const struct json *request) {
    if ((!box.namespaces && !box.container) || keeper.disk_fd < 0)
        return conn_error(c, "unsupported", 0, "save", "a box without a disk of its own cannot be saved");
    c->role = ROLE_SAVE;
    c->ticket = (json_bool(request, "full", false) ? SAVE_FULL : 0) | (json_bool(request, "difference", false) ? SAVE_DIFFERENCE : 0) |
                (json_bool(request, "row", false) ? SAVE_ROW : 0) | (json_bool(request, "watch", true) ? SAVE_WATCH : 0);
    c->since = json_num(request, "since", 0);
    if (keeper.saving >= 0 || keeper.freeze_look > 0) return; /* its turn comes */
    if (keeper.frozen) return begin_save(c);
    keeper.brief = true;
    ask_freeze();
}

/* A kill that is under way is waited for: what is frozen does not die. */
static bool killing(void) {
    for (struct exec *e = keeper.execs; e; e = e->next)
        if (e->killing || (box.container && e->state == E_STARTING)) return true; /* root's until it is a program: no stop of ours reaches it */
    return false;
}

void freeze_tick(double now) {
    if (keeper.freeze_look <= 0 || now < keeper.freeze_look) return;
    if (now > keeper.freeze_by) {
        if (keeper.frozen) let_go();
        keeper.brief = false;
        return answer(false);
    }
    keeper.freeze_look = now + LOOK_EVERY;
    if (!keeper.frozen && killing()) return;
    if (!keeper.frozen) keeper.frozen_at = now;
    keeper.frozen = true;
    const char *dir = freezer();
    if (!dir) ctl_tell(&(struct ctl){.command = C_FREEZE}, NULL, 0);
    else if (freeze_cgroup(dir)) tell_rest(true), answer(true);
}

void freeze_heard(const struct ctl *m) {
    if (m->status && keeper.frozen && keeper.freeze_look > 0) answer(true);
}

void thaw_request(struct conn *c) {
    c->role = ROLE_THAW;
    if (keeper.saving >= 0) return; /* when that is done */
    if (keeper.frozen) {
        let_go();
        answer(false);
    }
    conn_reply(c);
}

/* Everybody has been killed: let them die. */
void freeze_end(void) {
    const char *dir = keeper.frozen ? freezer() : NULL;
    if (dir) thaw_cgroup(dir);
}
