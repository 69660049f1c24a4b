/* sudo, as the sandbox's user calls it: options, environment, and then a question at the door (door.c). Root needs no door. */
#include "sudo.h"
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>

#define SECURE_PATH "/opt/capsule/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#define COMMAND_MOST 4096 /* of it is told in the environment */
#define USAGE "usage: sudo [-nEHSkb] [-u root] [-D directory] [-i | -s] [NAME=value …] [command …]"

static const char *const kept[] = {"TERM", "COLORTERM", "COLORS", "DISPLAY", "HOSTNAME", "LANG", "LANGUAGE", "LC_*", "LINGUAS",
                                   "LS_COLORS", "PS1", "PS2", "TZ", "XAUTHORITY", NULL};

struct person { char text[512], *name, *home, *shell; uid_t uid; gid_t gid; };

struct options {
    const char *user, *dir, *keep; /* keep: names with commas between */
    bool login, shell, preserve, set_home, background, list, only;
};

int sudo_fail(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "sudo: ");
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, "\n");
    va_end(ap);
    return 1;
}

static bool parse_person(struct person *p, const char *line) {
    char *fields[7], *rest = p->text;
    snprintf(p->text, sizeof p->text, "%s", line);
    p->text[strcspn(p->text, "\n")] = 0;
    for (int i = 0; i < 7; i++)
        if (!(fields[i] = strsep(&rest, ":"))) return false;
    p->name = fields[0];
    p->uid = (uid_t)strtoul(fields[2], NULL, 10);
    p->gid = (gid_t)strtoul(fields[3], NULL, 10);
    p->home = fields[5];
    p->shell = *fields[6] ? fields[6] : "/bin/sh";
    return true;
}

/* By name, by "#number", or by `uid`. A C library's own function would load others, which a static program must not. */
static bool find_person(struct person *p, const char *name, uid_t uid) {
    char line[512];
    FILE *file = fopen("/etc/passwd", "re");
    bool number = name && *name == '#', found = false;
    if (number) uid = (uid_t)strtoul(name + 1, NULL, 10);
    while (file && !found && fgets(line, sizeof line, file))
        found = parse_person(p, line) && (name && !number ? !strcmp(p->name, name) : p->uid == uid);
    if (file) fclose(file);
    if (!found && (!name || number)) snprintf(line, sizeof line, "%u:x:%u:%u::/:/bin/sh", (unsigned)uid, (unsigned)uid, (unsigned)uid);
    return found || ((!name || number) && parse_person(p, line));
}

static const struct { const char *name; char letter; } long_options[] = {
    {"user", 'u'}, {"group", 'g'}, {"prompt", 'p'}, {"close-from", 'C'}, {"chdir", 'D'}, {"host", 'h'}, {"role", 'r'}, {"type", 't'},
    {"command-timeout", 'T'}, {"login", 'i'}, {"shell", 's'}, {"non-interactive", 'n'}, {"preserve-env", 'E'}, {"set-home", 'H'},
    {"stdin", 'S'}, {"reset-timestamp", 'k'}, {"remove-timestamp", 'K'}, {"preserve-groups", 'P'}, {"askpass", 'A'}, {"bell", 'B'},
    {"background", 'b'}, {"validate", 'v'}, {"list", 'l'}, {"version", 'V'}, {"help", '?'}};

static char letter_of(const char *word, size_t n) {
    for (size_t i = 0; i < sizeof long_options / sizeof *long_options; i++)
        if (strlen(long_options[i].name) == n && !strncmp(long_options[i].name, word, n)) return long_options[i].letter;
    return 0;
}

/* false: no such option. What only concerns passwords is taken, as there are none. */
static bool take(struct options *o, char letter, const char *value) {
    switch (letter) {
    case 'u': o->user = value; break;
    case 'D': o->dir = value; break;
    case 'E':
        o->keep = value ? value : o->keep;
        o->preserve |= !value;
        break;
    case 'H': o->set_home = true; break;
    case 'i': o->login = true; break;
    case 's': o->shell = true; break;
    case 'b': o->background = true; break;
    case 'l': o->list = o->only = true; break;
    case 'k': case 'K': case 'v': o->only = true; break;
    default: return letter && strchr("nSPABpC", letter);
    }
    return true;
}

/* How many words are options; 0: a message was written. argv[0] is passed over. */
static int parse(struct options *o, char **argv) {
    static const char valued[] = "ugpCDhrtT";
    int i = 1;
    for (; argv[i] && argv[i][0] == '-' && argv[i][1]; i++) {
        char *word = argv[i];
        if (!strcmp(word, "--")) return i + 1;
        if (word[1] == '-') {
            char *value = strchr(word, '='), letter = letter_of(word + 2, value ? (size_t)(value - word - 2) : strlen(word + 2));
            if (value) value++;
            else if (letter && strchr(valued, letter) && !(value = argv[++i])) return sudo_fail("%s needs a value", word), 0;
            if (!take(o, letter, value)) return sudo_fail("%s: no such option here\n" USAGE, word), 0;
            continue;
        }
        for (char *c = word + 1; *c; c++) {
            bool wants = strchr(valued, *c);
            char *value = !wants ? NULL : c[1] ? c + 1 : argv[++i];
            if (wants && !value) return sudo_fail("-%c needs a value", *c), 0;
            if (!take(o, *c, value)) return sudo_fail("-%c: no such option here\n" USAGE, *c), 0;
            if (wants) break;
        }
    }
    return i;
}

struct words { char **at; size_t n; };

static void add(struct words *w, char *word) {
    w->at = xrealloc(w->at, (w->n + 2) * sizeof *w->at);
    w->at[w->n++] = word;
    w->at[w->n] = NULL;
}

static size_t name_length(const char *entry) { return strcspn(entry, "="); }

/* NAME=value, and not a program whose path has such a sign. */
static bool is_setting(const char *word) {
    size_t n = name_length(word);
    return n && word[n] && !memchr(word, '/', n);
}

/* NAME=value, instead of what there was of that name. */
static void put(struct words *env, char *entry) {
    size_t n = name_length(entry);
    for (size_t i = 0; i < env->n; i++)
        if (name_length(env->at[i]) == n && !strncmp(env->at[i], entry, n)) {
            env->at[i] = entry;
            return;
        }
    add(env, entry);
}

static void set(struct words *env, const char *name, const char *value) {
    struct buf b = {0};
    buf_printf(&b, "%s=%s", name, value);
    buf_add(&b, "", 1);
    put(env, b.p);
}

static bool in_list(const char *list, const char *name, size_t n) {
    for (; list && *list; list += strcspn(list, ","), list += *list == ',')
        if (strcspn(list, ",") == n && !strncmp(list, name, n)) return true;
    return false;
}

static bool keeps(const struct options *o, const char *entry) {
    size_t n = name_length(entry);
    if (o->preserve || in_list(o->keep, entry, n)) return true;
    for (const char *const *k = kept; *k; k++) {
        size_t most = strlen(*k);
        if ((*k)[most - 1] == '*' ? !strncmp(entry, *k, most - 1) : n == most && !strncmp(entry, *k, n)) return true;
    }
    return false;
}

static char *joined(char *const *words, bool escape) {
    struct buf b = {0};
    for (char *const *w = words; *w; w++) {
        if (w != words) buf_add(&b, " ", 1);
        for (const char *c = *w; *c; c++) {
            if (escape && !isalnum((unsigned char)*c) && !strchr("_-$", *c) && !(*c & 0x80)) buf_add(&b, "\\", 1);
            buf_add(&b, c, 1);
        }
    }
    buf_add(&b, "", 1);
    return b.p;
}

static struct words environment(const struct options *o, const struct person *me, const struct person *who, char **own, char *const *command) {
    struct words env = {0};
    char number[16];
    for (char **e = environ; *e; e++)
        if (keeps(o, *e)) add(&env, *e);
    set(&env, "PATH", SECURE_PATH);
    if (!o->preserve || o->set_home || o->login) set(&env, "HOME", who->home);
    if (!o->preserve || o->login) set(&env, "SHELL", who->shell);
    set(&env, "USER", who->name);
    set(&env, "LOGNAME", who->name);
    set(&env, "SUDO_USER", me->name);
    snprintf(number, sizeof number, "%u", (unsigned)me->uid);
    set(&env, "SUDO_UID", number);
    snprintf(number, sizeof number, "%u", (unsigned)me->gid);
    set(&env, "SUDO_GID", number);
    char *all = joined(command, false);
    if (strlen(all) > COMMAND_MOST) all[COMMAND_MOST] = 0;
    set(&env, "SUDO_COMMAND", all);
    for (; *own && is_setting(*own); own++) put(&env, *own);
    return env;
}

/* The path of a command, or NULL. What is named by a path is left to execve. */
static char *find_command(char *name) {
    struct buf b = {0};
    if (strchr(name, '/')) return name;
    for (const char *p = SECURE_PATH; *p && *name;) {
        size_t n = strcspn(p, ":");
        b.n = 0;
        buf_printf(&b, "%.*s/%s", (int)n, p, name);
        buf_add(&b, "", 1);
        if (!access(b.p, X_OK)) return b.p;
        p += n + (p[n] == ':');
    }
    buf_free(&b);
    return NULL;
}

/* -i and -s: a shell, and what it is to run as one text. */
static char **shell_command(const struct options *o, const struct person *who, char **command, const char **name) {
    static char first[64];
    struct words w = {0};
    char *own = getenv("SHELL"), *shell = !o->login && own && *own ? own : strdup(who->shell);
    const char *slash = strrchr(shell, '/');
    if (o->login) {
        snprintf(first, sizeof first, "-%s", slash ? slash + 1 : shell);
        *name = first;
    }
    add(&w, shell);
    if (*command) add(&w, "-c"), add(&w, joined(command, true));
    return w.at;
}

static int run_here(const struct sudo_wish *w) {
    char *path = w->argv[0];
    if (w->dir && chdir(w->dir)) return sudo_fail("unable to change directory to %s: %s", w->dir, strerror(errno));
    if (w->name) w->argv[0] = (char *)w->name;
    execve(path, w->argv, w->envp);
    return sudo_fail("unable to execute %s: %s", path, strerror(errno));
}

static int run(const struct options *o, const struct person *me, const struct person *who, char **rest) {
    struct sudo_wish w = {.dir = o->dir ? o->dir : o->login ? who->home : NULL};
    char **command = rest;
    while (*command && is_setting(*command)) command++;
    w.argv = o->login || o->shell ? shell_command(o, who, command, &w.name) : command;
    if (!w.argv[0]) return sudo_fail("what is to be run?\n" USAGE);
    char *path = find_command(w.argv[0]);
    if (!path) return sudo_fail("%s: command not found", w.argv[0]);
    char *asked = w.argv[0];
    w.argv[0] = path;
    w.envp = environment(o, me, who, rest, w.argv).at;
    if (!w.name && asked != path && strlen(asked) < sizeof((struct sudo_request){0}).name) w.name = asked;
    if (o->background && fork() > 0) return 0;
    return who->uid == me->uid ? run_here(&w) : sudo_ask(&w);
}

/* -l, -v, -k: nothing is run, but who says yes must know that somebody would run it. */
static int answer(const struct options *o, const struct person *me, const struct person *who) {
    char *none[] = {NULL};
    int code = who->uid == me->uid ? 0 : sudo_ask(&(struct sudo_wish){.argv = none, .envp = none});
    if (code || !o->list) return code;
    return printf("User %s may run the following commands here:\n    (root) NOPASSWD: ALL\n", me->name) < 0;
}

static void fill_descriptors(void) {
    int fd;
    while ((fd = open("/dev/null", O_RDWR)) >= 0 && fd < 3) {}
    if (fd > 2) close(fd);
}

int sudo_main(int argc, char **argv) {
    struct options o = {.user = "root"};
    struct person me, who;
    fill_descriptors();
    if (argc == 2 && (!strcmp(argv[1], "-V") || !strcmp(argv[1], "--version"))) return puts("Sudo of Capsule") < 0;
    if (argc == 2 && (!strcmp(argv[1], "-h") || !strcmp(argv[1], "--help"))) return puts(USAGE) < 0;
    int n = parse(&o, argv);
    if (!n) return 1;
    find_person(&me, NULL, geteuid());
    if (!find_person(&who, o.user, 0)) return sudo_fail("unknown user %s", o.user);
    if (who.uid && who.uid != me.uid) return sudo_fail("there is nobody in this sandbox to become but root, not %s", o.user);
    if (o.list || (o.only && !argv[n])) return answer(&o, &me, &who);
    return run(&o, &me, &who, argv + n);
}
