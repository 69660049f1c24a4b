"""Limits and lives of sandboxes on Debian with systemd, in a machine that QEMU emulates."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.vm import machines

MACHINE = ROOT / ".cache" / "vm" / "systemd"
# QEMU 7.2 emulates cmpxchg16b in a way that a kernel 6.12 does not survive.
CPU = "qemu64,-cx16"


def second_disk(scratch: Path) -> Path:
    """The tree as `make setup` would have it in /opt/capsule, compiled: there it takes minutes."""
    tree = scratch / "tree"
    for name in ("src", "sdk/python/src", "spec", "deploy", "tests/vm"):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tree / name, ignore=skip)
    (tree / "agent/build").mkdir(parents=True)
    shutil.copy(ROOT / "agent/build/capsule-agent", tree / "agent/build")
    shutil.copy(ROOT / "pyproject.toml", tree)
    command = tree / ".venv/bin/capsule"
    command.parent.mkdir(parents=True)
    folders = ["/opt/capsule/src", "/opt/capsule/sdk/python/src", "/opt/site"]
    start = ["import sys", f"sys.path[:0] = {folders}", "from capsule.cli.main import main"]
    command.write_text("\n".join(["#!/usr/bin/python3", *start, "sys.exit(main())", ""]))
    command.chmod(0o755)
    usr = MACHINE / "python/usr"
    libraries = usr / "lib/x86_64-linux-gnu"
    python = [libraries / "ld-linux-x86-64.so.2", "--library-path", libraries, usr / "bin/python3"]
    compile_ = ["-m", "compileall", "-qq", "-s", tree, "-p", "/opt/capsule", tree]
    subprocess.run(
        [str(word) for word in (*python, *compile_)],
        env={"PYTHONHOME": str(usr)},
        check=True,
    )
    disk = scratch / "capsule.ext4"
    made = ["mke2fs", "-q", "-t", "ext4", "-L", "capsule", "-E", "root_owner=0:0", "-d"]
    subprocess.run([*made, tree, disk, "100M"], check=True)
    return disk


def boot(scratch: Path, timeout: float) -> str:
    disks = [(MACHINE / "disk.ext4", "on"), (second_disk(scratch), "off")]
    command = ["qemu-system-x86_64", "-nographic", "-no-reboot", "-m", "3072", "-smp", "2"]
    command += ["-cpu", CPU, "-nic", "none"]
    command += ["-kernel", str(MACHINE / "vmlinuz"), "-initrd", str(MACHINE / "initrd")]
    for disk, snapshot in disks:
        command += ["-drive", f"file={disk},format=raw,if=virtio,snapshot={snapshot}"]
    quiet = "quiet loglevel=1 systemd.show_status=false panic=-1 nohz=off highres=off"
    command += ["-append", f"root=/dev/vda rw console=ttyS0 {quiet}"]
    screen = scratch / "screen"
    with open(screen, "wb") as output:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            timeout=timeout,
            check=False,
        )
    return screen.read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.needs("systemd-machine")
@pytest.mark.timeout(900)
def test_limits_hold_and_sandboxes_live_on_as_promised_under_systemd(tmp_path: Path) -> None:
    screen = boot(tmp_path, 880).replace("\r", "")
    assert "VM-END 0" in screen and "not ok" not in screen, screen[-6000:]
    (machine,) = re.findall(r"MACHINE (.*)", screen)
    rows = [json.loads(row) for row in re.findall(r"ROW (.*)", screen)]
    (MACHINE / "rows.json").write_text(json.dumps({"machine": machine, "rows": rows}))
    page = machines.PAGE.read_text()
    tried = page.partition(machines.BEGIN)[2].strip().partition(":\n")[0]  # a kernel may be newer
    assert machines.with_table(page, tried, rows) == page, "python -m tests.vm.machines"
