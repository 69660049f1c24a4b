"""How often the host is looked at: once a second, and again for what was missing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from capsule.errors import NotFoundError
from capsule.model import Isolation, Template
from capsule.providers.local import programs, roots, skeleton
from capsule.providers.local.roots import Roots

SHELL = Template("shell", needs=("sh",))
LACKING = Template("lacking", needs=("sh", "no-such-program"))


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kind of look was had at the host."""
    seen: Counter[str] = Counter()
    for module, name in ((skeleton, "signature"), (programs, "missing_on_host")):
        real = getattr(module, name)

        def look(*args: object, name: str = name, real: object = real) -> object:
            seen[name] += 1
            return real(*args)  # type: ignore[operator]

        monkeypatch.setattr(module, name, look)
    return seen


@pytest.fixture
async def known(
    tmp_path: Path, looks: Counter[str], agent_binary: Path, monkeypatch: pytest.MonkeyPatch
) -> Roots:
    """One that has made the host's root, and has looked a moment ago, however long a test takes."""
    monkeypatch.setattr(roots, "LOOK", 600.0)
    made = Roots(tmp_path, Isolation.NAMESPACES, overlay=False, agent=agent_binary)
    assert await made.get(SHELL) is not None
    looks.clear()
    return made


async def test_creates_in_a_row_look_once(known: Roots, looks: Counter[str]) -> None:
    first = await known.get(SHELL)
    assert await known.get(SHELL) is first and not looks


async def test_a_second_later_it_is_looked_again(
    known: Roots, looks: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roots, "LOOK", 0.0)
    await known.get(SHELL)
    assert looks == {"signature": 1, "missing_on_host": 1}


async def test_a_host_that_has_changed_is_taken_anew(
    known: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await known.get(SHELL)
    monkeypatch.setattr(roots, "LOOK", 0.0)
    monkeypatch.setattr(known, "_signature", ("as it was before",))
    after = await known.get(SHELL)
    assert after == before and after is not before


async def test_what_was_missing_is_looked_for_each_time(known: Roots, looks: Counter[str]) -> None:
    for _ in range(2):
        with pytest.raises(NotFoundError, match="no-such-program"):
            await known.get(LACKING)
    assert looks == {"missing_on_host": 2}
