"""Which level is chosen when trial sandboxes fail, as recorded on machines that people have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from capsule.errors import CapacityError, CapsuleError, UnavailableError
from capsule.link.conversation import silence
from capsule.model import Isolation
from capsule.providers.local.cgroups import Cgroups
from capsule.providers.local.levels import FILE, Way, settle, ways
from capsule.providers.local.probe import Facts, Try
from capsule.providers.local.settings import LocalSettings

NAMESPACES, LANDLOCK = Isolation.NAMESPACES, Isolation.LANDLOCK
OPEN = ("userns", "mounts", "overlay", "seccomp", "loop", "layers")


def facts(*, root: bool = True, refused: tuple[str, ...] = (), abi: int = 7) -> Facts:
    tries = {name: Try(name not in refused, stage=name) for name in OPEN}
    return Facts(
        uid=0 if root else 1000,
        gid=0 if root else 1000,
        kernel="6.18",
        tries={**tries, "landlock": Try(abi > 0, abi)},
        cgroups=Cgroups(0),
        mkfs=Path("/sbin/mkfs.ext4"),
        uid_ranges=root,
        cpus=(0, 1),
        sysctls={},
    )


class Machine:
    """Its launches fail at a stage, as those of a container did."""

    def __init__(self, **stages: str | CapsuleError) -> None:
        self.tried: list[Way] = []
        self._stages = stages

    async def attempt(self, way: Way) -> CapsuleError | None:
        self.tried.append(way)
        ranged = "ranges" if way.uid_ranges else "shared"
        for name in (f"{way.level}_{ranged}_{way.backing}", f"{way.level}_{ranged}", way.level):
            failure = self._stages.get(name)
            if isinstance(failure, str):
                text = f"the sandbox could not be started: {failure}: Operation not permitted"
                return UnavailableError(text, stage=failure)
            if failure is not None:
                return failure
        return None


@pytest.fixture
def settings(tmp_path: Path) -> LocalSettings:
    return LocalSettings(tmp_path, tmp_path / "run", Path("/bin/true"))


@pytest.mark.parametrize(
    ("machine", "host", "expected"),
    [
        pytest.param(Machine(), facts(), Way(NAMESPACES, True, "loop"), id="root"),
        pytest.param(Machine(), facts(root=False), Way(NAMESPACES, False, "loop"), id="user"),
        pytest.param(
            Machine(namespaces_ranges="mount namespace", namespaces_shared_loop="mount disk"),
            facts(),
            Way(NAMESPACES, False, "tmpfs"),
            id="docker, root, seccomp and systempaths unconfined",
        ),
        pytest.param(
            Machine(namespaces="pivot_root"),
            facts(),
            Way(LANDLOCK, True, "dir"),
            id="docker, root with SYS_ADMIN alone",
        ),
        pytest.param(
            Machine(namespaces="sethostname"),
            facts(root=False, refused=("loop",)),
            Way(LANDLOCK, False, "dir"),
            id="rootless podman with unmask=ALL",
        ),
        pytest.param(
            Machine(landlock_ranges="own disk directory"),
            facts(refused=("userns",)),
            Way(LANDLOCK, False, "dir"),
            id="docker, root without capabilities",
        ),
        pytest.param(
            Machine(landlock="kill"), facts(refused=("userns",)), None, id="programs never end"
        ),
        pytest.param(
            Machine(), facts(root=False, refused=("mounts",), abi=4), None, id="ubuntu 24.04"
        ),
    ],
)
async def test_the_strongest_way_that_works_is_chosen(
    machine: Machine, host: Facts, expected: Way | None, settings: LocalSettings
) -> None:
    settled, chosen = await settle(host, settings, machine.attempt)
    assert chosen == expected
    assert settled.strongest() == (expected.level if expected else Isolation.NONE)
    for level, trial in settled.trials.items():
        assert trial.ok or all("Operation not permitted" in each for each in trial.failures), level


async def test_a_level_that_is_set_is_the_only_one_tried(settings: LocalSettings) -> None:
    only = replace(settings, isolation=LANDLOCK)
    assert {way.level for way in ways(facts(), only)} == {LANDLOCK}


async def test_outcomes_are_kept_until_something_changes(settings: LocalSettings) -> None:
    machine = Machine(namespaces_ranges_loop="mount disk")
    for _ in range(2):
        _, chosen = await settle(facts(), settings, machine.attempt)
        assert chosen == Way(NAMESPACES, True, "tmpfs")
    assert len(machine.tried) == 2
    await settle(replace(facts(), kernel="6.19"), settings, machine.attempt)
    assert len(machine.tried) == 4
    await settle(facts(), settings, machine.attempt, every_level=True)
    assert len(machine.tried) == 7, "a report tries all levels anew"
    (settings.data_dir / FILE).write_text("{")
    await settle(facts(), settings, machine.attempt)
    assert len(machine.tried) == 9


async def test_what_fails_at_no_stage_counts_for_this_start_alone(settings: LocalSettings) -> None:
    """An agent that hung up, a box that could not be removed."""
    machine = Machine(namespaces=UnavailableError("the agent hung up before it was done"))
    for _ in range(2):
        _, chosen = await settle(facts(root=False), settings, machine.attempt)
        assert chosen == Way(LANDLOCK, False, "dir")
    assert [way.level for way in machine.tried].count(NAMESPACES) == 4
    assert [way.level for way in machine.tried].count(LANDLOCK) == 1


@pytest.mark.parametrize("error", [CapacityError("full"), silence("launch", 15.0)])
async def test_a_full_or_slow_machine_weakens_nothing(
    error: CapsuleError, settings: LocalSettings
) -> None:
    machine = Machine(namespaces=error)
    for count in (1, 2):
        _, chosen = await settle(facts(), settings, machine.attempt)
        assert chosen == Way(NAMESPACES, True, "loop")
        assert len(machine.tried) == count, "and is not kept"
