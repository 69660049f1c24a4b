"""Processes of the host: signal, trace, read, slow down or even notice one."""

from __future__ import annotations

from tests.escape.attempt import ALONE, ROOT, Attempt

GUESSED = "without a pid namespace a pid can be guessed: the kernel answers whether it exists"
LANDLOCK_KNOWS = {"landlock-root": GUESSED, "landlock-user": GUESSED}

ATTEMPTS = [
    Attempt(
        "kill",
        "kill a process of the host",
        "os.kill(A['pid'], signal.SIGKILL); time.sleep(0.1); escaped('sent')",
        actors=("victim",),
    ),
    Attempt(
        "kill-all",
        "kill every process there is: kill(-1, SIGKILL), with oneself asleep for it",
        """
        if os.fork() == 0:
            os.setsid()
            libc.syscall(A["nr"]["kill"], -1, signal.SIGKILL)
            os._exit(0)
        os.wait()
        """,
        actors=("victim",),
        proof=ALONE,
        killed=True,
    ),
    Attempt(
        "signal-thread",
        "stop it, and signal it by tgkill, tkill, rt_sigqueueinfo and rt_tgsigqueueinfo",
        """
        info = struct.pack("iiii", 10, 0, -1, 0) + bytes(112)
        sent = [n for n, *rest in (
            ("kill", A["pid"], 19), ("tgkill", A["pid"], A["pid"], 10), ("tkill", A["pid"], 10),
            ("rt_sigqueueinfo", A["pid"], 10, info),
            ("rt_tgsigqueueinfo", A["pid"], A["pid"], 10, info),
        ) if tried(n, *rest) == 0]
        time.sleep(0.1)
        if sent: escaped(sent)
        """,
        actors=("victim",),
    ),
    Attempt(
        "signal-pidfd",
        "signal it through a pidfd",
        """
        fd = os.pidfd_open(A["pid"])
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        time.sleep(0.1)
        escaped("sent")
        """,
        actors=("victim",),
    ),
    Attempt(
        "signal-by-descriptor",
        "let the kernel send it SIGKILL as the owner of a descriptor (F_SETOWN, F_SETSIG, O_ASYNC)",
        """
        one, other = os.pipe()
        fcntl.fcntl(one, fcntl.F_SETOWN, A["pid"])
        fcntl.fcntl(one, 10, signal.SIGKILL)
        fcntl.fcntl(one, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(other, b"x")
        time.sleep(0.2)
        """,
        actors=("victim",),
    ),
    Attempt(
        "ptrace",
        "attach to it with ptrace (ATTACH and SEIZE)",
        """
        if tried("ptrace", 0x4206, A["pid"], 0, 0) == 0: escaped("seized")
        call("ptrace", 16, A["pid"], 0, 0)
        escaped("attached")
        """,
        actors=("victim",),
        hardened=True,
    ),
    Attempt(
        "read-memory",
        "read and write its memory with process_vm_readv and process_vm_writev",
        """
        mine = ctypes.create_string_buffer(A["length"])
        local = struct.pack("QQ", ctypes.addressof(mine), A["length"])
        remote = struct.pack("QQ", A["address"], A["length"])
        if tried("process_vm_writev", A["pid"], local, 1, remote, 1, 0) == 0: escaped("written")
        call("process_vm_readv", A["pid"], local, 1, remote, 1, 0)
        escaped(mine.raw)
        """,
        actors=("victim",),
        hardened=True,
    ),
    Attempt(
        "proc-mem",
        "read its memory through /proc/PID/mem",
        """
        fd = os.open(f"/proc/{A['pid']}/mem", os.O_RDONLY)
        escaped(os.pread(fd, A["length"], A["address"]))
        """,
        actors=("victim",),
        hardened=True,
    ),
    Attempt(
        "proc-environ",
        "read its environment, command line, maps and status",
        """
        for name in ("environ", "cmdline", "maps", "status", "stat", "limits", "cgroup"):
            try:
                escaped(open(f"/proc/{A['pid']}/{name}").read())
            except OSError as error:
                refused = error
        raise refused
        """,
        actors=("victim",),
    ),
    Attempt(
        "proc-fd",
        "open what it has open, through /proc/PID/fd",
        """escaped(open(f"/proc/{A['pid']}/fd/{A['fd']}").read())""",
        actors=("victim",),
    ),
    Attempt(
        "proc-links",
        "read where /proc/PID/exe, cwd, root and fd/0 lead",
        """
        for name in ("exe", "cwd", "root", "fd/0"):
            try:
                escaped(os.readlink(f"/proc/{A['pid']}/{name}"))
            except OSError as error:
                refused = error
        raise refused
        """,
        actors=("victim",),
    ),
    Attempt(
        "steal-descriptor",
        "take a descriptor of it with pidfd_getfd",
        """
        fd = call("pidfd_getfd", os.pidfd_open(A["pid"]), A["fd"], 0)
        escaped(os.pread(fd, 100, 0))
        """,
        actors=("victim",),
        hardened=True,
    ),
    Attempt(
        "list",
        "list the host's processes in /proc",
        """
        pids = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        if A["pid"] in pids: escaped(f"{len(pids)} processes")
        """,
        actors=("victim",),
    ),
    Attempt(
        "notice",
        "learn that a process of the host exists: kill(pid, 0), getpgid, stat of /proc/PID",
        """
        found = []
        for look in (
            lambda: os.kill(A["pid"], 0), lambda: os.getpgid(A["pid"]),
            lambda: os.stat(f"/proc/{A['pid']}"),
        ):
            try:
                look()
                found.append("yes")
            except PermissionError:
                found.append("denied, so there is one")
            except OSError:
                pass
        if found: escaped(found)
        """,
        actors=("victim",),
        stands=LANDLOCK_KNOWS,
    ),
    Attempt(
        "limit",
        "set a limit of it with prlimit",
        """
        resource.prlimit(A["pid"], resource.RLIMIT_CPU, (1, 1))
        escaped("limited")
        """,
        actors=("victim",),
    ),
    Attempt(
        "slow-down",
        "slow it down: setpriority, sched_setscheduler, sched_setaffinity, ioprio_set",
        """
        done = []
        for action in (
            lambda: os.setpriority(os.PRIO_PROCESS, A["pid"], 19),
            lambda: os.sched_setscheduler(A["pid"], os.SCHED_IDLE, os.sched_param(0)),
            lambda: os.sched_setaffinity(A["pid"], [0]),
            lambda: call("ioprio_set", 1, A["pid"], 3 << 13),
        ):
            try:
                action()
                done.append("slower")
            except OSError as error:
                refused = error
        if done: escaped(done)
        raise refused
        """,
        actors=("victim",),
    ),
    Attempt(
        "slow-down-user",
        "lower the priority of all that runs as this user",
        "os.setpriority(os.PRIO_USER, 0, 19); time.sleep(0.05)",
        actors=("victim",),
        proof=ALONE,
    ),
    Attempt(
        "compare",
        "compare its descriptors with one's own, by kcmp",
        """escaped(call("kcmp", os.getpid(), A["pid"], 0, 0, 0))""",
        actors=("victim",),
        hardened=True,
    ),
    Attempt(
        "reclaim-memory",
        "push its memory out with process_madvise and process_mrelease",
        """
        fd = os.pidfd_open(A["pid"])
        page = A["address"] & ~4095
        call("process_madvise", fd, struct.pack("QQ", page, 4096), 1, 21, 0)
        escaped("advised")
        """,
        actors=("victim",),
        proof=ROOT,
    ),
    Attempt(
        "enter-namespaces",
        "enter its namespaces through /proc/PID/ns and by pidfd",
        """
        for kind in ("uts", "mnt", "net", "pid", "user"):
            try:
                fd = os.open(f"/proc/{A['pid']}/ns/{kind}", os.O_RDONLY)
                call("setns", fd, 0)
                escaped(kind)
            except OSError as error:
                refused = error
        call("setns", os.pidfd_open(A["pid"]), 0x04000000)
        escaped("by pidfd")
        """,
        actors=("victim",),
        proof=ROOT,
    ),
]
