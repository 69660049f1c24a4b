"""What of the host a box's root is made of: how often it is looked at, and its programs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from capsule.errors import NotFoundError
from capsule.model import Isolation, Template
from capsule.providers.local import programs, roots, skeleton
from capsule.providers.local.programs import missing_on_host
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
    """Has made the host's root and has just looked, however slow the machine is."""
    monkeypatch.setattr(roots, "LOOK", 600.0)
    made = Roots(tmp_path, Isolation.NAMESPACES, overlay=False, agent=agent_binary)
    assert await made.get(SHELL) is not None
    looks.clear()
    return made


async def test_the_host_is_looked_at_once_a_second(
    known: Roots, looks: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await known.get(SHELL)
    assert await known.get(SHELL) is first and not looks
    for turn in (1, 2):  # what is missing is looked for each time
        with pytest.raises(NotFoundError, match="no-such-program"):
            await known.get(LACKING)
        assert looks == {"missing_on_host": turn}
    looks.clear()
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


@pytest.fixture
def usr(tmp_path: Path) -> Path:
    """A folder that boxes see, beside one that they do not."""
    for name in ("usr/bin", "usr/lib", "home/bin"):
        (tmp_path / name).mkdir(parents=True)
        program = tmp_path / name / "real"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return tmp_path / "usr"


def is_missing(usr: Path, name: str = "tool", *, path: str = "usr/bin") -> bool:
    places = ":".join(str(usr.parent / place) for place in path.split(":"))
    template = Template("t", needs=(name,), env={"PATH": places})
    return missing_on_host(template, visible=(f"{usr}/",)) == [name]


def test_programs_are_there_where_a_box_finds_them(usr: Path) -> None:
    tool = usr / "bin/tool"
    assert not is_missing(usr, "real")
    assert is_missing(usr, "real", path="home/bin")
    assert not is_missing(usr, "real", path="home/bin:usr/bin")
    tool.symlink_to("../lib/real")
    assert not is_missing(usr)
    for target in ("nowhere", "../../home/bin/real", "tool", "../lib"):
        tool.unlink()
        tool.symlink_to(target)
        assert is_missing(usr), target
    tool.unlink()
    tool.write_text("no program")
    assert is_missing(usr)
