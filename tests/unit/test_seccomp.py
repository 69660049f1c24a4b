"""The compiler against a reference, the profiles against the kernel: each rule tried for real."""

from __future__ import annotations

import copy
import errno
import os
import re
import signal
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.errors import InvalidError, NotFoundError
from capsule.providers.local import bpf, seccomp
from capsule.providers.local.profile import ALLOW, ERRNO, KILL_PROCESS
from capsule.providers.local.syscalls import ARCHES, numbers
from tests.support.confine import PTY, Killed, Room, Text, attempt

NATIVE = seccomp.native_arch()
AUDIT = seccomp.AUDIT_ARCH[NATIVE]
NR = numbers(NATIVE)
MARK = 250  # an errno that no kernel gives: the answer is the filter's
U64 = 2**64 - 1
HIGH = 0xDEADBEEF << 32  # bits that the kernel ignores where an argument is an int


def profile(*entries: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": list(entries), **top}


def entry(*names: str, action: str = "SCMP_ACT_ALLOW", **more: Any) -> dict[str, Any]:
    return {"names": list(names), "action": action, **more}


def when(index: int, op: str, value: int, value_two: int = 0) -> dict[str, Any]:
    return {"index": index, "op": f"SCMP_CMP_{op}", "value": value, "valueTwo": value_two}


def verdict(program: bytes, name: str, *args: int, arch: str = NATIVE) -> int:
    number = numbers(arch)[name]
    return bpf.simulate(program, number, seccomp.AUDIT_ARCH[arch], args).value


def marked(source: dict[str, Any]) -> dict[str, Any]:
    """The same rules, every refusal with an errno of its own."""
    changed = copy.deepcopy(source)
    changed["defaultErrnoRet"] = MARK
    for each in changed["syscalls"]:
        if each["action"] == "SCMP_ACT_ERRNO":
            each["errnoRet"] = MARK
    return changed


# The compiler


def holds(condition: dict[str, Any], args: tuple[int, ...]) -> bool:
    arg, value, two = args[condition["index"]], condition["value"], condition["valueTwo"]
    answers: dict[str, bool] = {
        "NE": arg != value,
        "LT": arg < value,
        "LE": arg <= value,
        "EQ": arg == value,
        "GE": arg >= value,
        "GT": arg > value,
        "MASKED_EQ": arg & value == two,
    }
    return answers[condition["op"].removeprefix("SCMP_CMP_")]


def reference(source: dict[str, Any], name: str, args: tuple[int, ...]) -> int:
    """What a profile means, written down as plainly as possible."""
    matching = [each for each in source["syscalls"] if name in each["names"]]
    guarded = [each for each in matching if each.get("args")]
    for each in guarded + [each for each in matching if not each.get("args")]:
        if all(holds(condition, args) for condition in each.get("args", ())):
            return ALLOW if each["action"] == "SCMP_ACT_ALLOW" else ERRNO | each["errnoRet"]
    return ERRNO | errno.EPERM


words = st.sampled_from(
    [0, 1, 2, 0x10, 0xFFFF, 0x7FFFFFFF, 0x80000000, 2**32 - 1, 2**32, 2**32 + 1, 2**63, U64]
)
values = words | st.integers(0, U64)
conditions = st.builds(
    when,
    st.integers(0, 5),
    st.sampled_from(["NE", "LT", "LE", "EQ", "GE", "GT", "MASKED_EQ"]),
    values,
    values,
)
NAMES = ["read", "write", "close", "ioctl", "socket", "clone", "openat", "futex", "mseal"]
guarded_entries = st.builds(
    lambda names, conditions, errno: entry(
        *names,
        args=conditions,
        **({"action": "SCMP_ACT_ERRNO", "errnoRet": errno} if errno else {}),
    ),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True),
    st.lists(conditions, min_size=1, max_size=4),
    st.integers(0, 40),
)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(guarded_entries, max_size=8),
    st.sets(st.sampled_from(NAMES)),
    st.lists(st.tuples(*[values] * 6), min_size=1, max_size=4),
    st.sampled_from(ARCHES),
)
def test_a_compiled_profile_means_what_it_says(
    guarded: list[dict[str, Any]], plain: set[str], calls: list[tuple[int, ...]], arch: str
) -> None:
    entries = [*guarded, *([entry(*sorted(plain))] if plain else [])]
    source = profile(*entries)
    program = seccomp.compile_profile(source, arch)
    # Each condition's own values are the interesting arguments.
    edges = {c["value"] + d & U64 for e in guarded for c in e["args"] for d in (-1, 0, 1)}
    for args in [*calls, *((edge,) * 6 for edge in edges)]:
        for name in [*NAMES, "getpid"]:
            assert verdict(program, name, *args, arch=arch) == reference(source, name, args)


@pytest.mark.parametrize("arch", ARCHES)
def test_every_number_is_answered_as_its_name(arch: str) -> None:
    """Also the ones between and beyond the names."""
    chosen = sorted(numbers(arch))[::3]
    program = seccomp.compile_profile(profile(entry(*chosen)), arch)
    allowed = {numbers(arch)[name] for name in chosen}
    for number in range(1024):
        found = bpf.simulate(program, number, seccomp.AUDIT_ARCH[arch]).value
        assert found == (ALLOW if number in allowed else ERRNO | errno.EPERM), number


def test_far_jumps_arrive() -> None:
    many = [entry("ioctl", args=[when(1, "EQ", value)]) for value in range(0, 800, 2)]
    everything = sorted(set(NR) - {"ioctl"})
    program = seccomp.compile_profile(profile(*many, entry(*everything)))
    assert len(program) // 8 > 400
    for value in (0, 2, 398, 400, 798, 1, 399, 799):
        expected = ALLOW if value % 2 == 0 else ERRNO | errno.EPERM
        assert verdict(program, "ioctl", 0, value) == expected
    assert verdict(program, "read") == verdict(program, "write") == ALLOW
    attempt(program, (NR["ioctl"], -1, 2))  # the kernel takes it too


def test_a_profile_that_is_too_large_is_refused() -> None:
    many = [entry("ioctl", args=[when(1, "EQ", value << 32)]) for value in range(3000)]
    with pytest.raises(InvalidError, match="limit 4096"):
        seccomp.compile_profile(profile(*many))


@pytest.mark.parametrize("default", ["SCMP_ACT_ERRNO", "SCMP_ACT_ALLOW"])
def test_other_architectures_and_x32_are_refused_whatever_the_default(default: str) -> None:
    source = {**profile(entry("getpid")), "defaultAction": default}
    program = seccomp.compile_profile(source, "x86_64")
    i386, x32 = 0x40000003, 0x40000000
    assert bpf.simulate(program, 39, i386).value == KILL_PROCESS
    assert bpf.simulate(program, 39, seccomp.AUDIT_ARCH["aarch64"]).value == KILL_PROCESS
    native = seccomp.AUDIT_ARCH["x86_64"]
    for number in (x32 + 39, x32, x32 + 520, -1):
        assert bpf.simulate(program, number, native).value == ERRNO | errno.ENOSYS
    assert bpf.simulate(program, 39, native).value == ALLOW


def test_a_call_must_pass_both_profiles() -> None:
    one = profile(entry("read", "write"), entry("close", args=[when(0, "LT", 3)]))
    other = profile(entry("write", "close"), defaultErrnoRet=errno.ENOSYS)
    program = seccomp.compile_profile(one, also=[other])
    assert verdict(program, "write") == ALLOW
    assert verdict(program, "read") == ERRNO | errno.ENOSYS
    assert verdict(program, "close", 2) == ALLOW
    assert verdict(program, "close", 3) == ERRNO | errno.EPERM
    assert verdict(program, "getpid") == ERRNO | errno.EPERM


DOCKERS = {
    "defaultAction": "SCMP_ACT_ERRNO",
    "defaultErrnoRet": 1,
    "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]}],
    "syscalls": [
        {"names": ["read", "_llseek", "chown32"], "action": "SCMP_ACT_ALLOW"},
        {"name": "write", "action": "SCMP_ACT_ALLOW", "args": None},
        {"names": ["mount"], "action": "SCMP_ACT_ALLOW", "includes": {"caps": ["CAP_SYS_ADMIN"]}},
        {
            "names": ["clone"],
            "action": "SCMP_ACT_ALLOW",
            "args": [{"index": 0, "value": 2114060288, "op": "SCMP_CMP_MASKED_EQ"}],
            "excludes": {"caps": ["CAP_SYS_ADMIN"], "arches": ["s390", "s390x"]},
        },
        {"names": ["ptrace"], "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "4.8"}},
        {"names": ["bpf"], "action": "SCMP_ACT_ALLOW", "includes": {"minKernel": "99.0"}},
        {"names": ["open"], "action": "SCMP_ACT_ALLOW", "includes": {"arches": ["amd64", "x32"]}},
        {"names": ["close"], "action": "SCMP_ACT_ALLOW", "excludes": {"arches": ["amd64"]}},
    ],
}


def test_dockers_own_form_is_read_without_capabilities() -> None:
    program = seccomp.compile_profile(DOCKERS, "x86_64")
    answers = {
        name: verdict(program, name, arch="x86_64") == ALLOW
        for name in ("read", "write", "mount", "clone", "ptrace", "bpf", "open", "close")
    }
    allowed = {name for name, yes in answers.items() if yes}
    assert allowed == {"read", "write", "clone", "ptrace", "open"}
    assert verdict(program, "clone", 0x10000000, arch="x86_64") == ERRNO | errno.EPERM
    arm = seccomp.compile_profile(DOCKERS, "arm64")
    assert verdict(arm, "close", arch="aarch64") == ALLOW


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "defaultAction is missing"),
        (profile(default_action="x"), "unknown key: 'default_action'"),
        (profile(defaultAction="ALLOW"), "not supported: 'ALLOW'"),
        (profile(defaultAction="SCMP_ACT_NOTIFY"), "not supported"),
        (profile({"names": ["read"]}), r"syscalls\[0\].action is not supported: None"),
        (profile(entry()), "must be a list of names"),
        (profile(entry("read", arg=[])), r"syscalls\[0\] has an unknown key: 'arg'"),
        (profile(entry("read", args={})), "must be a list"),
        (profile(entry("read", args=[when(6, "EQ", 1)])), r"args\[0\].index .* 6"),
        (profile(entry("read", args=[when(0, "ABOUT", 1)])), "op is unknown"),
        (profile(entry("read", args=[when(0, "EQ", -1)])), "value must be a whole number: -1"),
        (profile(entry("read", args=[when(0, "EQ", 2**64)])), "value must be a whole number"),
        (profile(entry("read", action="SCMP_ACT_ERRNO", errnoRet=4096)), "errno must be"),
        (profile(entry("read", includes={"minKernel": "new"})), "not a kernel version: 'new'"),
        (profile(entry("read", includes=[1])), "includes must be an object"),
        (profile("read"), r"syscalls\[0\] must be an object"),  # type: ignore[arg-type]
        (profile(entry("read"), entry("read", action="SCMP_ACT_KILL")), "decided twice"),
    ],
)
def test_wrong_profiles_name_the_field(source: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        seccomp.compile_profile(source)


def test_lint_reports_what_is_probably_not_meant() -> None:
    source = profile(
        entry("raed"),
        entry("ioctl", args=[when(1, "NE", 1), when(1, "NE", 2)]),
        entry("clone", args=[when(0, "MASKED_EQ", 1, 2)]),
        entry("clone"),
    )
    findings = "\n".join(seccomp.lint(source))
    assert "syscalls[0]: unknown system call raed, nearest: read" in findings
    assert "syscalls[1]: docker ORs conditions" in findings
    assert "syscalls[2]: valueTwo has bits outside the mask" in findings
    assert "syscalls[2]: docker drops these conditions" in findings
    assert seccomp.lint(profile(entry("read"))) == []


def test_profiles_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"defaultAction": "SCMP_ACT_ALLOW"}')
    assert seccomp.load_profile("mine", tmp_path) == {"defaultAction": "SCMP_ACT_ALLOW"}
    assert seccomp.load_profile("default", tmp_path)["defaultErrnoRet"] == errno.ENOSYS
    with pytest.raises(NotFoundError, match="no seccomp profile: other") as caught:
        seccomp.load_profile("other", tmp_path)
    assert "default" in str(caught.value)
    for name in ("../default", "", "a/b", "default.json"):
        with pytest.raises(InvalidError, match="not a profile name"):
            seccomp.load_profile(name)
    (tmp_path / "broken.json").write_text("[" * 100_000)
    with pytest.raises(InvalidError, match="not JSON"):
        seccomp.load_profile("broken", tmp_path)


# The tables


@pytest.mark.needs("headers", "x86-64")
def test_the_x86_64_table_is_that_of_this_machines_headers() -> None:
    places = ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h")
    header = next(path for path in map(Path, places) if path.exists())
    theirs = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    assert {name: NR.get(name) for name in theirs} == {k: int(v) for k, v in theirs.items()}


@pytest.mark.needs("headers")
def test_the_aarch64_table_is_that_of_the_generic_headers() -> None:
    header = Path("/usr/include/asm-generic/unistd.h")
    ours = numbers("aarch64")
    # Where 32-bit machines differ, and arm64's own choices, the generic header says more.
    theirs = dict(re.findall(r"#define __NR_(\w+) (\d+)\n", header.read_text()))
    common = {name: int(value) for name, value in theirs.items() if name in ours}
    assert len(common) > 270
    assert {name: ours[name] for name in common} == common


# Capsule's own profiles


def allowed_plainly(source: dict[str, Any]) -> set[str]:
    return {
        name
        for each in source["syscalls"]
        if each["action"] == "SCMP_ACT_ALLOW" and not each.get("args")
        for name in each["names"]
    }


DEFAULT = seccomp.load_profile("default")
LANDLOCK = seccomp.load_profile("landlock")
FILTER = seccomp.compile_profile(DEFAULT)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["default", "landlock", "shared-uid"])
def test_own_profiles_are_clean_and_small(name: str, arch: str) -> None:
    source = seccomp.load_profile(name)
    assert seccomp.lint(source, arch) == []
    assert len(seccomp.compile_profile(source, arch)) // 8 < 700


def test_every_ioctl_but_three_is_allowed() -> None:
    """The allowing entries cover 2^32 - 3 commands; look at all that differ in up to two bits."""
    refused = {0x5412, 0x541C, 0x5423}
    one_off = {c ^ 1 << i for c in refused for i in range(32)}
    near = one_off | {c ^ 1 << i for c in one_off for i in range(32)}
    high = {command | HIGH for command in one_off | refused}
    for command in near | refused | high:
        expected = ERRNO | errno.EPERM if command & 0xFFFFFFFF in refused else ALLOW
        assert verdict(FILTER, "ioctl", 0, command) == expected, hex(command)


def test_new_and_unknown_calls_look_like_an_older_kernel() -> None:
    for number in (NR["rseq_slice_yield"] + 1, 999, 0x3FFFFFFF):
        assert bpf.simulate(FILTER, number, AUDIT).value == ERRNO | errno.ENOSYS


NS_FLAGS = {
    "NEWNS": 0x00020000,
    "NEWCGROUP": 0x02000000,
    "NEWUTS": 0x04000000,
    "NEWIPC": 0x08000000,
    "NEWUSER": 0x10000000,
    "NEWPID": 0x20000000,
    "NEWNET": 0x40000000,
}
NEWTIME = 0x80
PID = os.getpid()
EPERM, ENOSYS, EACCES = errno.EPERM, errno.ENOSYS, errno.EACCES
FAMILY, PROTOCOL = errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT
SIGCHLD = int(signal.SIGCHLD)
DEVICE = Text("/tmp/capsule-dev")
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
STREAM, DGRAM, RAW, SEQPACKET = 1, 2, 3, 5

Rules = dict[str, tuple[str, tuple[Any, ...], int]]

# Refused whatever the arguments; these do no harm where the filter fails.
BY_NAME = {
    EPERM: """
        acct bpf chroot clock_adjtime clock_settime delete_module fanotify_init fanotify_mark
        finit_module fsconfig fsmount fsopen fspick init_module kexec_file_load kexec_load
        lookup_dcookie mount mount_setattr move_mount name_to_handle_at nfsservctl
        open_by_handle_at open_tree open_tree_attr perf_event_open pidfd_getfd pivot_root
        process_madvise process_vm_readv process_vm_writev quotactl quotactl_fd reboot request_key
        setdomainname sethostname setns settimeofday swapoff swapon syslog umount2 vhangup
    """,
    ENOSYS: """
        clone3 io_uring_enter io_uring_register listmount listns mbind memfd_secret migrate_pages
        move_pages statmount
    """,
}
if NATIVE == "x86_64":
    BY_NAME[EPERM] += " create_module ioperm iopl"
    BY_NAME[ENOSYS] += " _sysctl modify_ldt uselib"

# The call, its arguments, and what a confined program gets.
REFUSED: Rules = {
    **{n: (n, (-1,) * 6, error) for error, names in BY_NAME.items() for n in names.split()},
    **{f"clone {k}": ("clone", (v | SIGCHLD, 0, 0, 0, 0), EPERM) for k, v in NS_FLAGS.items()},
    **{f"unshare {k}": ("unshare", (v,), EPERM) for k, v in NS_FLAGS.items()},
    "unshare NEWTIME": ("unshare", (NEWTIME,), EPERM),
    "unshare with high bits": ("unshare", (0x10000000 | HIGH,), EPERM),
    **{
        f"socket family {family}": ("socket", (family, STREAM, 0), FAMILY)
        for family in range(48)
        if family not in (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK)
    },
    "socket AF_ALG": ("socket", (38, SEQPACKET, 0), FAMILY),
    "socket AF_PACKET": ("socket", (17, RAW, 0), FAMILY),
    "socket AF_VSOCK with high bits": ("socket", (40 | HIGH, STREAM, 0), FAMILY),
    "socket AF_UNIX with high bits": ("socket", (AF_UNIX | HIGH, STREAM, 0), FAMILY),
    "socket SCTP": ("socket", (AF_INET, STREAM, 132), PROTOCOL),
    "socket MPTCP": ("socket", (AF_INET6, STREAM, 262), PROTOCOL),
    "socket raw": ("socket", (AF_INET, RAW, 1), EPERM),
    "socket seqpacket": ("socket", (AF_INET, SEQPACKET, 0), ENOSYS),
    "netlink audit": ("socket", (AF_NETLINK, RAW, 9), PROTOCOL),
    "netlink netfilter": ("socket", (AF_NETLINK, RAW, 12), PROTOCOL),
    "socketpair AF_TIPC": ("socketpair", (30, SEQPACKET, 0, Room(8)), FAMILY),
    "io_uring_setup": ("io_uring_setup", (1, Room(120)), ENOSYS),
    "keyctl": ("keyctl", (0, -2, 1), EPERM),
    "add_key": ("add_key", (Text("user"), Text("capsule"), Text("x"), 1, -2), EPERM),
    "ptrace": ("ptrace", (0, 0, 0, 0), EPERM),
    "kcmp": ("kcmp", (PID, PID, 0, 0, 0), EPERM),
    "userfaultfd": ("userfaultfd", (1,), EPERM),
    "adjtimex": ("adjtimex", (Room(256),), EPERM),
    "limits of others": ("prlimit64", (1, 7, 0, Room(16)), EPERM),
    "core limit": ("prlimit64", (0, 4, Room(16), 0), 0),
    "core limit with high bits": ("prlimit64", (0, 4 | HIGH, Room(16), 0), 0),
    "core limit by setrlimit": ("setrlimit", (4, Room(16)), 0),
    "core limit by setrlimit with high bits": ("setrlimit", (4 | HIGH, Room(16)), 0),
    "sched_setaffinity": ("sched_setaffinity", (0, 128, Room(b"\xff" * 128)), EPERM),
    "set_mempolicy": ("set_mempolicy", (0, 0, 0), ENOSYS),
    "get_mempolicy": ("get_mempolicy", (0, 0, 0, 0, 0), ENOSYS),
    "io_setup": ("io_setup", (1, Room(8)), ENOSYS),
    "personality without randomisation": ("personality", (0x0040000,), ENOSYS),
    "personality with high bits": ("personality", (0x0040000 | HIGH,), ENOSYS),
    "personality READ_IMPLIES_EXEC": ("personality", (0x0400000,), ENOSYS),
    "TIOCSTI": ("ioctl", (PTY, 0x5412, Text("x")), EPERM),
    "TIOCSTI with high bits": ("ioctl", (PTY, 0x5412 | HIGH, Text("x")), EPERM),
    "TIOCSTI, sign extended": ("ioctl", (PTY, 0x5412 | 0xFFFFFFFF << 32, Text("x")), EPERM),
    "TIOCLINUX": ("ioctl", (PTY, 0x541C, Room(8)), EPERM),
    "TIOCLINUX with high bits": ("ioctl", (PTY, 0x541C | HIGH, Room(8)), EPERM),
    "TIOCSETD": ("ioctl", (PTY, 0x5423, Room(8)), EPERM),
    "device": ("mknodat", (-100, DEVICE, stat.S_IFCHR, 259), EPERM),
    "block device": ("mknodat", (-100, DEVICE, stat.S_IFBLK, 259), EPERM),
    "device, 16 bits count": ("mknodat", (-100, DEVICE, 0x10000 | stat.S_IFBLK, 259), EPERM),
    "sync of the host": ("sync", (), 0),
    "sync of a file system": ("syncfs", (0,), 0),
}
if NATIVE == "x86_64":
    REFUSED["device by mknod"] = ("mknod", (DEVICE, stat.S_IFCHR, 259), EPERM)
# Those that do no harm and work for any user, unconfined, where the kernel has them at all.
HARMLESS = """
    clone NEWUSER, unshare NEWUSER, socket family 40, socket AF_ALG, netlink audit, io_uring_setup,
    keyctl, add_key, ptrace, kcmp, userfaultfd, adjtimex, sched_setaffinity, get_mempolicy,
    set_mempolicy, io_setup, personality without randomisation, personality with high bits,
    personality READ_IMPLIES_EXEC, TIOCSTI, TIOCSTI with high bits, TIOCSETD
"""
# What a kernel without the feature, or a host with other settings, says instead.
NOT_HERE = {ENOSYS, EPERM, EACCES, FAMILY, PROTOCOL, errno.EIO, errno.ENODEV, errno.EOPNOTSUPP}

# At the level without namespaces.
LANDLOCK_REFUSED: Rules = {
    "unix": ("socket", (AF_UNIX, STREAM, 0), EACCES),
    "tcp": ("socket", (AF_INET, STREAM, 0), EACCES),
    "netlink": ("socket", (AF_NETLINK, RAW, 0), EACCES),
    "vsock": ("socket", (40, STREAM, 0), EACCES),
    "connect": ("connect", (0, Room(16), 16), EACCES),
    "bind": ("bind", (0, Room(16), 16), EACCES),
    "datagram pair": ("socketpair", (AF_UNIX, DGRAM, 0, Room(8)), EACCES),
    "datagram pair, cloexec": ("socketpair", (AF_UNIX, DGRAM | 0o2000000, 0, Room(8)), EACCES),
    "raw pair": ("socketpair", (AF_UNIX, RAW, 0, Room(8)), ENOSYS),
    "shmget": ("shmget", (0, 4096, 0), ENOSYS),
    "mq_open": ("mq_open", (Text("x"), 0, 0, 0), ENOSYS),
    "inotify": ("inotify_init1", (0,), ENOSYS),
    "core limit": ("prlimit64", (0, 4, Room(16), 0), 0),
    "limits of others": ("prlimit64", (1, 7, 0, Room(16)), EPERM),
    "priority of others": ("setpriority", (0, 1, 19), EPERM),
    "priority of the uid": ("setpriority", (2, 0, 19), EPERM),
    "io priority of the uid": ("ioprio_set", (3, 0, 0), EPERM),
    "scheduler of others": ("sched_setscheduler", (1, 0, Room(8)), EPERM),
    "ptrace": ("ptrace", (0, 0, 0, 0), EPERM),
    "io_uring": ("io_uring_setup", (1, Room(120)), ENOSYS),
    "TIOCSTI with high bits": ("ioctl", (PTY, 0x5412 | HIGH, Text("x")), EPERM),
}


def answers(rules: Rules, filter: bytes | None) -> dict[str, int]:
    """All in one child: what is refused has no effect on the next."""
    calls = [(NR[name], *args) for name, args, _ in rules.values()]
    return dict(zip(rules, attempt(filter, *calls), strict=True))


@pytest.mark.parametrize("level", ["default", "landlock"])
def test_what_is_refused(level: str) -> None:
    source, rules = (DEFAULT, REFUSED) if level == "default" else (LANDLOCK, LANDLOCK_REFUSED)
    expected = {rule: error for rule, (_, _, error) in rules.items()}
    assert answers(rules, seccomp.compile_profile(source)) == expected
    with_mark = answers(rules, seccomp.compile_profile(marked(source)))
    assert with_mark == dict.fromkeys(rules, MARK), "it is the filter that says no"


@pytest.mark.timeout(60)
def test_what_is_refused_works_unconfined() -> None:
    """Otherwise a refusal proves nothing. Each in a child of its own: these have effects."""
    rules = [" ".join(rule.split()) for rule in HARMLESS.split(",")]
    found = [
        attempt(None, (NR[name], *args))[0] for name, args, _ in map(REFUSED.__getitem__, rules)
    ]
    assert set(found) <= {0, *NOT_HERE}, dict(zip(rules, found, strict=True))
    assert found.count(0) > 7


@pytest.mark.needs("x86-64")
def test_thirty_two_bit_calls_end_the_process_and_x32_calls_do_not_exist() -> None:
    with suppress(Killed):  # a kernel without 32-bit calls
        assert attempt(None, ("i386",)) == [0]
    with pytest.raises(Killed, match="SIGSYS"):
        attempt(FILTER, ("i386",))
    assert attempt(FILTER, (0x40000000 + NR["getpid"],)) == [ENOSYS]


LIMITS = (0, 1, 2, 3, *range(5, 16))
ALLOWED: dict[str, tuple[str, tuple[Any, ...]]] = {
    **{
        name: (name, (-1,) * 6)
        for name in """
            close_range copy_file_range epoll_create1 epoll_pwait2 eventfd2 faccessat2 fchmodat2
            futex_waitv getgroups getxattrat inotify_init1 landlock_create_ruleset membarrier
            memfd_create mq_open mseal openat2 pidfd_open prctl rseq seccomp signalfd4 splice statx
            timerfd_create
        """.split()
    },
    "clone": ("clone", (SIGCHLD, 0, 0, 0, 0)),
    "unshare files": ("unshare", (0x400,)),
    "unix": ("socket", (AF_UNIX, STREAM, 0)),
    "tcp": ("socket", (AF_INET, STREAM | 0o2000000 | 0o4000, 6)),
    "tcp6": ("socket", (AF_INET6, STREAM, 0)),
    "udp": ("socket", (AF_INET, DGRAM, 17)),
    "route": ("socket", (AF_NETLINK, RAW | 0o2000000, 0)),
    "socketpair": ("socketpair", (AF_UNIX, DGRAM, 0, Room(8))),
    "read personality": ("personality", (0xFFFFFFFF,)),
    "read personality, sign extended": ("personality", (-1,)),
    "set personality": ("personality", (0,)),
    "uname26": ("personality", (0x20000,)),
    "linux32": ("personality", (8,)),
    "shmget": ("shmget", (0x63617073, 4096, 0)),  # a key that is not in use: nothing is made
    "msgget": ("msgget", (0x63617073, 0)),
    "semget": ("semget", (0x63617073, 1, 0)),
    "setuid": ("setuid", (os.getuid(),)),
    "setpriority": ("setpriority", (0, 0, 19)),  # of the caller: it is not to be had back
    "read core limit": ("prlimit64", (0, 4, 0, Room(16))),
    **{f"setrlimit {n}": ("setrlimit", (n, 1)) for n in LIMITS},
    **{f"prlimit64 {n}": ("prlimit64", (0, n, 1, 0)) for n in LIMITS},
    "sched_getaffinity": ("sched_getaffinity", (0, 128, Room(128))),
    "TCGETS": ("ioctl", (PTY, 0x5401, Room(64))),
    "TIOCGWINSZ": ("ioctl", (PTY, 0x5413, Room(64))),
    "FIONREAD": ("ioctl", (PTY, 0x541B, Room(64))),
    "TIOCGPTN": ("ioctl", (PTY, 0x80045430, Room(64))),
}


def test_everything_else_is_answered_by_the_kernel(tmp_path: Path) -> None:
    calls = [(NR[name], *args) for name, args in ALLOWED.values()]
    confined = dict(zip(ALLOWED, attempt(FILTER, *calls), strict=True))
    assert confined == dict(zip(ALLOWED, attempt(None, *calls), strict=True))
    kinds = (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG, 0)
    files = [(NR["mknodat"], -100, Text(tmp_path / f"{kind}"), kind | 0o600, 0) for kind in kinds]
    assert attempt(FILTER, *files) == [0, 0, 0, 0]


# The level without namespaces


SYSV_AND_QUEUES = set(
    "mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv "
    "msgsnd semctl semget semop semtimedop shmat shmctl shmdt shmget".split()
)


def test_landlock_is_the_default_minus_what_namespaces_made_private() -> None:
    less = allowed_plainly(DEFAULT) - allowed_plainly(LANDLOCK)
    assert allowed_plainly(LANDLOCK) < allowed_plainly(DEFAULT)
    conditional = {"setpriority", "ioprio_set"}
    conditional |= {"sched_setattr", "sched_setparam", "sched_setscheduler"}
    connecting = {"accept", "accept4", "bind", "connect", "listen"}
    inotify = {"inotify_add_watch", "inotify_init", "inotify_init1", "inotify_rm_watch"}
    assert less == SYSV_AND_QUEUES | connecting | conditional | inotify


def test_pairs_and_ones_own_priority_work_without_namespaces() -> None:
    calls = [
        (NR["socketpair"], AF_UNIX, STREAM | 0o2000000, 0, Room(8)),
        (NR["socketpair"], AF_UNIX, SEQPACKET, 0, Room(8)),
        (NR["setpriority"], 0, 0, 19),
        (NR["prlimit64"], 0, 7, 0, Room(16)),
    ]
    assert attempt(seccomp.compile_profile(LANDLOCK), *calls) == [0, 0, 0, 0]


def test_programs_with_the_servers_uid_change_no_file_by_path(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch(mode=0o600)
    program = seccomp.compile_profile(LANDLOCK, also=[seccomp.load_profile("shared-uid")])
    path = Text(victim)
    calls: dict[str, tuple[Any, ...]] = {
        "fchmodat": (-100, path, 0o777),
        "fchmodat2": (-100, path, 0o777, 0),
        "fchownat": (-100, path, -1, -1, 0),
        "utimensat": (-100, path, 0, 0),
        "setxattr": (path, Text("user.x"), Text("x"), 1, 0),
        "lremovexattr": (path, Text("user.x")),
    }
    answers = attempt(program, *((NR[name], *args) for name, args in calls.items()))
    assert answers == [EPERM] * len(calls)
    assert stat.S_IMODE(victim.stat().st_mode) == 0o600
    assert attempt(None, (NR["fchmodat"], *calls["fchmodat"])) == [0]
    assert stat.S_IMODE(victim.stat().st_mode) == 0o777, "unconfined it works"
    by_descriptor = [(NR["fchmod"], 0, 0o600), (NR["utimensat"], 0, 0, 0, 0)]
    assert EPERM not in attempt(program, *by_descriptor)


@pytest.mark.parametrize("arch", ARCHES)
def test_a_filter_like_ours_may_stay_loaded_when_the_agent_forks(arch: str) -> None:
    assert seccomp.fork_answer(seccomp.compiled("default", arch), arch) == 0x00050000 | EPERM
    strict = seccomp.load_profile("default")  # it would stand in the agent's way
    for each in strict["syscalls"]:
        each["names"] = [name for name in each["names"] if name != "setgroups"]
    lax = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}  # programs may make namespaces
    for source in (strict, lax):
        assert seccomp.fork_answer(seccomp.compile_profile(source, arch), arch) == 0
