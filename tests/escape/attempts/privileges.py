"""Privileges: get some, by setuid programs, capabilities, other ids, or files that grant them."""

from __future__ import annotations

from tests.escape.attempt import PEER, ROOT, Attempt

BOUNDING = "only root can empty the bounding set; no_new_privs makes what is in it worthless"

CAPABILITIES = """
header = struct.pack("Ii", 0x20080522, 0)
data = ctypes.create_string_buffer(24)
def capabilities():
    call("capget", header, data)
    effective, permitted, inheritable, *more = struct.unpack("6I", data.raw)
    return effective | permitted | inheritable | more[0] | more[1] | more[2]
"""

ATTEMPTS = [
    Attempt(
        "setuid-program",
        "start a setuid program of the host's /usr, and find it running as root",
        """
        import glob
        def counts(path):
            mode = os.stat(path).st_mode
            return stat.S_ISREG(mode) and mode & stat.S_ISUID and os.access(path, os.R_OK | os.X_OK)
        found = (path for d in ("/usr/bin", "/usr/sbin") for path in glob.glob(d + "/*"))
        paths = [path for path in found if os.path.exists(path) and counts(path)]
        if not paths: absent("there is no setuid program below /usr")
        for path in paths[:3]:
            for _ in range(3 if A.get("gvisor") else 20):
                pid = os.posix_spawn(path, [path], {}, file_actions=[
                    (os.POSIX_SPAWN_OPEN, n, "/dev/null", os.O_RDWR, 0) for n in (0, 1, 2)])
                end = time.monotonic() + 1
                while time.monotonic() < end:
                    owner = os.stat(f"/proc/{pid}").st_uid
                    if owner != os.getuid():
                        os.kill(pid, 9)
                        escaped(f"{path} runs as {owner}")
                    if os.waitpid(pid, os.WNOHANG)[0]: break
        """,
    ),
    Attempt(
        "capabilities",
        "have a capability, or take all of them",
        CAPABILITIES
        + """
if capabilities(): escaped(hex(capabilities()))
full = struct.pack("6I", 0xFFFFFFFF, 0xFFFFFFFF, 0, 0x1FF, 0x1FF, 0)
call("capset", header, full)
escaped("taken")
""",
        proof=ROOT,
    ),
    Attempt(
        "bounding-set",
        "have a capability left in the bounding set",
        """
        left = [cap for cap in range(41) if libc.prctl(23, cap, 0, 0, 0) == 1]
        if left: escaped(left)
        """,
        stands={"landlock-user": BOUNDING},
    ),
    Attempt(
        "ambient",
        "raise a capability in the ambient set",
        CAPABILITIES
        + """
call("capset", header, struct.pack("6I", 1, 1, 1, 0, 0, 0))
check(libc.prctl(47, 2, 0, 0, 0))
escaped("raised")
""",
        proof=ROOT,
    ),
    Attempt(
        "securebits",
        "keep capabilities across a change of user (securebits, keepcaps)",
        "check(libc.prctl(28, 0x10, 0, 0, 0)); escaped('set')",
        proof=ROOT,
    ),
    Attempt(
        "no-new-privs",
        "be without no_new_privs, so that setuid programs would count",
        """
        libc.prctl(38, 0, 0, 0, 0)
        if libc.prctl(39, 0, 0, 0, 0) == 0: escaped("it is off")
        """,
    ),
    Attempt(
        "become-root",
        "become root: setuid, setresuid, setgid, setgroups, setfsuid",
        """
        for name, count in (("setuid", 1), ("setresuid", 3), ("setgid", 1), ("setresgid", 3)):
            if tried(name, *[0] * count) == 0: escaped(name)
        if tried("setgroups", 1, struct.pack("I", 0)) == 0: escaped("setgroups")
        call("setfsuid", 0)
        if call("setfsuid", 0) == 0: escaped("setfsuid")
        """,
        proof=ROOT,
    ),
    Attempt(
        "become-another",
        "become another user of the box, or of another sandbox",
        """
        for uid in (1, 1001, 65534, os.getuid() + 65536):
            # the user's own id may be among them
            if uid != os.getuid() and tried("setresuid", uid, uid, uid) == 0: escaped(uid)
        """,
        proof=ROOT,
    ),
    Attempt(
        "supplementary-groups",
        "belong to a group of the server's",
        "if set(os.getgroups()) - {os.getgid()}: escaped(os.getgroups())",
        proof="the test's own users belong to none",
    ),
    Attempt(
        "file-capabilities",
        "set attributes of a file that the kernel believes: capabilities, overlays, integrity",
        """
        with open("tool", "wb"): pass
        value = struct.pack("<IIIII", 0x02000001, 0xFFFFFFFF, 0, 0x1FF, 0)
        for name, data in (("security.capability", value), ("trusted.overlay.opaque", b"y"),
                           ("security.ima", b"y"), ("security.evm", b"y")):
            try:
                os.setxattr("tool", name, data)
                escaped(name)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "setuid-of-another",
        "make a file of root's with the setuid bit",
        """
        with open("tool", "wb"): pass
        os.chown("tool", 0, 0)
        escaped("root's")
        """,
        proof=ROOT,
    ),
    Attempt(
        "setuid-for-host",
        "leave a setuid program of one's own where another user of the host can start it",
        """
        fd = os.open("tool", os.O_CREAT | os.O_WRONLY, 0o755)
        os.fchmod(fd, 0o4755)
        here = os.getcwd()
        reach = [p for p in (here, os.path.dirname(here)) if os.stat(p).st_mode & 0o001]
        mount = os.statvfs(".").f_flag & os.ST_NOSUID
        if len(reach) == 2 and not mount: escaped("reachable, and the bit counts")
        """,
        moot={"gvisor": "its disk is memory of its own kernel: no user of the host sees a file"},
    ),
    Attempt(
        "write-passwd",
        "open /etc/passwd, shadow, sudoers or ld.so.preload for writing",
        """
        for name in ("passwd", "shadow", "sudoers", "ld.so.preload", "ld.so.cache", "group"):
            try:
                os.open(f"/etc/{name}", os.O_WRONLY)
                escaped(name)
            except OSError as error:
                refused = error
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "replace-program",
        "overwrite the interpreter that runs oneself, by /proc/self/exe",
        """
        for path in ("/proc/self/exe", sys.executable):
            try:
                os.open(path, os.O_WRONLY)
                escaped(path)
            except OSError as error:
                if error.errno == errno.ETXTBSY: escaped("only because it runs")
                refused = error
        raise refused
        """,
        proof=ROOT,
    ),
    Attempt(
        "switch-user-programs",
        "become somebody else by set-uid programs, su and sudo, with an empty password",
        """
        import shlex
        lines = ("su -c id\\ -u", "/usr/bin/sudo -n id -u", "setpriv --reuid=0 id -u",
                 "unshare -r id -u")
        for line in lines:
            argv = shlex.split(line)
            try:
                ended = subprocess.run(argv, capture_output=True, text=True, input="\\n", timeout=1)
            except (OSError, subprocess.TimeoutExpired):
                continue
            if ended.returncode == 0 and ended.stdout.strip() == "0": escaped(argv[0])
        """,
        proof=PEER,
    ),
]
