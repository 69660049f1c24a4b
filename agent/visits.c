/* The sessions of sudo's that pid 1 has started (door.c), and which exec each belongs to. With namespaces that is the exec's tag. In a
 * container it is the exec's shepherd, and once that is gone the exec's number; the session has a shepherd of its own there, who stays as
 * long as anybody whom the session has left, and counts no more among those that are at work. */
#include "agent.h"
#include <signal.h>

static uint64_t visits[WORKERS]; /* by the place of a worker; 0: that one is none */

void visit_note(int place, uint64_t whose) { visits[place] = whose; }

static int count(bool lingering) {
    int n = 0;
    for (int i = 0; i < WORKERS; i++) n += visits[i] && init_worker(i) && init_lingers(i) == lingering;
    return n;
}

bool visits_full(void) { return count(false) >= VISITS; }
bool visits_left_too_many(void) { return count(true) >= VISITS_LEFT; }

static int place_of(pid_t pid) {
    for (int i = 0; i < WORKERS; i++)
        if (visits[i] && pid > 1 && init_worker(i) == pid) return i;
    return -1;
}

static bool herds(pid_t pid) { return init_has_shepherd(pid) || place_of(pid) >= 0; }

uint64_t visit_whose(pid_t visitor) {
    pid_t pid = sweep_above(visitor, herds);
    int place = place_of(pid);
    return place < 0 ? (uint64_t)pid : visits[place];
}

void visits_pass_on(uint64_t from, uint64_t to) {
    for (int i = 0; i < WORKERS; i++)
        if (visits[i] == from) visits[i] = to;
}

/* With namespaces these are the sessions that a tag does not give away yet. Else all below the shepherd, who then ends by himself. */
bool visits_kill(uint64_t whose) {
    bool any = false;
    for (int i = 0; whose && i < WORKERS; i++) {
        pid_t pid = visits[i] == whose ? init_worker(i) : 0;
        if (pid > 1 && box.namespaces) kill(pid, SIGKILL);
        else if (pid > 1) sweep_signal(0, pid, SIGKILL);
        any |= pid != 0;
    }
    return any;
}
