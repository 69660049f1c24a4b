"""Interrupts and timeouts of runs that wait for programs which no Ctrl-C of a terminal reaches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.test_contexts import Box, box, until_printed
from tests.unit.test_service_real import folder, serving

pytestmark = [pytest.mark.real, pytest.mark.timeout(60)]
__all__ = ["box", "folder"]

APART = {
    "timeout": "timeout 60 sleep 50",
    "substitution": "x=$(timeout 60 sleep 50)",
    "session": "setsid -w sleep 50",
    "job control": "set -m; sleep 50; set +m",
    "deaf": "trap '' INT; sleep 50; trap - INT",
    "deaf loop": "trap '' INT; while :; do :; done",
}


@pytest.mark.parametrize("code", list(APART.values()), ids=list(APART))
async def test_a_shell_outlives_its_timeout(box: Box, code: str) -> None:
    context = await box.context("bash")
    await box.run("kept=1; f() { echo $kept; }", context)
    ended = await box.run(code, context, timeout=0.3)
    assert (ended.end.status, ended.end.state) == ("timed_out", "idle")
    after = await box.run("f", context)
    assert (after.end.status, after.stdout) == ("ok", b"1\n")


@pytest.mark.parametrize("code", [APART["timeout"], APART["session"]])
async def test_an_interrupt_reaches_other_groups_when_it_is_not_heard(box: Box, code: str) -> None:
    context = await box.context("bash")
    live = await box.start(f"echo on; {code}", context)
    await until_printed(live, b"on")
    assert await box.contexts.interrupt(box.id, context)
    events = [event async for event in live]
    assert getattr(events[-1], "status", "") == "interrupted"


async def test_what_runs_beside_a_shell_is_spared_by_an_interrupt_that_is_heard(box: Box) -> None:
    context = await box.context("bash")
    await box.run("setsid sleep 1000 >/dev/null 2>&1 & echo $! > pid", context)
    live = await box.start("echo on; sleep 50", context)
    await until_printed(live, b"on")
    await box.contexts.interrupt(box.id, context)
    assert [event async for event in live]
    assert (await box.run("kill -0 $(cat pid); echo $?", context)).stdout == b"0\n"


@pytest.mark.needs("node")
async def test_node_outlives_its_timeout(folder: Path) -> None:
    async with serving(folder) as service:
        box = await Box.create(service, "node")
        await box.run("kept = 1")
        code = 'require("child_process").execSync("timeout 60 sleep 50")'
        ended = await box.run(code, timeout=0.3)
        assert (ended.end.status, ended.end.state) == ("timed_out", "idle")
        assert (await box.run("console.log(kept)")).stdout == b"1\n"


async def test_python_is_not_kept_waiting(box: Box) -> None:
    context = await box.context()
    await box.run("kept = 1", context)
    ended = await box.run("import os; os.system('timeout 60 sleep 50')", context, timeout=0.3)
    assert (ended.end.status, ended.end.state) == ("timed_out", "idle")
    assert (await box.run("print(kept)", context)).stdout == b"1\n"
