"""The same boxes on another kernel, with cgroup v2 alone, in a machine that QEMU emulates."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.support import ROOT

CACHE = ROOT / ".cache" / "vm"


@pytest.mark.needs("qemu")
@pytest.mark.timeout(400)
def test_limits_hold_under_cgroup_2_on_an_older_kernel(tmp_path: Path) -> None:
    image, boot = tmp_path / "vm.cpio", max(CACHE.glob("boot/vmlinuz-*"))
    site = sysconfig.get_path("purelib")
    build = ROOT / "tests" / "vm" / "build_image.sh"
    subprocess.run([build, CACHE / "lib" / "modules", site, image], check=True)
    command = ["qemu-system-x86_64", "-nographic", "-no-reboot", "-m", "2048", "-smp", "2"]
    command += ["-kernel", str(boot), "-initrd", str(image)]
    command += ["-append", "console=ttyS0 quiet panic=-1"]
    result = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=380, check=False
    )
    screen = result.stdout.decode(errors="replace")
    assert "VM-END 0" in screen, screen[-4000:]
    assert "not ok" not in screen
