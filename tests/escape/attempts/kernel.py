"""The kernel's own interfaces: /proc, /sys, and system calls that rule the whole machine."""

from __future__ import annotations

import os
from pathlib import Path

from tests.escape.attempt import PEER, ROOT, Attempt

NO_PRIORITIES = "gVisor lets everybody set a priority, and schedules without looking at it"

SYS = (
    "/sys/kernel/debug", "/sys/kernel/tracing", "/sys/class", "/sys/bus", "/sys/block",
    "/sys/firmware", "/sys/module",
)  # fmt: skip


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


ATTEMPTS = [
    Attempt(
        "write-settings",
        "open settings in /proc and /sys for writing, sysrq (which reboots), the kernel's log",
        """
        names = ["/proc/sysrq-trigger", "/dev/kmsg", "/sys/kernel/mm/transparent_hugepage/enabled",
                 "/sys/kernel/uevent_helper", "/sys/power/state", "/sys/block/vda/queue/scheduler",
                 "/sys/devices/system/cpu/cpu1/online"]
        names += [f"/proc/sys/{name}" for name in (
            "kernel/core_pattern", "kernel/hostname", "kernel/modprobe", "kernel/panic",
            "vm/overcommit_memory", "net/ipv4/ip_forward", "user/max_user_namespaces")]
        opened = []
        for name in names:
            try:
                fd = os.open(name, os.O_WRONLY)
                if name == "/dev/kmsg" or stat.S_ISREG(os.fstat(fd).st_mode): opened.append(name)
            except OSError as error:
                refused = error
        if opened: escaped(opened)
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "machine-calls",
        "be allowed to reboot, set the clock, swap, account, use I/O ports (asked for nothing)",
        """
        allowed = [name for name, answer, *given in (
            ("reboot", errno.EINVAL, 0, 0, 0, 0), ("settimeofday", 0, None, None),
            ("clock_settime", errno.EFAULT, 0, None), ("swapoff", errno.ENOENT, b"/nonexistent"),
            ("swapon", errno.ENOENT, b"/nonexistent", 0), ("acct", errno.ENOENT, b"/nonexistent"),
            ("iopl", 0, 3), ("sethostname", errno.EFAULT, None, 1),
        ) if name in A["nr"] and tried(name, *given) == answer]
        if allowed: escaped(allowed)
        """,
        proof=ROOT,
    ),
    Attempt(
        "kernel-memory",
        "open the machine's memory: /proc/kcore, /dev/mem, /dev/kmem, /dev/port",
        """
        for path in ("/proc/kcore", "/dev/mem", "/dev/kmem", "/dev/port"):
            try:
                fd = os.open(path, os.O_RDONLY)
                if os.read(fd, 16): escaped(path)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof="many kernels have none of them, this machine's among them",
    ),
    Attempt(
        "kernel-layout",
        "read addresses and tables of the kernel: kallsyms, iomem, kpageflags, slabinfo, keys …",
        """
        names = "kallsyms iomem ioports kpageflags kpagecount slabinfo vmallocinfo timer_list"
        names += " interrupts buddyinfo zoneinfo keys key-users config.gz modules locks"
        for name in names.split():
            try:
                if open(f"/proc/{name}", "rb").read(64): escaped(name)
            except OSError as error:
                refused = error
        raise refused
        """,
        hardened=True,
    ),
    Attempt(
        "boot-parameters",
        "read the kernel's command line, which may hold secrets",
        "if open('/proc/cmdline').read() == A['cmdline']: escaped(A['cmdline'][:8])",
        args={"cmdline": Path("/proc/cmdline").read_text()},
    ),
    Attempt(
        "kernel-log",
        "read the kernel's log: syslog(2), /dev/kmsg, /proc/kmsg",
        """
        if tried("syslog", 3, ctypes.create_string_buffer(64), 64) == 0: escaped("syslog")
        for path in ("/dev/kmsg", "/proc/kmsg"):
            try:
                if os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 8192): escaped(path)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "keyring",
        "use the user's keyring, which no namespace makes private: add, search, read keys",
        """
        if tried("keyctl", 0, -4, 1) == 0: escaped("the user's keyring")
        key = call("add_key", b"user", b"capsule-escape", b"secret", 6, -4)
        tried("keyctl", 3, key)
        escaped(f"key {key}")
        """,
        hardened=True,
    ),
    Attempt(
        "bpf",
        "make a BPF map",
        "escaped(call('bpf', 0, struct.pack('IIIII', 2, 4, 8, 1, 0) + bytes(108), 128))",
        proof=ROOT,
        hardened=True,
    ),
    Attempt(
        "perf",
        "open a performance counter of the CPU, of everybody",
        """
        attr = struct.pack("IIQ", 1, 128, 0) + bytes(24) + struct.pack("Q", 1 << 5) + bytes(80)
        for pid, cpu in ((0, -1), (-1, 0)):
            if tried("perf_event_open", attr, pid, cpu, -1, 0) == 0: escaped("counting")
        call("perf_event_open", attr, 0, -1, -1, 0)
        """,
        proof=ROOT,
        hardened=True,
    ),
    Attempt(
        "userfaultfd",
        "handle one's own page faults, which wins races in the kernel",
        "escaped(call('userfaultfd', 1))",
        hardened=True,
    ),
    Attempt(
        "io-uring",
        "make an io_uring, a second way to every file operation that seccomp does not see",
        "escaped(call('io_uring_setup', 4, ctypes.create_string_buffer(120)))",
        hardened=True,
    ),
    Attempt(
        "aio",
        "make an AIO context, a resource that the whole host shares",
        "escaped(call('io_setup', 1, ctypes.byref(ctypes.c_long())))",
        hardened=True,
    ),
    Attempt(
        "load-module",
        "have the kernel look at a module: init_module, finit_module, delete_module",
        """
        fd = os.open("/usr/bin/env", os.O_RDONLY)
        answers = {
            tried("init_module", b"x", 1, b""), tried("finit_module", fd, b"", 0),
            tried("delete_module", b"capsule_none", 0),
        }
        if answers == {errno.ENOSYS}: absent("this kernel loads no modules")
        if answers - {errno.EPERM, errno.ENOSYS}: escaped(answers)
        """,
        proof=ROOT,
    ),
    Attempt(
        "local-descriptors",
        "put a descriptor into the CPU's local table (modify_ldt)",
        "call('modify_ldt', 1, struct.pack('IIII', 0, 0, 0, 0x51), 16); escaped('written')",
        hardened=True,
    ),
    Attempt(
        "personality",
        "switch address randomisation off for oneself and one's children",
        "call('personality', 0x0040000); escaped('off')",
    ),
    Attempt(
        "realtime",
        "run before everybody else: SCHED_FIFO, SCHED_DEADLINE, real-time I/O",
        """
        deadline = struct.pack("IIQiIQQQ", 48, 6, 0, 0, 0, 10**6, 10**7, 10**7)
        for action in (
            lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
            lambda: call("sched_setattr", 0, deadline, 0),
            lambda: call("ioprio_set", 1, 0, 1 << 13),
        ):
            try:
                action()
                escaped("ahead")
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "nice",
        "run before everybody else: nice -20",
        "os.setpriority(os.PRIO_PROCESS, 0, -20); escaped('ahead')",
        proof=ROOT,
        stands={"gvisor": NO_PRIORITIES},
    ),
    Attempt(
        "lock-memory",
        "keep 64 MiB from ever being swapped out",
        """
        space = mmap.mmap(-1, 64 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        at = ctypes.addressof(ctypes.c_char.from_buffer(space))
        call("mlock", at, 64 << 20)
        escaped("locked")
        """,
        proof=ROOT,
    ),
    Attempt(
        "fanotify",
        "watch whole file systems, and answer for others' opens (fanotify)",
        "escaped(call('fanotify_init', 0, 0))",
        proof=ROOT,
    ),
    Attempt(
        "leave-cgroup",
        "move to another cgroup, loosen one's own, make one (whose end may run a program)",
        """
        import glob
        files = [f"/sys/fs/cgroup/{n}" for n in ("cgroup.procs", "memory.max", "pids.max",
                 "cpu.max", "release_agent", "cgroup.kill", "memory/memory.limit_in_bytes")]
        files += glob.glob("/sys/fs/cgroup/*/cgroup.procs") + glob.glob("/sys/fs/cgroup/*/tasks")
        refused = FileNotFoundError(2, "no file of a cgroup is visible")
        for path in files:
            try:
                os.open(path, os.O_WRONLY)
                escaped(path)
            except OSError as error:
                refused = error
        for group in ["/sys/fs/cgroup", *glob.glob("/sys/fs/cgroup/*/")]:
            try:
                os.mkdir(f"{group}/own")
                escaped(group)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "tracing",
        "look at debugfs and tracefs, or see hardware in /sys",
        """
        refused = OSError(2, "empty, or not the host's")
        for path, names in A["sys"].items():
            try:
                if names and sorted(os.listdir(path)) == names: escaped(f"{path}: {names[:3]}")
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=PEER,
        args={"sys": {path: _names(path) for path in SYS}},
    ),
    Attempt(
        "core-dump",
        "have the kernel make a core, which the host may pipe to a program of root's",
        """
        more = resource.RLIM_INFINITY
        for limits in ((0, 1), (0, more), (4096, more), (more, more)):
            try:
                resource.setrlimit(resource.RLIMIT_CORE, limits)
            except (OSError, ValueError):
                pass
        now = resource.getrlimit(resource.RLIMIT_CORE)[0]
        if now != 1: escaped(f"the limit is {now}; only at 1 the kernel makes none at all")
        """,
    ),
    Attempt(
        "physical-addresses",
        "learn physical addresses of one's own memory from /proc/self/pagemap",
        """
        fd = os.open("/proc/self/pagemap", os.O_RDONLY)
        at = id(A) // 4096
        frame, = struct.unpack("Q", os.pread(fd, 8, at * 8))
        if frame & ((1 << 55) - 1): escaped(hex(frame))
        """,
        proof=ROOT,
    ),
]
