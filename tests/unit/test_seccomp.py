"""The compiler against a reference, the profiles against the kernel: each rule tried for real."""

from __future__ import annotations

import copy
import errno
import os
import platform
import re
import shutil
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.errors import InvalidError, NotFoundError, NotSupportedError
from capsule.providers.local import bpf, seccomp
from capsule.providers.local.profile import ALLOW, ERRNO, KILL_PROCESS
from capsule.providers.local.syscalls import ARCHES, known_names, numbers
from tests.support import component_missing
from tests.support.confine import PTY, Killed, Room, Text, attempt, run_confined

NATIVE = seccomp.native_arch()
AUDIT = seccomp.AUDIT_ARCH[NATIVE]
NR = numbers(NATIVE)
MARK = 250  # an errno that no kernel gives: whoever gets it was answered by the filter
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


@settings(max_examples=40, deadline=None)
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
    program = seccomp.compile_profile(profile(*many, entry("read", "write")))
    assert len(program) // 8 > 400
    for value in (0, 2, 398, 400, 798, 1, 399, 799):
        expected = ALLOW if value % 2 == 0 else ERRNO | errno.EPERM
        assert verdict(program, "ioctl", 0, value) == expected
    assert verdict(program, "read") == verdict(program, "write") == ALLOW
    attempt(program_that_lets_python_run(many), (NR["ioctl"], -1, 2))


def program_that_lets_python_run(more: list[dict[str, Any]]) -> bytes:
    everything = sorted(set(NR) - {"ioctl"})
    return seccomp.compile_profile(profile(entry(*everything), *more))


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


@pytest.mark.parametrize(
    ("action", "value"),
    [
        ("SCMP_ACT_KILL", 0),
        ("SCMP_ACT_KILL_THREAD", 0),
        ("SCMP_ACT_KILL_PROCESS", 0x80000000),
        ("SCMP_ACT_TRAP", 0x00030000),
        ("SCMP_ACT_ERRNO", 0x00050000 | 7),
        ("SCMP_ACT_TRACE", 0x7FF00000 | 7),
        ("SCMP_ACT_LOG", 0x7FFC0000),
        ("SCMP_ACT_ALLOW", 0x7FFF0000),
    ],
)
def test_actions_have_the_kernels_values(action: str, value: int) -> None:
    program = seccomp.compile_profile(profile(entry("read", action=action, errnoRet=7)))
    assert verdict(program, "read") == value


def test_the_programs_are_little_endian_sock_filters() -> None:
    program = seccomp.compile_profile(profile(entry("read")))
    assert program[:8] == bytes.fromhex("2000000004000000")  # A = arch
    assert bpf.disassemble(program)[0] == bpf.Instruction(bpf.LD_ABS, 0, 0, bpf.ARCH)


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


def test_architectures_have_their_aliases() -> None:
    assert seccomp.native_arch("arm64") == "aarch64"
    assert seccomp.native_arch("AMD64") == "x86_64"
    with pytest.raises(NotSupportedError, match="riscv64"):
        seccomp.native_arch("riscv64")


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


@pytest.mark.skipif(NATIVE != "x86_64", reason="needs x86-64")
def test_the_x86_64_table_is_that_of_this_machines_headers() -> None:
    candidates = (
        "/usr/include/x86_64-linux-gnu/asm/unistd_64.h",
        "/usr/include/asm/unistd_64.h",
    )
    header = next((Path(path) for path in candidates if Path(path).exists()), None)
    if header is None:
        component_missing("no kernel headers (linux-libc-dev)")
    theirs = dict(re.findall(r"#define __NR_(\w+) (\d+)", header.read_text()))
    assert {name: NR.get(name) for name in theirs} == {k: int(v) for k, v in theirs.items()}


def test_the_aarch64_table_is_that_of_the_generic_headers() -> None:
    header = Path("/usr/include/asm-generic/unistd.h")
    if not header.exists():
        component_missing("no kernel headers (linux-libc-dev)")
    ours = numbers("aarch64")
    # Where 32-bit machines differ, and arm64's own choices, the generic header says more.
    theirs = dict(re.findall(r"#define __NR_(\w+) (\d+)\n", header.read_text()))
    common = {name: int(value) for name, value in theirs.items() if name in ours}
    assert len(common) > 270
    assert {name: ours[name] for name in common} == common


def test_numbers_are_unique_and_shared_from_424_on() -> None:
    for arch in ARCHES:
        assert len(set(numbers(arch).values())) == len(numbers(arch))
    new = [{k: v for k, v in numbers(arch).items() if v >= 424} for arch in ARCHES]
    assert new[0] == new[1]
    assert len(known_names()) > 380


# Capsule's own profiles


DEFAULT = seccomp.load_profile("default")
LANDLOCK = seccomp.load_profile("landlock")
OWN = ("default", "landlock", "shared-uid")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", OWN)
def test_own_profiles_are_clean_and_small(name: str, arch: str) -> None:
    source = seccomp.load_profile(name)
    assert seccomp.lint(source, arch) == []
    program = seccomp.compile_profile(source, arch)
    assert len(program) // 8 < 700


@pytest.mark.parametrize("arch", ARCHES)
def test_a_call_costs_few_instructions(arch: str) -> None:
    program = seccomp.compile_profile(DEFAULT, arch)
    audit = seccomp.AUDIT_ARCH[arch]
    plain = {n for e in DEFAULT["syscalls"] if not e.get("args") for n in e["names"]}
    costs = [
        bpf.simulate(program, numbers(arch)[n], audit).steps for n in plain & set(numbers(arch))
    ]
    assert max(costs) <= 14
    ioctls = [
        bpf.simulate(program, numbers(arch)["ioctl"], audit, (0, cmd)) for cmd in (0x5401, 0x5413)
    ]
    assert max(each.steps for each in ioctls) <= 30


def test_every_ioctl_but_three_is_allowed() -> None:
    """The allowing entries cover 2^32 - 3 commands; look at all that differ in up to two bits."""
    program = seccomp.compile_profile(DEFAULT)
    refused = {0x5412, 0x541C, 0x5423}
    near = {c ^ 1 << i ^ 1 << j for c in refused for i in range(32) for j in range(32)}
    for command in near | refused:
        expected = ERRNO | errno.EPERM if command in refused else ALLOW
        assert verdict(program, "ioctl", 0, command) == expected, hex(command)
        assert verdict(program, "ioctl", 0, command | HIGH) == expected, hex(command)


def test_new_and_unknown_calls_look_like_an_older_kernel() -> None:
    program = seccomp.compile_profile(DEFAULT)
    for number in (NR["rseq_slice_yield"] + 1, 999, 0x3FFFFFFF):
        assert bpf.simulate(program, number, AUDIT).value == ERRNO | errno.ENOSYS


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
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
STREAM, DGRAM, RAW, SEQPACKET = 1, 2, 3, 5

# One line per rule: the call, its arguments, what a confined program is told.
REFUSED: dict[str, tuple[str, tuple[Any, ...], int]] = {
    "clone3": ("clone3", (0, 0), ENOSYS),
    **{f"clone {k}": ("clone", (v | SIGCHLD, 0, 0, 0, 0), EPERM) for k, v in NS_FLAGS.items()},
    **{f"unshare {k}": ("unshare", (v,), EPERM) for k, v in NS_FLAGS.items()},
    "unshare NEWTIME": ("unshare", (NEWTIME,), EPERM),
    "unshare with high bits": ("unshare", (0x10000000 | HIGH,), EPERM),
    "setns": ("setns", (-1, 0), EPERM),
    "socket AF_VSOCK": ("socket", (40, STREAM, 0), FAMILY),
    "socket AF_ALG": ("socket", (38, SEQPACKET, 0), FAMILY),
    "socket AF_PACKET": ("socket", (17, RAW, 0), FAMILY),
    "socket AF_VSOCK with high bits": ("socket", (40 | HIGH, STREAM, 0), FAMILY),
    "socket AF_UNIX with high bits": ("socket", (AF_UNIX | HIGH, STREAM, 0), FAMILY),
    **{
        f"socket family {family}": ("socket", (family, STREAM, 0), FAMILY)
        for family in range(48)
        if family not in (AF_UNIX, AF_INET, AF_INET6, AF_NETLINK)
    },
    "socket SCTP": ("socket", (AF_INET, STREAM, 132), PROTOCOL),
    "socket MPTCP": ("socket", (AF_INET6, STREAM, 262), PROTOCOL),
    "socket raw": ("socket", (AF_INET, RAW, 1), EPERM),
    "socket seqpacket": ("socket", (AF_INET, SEQPACKET, 0), ENOSYS),
    "netlink audit": ("socket", (AF_NETLINK, RAW, 9), PROTOCOL),
    "netlink netfilter": ("socket", (AF_NETLINK, RAW, 12), PROTOCOL),
    "socketpair AF_TIPC": ("socketpair", (30, SEQPACKET, 0, Room(8)), FAMILY),
    "io_uring_setup": ("io_uring_setup", (1, Room(120)), ENOSYS),
    "io_uring_enter": ("io_uring_enter", (-1, 0, 0, 0, 0, 0), ENOSYS),
    "io_uring_register": ("io_uring_register", (-1, 0, 0, 0), ENOSYS),
    "keyctl": ("keyctl", (0, -2, 1), EPERM),
    "add_key": ("add_key", (Text("user"), Text("capsule"), Text("x"), 1, -2), EPERM),
    "request_key": ("request_key", (Text("user"), Text("capsule"), 0, 0), EPERM),
    "ptrace": ("ptrace", (0, 0, 0, 0), EPERM),
    "process_vm_readv": ("process_vm_readv", (PID, 0, 0, 0, 0, 0), EPERM),
    "process_vm_writev": ("process_vm_writev", (PID, 0, 0, 0, 0, 0), EPERM),
    "process_madvise": ("process_madvise", (-1, 0, 0, 0, 0), EPERM),
    "pidfd_getfd": ("pidfd_getfd", (-1, 0, 0), EPERM),
    "kcmp": ("kcmp", (PID, PID, 0, 0, 0), EPERM),
    "userfaultfd": ("userfaultfd", (1,), EPERM),
    "perf_event_open": ("perf_event_open", (Room(128), 0, -1, -1, 0), EPERM),
    "bpf": ("bpf", (0, Room(128), 128), EPERM),
    "mount": ("mount", (0, 0, 0, 0, 0), EPERM),
    "umount2": ("umount2", (Text("/nonexistent"), 0), EPERM),
    "pivot_root": ("pivot_root", (0, 0), EPERM),
    "chroot": ("chroot", (Text("/"),), EPERM),
    "fsopen": ("fsopen", (Text("tmpfs"), 0), EPERM),
    "fsconfig": ("fsconfig", (-1, 0, 0, 0, 0), EPERM),
    "fsmount": ("fsmount", (-1, 0, 0), EPERM),
    "fspick": ("fspick", (-100, Text("/"), 0), EPERM),
    "open_tree": ("open_tree", (-100, Text("/"), 0), EPERM),
    "open_tree_attr": ("open_tree_attr", (-100, Text("/"), 0, 0, 0), EPERM),
    "move_mount": ("move_mount", (-1, Text(""), -1, Text(""), 0), EPERM),
    "mount_setattr": ("mount_setattr", (-1, Text(""), 0, 0, 0), EPERM),
    "statmount": ("statmount", (0, 0, 0, 0), ENOSYS),
    "listmount": ("listmount", (0, 0, 0, 0), ENOSYS),
    "listns": ("listns", (0, 0, 0, 0), ENOSYS),
    "open_by_handle_at": ("open_by_handle_at", (-100, Room(64), 0), EPERM),
    "name_to_handle_at": ("name_to_handle_at", (-100, Text("/"), Room(64), Room(8), 0), EPERM),
    "fanotify_init": ("fanotify_init", (0, 0), EPERM),
    "fanotify_mark": ("fanotify_mark", (-1, 0, 0, -1, 0), EPERM),
    "quotactl": ("quotactl", (0, 0, 0, 0), EPERM),
    "quotactl_fd": ("quotactl_fd", (-1, 0, 0, 0), EPERM),
    "swapon": ("swapon", (Text("/nonexistent"), 0), EPERM),
    "swapoff": ("swapoff", (Text("/nonexistent"),), EPERM),
    "reboot": ("reboot", (0, 0, 0, 0), EPERM),
    "kexec_load": ("kexec_load", (0, 99, 0, 0), EPERM),
    "kexec_file_load": ("kexec_file_load", (-1, -1, 0, 0, 0), EPERM),
    "init_module": ("init_module", (0, 0, 0), EPERM),
    "finit_module": ("finit_module", (-1, 0, 0), EPERM),
    "delete_module": ("delete_module", (Text("nonexistent"), 0), EPERM),
    "syslog": ("syslog", (10, 0, 0), EPERM),
    "acct": ("acct", (Text("/nonexistent"),), EPERM),
    "settimeofday": ("settimeofday", (0, 0), EPERM),
    "clock_settime": ("clock_settime", (0, 0), EPERM),
    "adjtimex": ("adjtimex", (Room(256),), EPERM),
    "clock_adjtime": ("clock_adjtime", (0, Room(256)), EPERM),
    "sethostname": ("sethostname", (0, -1), EPERM),
    "setdomainname": ("setdomainname", (0, -1), EPERM),
    "lookup_dcookie": ("lookup_dcookie", (0, 0, 0), EPERM),
    "nfsservctl": ("nfsservctl", (0, 0, 0), EPERM),
    "vhangup": ("vhangup", (), EPERM),
    "limits of others": ("prlimit64", (1, 7, 0, Room(16)), EPERM),
    "core limit": ("prlimit64", (0, 4, Room(16), 0), 0),
    "core limit with high bits": ("prlimit64", (0, 4 | HIGH, Room(16), 0), 0),
    "core limit by setrlimit": ("setrlimit", (4, Room(16)), 0),
    "core limit by setrlimit with high bits": ("setrlimit", (4 | HIGH, Room(16)), 0),
    "sched_setaffinity": ("sched_setaffinity", (0, 128, Room(b"\xff" * 128)), EPERM),
    "mbind": ("mbind", (0, 0, 0, 0, 0, 0), ENOSYS),
    "set_mempolicy": ("set_mempolicy", (0, 0, 0), ENOSYS),
    "get_mempolicy": ("get_mempolicy", (0, 0, 0, 0, 0), ENOSYS),
    "move_pages": ("move_pages", (0, 0, 0, 0, 0, 0), ENOSYS),
    "migrate_pages": ("migrate_pages", (0, 0, 0, 0), ENOSYS),
    "memfd_secret": ("memfd_secret", (0,), ENOSYS),
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
    "mknodat device": ("mknodat", (-100, Text("/tmp/capsule-dev"), stat.S_IFCHR, 259), EPERM),
    "mknodat block": ("mknodat", (-100, Text("/tmp/capsule-dev"), stat.S_IFBLK, 259), EPERM),
    "mknodat, 16 bits count": (
        "mknodat",
        (-100, Text("/tmp/capsule-dev"), 0x10000 | stat.S_IFBLK, 259),
        EPERM,
    ),
}
if NATIVE == "x86_64":
    REFUSED |= {
        "iopl": ("iopl", (0,), EPERM),
        "ioperm": ("ioperm", (0, 0, 0), EPERM),
        "modify_ldt": ("modify_ldt", (0, Room(64), 64), ENOSYS),
        "create_module": ("create_module", (0, 0), EPERM),
        "_sysctl": ("_sysctl", (0,), ENOSYS),
        "mknod device": ("mknod", (Text("/tmp/capsule-dev"), stat.S_IFCHR, 259), EPERM),
        "uselib": ("uselib", (Text("/nonexistent"),), ENOSYS),
    }

# Those that do no harm and work for any user, unconfined, where the kernel has them at all.
HARMLESS = (
    "clone NEWUSER",
    "unshare NEWUSER",
    "socket AF_VSOCK",
    "socket AF_ALG",
    "netlink audit",
    "io_uring_setup",
    "keyctl",
    "add_key",
    "ptrace",
    "kcmp",
    "userfaultfd",
    "adjtimex",
    "sched_setaffinity",
    "get_mempolicy",
    "set_mempolicy",
    "io_setup",
    "personality without randomisation",
    "personality with high bits",
    "personality READ_IMPLIES_EXEC",
    "TIOCSTI",
    "TIOCSTI with high bits",
    "TIOCSTI, sign extended",
    "TIOCSETD",
)
# What a kernel without the feature, or a host with other settings, says instead.
NOT_HERE = {ENOSYS, EPERM, EACCES, FAMILY, PROTOCOL, errno.EIO, errno.ENODEV, errno.EOPNOTSUPP}


@pytest.fixture(scope="module")
def default_filter() -> bytes:
    return seccomp.compile_profile(DEFAULT)


@pytest.fixture(scope="module")
def marked_filter() -> bytes:
    return seccomp.compile_profile(marked(DEFAULT))


Rules = dict[str, tuple[str, tuple[Any, ...], int]]


def answers(rules: Rules, filter: bytes) -> dict[str, int]:
    """All in one child: what is refused has no effect on the next."""
    calls = [(NR[name], *args) for name, args, _ in rules.values()]
    return dict(zip(rules, attempt(filter, *calls), strict=True))


@pytest.fixture(scope="module")
def refusals(default_filter: bytes, marked_filter: bytes) -> tuple[dict[str, int], dict[str, int]]:
    return answers(REFUSED, default_filter), answers(REFUSED, marked_filter)


@pytest.mark.parametrize("rule", REFUSED)
def test_refused(rule: str, refusals: tuple[dict[str, int], dict[str, int]]) -> None:
    plain, with_mark = refusals
    assert plain[rule] == REFUSED[rule][2]
    assert with_mark[rule] == MARK, "it is the filter that says no"


@pytest.mark.parametrize("rule", HARMLESS)
def test_refused_calls_work_unconfined(rule: str) -> None:
    """Else their refusal proves nothing."""
    name, args, _ = REFUSED[rule]
    (found,) = attempt(None, (NR[name], *args))
    if found in NOT_HERE:
        pytest.skip(f"this kernel answers {errno.errorcode[found]} to {rule} unconfined")
    assert found == 0


@pytest.mark.skipif(NATIVE != "x86_64", reason="needs x86-64")
def test_thirty_two_bit_calls_end_the_process(default_filter: bytes) -> None:
    with pytest.raises(Killed, match="SIGSYS"):
        attempt(default_filter, ("i386",))


@pytest.mark.skipif(NATIVE != "x86_64", reason="needs x86-64")
def test_thirty_two_bit_calls_work_unconfined() -> None:
    try:
        assert attempt(None, ("i386",)) == [0]
    except Killed as killed:
        pytest.skip(f"this kernel has no 32-bit calls: {killed}")


@pytest.mark.skipif(NATIVE != "x86_64", reason="needs x86-64")
def test_x32_calls_do_not_exist(default_filter: bytes) -> None:
    assert attempt(default_filter, (0x40000000 + NR["getpid"],)) == [ENOSYS]


ALLOWED: dict[str, tuple[str, tuple[Any, ...]]] = {
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
    "statx": ("statx", (-100, Text("/"), 0, 0xFFF, Room(256))),
    "openat2": ("openat2", (-100, Text("/"), Room(24), 24)),
    "faccessat2": ("faccessat2", (-100, Text("/"), 0, 0)),
    "close_range": ("close_range", (900, 999, 0)),
    "pidfd_open": ("pidfd_open", (PID, 0)),
    "memfd_create": ("memfd_create", (Text("x"), 1)),
    "membarrier": ("membarrier", (0, 0, 0)),
    "inotify": ("inotify_init1", (0,)),
    "epoll": ("epoll_create1", (0,)),
    "epoll_pwait2": ("epoll_pwait2", (-1, 0, 0, 0, 0, 0)),
    "timerfd": ("timerfd_create", (1, 0)),
    "signalfd": ("signalfd4", (-1, Room(8), 8, 0)),
    "eventfd": ("eventfd2", (0, 0)),
    "copy_file_range": ("copy_file_range", (-1, 0, -1, 0, 0, 0)),
    "splice": ("splice", (-1, 0, -1, 0, 0, 0)),
    "seccomp": ("seccomp", (2, 0, Room(b"\x00\x00\xff\x7f"))),
    "landlock": ("landlock_create_ruleset", (0, 0, 1)),
    "prctl": ("prctl", (3, 0, 0, 0, 0)),
    "rseq": ("rseq", (0, 0, 0, 0)),
    "shmget": ("shmget", (0x63617073, 4096, 0)),  # a key that nobody has: nothing is made
    "msgget": ("msgget", (0x63617073, 0)),
    "semget": ("semget", (0x63617073, 1, 0)),
    "mq_open": ("mq_open", (Text("capsule-nonexistent"), 0, 0, 0)),
    "setuid": ("setuid", (os.getuid(),)),
    "getgroups": ("getgroups", (0, 0)),
    "setpriority": ("setpriority", (0, PID, 19)),
    "prlimit64": ("prlimit64", (0, 7, 0, Room(16))),
    "read core limit": ("prlimit64", (0, 4, 0, Room(16))),
    **{f"setrlimit {n}": ("setrlimit", (n, 1)) for n in (0, 1, 2, 3, *range(5, 16))},
    **{f"prlimit64 {n}": ("prlimit64", (0, n, 1, 0)) for n in (0, 1, 2, 3, *range(5, 16))},
    "sched_getaffinity": ("sched_getaffinity", (0, 128, Room(128))),
    "futex_waitv": ("futex_waitv", (0, 0, 0, 0, 0)),
    "fchmodat2": ("fchmodat2", (-100, Text("/nonexistent"), 0, 0)),
    "mseal": ("mseal", (1, 0, 0)),
    "getxattrat": ("getxattrat", (-100, Text("/nonexistent"), 0, 0, 0, 0)),
    "TCGETS": ("ioctl", (PTY, 0x5401, Room(64))),
    "TIOCGWINSZ": ("ioctl", (PTY, 0x5413, Room(64))),
    "FIONREAD": ("ioctl", (PTY, 0x541B, Room(64))),
    "TIOCGPTN": ("ioctl", (PTY, 0x80045430, Room(64))),
}


def test_everything_else_is_answered_by_the_kernel(default_filter: bytes) -> None:
    calls = [(NR[name], *args) for name, args in ALLOWED.values()]
    confined = dict(zip(ALLOWED, attempt(default_filter, *calls), strict=True))
    assert confined == dict(zip(ALLOWED, attempt(None, *calls), strict=True))


def test_fifos_and_sockets_may_be_made(default_filter: bytes, tmp_path: Path) -> None:
    kinds = (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFREG, 0)
    calls = [
        (NR["mknodat"], -100, Text(tmp_path / str(i)), kind | 0o600, 0)
        for i, kind in enumerate(kinds)
    ]
    assert attempt(default_filter, *calls) == [0, 0, 0, 0]


def test_sync_succeeds_without_flushing_the_host(
    default_filter: bytes, marked_filter: bytes
) -> None:
    calls = [(NR["sync"],), (NR["syncfs"], 0)]
    assert attempt(default_filter, *calls) == [0, 0]
    assert attempt(marked_filter, *calls) == [MARK, MARK]


def test_a_second_filter_cannot_undo_the_first(default_filter: bytes) -> None:
    generous = seccomp.compile_profile(profile(defaultAction="SCMP_ACT_ALLOW"))
    script = str(Path(__file__).parents[1] / "support/confine.py")
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or "python3"
    code = f"""
import sys; sys.path.insert(0, {str(Path(script).parent)!r})
import confine; confine.load(bytes.fromhex({generous.hex()!r}))
print(confine.call({NR["ptrace"]}, 0, 0, 0, 0))
"""
    ended = run_confined(default_filter, python, "-c", code)
    assert ended.stdout == f"{EPERM}\n", ended.stderr


# The level without namespaces


SYSV_AND_QUEUES = set(
    "mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv "
    "msgsnd semctl semget semop semtimedop shmat shmctl shmdt shmget".split()
)


def allowed_plainly(source: dict[str, Any]) -> set[str]:
    return {
        name
        for each in source["syscalls"]
        if each["action"] == "SCMP_ACT_ALLOW" and not each.get("args")
        for name in each["names"]
    }


def test_landlock_is_the_default_minus_what_namespaces_made_private() -> None:
    less = allowed_plainly(DEFAULT) - allowed_plainly(LANDLOCK)
    assert allowed_plainly(LANDLOCK) < allowed_plainly(DEFAULT)
    conditional = {"setpriority", "ioprio_set"}
    conditional |= {"sched_setattr", "sched_setparam", "sched_setscheduler"}
    connecting = {"accept", "accept4", "bind", "connect", "listen"}
    inotify = {"inotify_add_watch", "inotify_init", "inotify_init1", "inotify_rm_watch"}
    assert less == SYSV_AND_QUEUES | connecting | conditional | inotify


LANDLOCK_REFUSED: dict[str, tuple[str, tuple[Any, ...], int]] = {
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


def test_refused_without_namespaces() -> None:
    found = answers(LANDLOCK_REFUSED, seccomp.compile_profile(LANDLOCK))
    assert found == {rule: expected for rule, (_, _, expected) in LANDLOCK_REFUSED.items()}
    with_mark = answers(LANDLOCK_REFUSED, seccomp.compile_profile(marked(LANDLOCK)))
    assert with_mark == dict.fromkeys(LANDLOCK_REFUSED, MARK)


def test_pairs_and_ones_own_priority_work_without_namespaces() -> None:
    calls = [
        (NR["socketpair"], AF_UNIX, STREAM | 0o2000000, 0, Room(8)),
        (NR["socketpair"], AF_UNIX, SEQPACKET, 0, Room(8)),
        (NR["setpriority"], 0, 0, 19),
        (NR["prlimit64"], 0, 7, 0, Room(16)),
    ]
    assert attempt(seccomp.compile_profile(LANDLOCK), *calls) == [0, 0, 0, 0]


SEND_THROUGH_PAIR = """
import socket, sys
try:
    one, other = socket.socketpair(socket.AF_UNIX, getattr(socket, sys.argv[2]))
    one.sendto(b"escaped", sys.argv[1])
except OSError as error:
    print(error.errno)
"""


@pytest.mark.parametrize("kind", ["SOCK_DGRAM", "SOCK_STREAM", "SOCK_SEQPACKET"])
def test_a_pair_cannot_reach_the_hosts_sockets(kind: str, tmp_path: Path) -> None:
    """One end of a datagram pair sends to any address: the reason why there are none."""
    path = str(tmp_path / "host.sock")
    argv = (shutil.which("python3") or "python3", "-c", SEND_THROUGH_PAIR, path, kind)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as host:
        host.bind(path)
        host.setblocking(False)
        if kind == "SOCK_DGRAM":
            run_confined(None, *argv)
            assert host.recv(100) == b"escaped", "unconfined it arrives"
        run_confined(seccomp.compile_profile(LANDLOCK), *argv)
        with pytest.raises(BlockingIOError):
            host.recv(100)


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


# Real programs


C_PROGRAM = """
#include <pthread.h>
#include <stdio.h>
static void *hello(void *x) { puts("hello from C"); return x; }
int main(void) { pthread_t t; pthread_create(&t, 0, hello, 0); return pthread_join(t, 0); }
"""
GO_PROGRAM = 'package main\nimport "fmt"\nfunc main() { fmt.Println("hello from Go") }\n'
JAVA_PROGRAM = 'class A { public static void main(String[] a) { System.out.print("hello"); } }'
PYTHON_PROGRAM = """
import asyncio, multiprocessing, socket, ssl, subprocess, tempfile, threading, ctypes, random
async def main():
    proc = await asyncio.create_subprocess_exec("echo", "child", stdout=subprocess.PIPE)
    print((await proc.communicate())[0].decode().strip())
asyncio.run(main())
threading.Thread(target=print, args=("thread",)).start()
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(sum(pool.map(abs, [-1, -2])))
"""
NODE_PROGRAM = """
const fs = require("fs"), { Worker } = require("worker_threads"), cp = require("child_process");
fs.promises.readFile("/etc/hostname").catch(() => {}).then(() => {
  console.log(cp.execFileSync("echo", ["child"]).toString().trim());
  new Worker("console.log('worker')", { eval: true }).on("exit", () => console.log("done"));
});
"""
GIT = """
git init -q r && cd r && git config user.email a@b && git config user.name n &&
echo x > f && git add f && git commit -qm first && git clone -q . ../copy &&
git -C ../copy log --oneline
"""
TMUX = """
tmux -L t$$ -f /dev/null new-session -d 'echo in tmux > out; tmux -L t$$ wait-for -S done' &&
timeout 10 tmux -L t$$ wait-for done; cat out; tmux -L t$$ kill-server 2>/dev/null; true
"""
PROGRAMS: dict[str, tuple[str, str, str]] = {
    "python": ("python3", f"python3 - <<'E'\n{PYTHON_PROGRAM}\nE", "child\nthread\n3"),
    "node": ("node", f"node - <<'E'\n{NODE_PROGRAM}\nE", "child\nworker\ndone"),
    "gcc": ("gcc", f"cat > a.c <<'E'\n{C_PROGRAM}\nE\ngcc -pthread a.c && ./a.out", "hello from C"),
    "go": (
        "go",
        f"cat > a.go <<'E'\n{GO_PROGRAM}\nE\nGOCACHE=$PWD/c go run a.go",
        "hello from Go",
    ),
    "git": ("git", GIT, "first"),
    "bash": ("bash", "set -o pipefail; seq 9 | tac | head -1; wait; echo $(<a)", "9"),
    "java": ("java", f"echo '{JAVA_PROGRAM}' > A.java && java A.java", "hello"),
    "vim": (
        "vim",
        "printf 'a\\n' > f; vim -es -u NONE +'s/a/edited/' +wq f </dev/null; cat f",
        "edited",
    ),
    "top": ("top", "TERM=xterm top -bn1 | head -3", "load average"),
    "tmux": ("tmux", TMUX, "in tmux"),
    "script": ("script", "script -qec 'tty && stty size' /dev/null </dev/null", "/dev/pts/"),
    "perl": ("perl", "perl -e 'fork // die; wait; print qq(perl\\n)'", "perl"),
    "tar": ("tar", "mkdir d; touch d/f; tar czf d.tgz d; tar tzf d.tgz", "d/f"),
}


@pytest.mark.slow  # Go and Java take their time
@pytest.mark.parametrize(
    ("profile_name", "name"),
    [
        *(("default", name) for name in PROGRAMS),
        # tmux talks to itself through a Unix socket, which there are none of at that level.
        *(("landlock", name) for name in PROGRAMS if name != "tmux"),
    ],
)
def test_programs_run_confined(profile_name: str, name: str, tmp_path: Path) -> None:
    program, script, expected = PROGRAMS[name]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    env = {**os.environ, "HOME": str(tmp_path), "TMUX_TMPDIR": str(tmp_path)}
    compiled = seccomp.compile_profile(seccomp.load_profile(profile_name))
    ended = run_confined(compiled, "bash", "-c", script, cwd=tmp_path, env=env)
    assert expected in ended.stdout, ended.stderr


def test_node_goes_without_io_uring(tmp_path: Path, default_filter: bytes) -> None:
    """Its event loop tries io_uring first; ENOSYS makes it use its threads."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    (tmp_path / "f").write_text("x" * 100_000)
    code = "require('fs').promises.readFile('f').then(d => console.log(d.length))"
    env = {**os.environ, "UV_USE_IO_URING": "1"}
    ended = run_confined(default_filter, "node", "-e", code, cwd=tmp_path, env=env)
    assert ended.stdout == "100000\n", ended.stderr


def test_this_machine_is_one_we_know() -> None:
    assert platform.machine() in (*ARCHES, "amd64", "arm64")


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_whoever_forks_may_have_our_own_filter_but_for_two_calls(arch: str) -> None:
    program = seccomp.compiled("default", arch)
    assert seccomp.fork_answer(program, arch) == 0x00050000 | 1  # EPERM


def test_a_filter_that_stands_in_the_way_comes_last() -> None:
    strict = seccomp.load_profile("default")
    for entry in strict["syscalls"]:
        entry["names"] = [name for name in entry["names"] if name != "setgroups"]
    assert seccomp.fork_answer(seccomp.compile_profile(strict)) == 0


def test_a_filter_that_lets_programs_make_namespaces_is_loaded_whole() -> None:
    lax = {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []}
    assert seccomp.fork_answer(seccomp.compile_profile(lax)) == 0
