/* What an exec has written, addressed by byte offset. Small outputs stay in memory; what grows goes to a file
 * without a name, so that a keeper's memory does not follow its sandbox's output. */
#include "agent.h"
#include <sys/mman.h>

#define IN_MEMORY (128u << 10)

void output_open(struct output *o, uint64_t limit, bool tail) {
    *o = (struct output){.limit = limit ? limit : 1, .tail = tail, .file = -1};
}

static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

uint64_t output_first(const struct output *o) { return o->tail ? larger(o->lost, o->total > o->limit ? o->total - o->limit : 0) : 0; }
uint64_t output_end(const struct output *o) { return o->tail ? o->total : smaller(o->total, o->lost ? o->lost : o->limit); }
uint64_t output_kept(const struct output *o) { return output_end(o) - output_first(o); }
bool output_truncated(const struct output *o, uint64_t total) { return o->lost || total > o->limit; }

static bool spill(struct output *o) {
    cleanup_fd int fd = open(box.spool, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0 || pwrite(fd, o->mem, o->cap, 0) != (ssize_t)o->cap) return false;
    o->file = steal_fd(&fd);
    free(o->mem);
    o->mem = NULL;
    return true;
}

/* Writes at a place below limit. false: the host's disk is full. */
static bool put(struct output *o, uint64_t at, const char *p, size_t n) {
    bool full = o->file < 0 && at + n > o->cap;
    if (full && o->cap >= IN_MEMORY && box.spool) {
        if (!spill(o)) return false;
    } else if (full) {
        size_t cap = o->cap ? o->cap : 1024;
        while (cap < at + n) cap *= 2;
        o->mem = xrealloc(o->mem, cap);
        memset(o->mem + o->cap, 0, cap - o->cap);
        o->cap = cap;
    }
    if (o->file >= 0) return pwrite(o->file, p, n, (off_t)at) == (ssize_t)n;
    memcpy(o->mem + at, p, n);
    return true;
}

/* The host's disk is full: a terminal goes on in little memory, rather than show nothing. */
static void shrink(struct output *o, uint64_t at) {
    drop_fd(&o->file);
    o->mem = xrealloc(o->mem, IN_MEMORY);
    o->limit = o->cap = IN_MEMORY;
    o->lost = at;
}

void output_add(struct output *o, const char *p, size_t n) {
    uint64_t at = o->total;
    o->total += n;
    if (!o->tail) {
        if (at < output_end(o) && !put(o, at, p, (size_t)smaller(n, o->limit - at))) o->lost = larger(at, 1);
        return;
    }
    if (n > o->limit) { at += n - o->limit; p += n - o->limit; n = (size_t)o->limit; }
    uint64_t place = at % o->limit;
    size_t first = (size_t)smaller(n, o->limit - place);
    if (put(o, place, p, first) && (n == first || put(o, 0, p + first, n - first))) return;
    shrink(o, at);
    o->total = at;
    output_add(o, p, n); /* where there is room for it now */
}

size_t output_read(const struct output *o, uint64_t at, char *p, size_t room) {
    uint64_t end = output_end(o), place = o->tail ? at % o->limit : at;
    if (at < output_first(o) || at >= end) return 0;
    size_t n = end - at < room ? (size_t)(end - at) : room;
    if (o->tail && n > o->limit - place) n = (size_t)(o->limit - place);
    if (o->file < 0) memcpy(p, o->mem + place, n);
    else if (pread(o->file, p, n, (off_t)place) != (ssize_t)n) return 0;
    return n;
}

void output_close(struct output *o) {
    free(o->mem);
    drop_fd(&o->file);
    o->mem = NULL;
    o->cap = 0;
}
