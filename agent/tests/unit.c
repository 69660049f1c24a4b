/* Tests of what needs no box: frames against spec/golden, JSON, kept output, paths, signals. Built with
 * AddressSanitizer and UBSan by tests/unit/test_agent_unit.py; prints one line per check that fails. */
#include "../keeper.h"
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

static int failures, checks;
#define CHECK(what) do { checks++; if (!(what)) { failures++; printf("not ok: %s:%d: %s\n", __FILE__, __LINE__, #what); } } while (0)

static size_t unhex(const char *text, unsigned char *out) {
    size_t n = 0;
    unsigned byte;
    if (!strcmp(text, "-")) return 0;
    for (; sscanf(text, "%2x", &byte) == 1; text += 2) out[n++] = (unsigned char)byte;
    return n;
}

static void golden_frames(const char *path) {
    static char line[1 << 16], payload_hex[1 << 15], frame_hex[1 << 15];
    static unsigned char payload[1 << 14], frame[1 << 14];
    char name[64];
    unsigned type, stream, seen = 0;
    unsigned long long offset;
    FILE *f = fopen(path, "r");
    CHECK(f != NULL);
    while (f && fgets(line, sizeof line, f)) {
        if (line[0] == '#' || sscanf(line, "%63s %u %u %llu %32767s %32767s", name, &type, &stream, &offset, payload_hex, frame_hex) != 6) continue;
        size_t n = unhex(payload_hex, payload), whole = unhex(frame_hex, frame);
        unsigned char packed[HEADER_SIZE];
        struct header h, made = {(uint32_t)n, (uint8_t)type, (uint8_t)stream, offset};
        header_pack(packed, &made);
        header_unpack(&h, frame);
        CHECK(whole == HEADER_SIZE + n);
        CHECK(!memcmp(packed, frame, HEADER_SIZE));
        CHECK(!memcmp(payload, frame + HEADER_SIZE, n));
        CHECK(h.length == n && h.type == type && h.stream == stream && h.offset == offset);
        if (type != F_DATA && type != F_EOF) {
            char *copy = malloc(n + 1);
            memcpy(copy, payload, n);
            struct json *j = json_parse(copy, n);
            CHECK(j != NULL && j->type == J_OBJ);
            free(j);
            free(copy);
        }
        seen++;
    }
    CHECK(seen >= 10);
    if (f) fclose(f);
}

static struct json *parse(char **text, const char *source) {
    *text = strdup(source);
    return json_parse(*text, strlen(*text));
}

static void json_values(void) {
    char *text;
    struct json *j = parse(&text, " {\"a\":[1,-2.5e1,true,null],\"s\":\"x\\u00e9\\ud83d\\ude00\\udcff\\n\",\"z\":\"a\\u0000b\",\"n\":7} ");
    CHECK(j != NULL);
    CHECK(json_num(j, "n", 0) == 7);
    CHECK(json_get(j, "a")->child->next->num == -25);
    CHECK(!strcmp(json_str(j, "s"), "x\xc3\xa9\xf0\x9f\x98\x80\xff\n"));
    CHECK(json_str(j, "z") == NULL);          /* a NUL inside is no C string */
    CHECK(json_get(j, "z")->len == 3);
    CHECK(json_str(j, "missing") == NULL && json_num(j, "s", 5) == 5 && json_bool(j, "n", true));
    free(j);
    free(text);
    static const char *const wrong[] = {"", "{", "[1,", "{\"a\"}", "\"\\ud800\"", "\"\\u12\"", "tru", "1 2", "{\"a\":1,}", "\"abc", "[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]", "-", "\"\\x\""};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        CHECK((j = parse(&text, wrong[i])) == NULL);
        free(j);
        free(text);
    }
    char nul[] = "[1\0]";
    CHECK(json_parse(nul, sizeof nul - 1) == NULL);
}

static void json_integers_stay_in_range(void) {
    char *text;
    struct json *j = parse(&text, "{\"big\":1e999,\"small\":-1e999,\"n\":7.9}");
    CHECK(json_int(j, "big", 0, 0, 65536) == 65536 && json_int(j, "small", 0, -1, 5) == -1 && json_int(j, "n", 0, 0, 9) == 7);
    CHECK(json_int(j, "missing", 3, 0, 9) == 3 && json_int(j, "big", 0, 0, MAX_INT) == MAX_INT);
    free(j);
    free(text);
}

static void json_strings_round_trip(void) {
    struct buf b = {0};
    char raw[256];
    for (int i = 0; i < 256; i++) raw[i] = (char)i;
    buf_json_string(&b, raw, sizeof raw);
    struct json *j = json_parse(b.p, b.n);
    CHECK(j && j->len == sizeof raw && !memcmp(j->str, raw, sizeof raw));
    free(j);
    buf_free(&b);
}

/* Any bytes are either JSON or not; the sanitizers watch that nothing else happens. */
static void json_fuzz(void) {
    static const char seed[] = "{\"op\":\"exec\",\"id\":\"e1\",\"argv\":[\"a\",\"\\u00e9\\udc80\"],\"env\":{\"A\":\"b\"},\"timeout\":1.5,\"x\":[true,false,null,{\"y\":-1e9}]}";
    uint32_t r = 12345;
    for (int round = 0; round < 200000; round++) {
        char *text = malloc(sizeof seed - 1); /* exactly sized: one byte too far is seen */
        size_t n = sizeof seed - 1;
        memcpy(text, seed, n);
        for (int k = 0; k < 1 + round % 4; k++) {
            r = r * 1664525u + 1013904223u;
            text[(r >> 8) % n] = (char)(r >> 24);
        }
        r = r * 1664525u + 1013904223u;
        free(json_parse(text, (r >> 16) % 3 ? n : (r >> 8) % n));
        free(text);
    }
}

static void output_head_and_tail(void) {
    struct output o;
    char p[64];
    output_open(&o, 10, false);
    output_add(&o, "0123456", 7);
    output_add(&o, "789abc", 6);
    CHECK(o.total == 13 && output_first(&o) == 0 && output_end(&o) == 10);
    CHECK(output_read(&o, 5, p, sizeof p) == 5 && !memcmp(p, "56789", 5));
    CHECK(output_read(&o, 10, p, sizeof p) == 0);
    output_close(&o);
    output_open(&o, 10, true);
    for (int i = 0; i < 26; i++) output_add(&o, &"abcdefghijklmnopqrstuvwxyz"[i], 1);
    CHECK(output_first(&o) == 16 && output_end(&o) == 26);
    size_t n = output_read(&o, 16, p, sizeof p);
    n += output_read(&o, 16 + n, p + n, sizeof p - n);
    CHECK(n == 10 && !memcmp(p, "qrstuvwxyz", 10));
    output_add(&o, "0123456789ABCDEFGHIJ", 20);
    CHECK(output_first(&o) == 36);
    n = output_read(&o, 36, p, sizeof p);
    n += output_read(&o, 36 + n, p + n, sizeof p - n);
    CHECK(n == 10 && !memcmp(p, "ABCDEFGHIJ", 10));
    output_close(&o);
}

static void output_spills_to_a_file(const char *dir) {
    static char block[100000];
    struct output o;
    char p[16];
    box.spool = dir;
    output_open(&o, 1u << 20, false);
    for (int i = 0; i < 8; i++) {
        memset(block, 'a' + i, sizeof block);
        output_add(&o, block, sizeof block);
    }
    CHECK(o.file >= 0);
    CHECK(output_read(&o, 0, p, 4) == 4 && !memcmp(p, "aaaa", 4));
    CHECK(output_read(&o, 799996, p, 16) == 4 && !memcmp(p, "hhhh", 4));
    output_close(&o);
    box.spool = NULL;
}

/* Where the host's disk is full what was kept stays true: a first part; a tail goes on in less memory. */
static void output_on_a_full_disk(const char *dir) {
    static char block[100000];
    struct output head, tail;
    char p[16];
    box.spool = "/nonexistent";
    output_open(&head, 1u << 20, false);
    output_open(&tail, 200000, true);
    for (int i = 0; i < 4; i++) {
        memset(block, 'a' + i, sizeof block);
        output_add(&head, block, sizeof block);
        output_add(&tail, block, sizeof block);
    }
    uint64_t end = output_end(&head);
    CHECK(head.total == 400000 && end >= 100000 && end < 400000 && end % 100000 == 0 && head.limit == 1u << 20);
    CHECK(output_truncated(&head, head.total) && output_read(&head, 99999, p, 2) == (end > 100000 ? 2u : 1u) && p[0] == 'a');
    uint64_t kept = 128u << 10;
    CHECK(output_first(&tail) == 400000 - kept && output_end(&tail) == 400000);
    CHECK(output_read(&tail, 400000 - kept, p, 1) == 1 && p[0] == 'c' && output_read(&tail, 399999, p, 16) == 1 && p[0] == 'd');
    box.spool = dir; /* there is room again */
    output_add(&tail, "z", 1);
    CHECK(output_first(&tail) == 400001 - kept && output_read(&tail, 400000, p, 16) == 1 && p[0] == 'z');
    output_close(&head);
    output_close(&tail);
    box.spool = NULL;
}

static void paths(void) {
    char out[4096];
    CHECK(!strcmp(box_path("/etc/passwd", out, sizeof out), "/etc/passwd"));
    CHECK(!strcmp(box_path("a/b", out, sizeof out), "/workspace/a/b"));
    CHECK(!strcmp(box_path("/a/..b/c..", out, sizeof out), "/a/..b/c.."));
    CHECK(box_path("..", out, sizeof out) == NULL);
    CHECK(box_path("/workspace/../etc", out, sizeof out) == NULL);
    CHECK(box_path("a/..", out, sizeof out) == NULL);
    char *text = strdup("{\"paths\":[[\"/workspace\",\"/data/x\"],[\"/tmp\",\"/data/t\"]]}");
    box.spec = json_parse(text, strlen(text));
    CHECK(!strcmp(box_path("/workspace/f", out, sizeof out), "/data/x/f"));
    CHECK(!strcmp(box_path("f", out, sizeof out), "/data/x/f"));
    CHECK(!strcmp(box_path("/workspaces/f", out, sizeof out), "/workspaces/f"));
    CHECK(!strcmp(box_path("/tmp", out, sizeof out), "/data/t"));
    free(box.spec);
    free(text);
    text = strdup("{\"paths\":[[\"/workspace\",\"/tmp/data/x\"],[\"/tmp\",\"/tmp/data/t\"]]}");
    box.spec = json_parse(text, strlen(text));
    CHECK(!strcmp(box_path("/tmp/data/x/f", out, sizeof out), "/tmp/data/x/f"));
    CHECK(!strcmp(box_path("/tmp/data/t", out, sizeof out), "/tmp/data/t"));
    CHECK(!strcmp(box_path("/tmp/data/xy", out, sizeof out), "/tmp/data/t/data/xy"));
    free(box.spec);
    free(text);
    box.spec = NULL;
}

static void trees_are_removed_at_any_depth(const char *dir) {
    char top[4096];
    snprintf(top, sizeof top, "%s/deep", dir);
    CHECK(!mkdirat(AT_FDCWD, top, 0700));
    int at = open(top, O_RDONLY | O_DIRECTORY);
    for (int i = 0; i < 3000 && at >= 0; i++) {
        CHECK(!mkdirat(at, "d", 0700));
        int next = openat(at, "d", O_RDONLY | O_DIRECTORY);
        close(at);
        at = next;
    }
    CHECK(at >= 0 && !symlinkat("/", at, "link"));
    close(at);
    CHECK(remove_tree(AT_FDCWD, top));
    CHECK(access(top, F_OK) && !access("/", F_OK));
}

/* Without root a folder that its owner closed is in the way, and so is one below 64 others that must be moved up first. */
static void closed_folders_are_removed(const char *dir) {
    char top[4096];
    int status = -1;
    snprintf(top, sizeof top, "%s/closed", dir);
    CHECK(!mkdir(top, 0700) && (geteuid() || !chown(top, 61000, 61000)));
    pid_t pid = fork();
    if (!pid) {
        int at = open(top, O_RDONLY | O_DIRECTORY), there = dup(at);
        if (!geteuid() && (setgid(61000) || setuid(61000))) _exit(2);
        for (int i = 0; i < 200; i++) {
            int next = mkdirat(at, "d", 0700) ? -1 : openat(at, "d", O_RDONLY | O_DIRECTORY);
            if (next < 0) _exit(3);
            close(at);
            at = next;
        }
        if (mkdirat(at, "x", 0)) _exit(4);
        for (int i = 0; i < 200; i++) { /* closed from below, so that the way up stays open */
            int up = openat(at, "..", O_RDONLY | O_DIRECTORY);
            if (i % 3 == 0) fchmod(at, 0);
            close(at);
            at = up;
        }
        _exit(remove_tree(there, "d") ? 0 : 5);
    }
    waitpid(pid, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    rmdir(top);
}

/* "Not empty" would be true, and no help. */
static void what_cannot_be_removed_says_why(const char *dir) {
    int status = -1;
    if (geteuid()) return;
    CHECK(!chdir(dir) && !mkdir("top", 0700) && !mkdir("top/mine", 0700) && !mkdir("top/mine/held", 0755) && !mkdir("top/mine/held/x", 0755));
    CHECK(!chown("top", 61000, 61000) && !chown("top/mine", 61000, 61000));
    pid_t pid = fork();
    if (!pid) {
        int top = open("top", O_RDONLY | O_DIRECTORY);
        if (setgid(61000) || setuid(61000) || remove_tree(top, "mine")) _exit(255);
        _exit(errno);
    }
    waitpid(pid, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EACCES);
    CHECK(remove_tree(AT_FDCWD, "top"));
}

static bool write_at(const char *path, off_t at, const char *text) {
    cleanup_fd int fd = open(path, O_WRONLY | O_CREAT, 0640);
    return fd >= 0 && pwrite(fd, text, strlen(text), at) == (ssize_t)strlen(text);
}

static void trees_are_copied(const char *dir) {
    struct stat a, b;
    char word[8] = "";
    CHECK(!chdir(dir) && !mkdir("from", 0700) && !mkdir("from/sub", 0750) && !symlink("nowhere", "from/sub/link"));
    CHECK(write_at("from/sub/file", 8 << 20, "end") && !mkfifo("from/pipe", 0600));
    CHECK(copy_tree("from", "to") && !lstat("from/sub/file", &a) && !lstat("to/sub/file", &b));
    CHECK(a.st_size == b.st_size && a.st_mode == b.st_mode && a.st_mtim.tv_nsec == b.st_mtim.tv_nsec && b.st_blocks < 1 << 10);
    cleanup_fd int fd = open("to/sub/file", O_RDONLY);
    CHECK(pread(fd, word, 3, 8 << 20) == 3 && !strcmp(word, "end"));
    CHECK(!lstat("to/sub", &b) && b.st_mode == (S_IFDIR | 0750) && readlink("to/sub/link", word, 8) == 7);
    CHECK(!lstat("to/pipe", &b) && S_ISFIFO(b.st_mode));
    errno = 0;
    CHECK(!copy_tree("from", "to") && errno == EEXIST);
    CHECK(!copy_tree("from", "from/sub/itself") && errno == EINVAL);
    CHECK(!copy_tree("nosuch", "x") && errno == ENOENT && access("x", F_OK));
    CHECK(remove_tree(AT_FDCWD, "from") && remove_tree(AT_FDCWD, "to"));
    CHECK(!mkdir("from", 0700));
    int at = open("from", O_RDONLY | O_DIRECTORY);
    for (int i = 0; i < 200; i++) {
        int next = mkdirat(at, "d", 0700) ? -1 : openat(at, "d", O_RDONLY | O_DIRECTORY);
        close(at);
        at = next;
    }
    close(at);
    CHECK(!copy_tree("from", "to") && errno == E2BIG);
    CHECK(remove_tree(AT_FDCWD, "from") && remove_tree(AT_FDCWD, "to"));
}

static volatile sig_atomic_t continued;
static void note_continue(int unused) { (void)unused; continued = 1; }

/* A process that notes in *seen whether it was continued; `stopped`: after it stopped itself. */
static pid_t start_witness(volatile int *seen, bool stopped) {
    pid_t pid = fork();
    if (pid) return pid;
    signal(SIGCONT, note_continue);
    *seen = 1;
    if (stopped) raise(SIGSTOP);
    while (!continued) usleep(1000);
    *seen = 2;
    for (;;) pause();
}

static bool is_stopped(pid_t pid) {
    int status;
    return waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status);
}

/* As pid 1 of a box: one process must die, one is only interrupted, and one that was stopped before stays so. */
static int freeze_a_box(void) {
    volatile int *seen = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int fs = (int)syscall(430 /* fsopen */, "proc", 1);
    if (fs < 0 || syscall(431 /* fsconfig */, fs, 6, NULL, NULL, 0)) return 77;
    box.namespaces = true;
    sweep_open((int)syscall(432 /* fsmount */, fs, 1, 0));
    pid_t runs = start_witness(&seen[0], false), waits = start_witness(&seen[1], true);
    if (!is_stopped(waits) || unshare(CLONE_NEWUTS)) return 77;
    uint64_t tag = sweep_own_tag();
    pid_t victim = start_witness(&seen[2], false);
    while (!seen[0] || !seen[2]) usleep(1000);
    sweep_frozen(tag);
    int status = 0;
    bool dead = waitpid(victim, &status, 0) == victim && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
    for (int i = 0; seen[0] != 2 && i < 2000; i++) usleep(1000);
    return dead && seen[0] == 2 && seen[1] == 1 && !kill(runs, 0) ? 0 : 1;
}

static void a_frozen_box_goes_on_as_it_was(void) {
    int status = 0;
    pid_t pid = fork();
    if (!pid) {
        if (unshare((geteuid() ? CLONE_NEWUSER : 0) | CLONE_NEWPID)) _exit(77);
        pid_t init = fork();
        if (!init) _exit(freeze_a_box());
        waitpid(init, &status, 0);
        _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
    }
    waitpid(pid, &status, 0);
    CHECK(WIFEXITED(status) && (!WEXITSTATUS(status) || WEXITSTATUS(status) == 77)); /* 77: not to be had on this host */
}

static void descriptors_travel(void) {
    int pair[2], fds[2] = {open("/dev/null", O_RDONLY), open("/dev/null", O_RDONLY)}, got[2] = {-1, -1}, n = 1, number = 7;
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
    CHECK(send_fds(pair[0], &number, sizeof number, fds, 2));
    int first_free = dup(pair[0]);
    close(first_free);
    number = 0;
    CHECK(recv_fds(pair[1], &number, sizeof number, got, &n) == sizeof number && number == 7 && n == 1 && got[0] == first_free);
    CHECK(fcntl(got[0], F_GETFD) == FD_CLOEXEC && fcntl(first_free + 1, F_GETFD) < 0); /* no room for the second: closed */
    CHECK(send_fds(pair[0], &number, sizeof number, NULL, 0));
    CHECK(recv_fds(pair[1], &number, sizeof number, NULL, NULL) == sizeof number);
    for (int i = 0; i < 2; i++) { close(pair[i]); close(fds[i]); }
    close(got[0]);
}

static bool ends_soon(pid_t pid) {
    for (int i = 0; i < 200; i++, usleep(10000))
        if (waitpid(pid, NULL, WNOHANG) == pid) return true;
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return false;
}

/* A pump carries both ways, passes on the end of one way, and ends with a client that is gone, however quiet the other. */
static void pumps_end(void) {
    int a[2], b[2];
    char text[8] = "";
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM, 0, a) && !socketpair(AF_UNIX, SOCK_STREAM, 0, b));
    pid_t pid = fork();
    if (!pid) {
        close(a[0]);
        close(b[0]);
        net_pump(a[1], b[1]);
    }
    close(a[1]);
    close(b[1]);
    CHECK(write(a[0], "there", 5) == 5 && read(b[0], text, 5) == 5 && !memcmp(text, "there", 5));
    shutdown(a[0], SHUT_WR);
    CHECK(read(b[0], text, 5) == 0);
    CHECK(write(b[0], "back", 4) == 4 && read(a[0], text, 5) == 4 && !memcmp(text, "back", 4));
    close(a[0]);
    CHECK(ends_soon(pid));
    close(b[0]);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    golden_frames(argv[1]);
    json_values();
    json_integers_stay_in_range();
    json_strings_round_trip();
    json_fuzz();
    output_head_and_tail();
    output_spills_to_a_file(argv[2]);
    output_on_a_full_disk(argv[2]);
    paths();
    trees_are_removed_at_any_depth(argv[2]);
    closed_folders_are_removed(argv[2]);
    what_cannot_be_removed_says_why(argv[2]);
    trees_are_copied(argv[2]);
    a_frozen_box_goes_on_as_it_was();
    descriptors_travel();
    pumps_end();
    CHECK(signal_number("KILL") == 9 && signal_number("SIGTERM") == 15 && signal_number("NOPE") == 0 && signal_number(NULL) == 0);
    printf("%d checks, %d failed\n", checks, failures);
    return failures != 0;
}
