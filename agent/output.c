/* What an exec has written, addressed by byte offset. Small outputs stay in memory; what grows goes to a file
 * without a name, so that a keeper's memory does not follow its sandbox's output. */
#include "agent.h"
#include <sys/mman.h>

#define IN_MEMORY (128u << 10)

void output_open(struct output *o, uint64_t limit, bool tail) {
    *o = (struct output){.limit = limit ? limit : 1, .tail = tail, .file = -1};
}

uint64_t output_first(const struct output *o) { return o->tail && o->total > o->limit ? o->total - o->limit : 0; }
uint64_t output_end(const struct output *o) { return !o->tail && o->total > o->limit ? o->limit : o->total; }
uint64_t output_kept(const struct output *o) { return output_end(o) - output_first(o); }

static void spill(struct output *o) {
    int fd = box.spool ? open(box.spool, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600) : -1;
    if (fd < 0) return;
    if (pwrite(fd, o->mem, o->cap, 0) != (ssize_t)o->cap) { close(fd); return; }
    o->file = fd;
    free(o->mem);
    o->mem = NULL;
}

/* Writes at a place below limit. */
static void put(struct output *o, uint64_t at, const char *p, size_t n) {
    if (o->file < 0 && at + n > o->cap) {
        if (o->cap >= IN_MEMORY) spill(o);
        if (o->file < 0) {
            size_t cap = o->cap ? o->cap : 1024;
            while (cap < at + n) cap *= 2;
            o->mem = xrealloc(o->mem, cap);
            memset(o->mem + o->cap, 0, cap - o->cap);
            o->cap = cap;
        }
    }
    if (o->file < 0) memcpy(o->mem + at, p, n);
    else if (pwrite(o->file, p, n, (off_t)at) != (ssize_t)n) o->limit = at ? at : 1; /* host disk full: kept ends here */
}

void output_add(struct output *o, const char *p, size_t n) {
    uint64_t at = o->total;
    o->total += n;
    if (!o->tail) {
        if (at >= o->limit) return;
        put(o, at, p, n < o->limit - at ? n : (size_t)(o->limit - at));
        return;
    }
    if (n > o->limit) { at += n - o->limit; p += n - o->limit; n = (size_t)o->limit; }
    uint64_t place = at % o->limit;
    size_t first = n < o->limit - place ? n : (size_t)(o->limit - place);
    put(o, place, p, first);
    if (n > first) put(o, 0, p + first, n - first);
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
