#include "agent.h"
#include <sys/socket.h>
#include <sys/uio.h>

void header_pack(unsigned char o[HEADER_SIZE], const struct header *h) {
    for (int i = 0; i < 4; i++) o[i] = (unsigned char)(h->length >> (24 - 8 * i));
    o[4] = h->type;
    o[5] = h->stream;
    o[6] = o[7] = 0;
    for (int i = 0; i < 8; i++) o[8 + i] = (unsigned char)(h->offset >> (56 - 8 * i));
}

void header_unpack(struct header *h, const unsigned char in[HEADER_SIZE]) {
    *h = (struct header){.type = in[4], .stream = in[5]};
    for (int i = 0; i < 4; i++) h->length = h->length << 8 | in[i];
    for (int i = 0; i < 8; i++) h->offset = h->offset << 8 | in[8 + i];
}

bool read_full(int fd, void *p, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t got = RETRY(read(fd, (char *)p + at, n - at));
        if (got <= 0) return false;
        at += (size_t)got;
    }
    return true;
}

bool write_full(int fd, const void *p, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t put = RETRY(write(fd, (const char *)p + at, n - at));
        if (put <= 0) return false;
        at += (size_t)put;
    }
    return true;
}

bool frame_read(int fd, struct header *h, char **payload) {
    unsigned char raw[HEADER_SIZE];
    *payload = NULL;
    if (!read_full(fd, raw, sizeof raw)) return false;
    header_unpack(h, raw);
    if (h->length > MAX_PAYLOAD) return false;
    char *p = malloc((size_t)h->length + 1);
    if (!p || !read_full(fd, p, h->length)) { free(p); return false; }
    p[h->length] = 0;
    *payload = p;
    return true;
}

bool frame_write(int fd, enum frame_type type, int stream, uint64_t offset, const void *p, size_t n) {
    unsigned char raw[HEADER_SIZE];
    struct header h = {(uint32_t)n, (uint8_t)type, (uint8_t)stream, offset};
    header_pack(raw, &h);
    struct iovec v[2] = {{raw, sizeof raw}, {(void *)p, n}};
    ssize_t put = RETRY(writev(fd, v, n ? 2 : 1));
    if (put < 0) return false;
    if ((size_t)put < sizeof raw) return write_full(fd, raw + put, sizeof raw - (size_t)put) && write_full(fd, p, n);
    return write_full(fd, (const char *)p + (put - (ssize_t)sizeof raw), n - ((size_t)put - sizeof raw));
}

bool frame_json(int fd, enum frame_type type, struct buf *b) {
    bool ok = frame_write(fd, type, 0, 0, b->p, b->n);
    b->n = 0;
    return ok;
}

void error_json(struct buf *b, const struct fault *f, const char *message) {
    buf_printf(b, "{\"code\":\"%s\",\"errno\":%d,\"stage\":", f->code ? f->code : fault_code(f->err), f->err);
    buf_json_string(b, f->stage, strlen(f->stage));
    buf_printf(b, ",\"message\":");
    if (!message) message = f->err ? strerror(f->err) : f->stage;
    buf_json_string(b, message, strlen(message));
    buf_add(b, "}", 1);
}

void frame_error(int fd, const struct fault *f, const char *message) {
    struct buf b = {0};
    error_json(&b, f, message);
    frame_json(fd, F_ERROR, &b);
    buf_free(&b);
}

bool send_fds(int sock, const void *msg, size_t n, const int *fds, int nfds) {
    union { struct cmsghdr h; char space[CMSG_SPACE(sizeof(int) * 8)]; } control = {0};
    struct iovec v = {(void *)msg, n};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1};
    if (nfds) {
        m.msg_control = control.space;
        m.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)nfds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)nfds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)nfds);
    }
    return RETRY(sendmsg(sock, &m, MSG_NOSIGNAL)) == (ssize_t)n;
}

ssize_t recv_fds(int sock, void *msg, size_t n, int *fds, int *nfds) {
    union { struct cmsghdr h; char space[CMSG_SPACE(sizeof(int) * 8)]; } control;
    struct iovec v = {msg, n};
    struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control.space, .msg_controllen = sizeof control.space};
    int room = nfds ? *nfds : 0, all[8] = {0};
    if (nfds) *nfds = 0;
    ssize_t r = RETRY(recvmsg(sock, &m, MSG_CMSG_CLOEXEC));
    struct cmsghdr *c = r < 0 ? NULL : CMSG_FIRSTHDR(&m);
    if (!c || c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) return r;
    int count = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    memcpy(all, CMSG_DATA(c), sizeof(int) * (size_t)count);
    for (int i = 0; i < count; i++) {
        if (i < room) fds[(*nfds)++] = all[i];
        else close(all[i]);
    }
    return r;
}

void set_nonblocking(int fd, bool on) {
    int flags = fcntl(fd, F_GETFL);
    if (flags >= 0) fcntl(fd, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK);
}
