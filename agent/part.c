/* What changed since the save before, by the events that track.c has: only that is looked at. Files that have several names are not
 * told so: who writes to one of them is heard at that name alone. */
#include "agent.h"
#include "track.h"
#include <dirent.h>
#include <limits.h>

#define DEEPEST 200

static char told[PATH_MAX]; /* the folder that was told last, "" none */

static bool has_links(int fd, int depth);

static bool is_or_has_links(int dir, const char *name, int depth) {
    struct stat st;
    if (fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW)) return true; /* which is to say: look at everything */
    if (!S_ISDIR(st.st_mode)) return S_ISREG(st.st_mode) && st.st_nlink > 1; /* an overlay's marks of what is deleted are one file */
    if (st.st_dev != saving.device) return false;
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    return fd < 0 || has_links(fd, depth + 1);
}

static bool has_links(int fd, int depth) {
    bool found = depth > DEEPEST;
    DIR *d = fdopendir(fd); /* owns fd */
    if (!d) return close(fd), true;
    for (struct dirent *e; !found && (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, "..")) found = is_or_has_links(fd, e->d_name, depth);
    closedir(d);
    return found;
}

static int depth_of(const char *path) {
    int depth = 0;
    for (; *path; path++) depth += *path == '/';
    return depth;
}

static void set_path(const char *folder, const char *name) {
    saving.path.n = 0;
    buf_add(&saving.path, folder, strlen(folder));
    if (name && *folder) buf_add(&saving.path, "/", 1);
    if (name) buf_add(&saving.path, name, strlen(name));
}

/* Whether its folder is one that is told for itself: one that has come is told with all that is in it, and forgotten here. */
static const char *folder_path(const struct touch *t, char *path) {
    size_t n;
    const struct folder *f = track_folders(&n) + t->folder;
    memcpy(path, track_text(f->path), f->path.n);
    path[f->path.n] = 0;
    return f->gone ? NULL : path;
}

static bool copy_name(const struct touch *t, char *name) {
    if (t->name.n > NAME_MAX) return false;
    memcpy(name, track_text(t->name), t->name.n);
    name[t->name.n] = 0;
    return true;
}

/* Over layers the disk's own folders appear in the upper one when something in them changes; nothing else does there. */
static bool is_root_of_disk(const char *name) {
    const struct json *mounts = json_get(box.spec, "mounts");
    for (const struct json *m = mounts ? mounts->child : NULL; m; m = m->next) {
        const char *type = json_str(m, "type"), *from = json_str(m, "from");
        if (type && from && !strcmp(type, "disk") && !strcmp(from, name)) return true;
    }
    return false;
}

/* One that was touched: what is to be told of it, before anything is told. false: it cannot be told by itself. */
static bool settle(struct touch *t, int *dir, uint32_t *opened) {
    char path[PATH_MAX], name[NAME_MAX + 1];
    struct stat st;
    t->act = TELL_NOTHING;
    if (!copy_name(t, name) || !folder_path(t, path) || (!*path && !is_root_of_disk(name))) return true;
    if (*dir < 0 || *opened != t->folder) {
        drop_fd(dir);
        *dir = save_open(path, O_RDONLY | O_DIRECTORY);
        *opened = t->folder;
        if (*dir < 0) return errno == ENOENT || errno == ENOTDIR || errno == ELOOP ? track_forget(path, strlen(path)), true : false;
    }
    set_path(path, name);
    bool there = !fstatat(*dir, name, &st, AT_SYMLINK_NOFOLLOW);
    if ((!there && errno != ENOENT) || saving.path.n >= PATH_MAX) return false;
    bool folder = there && S_ISDIR(st.st_mode);
    if (!folder || t->how & TOUCH_CAME) track_forget(saving.path.p, saving.path.n);
    if (folder && !(t->how & TOUCH_CAME)) return true;
    if (there && !folder && !(t->how & TOUCH_SURE) && !save_changed(&st)) return true;
    bool left_out = there && !saving.upper && !folder && !S_ISREG(st.st_mode) && !S_ISLNK(st.st_mode);
    t->act = there && !left_out ? TELL_IT : TELL_GONE;
    return !there || !is_or_has_links(*dir, name, depth_of(path) + 1);
}

/* One in a folder that nobody noted is told with that, if at all. */
static void touch(const char *path, unsigned how) {
    const char *slash = strrchr(path, '/');
    struct folder *f = slash ? track_find(path, (size_t)(slash - path)) : NULL;
    if (f) track_touch(f, slash + 1, strlen(slash + 1), how);
}

static void touch_held(void) {
    const char *path;
    ino_t ino;
    bool mapped;
    for (size_t i = 0; held_next(&i, &path, &ino, &mapped);) touch(path, 0);
}

/* What has one name only is told by itself, and is no longer noted unless somebody still has it under another. */
static bool look_at_links(void) {
    char path[PATH_MAX];
    struct stat st;
    size_t n;
    const struct path *links = track_links(&n);
    for (size_t i = n; i--;) {
        memcpy(path, track_text(links[i]), links[i].n);
        path[links[i].n] = 0;
        cleanup_fd int fd = save_open(path, O_PATH);
        if (fd < 0 || fstat(fd, &st)) return false;
        if (!save_changed(&st)) continue;
        if (st.st_nlink > 1) return false;
        touch(path, TOUCH_SURE);
        track_drop_link(i);
    }
    return true;
}

/* A folder whose names are not all told: those that are not are as they were. */
static void tell_folder(const char *path, bool changed) {
    struct stat st;
    set_path(path, NULL);
    cleanup_fd int fd = save_open(path, O_RDONLY | O_DIRECTORY);
    if (fd < 0 || fstat(fd, &st)) return save_give_up(errno, NULL, NULL);
    saving.changed += changed;
    save_entry(save_opaque(fd) ? (changed ? 'P' : 'E') : (changed ? 'p' : 'e'), &st, "", 0);
}

/* With those above it that were not told yet. */
static void tell_way(const char *path, bool changed) {
    char part[PATH_MAX];
    if (!strcmp(path, told)) return;
    for (size_t n = 0;; n++) {
        if (path[n] && path[n] != '/') continue;
        memcpy(part, path, n);
        part[n] = 0;
        bool on_way = !strncmp(told, part, n) && (!told[n] || told[n] == '/');
        struct folder *f = on_way ? NULL : track_find(part, n);
        if (!on_way) tell_folder(part, path[n] ? f && f->changed : changed);
        if (!path[n]) break;
    }
    memcpy(told, path, strlen(path) + 1);
}

static void tell(const struct touch *t) {
    char path[PATH_MAX], name[NAME_MAX + 1];
    if (t->act == TELL_NOTHING || !copy_name(t, name) || !folder_path(t, path)) return;
    if (*path) tell_way(path, false);
    cleanup_fd int dir = save_open(path, O_RDONLY | O_DIRECTORY);
    if (dir < 0) return save_give_up(errno, NULL, NULL);
    set_path(path, name);
    if (t->act == TELL_IT) return save_one(dir, name, depth_of(path) + 1, false);
    saving.changed++;
    save_entry('g', &(struct stat){0}, "", 0);
}

/* In the order of paths: a folder, what was touched in it, and then the folders in it. */
static void tell_all(struct touch *touches, size_t n) {
    char path[PATH_MAX];
    size_t nfolders, at = 0;
    struct folder *folders = track_folders(&nfolders);
    for (size_t i = 0; i < nfolders; i++) {
        size_t first = at;
        while (at < n && touches[at].folder == i) at++;
        folders = track_folders(&nfolders); /* what has come is noted meanwhile */
        if (folders[i].gone) continue;
        struct path p = folders[i].path;
        memcpy(path, track_text(p), p.n);
        path[p.n] = 0;
        if (folders[i].changed && p.n) tell_way(path, true);
        for (size_t k = first; k < at; k++) tell(&touches[k]);
    }
}

/* Everything is looked at, but where their times do not tell: perhaps they were mapped. */
static void unmark_touched(const struct touch *touches, size_t n) {
    char path[PATH_MAX], name[NAME_MAX + 1];
    struct stat st;
    for (size_t i = 0; saving.memory && i < n; i++) {
        if (!copy_name(&touches[i], name) || !folder_path(&touches[i], path)) continue;
        cleanup_fd int dir = save_open(path, O_PATH | O_DIRECTORY);
        if (dir >= 0 && !fstatat(dir, name, &st, AT_SYMLINK_NOFOLLOW) && S_ISREG(st.st_mode)) held_unmark(st.st_ino);
    }
}

bool part_save(void) {
    size_t n;
    int dir = -1;
    uint32_t opened = 0;
    touch_held();
    bool ok = look_at_links();
    struct touch *touches = track_touches(&n);
    for (size_t i = 0; ok && i < n; i++) ok = settle(&touches[i], &dir, &opened);
    drop_fd(&dir);
    if (!ok) return unmark_touched(touches, n), false;
    set_path("", NULL);
    save_entry('o', &(struct stat){0}, "", 0);
    saving.part_since = saving.since;
    saving.since = 0; /* what is told from here on has changed, or come */
    saving.brief = false;
    tell_all(touches, n);
    return true;
}
