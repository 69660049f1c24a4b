"""Mounts: make one, move one, take a mask away, or change what / is."""

from __future__ import annotations

from tests.escape.attempt import ROOT, Attempt

MOUNTINFO = "/proc/self/mountinfo shows from which folders of the host the mounts were made"
NAMED = "gVisor shows the container's id, as the name of its cgroup; no path of the host"

ATTEMPTS = [
    Attempt(
        "mount-tmpfs",
        "mount a file system",
        """
        os.mkdir("m")
        check(libc.mount(b"tmpfs", b"m", b"tmpfs", 0, b"size=4k"))
        libc.umount2(b"m", 2)
        escaped("mounted")
        """,
        proof=ROOT,
    ),
    Attempt(
        "mount-proc",
        "mount a fresh /proc without masks, a sysfs, a devpts, a cgroup tree",
        """
        os.mkdir("m")
        for kind in (b"proc", b"sysfs", b"devpts", b"cgroup2", b"mqueue"):
            if libc.mount(kind, b"m", kind, 0, None) == 0:
                libc.umount2(b"m", 2)
                escaped(kind)
        raise OSError(ctypes.get_errno(), "refused")
        """,
        proof=ROOT,
    ),
    Attempt(
        "bind",
        "bind / to another place, to look under what is mounted on it",
        """
        os.mkdir("m")
        check(libc.mount(b"/", b"m", None, 4096, None))
        libc.umount2(b"m", 2)
        escaped(os.listdir("m"))
        """,
        proof=ROOT,
    ),
    Attempt(
        "remount",
        "make /, /usr, /proc/sys or /sys writable by a remount",
        """
        for place in (b"/", b"/usr", b"/proc/sys", b"/sys", b"/dev/null"):
            if libc.mount(None, place, None, 32 | 4096, None) == 0: escaped(place)
        raise OSError(ctypes.get_errno(), "refused")
        """,
        proof="it would change the host's own mounts",
    ),
    Attempt(
        "unmask",
        "unmount what masks files of /proc, and the private /tmp, /dev and /workspace",
        """
        for place in ("/proc/kallsyms", "/proc/cmdline", "/proc/meminfo", "/proc/sys", "/proc",
                      "/sys", "/tmp", "/dev/pts", "/dev/shm", "/workspace", "/usr", "/"):
            for flags in (0, 1, 2, 4, 8):
                if libc.umount2(place.encode(), flags) == 0: escaped(place)
        raise OSError(ctypes.get_errno(), "refused")
        """,
        proof="it would take the host's own mounts away",
    ),
    Attempt(
        "new-mount-api",
        "clone, move, change, make mounts by file descriptors (open_tree, move_mount, fsopen …)",
        """
        if tried("open_tree", -100, b"/usr", 1) == 0: escaped("open_tree")
        if tried("move_mount", -1, b"", -1, b"", 0x44) == errno.EBADF: escaped("move_mount")
        if tried("mount_setattr", -100, b"/", 0, bytes(32), 32) == 0: escaped("mount_setattr")
        fd = call("fsopen", b"tmpfs", 0)
        call("fsconfig", fd, 6, None, None, 0)
        escaped(call("fsmount", fd, 0, 0))
        """,
        proof=ROOT,
    ),
    Attempt(
        "pivot-root",
        "change what / is with pivot_root",
        "call('pivot_root', b'.', b'.'); escaped('pivoted')",
        proof="it would change what / is for everybody",
    ),
    Attempt(
        "chroot",
        "the old way out of a chroot: chroot below oneself, then walk up",
        """
        os.mkdir("deep")
        up = os.open(".", os.O_RDONLY)
        os.chroot("deep")
        os.fchdir(up)
        for _ in range(40): os.chdir("..")
        os.chroot(".")
        escaped(os.listdir("/")[:3])
        """,
        proof=ROOT,
    ),
    Attempt(
        "list-mounts",
        "list the mounts of the host with listmount and statmount",
        """
        request = struct.pack("IIQQQ", 32, 0, 0xFFFFFFFFFFFFFFFF, 0, 0)
        ids = (ctypes.c_ulong * 8)()
        number = tried("listmount", request, ids, 8, 0)
        if number == 0 and ids[0]: escaped(list(ids))
        """,
        proof="root mounts of a namespace differ in what they answer to listmount",
    ),
    Attempt(
        "host-paths",
        "learn paths of the host from the list of one's own mounts",
        """
        text = open("/proc/self/mountinfo").read()
        paths = [w for line in text.splitlines() for w in line.split()[3:4] if len(w) > 12]
        if paths: escaped(paths[:2])
        absent("nothing is bound from elsewhere")
        """,
        stands={
            "namespaces-root": MOUNTINFO,
            "namespaces-user": MOUNTINFO,
            "docker": MOUNTINFO,
            "gvisor": NAMED,
        },
    ),
    Attempt(
        "fuse",
        "mount a file system that one serves oneself",
        """
        fd = os.open("/dev/fuse", os.O_RDWR)
        os.mkdir("m")
        options = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        check(libc.mount(b"x", b"m", b"fuse", 0, options.encode()))
        libc.umount2(b"m", 2)
        escaped("mounted")
        """,
        proof=ROOT,
    ),
]
