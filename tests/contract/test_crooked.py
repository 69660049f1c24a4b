"""The crooked providers misbehave as they say, and the link tells the truth about it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from capsule.errors import UnavailableError
from capsule.link.protocol import ProtocolError
from capsule.model import Template
from capsule.providers.contract import Provider
from capsule.providers.fake import (
    DiesAtLaunch,
    DiesMidExec,
    LiesAboutExit,
    RefusesDestroy,
)
from capsule.providers.local.provider import LocalProvider
from capsule.providers.local.settings import LocalSettings
from capsule.testing.harness import Launcher, drain, opened, owned

pytestmark = pytest.mark.real


@pytest.fixture
async def real(data_dir: Path, run_dir: Path, agent_binary: Path) -> AsyncIterator[Provider]:
    async with opened(LocalProvider(LocalSettings(data_dir, run_dir, agent_binary))) as provider:
        yield provider


def launcher(provider: Provider) -> Launcher:
    return Launcher(provider, f"c{id(provider):x}-", Template("crooked"))


async def test_what_dies_at_launch_leaves_nothing(real: Provider) -> None:
    launch = launcher(DiesAtLaunch(real, times=2))
    for _ in range(2):
        with pytest.raises(UnavailableError, match="before it was ready"):
            await launch()
    assert await owned(real) == []
    assert await (await launch()).output("echo third time lucky") == "third time lucky"


@pytest.mark.parametrize("after", [1, 20, 100, 1000])
async def test_a_box_that_dies_mid_exec_is_unavailable_and_has_no_exit(
    real: Provider, after: int
) -> None:
    launch = launcher(DiesMidExec(real, after=after))
    with pytest.raises(UnavailableError):
        await (await launch()).sh("yes | head -c 5000; sleep 1000")
    assert await owned(real) == []


async def test_an_exit_kept_back_is_not_invented(real: Provider) -> None:
    subject = await launcher(LiesAboutExit(real))()
    with pytest.raises(UnavailableError):
        await subject.sh("echo out")
    async with await subject.start_sh("echo out") as stream:
        with pytest.raises(UnavailableError):
            await drain(stream)
        assert stream.exit is None


async def test_an_exit_made_up_is_not_believed(real: Provider) -> None:
    subject = await launcher(LiesAboutExit(real, made_up=True))()
    with pytest.raises(ProtocolError):
        await subject.sh("echo out")


async def test_what_cannot_be_destroyed_stays_owned_until_it_can(real: Provider) -> None:
    launch = launcher(RefusesDestroy(real, times=2))
    subject = await launch()
    for remove in (subject.box.destroy(), launch.provider.discard(subject.box.handle)):
        with pytest.raises(UnavailableError, match="right now"):
            await remove
    assert await subject.output("echo alive") == "alive"
    assert len(await owned(launch.provider)) == 1
    await subject.box.destroy()
    assert await owned(launch.provider) == []
