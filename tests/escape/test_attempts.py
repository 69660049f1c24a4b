"""Attempts that are programs and nothing more, by what they attack: attempts/ has them."""

from __future__ import annotations

import pytest

from tests.escape.attempt import CELLS, Attempt, Check, parameters, proofs
from tests.escape.attempts import (
    devices,
    host_files,
    host_processes,
    kernel,
    mounts,
    namespaces,
    network,
    privileges,
    seccomp_evasion,
)

pytestmark = pytest.mark.real

GROUPS = {
    module.__name__.rpartition(".")[2]: module.ATTEMPTS
    for module in (
        devices,
        host_files,
        host_processes,
        kernel,
        mounts,
        namespaces,
        network,
        privileges,
        seccomp_evasion,
    )
}


@pytest.mark.parametrize(
    ("attempt", "cell"),
    [each for name, found in GROUPS.items() for each in parameters(found, CELLS, name)],
    indirect=["cell"],
)
def test_stays_inside(attempt: Attempt, holds: Check) -> None:
    holds(attempt)


@proofs([attempt for found in GROUPS.values() for attempt in found])
def test_works_outside(attempt: Attempt, works: Check) -> None:
    works(attempt)
