/* What a worker that saves knows of the saves before it (track.c), and what it tells (save.c, part.c). */
#ifndef TRACK_H
#define TRACK_H

#include "agent.h"
#include <sys/stat.h>

struct path { uint32_t at, n; };
struct folder { int wd[2]; struct path path; bool changed, gone; }; /* itself, or which names are in it */
enum { TOUCH_SURE = 1, TOUCH_CAME = 2 };    /* not sure: perhaps it was only opened. Came: a folder that was not there, or elsewhere */
struct touch { uint32_t folder; struct path name; unsigned how; enum { TELL_NOTHING, TELL_IT, TELL_GONE } act; };

bool track_begin(double since);             /* false: everything has to be looked at */
bool track_is_on(void);
void track_forget_all(void);
const char *track_text(struct path p);
struct folder *track_find(const char *path, size_t n);
void track_forget(const char *path, size_t n); /* the folder, and those in it */
void track_touch(struct folder *f, const char *name, size_t n, unsigned how);
struct touch *track_touches(size_t *n);     /* by path */
bool track_touched(size_t folder, const char *name);
struct folder *track_folders(size_t *n);    /* that were noted, by path */
const struct path *track_links(size_t *n);  /* files with further names, or that are `held_lost` */
void track_drop_link(size_t i);             /* the last one takes its place */
const struct folder *track_folder(const char *path, size_t n, int fd, int shown); /* as which it was noted, if it was */
void track_link(const char *path, size_t n);
void track_give_up(void);                    /* nothing is noted for this box any more */
void track_end(double at);

/* held.c: files that programs have open to write to, or mapped; their paths are relative to the disk */
void held_look(void);                       /* while we may look at processes */
bool held_too_many(void);                   /* to know which: everything is told, now and the next time */
void held_mark(void);                       /* and so that the next change to one shows in its times; where none does, it is `unmarked` */
void held_unmark(ino_t ino);
bool held_unmarked(const struct stat *st);
bool held_lost(const struct stat *st);      /* somebody may write to it under a name that it no longer has: that is no event */
bool held_next(size_t *i, const char **path, ino_t *ino, bool *mapped); /* ino: 0 if it is marked */
void held_was_mapped(const char *path, size_t n, ino_t ino); /* at the save before */
void held_found(int fd, const struct stat *st); /* one that is told: it may be one of which no more than the inode is known */

/* save.c */
struct saving {
    int disk;
    struct buf path;     /* of what is being told */
    double since;        /* what has not changed since then is told, but not its content */
    bool brief;          /* nor is it told at all, in a folder that has not changed either */
    bool upper;          /* what is read is the upper folder of an overlay */
    bool memory;         /* the disk is: what is written through a mapping touches no times there */
    double part_since;   /* of a part, of which all that is told has changed or come: since then */
    size_t was;          /* as which the folder was noted that has come, and is being told; 0: as none, else one more */
    dev_t device;        /* of the folder that is walked: a volume is another, and no part of it */
    uint64_t changed;
};
extern struct saving saving;
void save_entry(char kind, const struct stat *st, const char *target, size_t n);
void save_one(int dir, const char *name, int depth, bool same);
bool save_changed(const struct stat *st);
bool save_opaque(int fd);
void save_give_up(int err, const char *code, const char *message);
size_t save_watch(int fd);                  /* the folder at saving.path, from now on; what it `was` */
int save_open(const char *path, int flags); /* relative to the disk; follows nothing */
/* part.c */
bool part_save(void);                       /* what changed, and nothing else; false: nothing was told */

#endif
