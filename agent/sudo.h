/* sudo: what its three parts say to each other. door.c is pid 1's, sudo_session.c root's, sudo.c and sudo_client.c the user's. */
#ifndef CAPSULE_SUDO_H
#define CAPSULE_SUDO_H

#include "agent.h"
#include <termios.h>

#define SUDO_PROGRAM (box.container ? "/usr/local/bin/sudo" : "/opt/capsule/bin/sudo") /* this binary, as whoever has a door has it */
#define SUDO_SESSION "sudo-session"          /* its name while it is root */
#define SUDO_CONN 3                          /* a session's socket to its client */
#define SUDO_DOOR "capsule-sudo"             /* an abstract name in the box's network namespace; in a container: */
#define SUDO_PATH "/dev/capsule-sudo"        /* there Landlock keeps programs from abstract names that are not their own */
#define SUDO_MOST (2u << 20)                 /* bytes of arguments and environment */
#define SUDO_WORDS 65536

/* The first message of a client, with five descriptors. The text, in the first of them, is words that each end with a NUL: the
 * folder to start in ("": that of the second descriptor), argc arguments of which the first is the program, and the environment.
 * Without an argument it is only asked whether one would be started. */
enum { SUDO_TEXT, SUDO_CWD, SUDO_IN, SUDO_OUT, SUDO_ERR, SUDO_FDS };
struct sudo_request {
    uint32_t size, argc, words;
    uint32_t terminal;     /* a bit for each of stdin, stdout, stderr that is to be the session's terminal; 0: it has none */
    uint32_t mask;         /* of the modes of files */
    uint64_t ignored;      /* signals that the program is to ignore, as its caller does; bit 0: the first */
    char name[64];         /* of the program, as its first argument; "": the path */
    struct winsize window;
    struct termios mode;
};

/* All others. To the client: REFUSED (text), BEGUN (before the program can do anything), TERMINAL (with its descriptor), STOPPED
 * (by which signal), FAILED (errno of execve), ENDED (as wait(2) says it). From it: SIGNAL. */
enum sudo_kind { SU_REFUSED = 1, SU_TERMINAL, SU_STOPPED, SU_FAILED, SU_ENDED, SU_SIGNAL, SU_BEGUN };
struct sudo_message { int32_t kind, value; char text[160]; };

/* sudo_client.c */
struct sudo_wish {
    const char *dir;      /* NULL: where we are */
    const char *name;     /* argv[0]; NULL: the path */
    char **argv, **envp;  /* argv[0]: the path; NULL: it is only asked */
};
int sudo_ask(const struct sudo_wish *w); /* its exit status, or does not return */

/* sudo.c */
int sudo_fail(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#endif
