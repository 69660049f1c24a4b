"""Files of the host: read, write, make, rename, watch or execute one that is none of theirs."""

from __future__ import annotations

from tests.escape.attempt import LOCAL, ROOT, Attempt

VISIBLE = (
    "without a mount namespace names and attributes of files can be seen: Landlock checks opening"
)
LANDLOCK_SEES = {"landlock-root": VISIBLE, "landlock-user": VISIBLE}
SHARED_USR = "/usr is the host's own: locks and events on its files are shared with the host"

ATTEMPTS = [
    Attempt(
        "read-file",
        "open and read a file of the host that all users may read",
        "escaped(open(A['secret']).read())",
        actors=("open_file",),
    ),
    Attempt(
        "read-own-file",
        "read a private file of the user who runs the server",
        "escaped(open(A['secret']).read())",
        actors=("own_file",),
    ),
    Attempt(
        "write-file",
        "write to a file of the host that all users may write, and truncate it by its path",
        """
        try:
            open(A["secret"], "a").close()
        except OSError:
            os.truncate(A["secret"], 0)
        escaped("written")
        """,
        actors=("open_file",),
    ),
    Attempt(
        "create-file",
        "list a folder like /tmp of the host, make a file, a folder, a FIFO, a symlink in it",
        """
        made = []
        for make in (
            lambda p: open(p, "x"), os.mkdir, os.mkfifo, lambda p: os.symlink("/", p),
            lambda p: os.listdir(os.path.dirname(p)),
        ):
            try:
                made.append(make(f"{A['shared']}/{len(made)}"))
            except OSError as error:
                refused = error
        if made: escaped(f"made {len(made)}")
        raise refused
        """,
        actors=("shared_folder",),
    ),
    Attempt(
        "remove-file",
        "unlink and rename a private file of the user who runs the server",
        """
        try:
            os.rename(A["secret"], "mine")
        except OSError:
            os.unlink(A["secret"])
        escaped("gone")
        """,
        actors=("own_file",),
    ),
    Attempt(
        "symlink-to-file",
        "follow a symlink that leads from the workspace to a file of the host",
        "os.symlink(A['secret'], 'link'); escaped(open('link').read())",
        actors=("open_file",),
    ),
    Attempt(
        "hard-link-file",
        "give a file of the host a second name in the workspace",
        "os.link(A['secret'], 'link'); escaped(open('link').read())",
        actors=("own_file",),
    ),
    Attempt(
        "proc-root",
        "reach the host through /proc/PID/root and /proc/PID/cwd of self, pid 1 and the parent",
        """
        for pid in ("self", "1", os.getppid(), "thread-self", A.get("keeper", "self")):
            for way in ("root", "cwd/../../../../../../.."):
                try:
                    escaped(open(f"/proc/{pid}/{way}{A['secret']}").read())
                except OSError as error:
                    refused = error
        raise refused
        """,
        actors=("open_file",),
    ),
    Attempt(
        "walk-up",
        "walk up by `..` from descriptors of /, the workspace and /proc, then down to a file",
        """
        for start in ("/", ".", "/proc", "/dev", "/usr"):
            try:
                at = os.open(start, os.O_PATH)
                for _ in range(40):
                    at = os.open("..", os.O_PATH, dir_fd=at)
                fd = os.open(A["secret"].lstrip("/"), os.O_RDONLY, dir_fd=at)
                escaped(os.read(fd, 100))
            except OSError as error:
                refused = error
        raise refused
        """,
        actors=("open_file",),
    ),
    Attempt(
        "file-handle",
        "open a file by its handle, around every mount (the shocker exploit)",
        """
        handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
        mount = ctypes.c_int()
        call("name_to_handle_at", -100, b"/usr", handle, ctypes.byref(mount), 0)
        fd = call("open_by_handle_at", os.open("/usr", os.O_RDONLY), handle, os.O_RDONLY)
        escaped(os.listdir(fd)[:3])
        """,
        proof=ROOT,
    ),
    Attempt(
        "open-path-mode",
        "change mode, owner, times, attributes of a file through a descriptor that opens nothing",
        """
        fd = os.open(A["secret"], os.O_PATH)
        done = []
        for name, *arguments in (
            ("fchmodat2", fd, b"", 0o604, 0x1000),
            ("fchownat", fd, b"", os.getuid(), os.getgid(), 0x1000),
            ("utimensat", fd, b"", None, 0x1000),
            ("setxattrat", fd, b"", 0x1000, b"user.x", struct.pack("QII", 0, 0, 0), 16),
            ("fchmod", fd, 0o604),
        ):
            if name in A["calls"] and tried(name, *arguments) == 0:
                done.append(name)
        if done: escaped(done)
        """,
        actors=("own_file",),
        args={"calls": ["fchmodat2", "utimensat", "setxattrat", "fchmod"]},
    ),
    Attempt(
        "chmod-file",
        "change mode, times, attributes of a private file of the server's user, by its path",
        """
        for change in (
            lambda: os.chmod(A["secret"], 0o606), lambda: os.utime(A["secret"], (1, 1)),
            lambda: os.setxattr(A["secret"], "user.escaped", b"x"),
        ):
            try:
                change()
                escaped("changed")
            except OSError as error:
                refused = error
        raise refused
        """,
        actors=("own_file",),
    ),
    Attempt(
        "execute-file",
        "execute a program of the host that is not below /usr",
        """
        for argv in ([A["program"]], ["/bin/sh", A["program"]]):
            ended = subprocess.run(argv, capture_output=True, text=True)
            if ended.returncode == 0: escaped(ended.stdout)
        """,
        actors=("host_program",),
    ),
    Attempt(
        "stat-file",
        "learn that a file of the host exists, and its size",
        "escaped(os.stat(A['secret']).st_size)",
        actors=("open_file",),
        stands=LANDLOCK_SEES,
    ),
    Attempt(
        "read-link",
        "read where a symlink of the host leads",
        "escaped(os.readlink('/proc/mounts' if os.path.exists(A['secret']) else A['secret']))",
        actors=("open_file",),
        stands=LANDLOCK_SEES,
    ),
    Attempt(
        "watch-folder",
        "learn names of files that somebody makes in a folder of the host, by inotify",
        """
        fd = check(libc.inotify_init1(0))
        check(libc.inotify_add_watch(fd, A["busy"].encode(), 0xFFF))
        if select.select([fd], [], [], 2)[0]: escaped(os.read(fd, 4096))
        """,
        actors=("busy_folder",),
    ),
    Attempt(
        "watch-usr",
        "see by inotify when the host opens a program of /usr",
        """
        fd = check(libc.inotify_init1(0))
        check(libc.inotify_add_watch(fd, A["busy"].encode(), 0x20))
        if select.select([fd], [], [], 1)[0]: escaped("the host opened it")
        """,
        actors=("busy_program",),
        stands={"namespaces-root": SHARED_USR, "namespaces-user": SHARED_USR},
    ),
    Attempt(
        "lock-usr",
        "lock a file of /usr against the host",
        """
        file = open(A["wanted"], "rb")
        fcntl.flock(file, fcntl.LOCK_SH)
        time.sleep(0.2)
        """,
        actors=("locker",),
        stands=dict.fromkeys(LOCAL, SHARED_USR),
    ),
    Attempt(
        "write-usr",
        "open a file of /usr for writing",
        "os.open('/usr/lib/os-release', os.O_WRONLY); escaped('open for writing')",
        proof=ROOT,
    ),
    Attempt(
        "create-in-system",
        "make a file in /, /usr, /etc, /bin, /lib, /opt, /sys or /proc",
        """
        for place in "/ /usr /usr/bin /etc /bin /lib /opt /home /var/lib /sys /proc".split():
            path = f"{place}/.capsule-escape"
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                os.unlink(path)
                escaped(place)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "read-shadow",
        "read the host's /etc/shadow, root's home and the machine's id",
        """
        for path in ("/etc/shadow", "/root/.bashrc", "/etc/machine-id", "/etc/hostname"):
            try:
                text = open(path).read()
                if text.strip() not in ("", "capsule"): escaped(path)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=ROOT,
    ),
]
