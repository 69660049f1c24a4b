#include "agent.h"
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/resource.h>
#include <time.h>

#define PATIENCE_SLICE 100 /* ms */

void *xrealloc(void *p, size_t n) {
    void *q = realloc(p, n);
    if (!q) _exit(70); /* no memory for bookkeeping: the box cannot be kept honestly */
    return q;
}

double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_BOOTTIME, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

double cpu_ms(const struct rusage *u) {
    return (double)(u->ru_utime.tv_sec + u->ru_stime.tv_sec) * 1e3 + (double)(u->ru_utime.tv_usec + u->ru_stime.tv_usec) / 1e3;
}

/* In slices: a box that was paused meanwhile has used up one of them, not all. */
bool readable_within(int fd, int ms) {
    struct pollfd p = {fd, POLLIN, 0};
    long ready = 0;
    for (; ms > 0 && !ready; ms -= PATIENCE_SLICE) ready = RETRY(poll(&p, 1, PATIENCE_SLICE));
    return ready > 0;
}

static void reserve(struct buf *b, size_t more) {
    if (b->n + more <= b->cap) return;
    size_t cap = b->cap ? b->cap : 256;
    while (cap < b->n + more) cap *= 2;
    b->p = xrealloc(b->p, cap);
    b->cap = cap;
}

void buf_add(struct buf *b, const void *p, size_t n) {
    if (!n) return;
    reserve(b, n);
    memcpy(b->p + b->n, p, n);
    b->n += n;
}

void buf_free(struct buf *b) {
    free(b->p);
    *b = (struct buf){0};
}

void buf_printf(struct buf *b, const char *fmt, ...) {
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    if (n > 0) {
        reserve(b, (size_t)n + 1);
        vsnprintf(b->p + b->n, (size_t)n + 1, fmt, again);
        b->n += (size_t)n;
    }
    va_end(again);
}

/* Length of the valid UTF-8 sequence at s, 0 if there is none. Overlong forms and surrogates are not valid. */
static size_t utf8_length(const unsigned char *s, size_t n) {
    unsigned c = s[0];
    size_t len = c < 0x80 ? 1 : c >= 0xc2 && c < 0xe0 ? 2 : (c & 0xf0) == 0xe0 ? 3 : c >= 0xf0 && c < 0xf5 ? 4 : 0;
    if (!len || len > n) return 0;
    for (size_t i = 1; i < len; i++)
        if ((s[i] & 0xc0) != 0x80) return 0;
    if (len == 3 && ((c == 0xe0 && s[1] < 0xa0) || (c == 0xed && s[1] >= 0xa0))) return 0;
    if (len == 4 && ((c == 0xf0 && s[1] < 0x90) || (c == 0xf4 && s[1] >= 0x90))) return 0;
    return len;
}

void buf_json_string(struct buf *b, const char *s, size_t n) {
    buf_add(b, "\"", 1);
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)s[i];
        size_t len = utf8_length((const unsigned char *)s + i, n - i);
        if (!len) { /* not UTF-8: Python's surrogateescape */
            buf_printf(b, "\\udc%02x", c);
            i++;
        } else if (c < 0x20 || c == '"' || c == '\\' || c == 0x7f) {
            buf_printf(b, "\\u%04x", c);
            i++;
        } else {
            buf_add(b, s + i, len);
            i += len;
        }
    }
    buf_add(b, "\"", 1);
}

bool fault_set(struct fault *f, int err, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    f->err = err;
    f->code = NULL;
    vsnprintf(f->stage, sizeof f->stage, fmt, ap);
    va_end(ap);
    return false;
}

const char *fault_code(int err) {
    switch (err) {
    case ENOENT: return "not_found";
    case EEXIST: return "exists";
    case EACCES: case EPERM: return "denied";
    case ENOTDIR: return "not_a_directory";
    case EISDIR: return "is_a_directory";
    case ENOTEMPTY: return "not_empty";
    case ENOSPC: case EDQUOT: return "no_space";
    case EFBIG: case E2BIG: return "too_large";
    case EROFS: return "read_only";
    case EBUSY: case ETXTBSY: return "busy";
    case EAGAIN: case EMFILE: case ENFILE: case ENOMEM: return "limit";
    case ECONNREFUSED: case EHOSTUNREACH: case ENETUNREACH: case ETIMEDOUT: return "refused";
    case EINVAL: case ENAMETOOLONG: case ELOOP: case EXDEV: case ENOEXEC: case ENXIO: return "invalid";
    case ENOSYS: case EOPNOTSUPP: return "unsupported";
    default: return "internal";
    }
}
