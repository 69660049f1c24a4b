"""A box is shown a machine of its own size, and has cores of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from capsule.model import MIB, Limits
from capsule.providers.local.cores import Cores
from capsule.providers.local.views import Views, visible_cpus


@pytest.mark.parametrize(("cpus", "shown"), [(0.1, 1), (0.5, 1), (1.0, 1), (1.5, 2), (64.0, 8)])
def test_a_part_of_a_core_is_shown_as_one(cpus: float, shown: int) -> None:
    assert visible_cpus(Limits(cpus=cpus), available=8) == shown


def test_boxes_of_a_size_share_a_view(tmp_path: Path) -> None:
    store = Views(tmp_path / "views")
    assert store.known(1, 512 * MIB) is None
    made = store.make(1, 512 * MIB)
    assert store.known(1, 512 * MIB + 17) == made
    assert store.known(2, 512 * MIB) is None
    assert (made / "sys/devices/system/cpu/online").read_text() == "0\n"
    assert (made / "sys/fs/cgroup/memory.max").read_text() == f"{512 * MIB}\n"
    Views(tmp_path / "views").clear()
    assert store.known(1, 512 * MIB) is None


def test_boxes_are_spread_over_the_cores() -> None:
    cores = Cores((0, 1, 2, 3))
    picked: list[int] = []
    for name in "abcd":
        cores.take(name, one := cores.pick(1))
        picked += one
    assert picked == [0, 1, 2, 3]
    cores.release("c")
    assert cores.pick(1) == (2,)
    assert cores.pick(4) == (), "who may have all of them is not bound"


def test_a_box_is_counted_once_however_often_it_is_adopted() -> None:
    cores = Cores((0, 1))
    for _ in range(3):
        cores.take("a", (0, 7))
    cores.take("b", (1,))
    assert cores.pick(1) == (0,)
    for _ in range(2):
        cores.release("b")
    assert cores.pick(1) == (1,)
