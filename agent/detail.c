/* What a file worker tells of a file beyond its stat, for who asks: names of owner and group, where a link ends, attributes. */
#include "agent.h"
#include <limits.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/xattr.h>

#define MOST_NAMES (256u << 10) /* bytes of /etc/passwd, and of attributes' names */
#define MOST_VALUE 4096u        /* of an attribute */
#define MOST_TOLD (16u << 10)   /* of one file's, together */

struct names { const char *path; char *text; unsigned last; char found[64]; };

static bool wanted;
static const char *prefix; /* of attributes; NULL: none are told */
static struct names users = {.path = "/etc/passwd"}, groups = {.path = "/etc/group"};

void detail_want(const struct json *request) {
    wanted = json_bool(request, "detail", false);
    prefix = json_str(request, "attributes");
    if (prefix && strncmp(prefix, "user.", 5)) prefix = NULL; /* others are the kernel's, and no business of ours */
}

const char *type_name(mode_t m) {
    return S_ISREG(m) ? "file" : S_ISDIR(m) ? "dir" : S_ISLNK(m) ? "symlink" : S_ISFIFO(m) ? "fifo" : S_ISSOCK(m) ? "socket" : "device";
}

static char *read_names(const char *path) {
    char *text = xrealloc(NULL, MOST_NAMES + 1);
    cleanup_fd int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : RETRY(read(fd, text, MOST_NAMES));
    text[n > 0 ? n : 0] = 0;
    return text;
}

/* NAME:x:ID:… a line; the number itself where nobody has it. The folder's next file mostly has the same owner. */
static const char *name_of(struct names *n, unsigned id) {
    char number[16];
    if (n->text && n->last == id) return n->found;
    if (!n->text) n->text = read_names(n->path);
    n->last = id;
    snprintf(n->found, sizeof n->found, "%u", id);
    size_t digits = (size_t)snprintf(number, sizeof number, ":%u:", id);
    for (const char *line = n->text; *line; line += strcspn(line, "\n"), line += *line == '\n') {
        size_t name = strcspn(line, ":\n"), word = line[name] == ':' ? strcspn(line + name + 1, ":\n") : 0;
        if (line[name] != ':' || strncmp(line + name + 1 + word, number, digits) || name >= sizeof n->found) continue;
        snprintf(n->found, sizeof n->found, "%.*s", (int)name, line);
        break;
    }
    return n->found;
}

/* By way of the descriptor: what it is in the end, under the name that the kernel has for it. */
static void put_end(struct buf *b, int dir, const char *name) {
    char at[40], path[PATH_MAX];
    struct stat st;
    cleanup_fd int fd = openat(dir, name, O_PATH | O_CLOEXEC);
    snprintf(at, sizeof at, "/proc/self/fd/%d", fd);
    ssize_t n = fd < 0 || fstat(fd, &st) ? -1 : readlink(at, path, sizeof path);
    if (n <= 0) return buf_printf(b, ",\"resolved\":null");
    buf_printf(b, ",\"resolved\":{\"path\":");
    buf_json_string(b, path, (size_t)n);
    buf_printf(b, ",\"type\":\"%s\",\"mode\":%u,\"size\":%lld}", type_name(st.st_mode), (unsigned)(st.st_mode & 07777), (long long)st.st_size);
}

/* A name's path, though only its folder's descriptor may be known. */
static const char *path_at(int dir, const char *name, char out[PATH_MAX]) {
    if (dir == AT_FDCWD) return name;
    return snprintf(out, PATH_MAX, "/proc/self/fd/%d/%s", dir, name) < PATH_MAX ? out : NULL;
}

static void put_attributes(struct buf *b, int dir, const char *name, const struct stat *st) {
    char at[PATH_MAX], value[MOST_VALUE];
    cleanup_free char *names = NULL;
    const char *path = S_ISREG(st->st_mode) || S_ISDIR(st->st_mode) ? path_at(dir, name, at) : NULL;
    ssize_t all = path ? llistxattr(path, NULL, 0) : 0; /* most have none: no memory for those */
    if (all > 0) all = llistxattr(path, names = xrealloc(NULL, MOST_NAMES), MOST_NAMES);
    size_t told = 0, skip = strlen(prefix), count = 0;
    buf_printf(b, ",\"metadata\":{");
    for (ssize_t i = 0; i < all; i += (ssize_t)strlen(names + i) + 1) {
        const char *key = names + i;
        if (strncmp(key, prefix, skip) || !key[skip]) continue;
        ssize_t n = lgetxattr(path, key, value, sizeof value);
        if (n < 0 || (told += (size_t)n + strlen(key)) > MOST_TOLD) continue;
        if (count++) buf_add(b, ",", 1);
        buf_json_string(b, key + skip, strlen(key + skip));
        buf_add(b, ":", 1);
        buf_json_string(b, value, (size_t)n);
    }
    buf_add(b, "}", 1);
}

void detail_json(struct buf *b, int dir, const char *name, const struct stat *st) {
    if (wanted) {
        const char *user = name_of(&users, st->st_uid), *group = name_of(&groups, st->st_gid);
        buf_printf(b, ",\"mtime_ns\":%lld,\"owner\":", (long long)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec);
        buf_json_string(b, user, strlen(user));
        buf_printf(b, ",\"group\":");
        buf_json_string(b, group, strlen(group));
        if (S_ISLNK(st->st_mode)) put_end(b, dir, name);
    }
    if (prefix) put_attributes(b, dir, name, st);
}

static bool remove_attributes(int fd) {
    cleanup_free char *names = xrealloc(NULL, MOST_NAMES);
    ssize_t all = flistxattr(fd, names, MOST_NAMES);
    if (all < 0) return errno == EOPNOTSUPP; /* then there are none */
    for (ssize_t i = 0; i < all; i += (ssize_t)strlen(names + i) + 1)
        if (!strncmp(names + i, prefix, strlen(prefix)) && fremovexattr(fd, names + i)) return false;
    return true;
}

/* Instead of all that it had under the prefix. false: see errno. */
bool attributes_set(int fd, const struct json *request) {
    const struct json *metadata = json_get(request, "metadata");
    if (!prefix || !metadata || metadata->type != J_OBJ) return true;
    if (!remove_attributes(fd)) return false;
    for (const struct json *j = metadata->child; j; j = j->next) {
        char name[256];
        if (j->type != J_STR || !j->key_len || strlen(j->key) != j->key_len) return errno = EINVAL, false;
        if (snprintf(name, sizeof name, "%s%s", prefix, j->key) >= (int)sizeof name || j->len > MOST_VALUE) return errno = E2BIG, false;
        if (fsetxattr(fd, name, j->str, j->len, 0)) return false;
    }
    return true;
}
