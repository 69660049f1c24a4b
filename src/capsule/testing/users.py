"""Conformance: programs that are root in their sandbox, and nobody outside of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from capsule.errors import InvalidError, NotSupportedError
from capsule.model import ROOT, WORKSPACE
from capsule.testing.harness import ENV, Subject, drain, read_until

AT_HOME: Mapping[str, Any] = {"user": ROOT, "env": {**ENV, "HOME": "/root"}}
AS_ROOT: Mapping[str, Any] = {**AT_HOME, "cwd": WORKSPACE}

# All of what root has over the files of its sandbox: CHOWN, DAC_OVERRIDE, FOWNER, FSETID.
POWERS = 0x1B


async def need_root(subject: Subject) -> None:
    """Skip, with the box's own words, where programs are not root."""
    try:
        await subject.run("true", **AS_ROOT)
    except NotSupportedError as exc:
        assert "root" in exc.message, exc.message
        pytest.skip(exc.message)


class TestRoot:
    async def test_root_is_root_and_has_a_home(self, subject: Subject) -> None:
        await need_root(subject)
        script = "id -u; id -g; cd; pwd; echo kept > note; cat note; rm note"
        said = await subject.output(script, **AS_ROOT)
        assert said.split() == ["0", "0", "/root", "kept"]
        assert await subject.output("id -u") != "0"

    async def test_without_a_directory_root_starts_at_home(self, subject: Subject) -> None:
        await need_root(subject)
        request = subject.request("/bin/pwd", **AT_HOME)
        assert (await subject.link.collect(request)).stdout == b"/root\n"

    async def test_root_and_the_user_share_their_files(self, subject: Subject) -> None:
        await need_root(subject)
        await subject.sh("echo mine > of-user; chmod 600 of-user")
        said = await subject.output("cat of-user; stat -c %u of-user; echo x > of-root", **AS_ROOT)
        assert said.split() == ["mine", "0"]
        assert await subject.content("of-root") == b"x\n"
        assert await subject.output("rm of-root of-user && echo gone") == "gone"

    async def test_modes_do_not_stop_root(self, subject: Subject) -> None:
        await need_root(subject)
        await subject.need_chmod()
        await subject.sh("mkdir closed && echo deep > closed/file && chmod 0 closed/file closed")
        assert (await subject.sh("cat closed/file")).exit.exit_code != 0
        assert await subject.output("cat closed/file; chmod 755 closed", **AS_ROOT) == "deep"

    async def test_root_has_no_more_than_power_over_files(self, subject: Subject) -> None:
        await need_root(subject)
        status = await subject.output("cat /proc/self/status", **AS_ROOT)
        found = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert {int(found[f"Cap{which}"], 16) for which in ("Prm", "Eff", "Bnd")} == {POWERS}
        assert {found["CapInh"], found["CapAmb"]} == {"0" * 16}
        assert found["NoNewPrivs"] == "1" and found["Seccomp"] == "2"

    async def test_others_cannot_be_named(self, subject: Subject) -> None:
        with pytest.raises((InvalidError, NotSupportedError), match="user"):
            await subject.run("true", user="daemon")

    async def test_a_kill_takes_all_that_root_started(self, subject: Subject) -> None:
        await need_root(subject)
        stream = await subject.start_sh("setsid sleep 600 & echo $! > pid; sleep 600", **AS_ROOT)
        pid = await subject.pid_in("pid")
        assert await subject.is_alive(pid)
        assert await subject.link.kill(stream.exec_id)
        await drain(stream)
        await stream.aclose()
        assert not await subject.is_alive(pid)

    async def test_a_timeout_takes_all_that_root_started(self, subject: Subject) -> None:
        await need_root(subject)
        script = "setsid sleep 600 & echo $! > late; sleep 600"
        result = await subject.sh(script, timeout=0.5, **AS_ROOT)
        assert result.exit.timed_out
        pid = int(await subject.content("late"))
        assert not await subject.is_alive(pid)

    async def test_root_has_terminal_input_and_carry(self, subject: Subject) -> None:
        await need_root(subject)
        stream = await subject.start("/bin/sh", "-c", "tty && id -u; read x", tty=True, **AS_ROOT)
        assert b"/dev/pts/" in await read_until(stream, b"0\r\n")
        await subject.link.kill(stream.exec_id)
        await stream.aclose()
        told = await subject.sh("cat; echo carried >&3", input=b"in", carry=True, **AS_ROOT)
        assert (told.stdout, told.carry) == (b"in", b"carried\n")

    async def test_root_after_root(self, subject: Subject) -> None:
        """What was made for the first serves the others, or goes with it."""
        await need_root(subject)
        assert [await subject.output("id -u", **AS_ROOT) for _ in range(3)] == ["0"] * 3
        assert await subject.output("id -u") != "0"
