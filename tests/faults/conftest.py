from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.nursery import Nursery, nursery
from tests.support.users import User


@pytest.fixture(scope="session")
def own_nursery(agent_binary: Path) -> Iterator[Nursery]:
    """Servers of whoever runs the tests."""
    with nursery() as made:
        yield made


@pytest.fixture
def user_nursery(agent_binary: Path, as_user: User) -> Iterator[Nursery]:
    """Servers of an ordinary user."""
    with nursery(as_user) as made:
        yield made
