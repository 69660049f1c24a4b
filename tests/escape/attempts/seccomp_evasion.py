"""System calls that a filter may not recognise: other architectures, other widths, other doors."""

from __future__ import annotations

import platform

from capsule.providers.local.syscalls import numbers
from tests.escape.attempt import Attempt

MACHINE_CODE = """
if A["machine"] != "x86_64": absent("only x86-64 has a second door")
def run(code):
    space = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=7)
    space.write(code)
    return ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(space)))()
"""

# A 32-bit program: write(1, "ESCAPED by i386\\n", 16); exit(0)
ELF32 = """
if A["machine"] != "x86_64": absent("only x86-64 runs them")
text = b"ESCAPED by i386\\n"
base = 0x08048000
code = bytes.fromhex("b804000000bb01000000b9") + struct.pack("<I", base + 84 + 34)
code += bytes.fromhex("ba10000000cd80b80100000031dbcd80")
head = b"\\x7fELF\\x01\\x01\\x01" + bytes(9)
head += struct.pack("<HHIIIIIHHHHHH", 2, 3, 1, base + 84, 52, 0, 0, 52, 32, 1, 0, 0, 0)
head += struct.pack("<IIIIIIII", 1, 0, base, base, 200, 200, 5, 4096)
body = (head + code).ljust(84 + 34, b"\\x90") + text
fd = os.open("i386", os.O_CREAT | os.O_WRONLY, 0o755)
os.write(fd, body.ljust(200, b"\\0"))
os.close(fd)
os.execv("./i386", ["i386"])
"""

ATTEMPTS = [
    Attempt(
        "int80",
        "make a system call by the 32-bit door of a 64-bit program (int 0x80)",
        MACHINE_CODE
        + """
answer = run(bytes.fromhex("b814000000cd80c3"))
if answer == os.getpid(): escaped(f"getpid answered {answer}")
""",
        killed=True,
        hardened=True,
    ),
    Attempt(
        "i386-program",
        "run a 32-bit program",
        ELF32,
        killed=True,
        hardened=True,
    ),
    Attempt(
        "x32",
        "make calls by x32 numbers",
        """
        if A["machine"] != "x86_64": absent("only x86-64 has them")
        libc.syscall.restype = ctypes.c_long
        pid = libc.syscall(ctypes.c_long(0x40000000 + 39))
        if pid == os.getpid(): escaped("getpid answered")
        absent("this kernel has no x32")
        """,
        killed=True,
    ),
    Attempt(
        "high-bits-clone",
        "the same with clone, whose upper half the kernel ignores",
        """
        pid = call("clone", 0x10000000 | 1 << 40 | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0: os._exit(0)
        os.waitpid(pid, 0)
        escaped("made")
        """,
        hardened=True,
    ),
    Attempt(
        "high-bits-prlimit",
        "change the limit of another process, whose pid has bits set that the kernel ignores",
        """
        child = os.fork()
        if child == 0:
            time.sleep(5)
            os._exit(0)
        number = tried("prlimit64", child | 1 << 32, 7, struct.pack("QQ", 5, 5), None)
        os.kill(child, 9)
        if number == 0: escaped("changed")
        """,
    ),
    Attempt(
        "second-filter",
        "load a filter that allows everything over the one there is, then trace a child",
        """
        allow = struct.pack("HBBI", 6, 0, 0, 0x7FFF0000)
        keep = ctypes.create_string_buffer(allow)
        program = struct.pack("HxxxxxxP", 1, ctypes.addressof(keep))
        libc.prctl(38, 1, 0, 0, 0)
        call("seccomp", 1, 0, program)
        child = os.fork()
        if child == 0:
            time.sleep(5)
            os._exit(0)
        number = tried("ptrace", 0x4206, child, 0, 0)
        os.kill(child, 9)
        if number == 0: escaped("traced")
        """,
    ),
    Attempt(
        "trace-child",
        "trace one's own child, to change its system calls after the filter saw them",
        """
        child = os.fork()
        if child == 0:
            call("ptrace", 0, 0, 0, 0)
            os._exit(42)
        if os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 42: escaped("traced")
        """,
    ),
    Attempt(
        "unknown-numbers",
        "find a system call newer than the filter that is allowed",
        """
        libc.syscall.restype = ctypes.c_long
        known = {errno.ENOSYS, errno.EPERM}
        found = []
        for number in [*range(471, 600), 1 << 20, (1 << 30) - 1]:  # above: see x32
            ctypes.set_errno(0)
            answer = libc.syscall(ctypes.c_long(number), -1, -1, -1, -1, -1, -1)
            if answer != -1 or ctypes.get_errno() not in known:
                found.append(number)
        if found: escaped(found)
        """,
        proof="a kernel of today has no calls of tomorrow",
    ),
    Attempt(
        "every-dangerous-call",
        "make each call that rules the machine, and get another answer than a refusal",
        """
        names = "ptrace bpf mount umount2 pivot_root setns unshare_ kexec_load init_module".split()
        names += "delete_module open_by_handle_at perf_event_open userfaultfd keyctl".split()
        names += "add_key request_key quotactl acct swapon reboot settimeofday chroot".split()
        names += "move_mount open_tree fsopen fspick fsmount mount_setattr pidfd_getfd kcmp".split()
        names += "process_vm_readv process_vm_writev io_uring_setup io_uring_enter".split()
        found = {}
        for name in names:
            if name in A["calls"]:
                libc.syscall.restype = ctypes.c_long
                result = libc.syscall(ctypes.c_long(A["calls"][name]), -1, -1, -1, -1, -1, -1)
                if result != -1 or ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
                    found[name] = ctypes.get_errno()
        if found: escaped(found)
        """,
        args={"calls": dict(numbers(platform.machine()))},
    ),
]
