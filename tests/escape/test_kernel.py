"""The kernel's own interfaces: /proc, /sys, and system calls that rule the whole machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.escape.attempt import PEER, ROOT, Attempt, cases, proofs

pytestmark = pytest.mark.real

Check = Callable[[Attempt], None]

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
        "write-sysctl",
        "open sysctls for writing: core_pattern, modprobe, panic, overcommit, ip_forward",
        """
        for name in ("kernel/core_pattern", "kernel/modprobe", "kernel/panic",
                     "vm/overcommit_memory", "net/ipv4/ip_forward", "user/max_user_namespaces"):
            try:
                os.open(f"/proc/sys/{name}", os.O_WRONLY)
                escaped(name)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "sysrq",
        "open /proc/sysrq-trigger for writing, which reboots and crashes machines",
        """
        fd = os.open("/proc/sysrq-trigger", os.O_WRONLY)
        if stat.S_ISREG(os.fstat(fd).st_mode): escaped("open for writing")
        """,
        proof="this kernel may have none; to write to it would crash the machine",
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
        "forge-kernel-log",
        "write a line into the kernel's log",
        "os.open('/dev/kmsg', os.O_WRONLY); escaped('open for writing')",
        proof=ROOT,
    ),
    Attempt(
        "keyring",
        "keep a key in the user's keyring, which no namespace makes private",
        """
        key = call("add_key", b"user", b"capsule-escape", b"secret", 6, -4)
        tried("keyctl", 3, key)
        escaped(f"key {key}")
        """,
        hardened=True,
    ),
    Attempt(
        "keyctl",
        "search and read keyrings of the host (keyctl, request_key)",
        """
        if tried("keyctl", 0, -4, 1) == 0: escaped("the user's keyring")
        call("request_key", b"user", b"capsule", None, -4)
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
        "kexec",
        "load another kernel",
        "call('kexec_load', 0, 0, 0, 0); escaped('loaded')",
        proof="it would take away a crash kernel that the host has loaded",
    ),
    Attempt(
        "reboot",
        "be allowed to reboot (asked with wrong magic numbers, which is refused later)",
        "if tried('reboot', 0, 0, 0, 0) == errno.EINVAL: escaped('only the magic was missing')",
        proof=ROOT,
    ),
    Attempt(
        "set-clock",
        "be allowed to set the clock: settimeofday, clock_settime, adjtimex",
        """
        if tried("settimeofday", None, None) == 0: escaped("settimeofday")
        if tried("clock_settime", 0, None) == errno.EFAULT: escaped("clock_settime")
        """,
        proof=ROOT,
    ),
    Attempt(
        "swap",
        "be allowed to switch swap on and off",
        """
        answers = {tried("swapon", b"/nonexistent", 0), tried("swapoff", b"/nonexistent")}
        if answers == {errno.ENOENT}: escaped("only the file was missing")
        """,
        proof=ROOT,
    ),
    Attempt(
        "accounting",
        "be allowed to start process accounting, and to read quotas",
        "if tried('acct', b'/nonexistent') == errno.ENOENT: escaped('only the file was missing')",
        proof=ROOT,
    ),
    Attempt(
        "io-ports",
        "use the machine's I/O ports",
        "call('iopl', 3); escaped('iopl')",
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
        "more-cores",
        "run on CPUs that the sandbox was not given",
        """
        mask = ctypes.create_string_buffer(b"\\xff" * 128)
        call("sched_setaffinity", 0, 128, mask)
        if len(os.sched_getaffinity(0)) > 1: escaped(os.sched_getaffinity(0))
        absent("it has one CPU")
        """,
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
        "write-sysfs",
        "open settings in /sys for writing: memory, CPUs, block devices, power, modules",
        """
        names = ("kernel/mm/transparent_hugepage/enabled", "kernel/uevent_helper", "power/state",
                 "block/vda/queue/scheduler", "devices/system/cpu/cpu1/online")
        for name in names:
            try:
                os.open(f"/sys/{name}", os.O_WRONLY)
                escaped(name)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "leave-cgroup",
        "move to another cgroup, or loosen one's own",
        """
        import glob
        files = [f"/sys/fs/cgroup/{n}" for n in ("cgroup.procs", "memory.max", "pids.max",
                 "cpu.max", "release_agent", "cgroup.kill", "memory/memory.limit_in_bytes")]
        files += glob.glob("/sys/fs/cgroup/*/cgroup.procs") + glob.glob("/sys/fs/cgroup/*/tasks")
        refused = FileNotFoundError(2, "no file of a cgroup is to be seen")
        for path in files:
            try:
                os.open(path, os.O_WRONLY)
                escaped(path)
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
    Attempt(
        "numa",
        "move memory between nodes: mbind, set_mempolicy, move_pages, migrate_pages",
        "call('set_mempolicy', 0, None, 0); escaped('set')",
    ),
    Attempt(
        "secret-memory",
        "have memory that the host's tools cannot see (memfd_secret)",
        """
        number = tried("memfd_secret", 0)
        if number == errno.ENOSYS and not A.get("keeper"): absent("this kernel has no memfd_secret")
        if number == 0: escaped("made")
        """,
    ),
]


@cases(ATTEMPTS)
def test_stays_inside(attempt: Attempt, holds: Check) -> None:
    holds(attempt)


@proofs(ATTEMPTS)
def test_works_outside(attempt: Attempt, works: Check) -> None:
    works(attempt)
