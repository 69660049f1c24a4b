"""`sudo` in real sandboxes: what it runs, when that ends, and who asks too much of it."""

from __future__ import annotations

import textwrap

import pytest

from capsule.service import CreateRequest, ExecCall
from tests.unit.test_service_real import folder
from tests.unit.test_users_real import Sandbox, base

__all__ = ["base", "folder"]

pytestmark = pytest.mark.real


async def test_the_usual_options(base: Sandbox) -> None:
    said = await base.sh(
        "sudo -n -E id -u; sudo -u root -i pwd; sudo A=1 sh -c 'echo $A'; sudo -nH -u '#0' whoami;"
        " sudo -s echo a; cd /var; sudo pwd; sudo -v"
    )
    assert said.split() == ["0", "/root", "1", "root", "a", "/var"]


async def test_the_environment_is_roots(base: Sandbox) -> None:
    env = {"SECRET": "1", "PATH": "/tmp:/opt/capsule/bin:/usr/local/bin:/usr/bin:/bin"}
    plain = await base.sh("sudo env", env=env)
    kept = await base.sh("sudo -E env", env=env)
    for line in ("HOME=/root", "USER=root", "LOGNAME=root", "SUDO_UID=1000", "SUDO_GID=1000"):
        assert f"{line}\n" in plain
    assert "SECRET" not in plain and "/tmp:" not in plain
    assert "SECRET=1" in kept


ENDS = {
    "sudo sh -c 'exit 3'": (3, ""),
    "sudo sh -c 'kill -TERM $$'": (143, ""),
    "sudo nothing-like-it": (1, "sudo: nothing-like-it: command not found"),
    "sudo -u nobody id": (1, "nobody in this sandbox to become but root"),
    "sudo -Z id": (1, "-Z: no such option here"),
}


async def test_how_it_ends(base: Sandbox) -> None:
    for command, (code, said) in ENDS.items():
        done = await base.service.exec(base.id, ExecCall(("bash", "-lc", f"{command}; exit $?")))
        assert (done.exit.exit_code, done.stdout) == (code, b""), command
        assert said in done.stderr.decode()


async def test_input_output_and_errors_are_the_callers(base: Sandbox) -> None:
    assert await base.sh("printf 'a\\nb\\n' | sudo sort -r | sudo tee /root/sorted") == "b\na\n"
    assert await base.sh("sudo sh -c 'echo no >&2; echo yes' 2>/dev/null") == "yes\n"
    assert await base.sh("sudo cat < /root/sorted; sudo true <&- >&- 2>&-") == "b\na\n"
    assert await base.sh("head -c 3000000 /dev/zero | sudo cat | wc -c") == "3000000\n"


ESCAPE = """
import os, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open("/tmp/marks", "a").write(f"{os.getpid()}\\n")
time.sleep(600)
"""


async def alive(base: Sandbox, script: str) -> bool:
    count = f"ps -eo args= | grep -c '[s]leep {script}'; true"
    return (await base.sh(count, user="root")).strip() != "0"


async def is_gone(base: Sandbox, pid: int) -> bool:
    return not await base.sh(f"ls -d /proc/{pid} 2>/dev/null; true", user="root")


async def test_a_kill_reaches_what_an_exec_left_that_has_ended(base: Sandbox) -> None:
    await base.service.files(base.id).write("/tmp/escape.py", ESCAPE.encode())
    script = """
        sudo python3 /tmp/escape.py
        sudo sh -c 'sleep 6543 >/dev/null 2>&1 &'
        until [ -s /tmp/marks ]; do sleep .02; done
        cat /tmp/marks
    """
    other = "sudo sh -c 'sleep 3456 >/dev/null 2>&1 &'"
    done = await base.service.exec(base.id, ExecCall(("bash", "-lc", textwrap.dedent(script))))
    await base.sh(other)
    assert await alive(base, "6543") and not await is_gone(base, int(done.stdout))
    assert not await base.service.kill(base.id, done.id)  # it does not run any more
    assert not await alive(base, "6543") and await is_gone(base, int(done.stdout))
    assert await alive(base, "3456")


HOSTILE = """
import array, os, socket, struct, subprocess, sys

def door(path=sys.argv[1]):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(path.replace("@", "\\0"))
    return sock

def send(sock, data, fds=()):
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg([data], rights)
        return sock.recv(4096)
    except OSError:
        return b""

null = os.open("/dev/null", os.O_RDWR)
head = struct.Struct("IIII")
for data in (b"", b"x", b"x" * 100_000, bytes(1000), b"\\xff" * 168, head.pack(2**32 - 1, 1, 1, 0)):
    for fds in ((), (null,), (null,) * 5, (null,) * 8):
        with door() as sock:
            answer = send(sock, data.ljust(168, b"\\0") if len(data) == 16 else data, fds)
            assert b"cannot be read" in answer or not answer, answer
kept = []
for _ in range(31):  # a silent client holds no more than its own place
    kept.append(door())
print(subprocess.run(["sudo", "id", "-u"], capture_output=True, text=True).stdout.strip())
for sock in kept: sock.close()
for _ in range(100):
    door().close()
try:
    thief = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    thief.bind(sys.argv[1].replace("@", "\\0"))
    print("stolen")
except OSError:
    print("not stolen")
print(subprocess.run(["sudo", "id", "-u"], capture_output=True, text=True).stdout.strip())
"""


async def test_a_request_that_cannot_be_read_harms_nobody(base: Sandbox) -> None:
    await base.service.files(base.id).write("/tmp/hostile.py", HOSTILE.encode())
    door = "@capsule-sudo" if base.confined else "/dev/capsule-sudo"
    said = (await base.sh(f"python3 /tmp/hostile.py {door}")).splitlines()
    assert said == ["0", "not stolen", "0"]


async def test_a_template_without_it_says_so(base: Sandbox) -> None:
    made = await base.service.create(CreateRequest(template="python"))
    done = await base.service.exec(made.id, ExecCall(("/opt/capsule/bin/sudo", "id")))
    assert (done.exit.exit_code, done.stdout) == (1, b"")
    assert b"`sudo: true`" in done.stderr and b'user="root"' in done.stderr
