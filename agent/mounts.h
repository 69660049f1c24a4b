/* The kernel's newer calls for mounts, which C libraries and headers have in part, and not alike. */
#ifndef MOUNTS_H
#define MOUNTS_H

#include <stdint.h>
#include <sys/syscall.h>

#ifndef SYS_open_tree
#define SYS_open_tree 428
#define SYS_move_mount 429
#define SYS_fsopen 430
#define SYS_fsconfig 431
#define SYS_fsmount 432
#endif
#ifndef SYS_mount_setattr
#define SYS_mount_setattr 442
#endif
#ifndef AT_RECURSIVE
#define AT_RECURSIVE 0x8000
#endif

enum { TREE_CLONE = 1, FROM_EMPTY_PATH = 4, TO_EMPTY_PATH = 0x40 };                                /* open_tree, move_mount */
enum { FS_CLOEXEC = 1, FS_SET_FLAG = 0, FS_SET_STRING = 1, FS_CREATE = 6 };                        /* fsopen, fsmount, fsconfig */
enum { SET_RDONLY = 1, SET_NOSUID = 2, SET_NODEV = 4, SET_NOEXEC = 8, SET_IDMAP = 0x100000 };      /* fsmount, mount_setattr */
struct attr { uint64_t set, clear, propagation, userns; };

/* rootfs.c: a mount that is nowhere yet; `below`: AT_RECURSIVE, or 0 for it alone. -1: see errno. */
int mount_copy(const char *path, unsigned below, struct attr a);

#endif
