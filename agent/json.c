/* Reads what the host sends. The host is trusted, but nothing here trusts it further than the frame's length. */
#include "agent.h"
#include <sys/mman.h>
#include <sys/stat.h>

#define MAX_DEPTH 16

struct reader { char *p, *end; struct json *nodes; size_t used, room; };

static struct json *node(struct reader *r, enum json_type type) {
    if (r->used == r->room) return NULL;
    struct json *j = &r->nodes[r->used++];
    *j = (struct json){.type = type};
    return j;
}

static void skip_space(struct reader *r) {
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\t' || *r->p == '\n' || *r->p == '\r')) r->p++;
}

static int hex4(const char *p) {
    int v = 0;
    for (int i = 0; i < 4; i++) {
        const char *digits = "0123456789abcdef0123456789ABCDEF", *d = memchr(digits, p[i], 32);
        if (!d) return -1;
        v = v * 16 + (int)((d - digits) & 15);
    }
    return v;
}

static char *put_utf8(char *out, unsigned c) {
    if (c < 0x80) *out++ = (char)c;
    else if (c < 0x800) { *out++ = (char)(0xc0 | c >> 6); *out++ = (char)(0x80 | (c & 63)); }
    else {
        if (c < 0x10000) *out++ = (char)(0xe0 | c >> 12);
        else { *out++ = (char)(0xf0 | c >> 18); *out++ = (char)(0x80 | (c >> 12 & 63)); }
        *out++ = (char)(0x80 | (c >> 6 & 63));
        *out++ = (char)(0x80 | (c & 63));
    }
    return out;
}

/* After the backslash-u: advances r->p, appends to out. \udc80..\udcff is one raw byte. */
static char *unicode_escape(struct reader *r, char *out) {
    if (r->end - r->p < 4) return NULL;
    int c = hex4(r->p);
    if (c < 0) return NULL;
    r->p += 4;
    if (c >= 0xdc80 && c <= 0xdcff) { *out++ = (char)(c & 0xff); return out; }
    if (c >= 0xd800 && c < 0xdc00 && r->end - r->p >= 6 && r->p[0] == '\\' && r->p[1] == 'u') {
        int low = hex4(r->p + 2);
        if (low < 0xdc00 || low > 0xdfff) return NULL;
        r->p += 6;
        return put_utf8(out, 0x10000u + ((unsigned)(c - 0xd800) << 10) + (unsigned)(low - 0xdc00));
    }
    return c >= 0xd800 && c <= 0xdfff ? NULL : put_utf8(out, (unsigned)c);
}

/* r->p is behind the opening quote. Decodes in place: no escape is shorter than what it stands for. */
static bool string(struct reader *r, const char **str, size_t *len) {
    char *start = r->p, *out = r->p;
    while (r->p < r->end && *r->p != '"') {
        if (*r->p != '\\') { *out++ = *r->p++; continue; }
        if (++r->p == r->end) return false;
        char c = *r->p++;
        switch (c) {
        case '"': case '\\': case '/': *out++ = c; break;
        case 'b': *out++ = '\b'; break;
        case 'f': *out++ = '\f'; break;
        case 'n': *out++ = '\n'; break;
        case 'r': *out++ = '\r'; break;
        case 't': *out++ = '\t'; break;
        case 'u': if (!(out = unicode_escape(r, out))) return false; break;
        default: return false;
        }
    }
    if (r->p == r->end) return false;
    r->p++;
    *out = 0; /* at most the closing quote's place */
    *str = start;
    *len = (size_t)(out - start);
    return true;
}

static struct json *value(struct reader *r, int depth);

static struct json *container(struct reader *r, int depth, bool object) {
    struct json *j = node(r, object ? J_OBJ : J_ARR), **tail = j ? &j->child : NULL;
    char close = object ? '}' : ']';
    if (!j || depth > MAX_DEPTH) return NULL;
    skip_space(r);
    if (r->p < r->end && *r->p == close) { r->p++; return j; }
    for (;;) {
        const char *key = NULL;
        size_t len = 0;
        skip_space(r);
        if (object) {
            if (r->p == r->end || *r->p++ != '"' || !string(r, &key, &len)) return NULL;
            skip_space(r);
            if (r->p == r->end || *r->p++ != ':') return NULL;
        }
        struct json *v = value(r, depth + 1);
        if (!v) return NULL;
        v->key = key;
        v->key_len = len;
        *tail = v;
        tail = &v->next;
        skip_space(r);
        if (r->p == r->end) return NULL;
        char c = *r->p++;
        if (c == close) return j;
        if (c != ',') return NULL;
    }
}

static struct json *literal(struct reader *r, const char *word, enum json_type type, double num) {
    size_t n = strlen(word);
    if ((size_t)(r->end - r->p) < n || memcmp(r->p, word, n)) return NULL;
    r->p += n;
    struct json *j = node(r, type);
    if (j) j->num = num;
    return j;
}

static struct json *value(struct reader *r, int depth) {
    skip_space(r);
    if (r->p == r->end) return NULL;
    switch (*r->p) {
    case '{': r->p++; return container(r, depth, true);
    case '[': r->p++; return container(r, depth, false);
    case 't': return literal(r, "true", J_BOOL, 1);
    case 'f': return literal(r, "false", J_BOOL, 0);
    case 'n': return literal(r, "null", J_NULL, 0);
    case '"': {
        struct json *j = node(r, J_STR);
        r->p++;
        return j && string(r, &j->str, &j->len) ? j : NULL;
    }
    default: {
        char text[40], *stop;
        size_t n = 0;
        while (r->p + n < r->end && n < sizeof text - 1 && memchr("+-.0123456789eE", r->p[n], 15)) n++;
        if (!n) return NULL;
        memcpy(text, r->p, n);
        text[n] = 0;
        double d = strtod(text, &stop);
        struct json *j = *stop ? NULL : node(r, J_NUM);
        if (j) { j->num = d; r->p += n; }
        return j;
    }
    }
}

struct json *json_parse(char *text, size_t n) {
    struct reader r = {.p = text, .end = text + n, .room = n / 2 + 2};
    r.nodes = malloc(r.room * sizeof *r.nodes); /* every value takes two bytes at least, but for the last */
    if (!r.nodes) return NULL;
    struct json *root = value(&r, 0);
    skip_space(&r);
    if (root && r.p == r.end) return root; /* the root is nodes[0] */
    free(r.nodes);
    return NULL;
}

struct json *json_read(int fd) {
    struct stat st;
    char *text = fstat(fd, &st) ? MAP_FAILED : mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    return text == MAP_FAILED ? NULL : json_parse(text, (size_t)st.st_size);
}

struct json *json_get(const struct json *obj, const char *key) {
    if (!obj || obj->type != J_OBJ) return NULL;
    for (struct json *j = obj->child; j; j = j->next)
        if (!strcmp(j->key, key)) return j;
    return NULL;
}

const char *json_str(const struct json *obj, const char *key) {
    struct json *j = json_get(obj, key);
    return j && j->type == J_STR && strlen(j->str) == j->len ? j->str : NULL;
}

double json_num(const struct json *obj, const char *key, double missing) {
    struct json *j = json_get(obj, key);
    return j && j->type == J_NUM ? j->num : missing;
}

int64_t json_int(const struct json *obj, const char *key, int64_t missing, int64_t low, int64_t high) {
    double v = json_num(obj, key, (double)missing);
    return v <= (double)low ? low : v >= (double)high ? high : (int64_t)v;
}

bool json_bool(const struct json *obj, const char *key, bool missing) {
    struct json *j = json_get(obj, key);
    return j && j->type == J_BOOL ? j->num != 0 : missing;
}
