/* What has happened to the files of a box since they were told, so that the next save of a row looks at nothing else.
 *
 * Every folder that was told is watched (inotify). pid 1 holds the events and, in a file without a name, the folders' paths; the
 * workers that save come and go. What was told lies on what the save before told, which the client names by its time: if that is not
 * the one that was noted here, or events were lost, everything is looked at again. Over layers a folder is watched twice: as programs
 * see it, where what they do is told, and in the upper folder, where those appear that are copied up for what is in them. */
#include "agent.h"
#include "track.h"
#include <stdio.h>
#include <sys/inotify.h>
#include <sys/mman.h>

#define SEEN (IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_MODIFY | IN_CLOSE_WRITE | IN_ATTRIB | IN_DELETE_SELF)
#define COPIED_UP (IN_CREATE | IN_MOVED_TO)
#define LISTING (IN_CREATE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO)

#define MOST_TEXT (16u << 20) /* of the folders and links that are noted: we are not in the box's cgroup */

struct head { uint32_t folders, links, held; bool tired, too_many; double at; }; /* at 0: of no save; tired: no more watches, or too many paths */
struct line { union { int32_t wd[2]; uint64_t ino; }; uint32_t n; };             /* a path follows */

static int events = -1, notes = -1; /* pid 1's */
static struct head head;
static struct buf text;             /* all paths and names */
static struct folder *folders;      /* those that were noted by path, then new ones as they come */
static size_t nfolders, nnoted, room;
static struct path *links;
static size_t nlinks, links_room;
static struct touch *touches;
static size_t ntouches, touches_room;
static struct { int wd; uint32_t at; } *places; /* where the folder of a watch is */
static size_t nplaces;

void track_open(void) {
    if (!box.namespaces || (events >= 0 && notes >= 0)) return;
    if (events < 0) events = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (notes < 0) notes = memfd_create("folders", MFD_CLOEXEC);
    if (notes >= 0 && write(notes, &(struct head){0}, sizeof head) != sizeof head) drop_fd(&notes);
}

void track_let_go(void) {
    drop_fd(&events);
    drop_fd(&notes);
}

bool track_is_on(void) { return events >= 0 && notes >= 0 && !head.tired; }
const char *track_text(struct path p) { return text.p + p.at; }

static struct path keep_text(const char *p, size_t n) {
    struct path kept = {(uint32_t)text.n, (uint32_t)n};
    buf_add(&text, p, n);
    return kept;
}

static void *one_more(void *all, size_t n, size_t *room_for, size_t size) {
    if (n < *room_for) return all;
    *room_for = *room_for ? *room_for * 2 : 64;
    return xrealloc(all, *room_for * size);
}

static void add_folder(const int wd[2], struct path path) {
    folders = one_more(folders, nfolders, &room, sizeof *folders);
    folders[nfolders++] = (struct folder){.wd = {wd[0], wd[1]}, .path = path};
}

static void add_link(struct path path) {
    links = one_more(links, nlinks, &links_room, sizeof *links);
    links[nlinks++] = path;
}

/* Folders before what is in them, and that before what comes after them. */
static int compare_paths(const char *a, size_t an, const char *b, size_t bn) {
    size_t n = an < bn ? an : bn, i = 0;
    while (i < n && a[i] == b[i]) i++;
    int x = i == an ? -1 : a[i] == '/' ? 0 : (unsigned char)a[i], y = i == bn ? -1 : b[i] == '/' ? 0 : (unsigned char)b[i];
    return (x > y) - (x < y);
}

static int by_path(const void *a, const void *b) {
    struct path p = ((const struct folder *)a)->path, q = ((const struct folder *)b)->path;
    return compare_paths(text.p + p.at, p.n, text.p + q.at, q.n);
}

static size_t first_not_before(const char *path, size_t n) {
    size_t low = 0, high = nnoted;
    while (low < high) {
        size_t mid = (low + high) / 2;
        if (compare_paths(text.p + folders[mid].path.at, folders[mid].path.n, path, n) < 0) low = mid + 1;
        else high = mid;
    }
    return low;
}

struct folder *track_find(const char *path, size_t n) {
    size_t at = first_not_before(path, n);
    bool found = at < nnoted && folders[at].path.n == n && !memcmp(text.p + folders[at].path.at, path, n);
    return found && !folders[at].gone ? &folders[at] : NULL;
}

void track_forget(const char *path, size_t n) {
    for (size_t i = first_not_before(path, n); i < nnoted; i++) {
        struct path p = folders[i].path;
        if (p.n < n || memcmp(text.p + p.at, path, n) || (p.n > n && text.p[p.at + n] != '/')) return;
        folders[i].gone = true;
    }
}

static size_t place_of(int wd) {
    size_t at = (uint32_t)wd * 0x9e3779b9u & (nplaces - 1);
    while (places[at].wd && places[at].wd != wd) at = (at + 1) & (nplaces - 1);
    return at;
}

static void note_place(int wd, size_t at) {
    size_t place = place_of(wd);
    places[place].wd = wd;
    places[place].at = (uint32_t)at;
}

static bool index_watches(void) {
    for (nplaces = 64; nplaces < nfolders * 4;) nplaces *= 2;
    places = calloc(nplaces, sizeof *places);
    for (size_t i = 0; places && i < nfolders; i++)
        for (size_t k = 0; k < 2; k++)
            if (folders[i].wd[k] > 0) note_place(folders[i].wd[k], i * 2 + k);
    return places;
}

void track_touch(struct folder *f, const char *name, size_t n, unsigned how) {
    touches = one_more(touches, ntouches, &touches_room, sizeof *touches);
    touches[ntouches++] = (struct touch){(uint32_t)(f - folders), keep_text(name, n), how, TELL_NOTHING};
}

static void take_event(const struct inotify_event *e) {
    size_t place = place_of(e->wd);
    if (!places[place].wd) return; /* of a folder that we have forgotten */
    struct folder *f = &folders[places[place].at / 2];
    bool copied_up = places[place].at % 2;
    if (e->mask & (IN_DELETE_SELF | IN_IGNORED) && !copied_up) f->gone = true;
    if (e->mask & LISTING || !e->len) f->changed = true;
    if (!e->len) return;
    size_t n = strnlen(e->name, e->len);
    bool came = e->mask & (IN_CREATE | IN_MOVED_TO);
    if (!(e->mask & IN_ISDIR)) track_touch(f, e->name, n, !copied_up && (saving.memory || e->mask & ~(uint32_t)IN_CLOSE_WRITE) ? TOUCH_SURE : 0);
    else if (e->mask & LISTING) track_touch(f, e->name, n, TOUCH_SURE | (came ? TOUCH_CAME : 0)); /* its own watch tells of its mode */
}

/* false: some are lost. All are taken in any case: they are of what is looked at now. */
static bool take_events(bool wanted) {
    static char chunk[64u << 10] __attribute__((aligned(8)));
    for (ssize_t n; (n = RETRY(read(events, chunk, sizeof chunk))) > 0;)
        for (ssize_t at = 0; at < n;) {
            const struct inotify_event *e = (const struct inotify_event *)(chunk + at);
            at += (ssize_t)(sizeof *e + e->len);
            if (e->mask & (IN_Q_OVERFLOW | IN_UNMOUNT)) wanted = false;
            else if (wanted) take_event(e);
        }
    return wanted;
}

static int by_place(const void *a, const void *b) {
    const struct touch *x = a, *y = b;
    if (x->folder != y->folder) return x->folder < y->folder ? -1 : 1;
    return compare_paths(text.p + x->name.at, x->name.n, text.p + y->name.at, y->name.n);
}

/* In the order of paths, each name once. */
struct touch *track_touches(size_t *n) {
    size_t kept = 0;
    if (ntouches) qsort(touches, ntouches, sizeof *touches, by_place);
    for (size_t i = 0; i < ntouches; i++) {
        if (kept && !by_place(&touches[kept - 1], &touches[i])) touches[kept - 1].how |= touches[i].how;
        else touches[kept++] = touches[i];
    }
    *n = ntouches = kept;
    return touches;
}

/* Once they are in order. */
bool track_touched(size_t folder, const char *name) {
    size_t low = 0, high = ntouches, n = strlen(name);
    while (low < high) {
        size_t mid = (low + high) / 2;
        const struct touch *t = &touches[mid];
        int order = t->folder != folder ? (t->folder < folder ? -1 : 1) : compare_paths(text.p + t->name.at, t->name.n, name, n);
        if (!order) return true;
        if (order < 0) low = mid + 1;
        else high = mid;
    }
    return false;
}

struct folder *track_folders(size_t *n) { return *n = nnoted, folders; }
const struct path *track_links(size_t *n) { return *n = nlinks, links; }

/* A hostile program cannot reach what pid 1 wrote, so it is as we left it. What was mapped then is looked at in any case. */
static bool read_notes(bool known) {
    off_t size = lseek(notes, 0, SEEK_END);
    cleanup_free char *all = size > 0 ? malloc((size_t)size) : NULL;
    if (!all || pread(notes, all, (size_t)size, 0) != size) return false;
    const char *p = all + sizeof head;
    for (uint32_t i = 0; i < head.folders + head.links + head.held; i++) {
        struct line l;
        memcpy(&l, p, sizeof l);
        const char *path = p + sizeof l;
        if (i >= head.folders + head.links) held_was_mapped(path, l.n, (ino_t)l.ino);
        else if (known && i < head.folders) add_folder(l.wd, keep_text(path, l.n));
        else if (known) add_link(keep_text(path, l.n));
        p += sizeof l + l.n;
    }
    nnoted = nfolders;
    return known && index_watches();
}

bool track_begin(double since) {
    if (events < 0 || notes < 0 || pread(notes, &head, sizeof head, 0) != sizeof head) return track_let_go(), false;
    double off = head.at - since;
    bool known = !head.tired && head.at > 0 && off < 2e-6 && off > -2e-6;
    struct head failed = head;
    failed.at = 0; /* until we have told all */
    (void)!pwrite(notes, &failed, sizeof failed, 0);
    known = take_events(read_notes(known));
    bool unheard = saving.memory && !known && !head.tired; /* what was mapped and let go: no times tell of it, and the event is lost */
    bool all = unheard || head.too_many || held_too_many();
    if (all) saving.since = 0;
    return known && !all;
}

void track_forget_all(void) {
    nfolders = nnoted = nlinks = ntouches = text.n = 0;
}

void track_drop_link(size_t i) { links[i] = links[--nlinks]; }
void track_give_up(void) { head.tired = true; }

static bool has_room(void) {
    if (text.n > MOST_TEXT) track_give_up();
    return text.n <= MOST_TEXT;
}

void track_link(const char *path, size_t n) {
    if (track_is_on() && has_room()) add_link(keep_text(path, n));
}

static int watch(int fd, uint32_t mask) {
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return inotify_add_watch(events, path, mask | IN_ONLYDIR | IN_EXCL_UNLINK);
}

static const struct folder *noted_with(int wd) {
    size_t place = nnoted && wd > 0 ? place_of(wd) : 0;
    return nnoted && wd > 0 && places[place].wd ? &folders[places[place].at / 2] : NULL;
}

/* `fd` is the folder on the disk; over layers `shown` is the same as programs see it, else -1. The topmost of an overlay has no path,
 * and is not watched as a folder: the disk's own appear in it. */
const struct folder *track_folder(const char *path, size_t n, int fd, int shown) {
    if (!track_is_on() || !has_room()) return NULL;
    bool twice = shown >= 0 || !n;
    int wd[2] = {n ? watch(shown >= 0 ? shown : fd, SEEN) : 0, twice ? watch(fd, COPIED_UP) : 0};
    if (wd[0] < 0 || wd[1] < 0) return track_give_up(), NULL;
    add_folder(wd, keep_text(path, n));
    return noted_with(wd[0]);
}

static void add_line(struct buf *b, const struct line *l, const char *path) {
    buf_add(b, l, sizeof *l);
    buf_add(b, path, l->n);
}

static void add_held(struct buf *b, struct head *h) {
    const char *path;
    ino_t ino;
    bool mapped;
    for (size_t i = 0; held_next(&i, &path, &ino, &mapped);) {
        if (!mapped) continue;
        add_line(b, &(struct line){.ino = ino, .n = (uint32_t)strlen(path)}, path);
        h->held++;
    }
}

/* What is there from now on. Should this save not become a part of the row after all, the next names another one's time. */
void track_end(double at) {
    struct buf b = {0};
    if (events < 0 || notes < 0) return;
    for (size_t i = 0; head.tired && i < nfolders; i++)
        for (int k = 0; k < 2; k++)
            if (folders[i].wd[k] > 0) inotify_rm_watch(events, folders[i].wd[k]);
    struct head h = {.tired = head.tired, .too_many = held_too_many(), .at = head.tired || at == head.at ? 0 : at}; /* two within a tick are not told apart */
    buf_add(&b, &h, sizeof h);
    if (nfolders > nnoted) qsort(folders + nnoted, nfolders - nnoted, sizeof *folders, by_path);
    for (size_t old = 0, new = nnoted; !head.tired && (old < nnoted || new < nfolders);) {
        struct folder *f = new == nfolders || (old < nnoted && by_path(&folders[old], &folders[new]) < 0) ? &folders[old++] : &folders[new++];
        if (f->gone) continue;
        add_line(&b, &(struct line){.wd = {f->wd[0], f->wd[1]}, .n = f->path.n}, text.p + f->path.at);
        h.folders++;
    }
    for (; !head.tired && h.links < nlinks; h.links++) add_line(&b, &(struct line){.n = links[h.links].n}, text.p + links[h.links].at);
    add_held(&b, &h);
    memcpy(b.p, &h, sizeof h);
    bool ok = !ftruncate(notes, 0) && pwrite(notes, b.p + sizeof h, b.n - sizeof h, sizeof h) == (ssize_t)(b.n - sizeof h);
    if (!ok || pwrite(notes, b.p, sizeof h, 0) != sizeof h) (void)!ftruncate(notes, 0); /* the head last: we may be killed */
}
