"""Runs as root inside the machine with systemd: starts servers as people do, and looks what holds.

One line per check, and one `ROW` of JSON per way of starting it. test_systemd.py reads them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = ["/opt/capsule", "/opt/capsule/sdk/python/src", "/opt/site"]

from capsule_sdk import Capsule  # noqa: E402
from tests.vm.systemd_people import (  # noqa: E402
    CAPSULE,
    DEV,
    HOME,
    LIMITS,
    LONE,
    PATIENCE,
    PROCESSES,
    Login,
    as_user,
    cgroup,
    client,
    end,
    healthy,
    held,
    measure,
    say,
    serve,
    server,
    wait,
)

STOP_DELAY = 2  # seconds from the last logout to the end of the user's manager: build_systemd.sh
UNIT = Path("/etc/systemd/system/capsule.service")
CORE = (
    "test_a_launched_box_has_an_agent_that_answers",
    "test_of_a_busy_box_nothing_is_left",
    "test_boxes_launched_at_once_share_nothing",
    "test_a_box_outlives_its_provider",
    "test_discard_ends_a_living_box",
    "test_memory",
    "test_processes",
    "test_cpus",
    "test_a_timeout_ends_everything",
)


def limits_hold(way: str, user: str, port: int, *, where: str) -> Capsule:
    """Returns a sandbox with something in it, for what comes next."""
    made = client(port).create("python", **LIMITS)
    found = measure(made)
    at = cgroup(made)
    say("ROW " + json.dumps({"way": way, "user": user, "held": held(found), "found": found}))
    say(f"  {way}: in {at}: {found}, {made.info.unenforced}")
    assert all(held(found).values()), found
    assert where in at, at
    made.write_file("/workspace/kept", way)
    return made


def lives_on(box: Capsule, port: int, way: str) -> None:
    """The sandbox answers another server, and its programs are still counted."""
    again = client(port).get(box.id)
    assert again.read_file("/workspace/kept") == way.encode()
    assert int(again.exec(["python3", "-c", PROCESSES], timeout=PATIENCE).stdout) < 32
    assert cgroup(again)


def a_user_in_a_plain_login_session() -> None:
    way, port = "login session", 8101
    dev = Login("dev")
    try:
        assert "session-" in dev.run("cat /proc/self/cgroup")
        say(dev.run(f"{CAPSULE} doctor | grep -A1 cgroups"))
        dev.run(f"setsid nohup {serve(port)} > first.log 2>&1 &")
        box = limits_hold(way, "dev", port, where="/app.slice/capsule-")
        assert "session-" in Path(f"/proc/{server(port)}/cgroup").read_text()
        log = Path("/home/dev/first.log").read_text()
        assert log.count("sandboxes end at the last logout of dev") == 1, log
        end(port, signal.SIGKILL)
        dev.run(f"setsid nohup {serve(port)} > second.log 2>&1 &")
        lives_on(box, port, way)
        box.delete()
        assert client(port).create("python", **LIMITS).exec(["true"]).exit_code == 0
        for each in client(port).list():
            each.delete()
        end(port)
        wait(lambda: not scopes(), PATIENCE, "the end of empty scopes")
    finally:
        dev.logout()


def scopes() -> list[Path]:
    return [*Path("/sys/fs/cgroup/user.slice").rglob("capsule-*.scope")]


def a_user_in_a_delegated_scope() -> None:
    way, port = "delegated scope", 8102
    dev = Login("dev")
    try:
        run = "systemd-run --user --scope --quiet --unit=own --property=Delegate=yes"
        dev.run(f"setsid nohup {run} {serve(port)} > scope.log 2>&1 &")
        box = limits_hold(way, "dev", port, where="/app.slice/own.scope/capsule")
        assert not scopes()
        box.delete()
        end(port)
    finally:
        dev.logout()


def a_users_service() -> None:
    way, port = "user service", 8103
    dev = Login("dev")
    try:
        unit = "--unit=served --property=Delegate=yes --property=Restart=no"
        dev.run(f"systemd-run --user {unit} {serve(port)}")
        box = limits_hold(way, "dev", port, where="/app.slice/capsule-")
        dev.run("systemctl --user restart served")
        lives_on(box, port, way)
        box.delete()
        dev.run("systemctl --user stop served")
    finally:
        dev.logout()


def a_job_of_cron() -> None:
    way, port = "cron-like, lingering", 8104
    subprocess.run(["loginctl", "enable-linger", "dev"], check=True)
    wait(lambda: Path("/run/user/1000/systemd/private").exists(), PATIENCE, "dev's manager")
    try:
        with open("/tmp/cron.log", "wb") as log:
            subprocess.Popen(as_user(DEV, *serve(port).split()), stdout=log, stderr=log)
        box = limits_hold(way, "dev", port, where="/app.slice/capsule-")
        assert "last logout" not in Path("/tmp/cron.log").read_text()
        box.delete()
        end(port)
        contract_core()
    finally:
        subprocess.run(["loginctl", "disable-linger", "dev"], check=True)


def contract_core() -> None:
    environment = [f"PYTHONPATH={HOME}:{HOME}/src:/opt/site", "PYTHONDONTWRITEBYTECODE=1"]
    run = ["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null"]
    run += ["-o", "asyncio_mode=auto", f"{HOME}/tests/vm/contract_core.py", "-k", " or ".join(CORE)]
    done = subprocess.run(
        as_user(DEV, "env", *environment, *run), capture_output=True, text=True, check=False
    )
    say(done.stdout.strip().rpartition("\n")[2])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def nobody_to_ask() -> None:
    port = 8105
    with open("/tmp/lone.log", "wb") as log:
        subprocess.Popen(as_user(LONE, *serve(port).split()), stdout=log, stderr=log)
    box = client(port).create("python", **LIMITS)
    gaps = {each.what: each for each in box.info.unenforced}
    assert {"memory", "cpus"} <= set(gaps), gaps
    assert "systemd gave no scope: no manager answers at /run/user/1001" in gaps["memory"].why
    assert "sudo loginctl enable-linger lone" in gaps["memory"].fix
    found = measure(box)
    watched = {**held(found), "memory": "watched"}  # by the agent, for want of a cgroup
    row = {"way": "no manager", "user": "lone", "held": watched, "found": found}
    say("ROW " + json.dumps(row))
    written = Path("/tmp/lone.log").read_text()
    assert written.count("systemd gave no scope") == 1, written
    assert "not enforced as meant: memory, cpus" in written, written
    box.delete()
    end(port)


def root_by_hand() -> None:
    way, port = "login session", 8106
    root = Login("root")
    try:
        root.run(f"setsid nohup {serve(port)} > /tmp/root.log 2>&1 &")
        box = limits_hold(way, "root", port, where="/system.slice/capsule-")
        end(port, signal.SIGKILL)
        root.run(f"setsid nohup {serve(port)} >> /tmp/root.log 2>&1 &")
        lives_on(box, port, way)
    finally:
        root.logout()
    lives_on(box, port, way)
    box.delete()
    end(port)


@contextlib.contextmanager
def unit(port: int, text: str) -> Iterator[None]:
    UNIT.write_text(text)
    Path("/etc/capsule").mkdir(exist_ok=True)
    Path("/etc/capsule/capsule.env").write_text(f"CAPSULE_PORT={port}\n")
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    systemctl("start")
    try:
        yield
    finally:
        subprocess.run(["systemctl", "stop", "capsule"], check=True)


def systemctl(verb: str) -> None:
    done = subprocess.run(["systemctl", verb, "capsule"], capture_output=True, text=True)
    if done.returncode:
        log = ["journalctl", "-u", "capsule", "-n", "20", "--no-pager", "-o", "cat"]
        raise AssertionError(
            done.stderr + subprocess.run(log, capture_output=True, text=True).stdout
        )


def the_shipped_unit() -> None:
    way, port = "shipped unit", 8107
    with unit(port, (HOME / "deploy/systemd/capsule.service").read_text()):
        box = limits_hold(way, "root", port, where="/system.slice/capsule.service/capsule")
        systemctl("restart")
        lives_on(box, port, way)
        systemctl("stop")
        systemctl("start")
        lives_on(box, port, way)
        pid = subprocess.run(
            ["systemctl", "show", "-P", "MainPID", "capsule"], capture_output=True, check=True
        )
        os.kill(int(pid.stdout), signal.SIGKILL)
        wait(lambda: not healthy(port), PATIENCE, "the end of the server")
        lives_on(box, port, way)
        box.delete()


def a_unit_without_a_subgroup() -> None:
    """As systemd before 254 sees the shipped one: sandboxes must not keep it from a start."""
    way, port = "unit without a subgroup", 8108
    shipped = (HOME / "deploy/systemd/capsule.service").read_text()
    with unit(port, shipped.replace("DelegateSubgroup=server\n", "")):
        box = client(port).create("python", **LIMITS)
        box.write_file("/workspace/kept", way)
        assert "/system.slice/capsule-" in cgroup(box), cgroup(box)
        systemctl("restart")
        lives_on(box, port, way)
        box.delete()


def a_logout_ends_sandboxes() -> None:
    port, dev = 8109, Login("dev")
    dev.run(f"setsid nohup {serve(port)} > gone.log 2>&1 &")
    box = client(port).create("python", **LIMITS)
    keeper = Path(cgroup_path(box))
    assert keeper.exists()
    end(port)
    assert keeper.exists()
    dev.logout()
    wait(lambda: not keeper.exists(), PATIENCE, "the end of the sandbox with the last logout")
    wait(lambda: not Path("/run/user/1000").exists(), PATIENCE, "the end of /run/user/1000")


def cgroup_path(box: Capsule) -> str:
    return f"/sys/fs/cgroup{cgroup(box)}/"


def a_server_in_the_session_keeps_it_open() -> None:
    way, port, dev = "open session", 8110, Login("dev")
    dev.run(f"setsid nohup {serve(port)} > open.log 2>&1 &")
    box = client(port).create("python", **LIMITS)
    box.write_file("/workspace/kept", way)
    dev.logout()
    time.sleep(STOP_DELAY + 3)  # the time in which the manager would have ended
    lives_on(box, port, way)
    box.delete()
    end(port)
    wait(lambda: not Path("/run/user/1000").exists(), PATIENCE, "the end of /run/user/1000")


def with_linger_they_outlive_a_logout() -> None:
    way, port, dev = "lingering", 8111, Login("dev")
    dev.run("loginctl enable-linger")  # their own command, without sudo
    if not Path("/var/lib/systemd/linger/dev").exists():  # no polkit here
        subprocess.run(["loginctl", "enable-linger", "dev"], check=True)
    dev.run(f"setsid nohup {serve(port)} > linger.log 2>&1 &")
    box = client(port).create("python", **LIMITS)
    box.write_file("/workspace/kept", way)
    assert "last logout" not in Path("/home/dev/linger.log").read_text()
    end(port)
    dev.logout()
    time.sleep(STOP_DELAY + 3)  # the time in which it would have ended
    dev = Login("dev")
    dev.run(f"setsid nohup {serve(port)} > linger2.log 2>&1 &")
    lives_on(box, port, way)
    box.delete()
    end(port)
    dev.logout()
    subprocess.run(["loginctl", "disable-linger", "dev"], check=True)


CLAIM = """
import os, statistics, subprocess, sys, time
from capsule.providers.local import scope
times = []
for _ in range(7):
    child = subprocess.Popen(["sleep", "60"])
    begun = time.monotonic()
    given = scope.asker("auto", child.pid)("")
    times.append((time.monotonic() - begun) * 1000)
    assert given.own, given
    child.kill(); child.wait()
by_bus = scope.sockets(os.geteuid(), os.environ)[-1:]
child = subprocess.Popen(["sleep", "60"])
begun = time.monotonic()
given = scope.claim(child.pid, os.geteuid(), by_bus, "")
child.kill()
bus = f"{(time.monotonic() - begun) * 1000:.0f} ms" if given.own else given.why
print(f"claim {statistics.median(times):.0f} ms, by the bus: {bus}")
"""


def what_a_scope_costs() -> None:
    dev = Login("dev")
    try:
        path = f"PYTHONPATH={HOME}/src:/opt/site"
        Path("/tmp/claim.py").write_text(CLAIM)
        answer = dev.run(f"{path} python3 /tmp/claim.py")
        say(f"  {answer}")
        for setting in ("auto", "never", "auto", "never"):
            begun = time.monotonic()
            printed = dev.run(f"CAPSULE_CGROUP_SCOPE={setting} {CAPSULE} run 'print(6 * 7)'")
            say(f"  capsule run, cgroup_scope {setting}: {time.monotonic() - begun:.2f} s")
            assert "42" in printed, printed
    finally:
        dev.logout()


# At the same time, on a processor each: no two of a line have the same user's data directory.
LINES: tuple[tuple[Callable[[], None], ...], ...] = (
    (
        a_user_in_a_plain_login_session,
        a_user_in_a_delegated_scope,
        a_users_service,
        a_logout_ends_sandboxes,
        a_server_in_the_session_keeps_it_open,
        with_linger_they_outlive_a_logout,
        what_a_scope_costs,
    ),
    (
        the_shipped_unit,
        a_unit_without_a_subgroup,
        root_by_hand,
        nobody_to_ask,
    ),
)


def run(checks: Iterable[Callable[[], None]]) -> int:
    """How many failed."""
    failed = 0
    for check in checks:
        try:
            check()
            say(f"ok {check.__name__}")
        except BaseException:
            failed += 1
            say(f"not ok {check.__name__} {traceback.format_exc()}")
            for path in [*Path("/home/dev").glob("*.log"), *Path("/tmp").glob("*.log")]:
                say(f"--- {path}\n{path.read_text()[-1500:]}")
            break  # its server has the data directory that the next one needs
    return failed


def main() -> int:
    release = Path("/etc/os-release").read_text().partition('PRETTY_NAME="')[2].partition('"')[0]
    version = subprocess.run(["systemctl", "--version"], capture_output=True, text=True).stdout
    say("MACHINE " + f"{release}, Linux {os.uname().release}, systemd {version.split()[1]}")
    # The kernel's first quota changes its code (a static key), which a QEMU that emulates two busy
    # processors does not always survive: one is idle now, and this quota stays.
    quota = ["systemctl", "set-property", "--runtime", "checks.service", "CPUQuota=190%"]
    subprocess.run(quota, check=True)
    with ThreadPoolExecutor() as pool:
        failed = sum(pool.map(run, LINES))
    return failed + run([a_job_of_cron])  # with the contract, which needs both processors


if __name__ == "__main__":
    say(f"VM-END {main()}")
