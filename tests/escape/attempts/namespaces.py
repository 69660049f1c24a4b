"""Namespaces: make one, which hands out capabilities, or enter another."""

from __future__ import annotations

from pathlib import Path

from tests.escape.attempt import ROOT, Attempt

KINDS = ("mnt", "pid", "net", "ipc", "uts", "cgroup", "user")
NONE = "this level is for kernels that give no namespaces: there are none to tell apart"

NO_USERNS = "unless the Engine maps users, containers are in the host's user namespace"


def host_namespaces() -> dict[str, int]:
    return {kind: Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in KINDS}


ATTEMPTS = [
    Attempt(
        "nested-root",
        "make user and mount namespaces, become root, mount something",
        """
        uid = os.getuid()
        call("unshare", 0x10000000 | 0x00020000)
        put("/proc/self/uid_map", f"0 {uid} 1")
        os.mkdir("m")
        check(libc.mount(b"tmpfs", b"m", b"tmpfs", 0, None))
        escaped("mounted")
        """,
        hardened=True,
    ),
    Attempt(
        "unshare-others",
        "make a mount, pid, net, ipc, uts, cgroup or time namespace",
        """
        flags = [0x20000, 0x20000000, 0x40000000, 0x8000000, 0x4000000, 0x2000000, 0x80]
        made = [hex(flag) for flag in flags if tried("unshare", flag) == 0]
        if made: escaped(made)
        """,
        proof=ROOT,
    ),
    Attempt(
        "clone",
        "fork a child into a new user namespace with clone",
        """
        pid = call("clone", 0x10000000 | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0: os._exit(0)
        os.waitpid(pid, 0)
        escaped(pid)
        """,
        hardened=True,
    ),
    Attempt(
        "clone3",
        "the same with clone3, whose flags seccomp cannot see",
        """
        flags = struct.pack("8Q", 0x10000000, 0, 0, 0, signal.SIGCHLD, 0, 0, 0)
        pid = call("clone3", flags, 64)
        if pid == 0: os._exit(0)
        os.waitpid(pid, 0)
        escaped(pid)
        """,
        hardened=True,
    ),
    Attempt(
        "clone-into-cgroup",
        "fork into another cgroup with clone3",
        """
        fd = os.open("/sys/fs/cgroup", os.O_RDONLY)
        flags = struct.pack("11Q", 0x200000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, fd)
        answer = tried("clone3", flags, 88)
        if answer not in (errno.ENOSYS, errno.EPERM, errno.EACCES): escaped("it looked")
        """,
        proof=ROOT,
    ),
    Attempt(
        "setns-own",
        "enter a namespace by its descriptor: one's own, to be sure it exists",
        """
        for kind in ("uts", "ipc", "net", "mnt"):
            try:
                call("setns", os.open(f"/proc/self/ns/{kind}", os.O_RDONLY), 0)
                escaped(kind)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "setns-init",
        "enter the namespaces of pid 1 and of the agent",
        """
        for pid in (1, A.get("keeper", os.getppid())):
            for kind in ("uts", "mnt", "pid", "user"):
                try:
                    call("setns", os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY), 0)
                    escaped(kind)
                except OSError as error:
                    refused = error
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "parent-namespace",
        "get a descriptor of the namespace above, by ioctl",
        """
        for kind in ("user", "pid"):
            fd = os.open(f"/proc/self/ns/{kind}", os.O_RDONLY)
            above = fcntl.ioctl(fd, 0xB702)
            if above >= 0: escaped(kind)
        """,
        proof="the host's own namespaces have none above them",
    ),
    Attempt(
        "same-namespaces",
        "be in a namespace of the host",
        """
        own = {kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in A["host"]}
        same = [kind for kind, number in A["host"].items() if own[kind] == number]
        if same: escaped(same)
        """,
        args={"host": host_namespaces()},
        stands={"landlock-root": NONE, "landlock-user": NONE, "docker": NO_USERNS},
    ),
    Attempt(
        "host-name",
        "change the host's name",
        """
        name = os.uname().nodename.encode()
        check(libc.sethostname(name, len(name)))
        escaped("set")
        """,
        proof=ROOT,
    ),
    Attempt(
        "map-more-ids",
        "map further ids into one's user namespace",
        """
        for name in ("uid_map", "gid_map", "setgroups"):
            try:
                put(f"/proc/self/{name}", "allow" if name == "setgroups" else "0 0 1")
                if name != "setgroups": escaped(name)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof="the host's own namespace has all ids already",
    ),
]
