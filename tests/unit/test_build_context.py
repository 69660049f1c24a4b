"""Build contexts: what a folder's patterns leave out, and what a stranger's tar may not have."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from capsule.errors import CapsuleError, InvalidError
from capsule.providers.docker import context as contexts
from capsule.providers.docker.context import bases, check_context
from capsule_sdk import errors as sdk_errors
from capsule_sdk._context import Ignored, pack_context


def packed(folder: Path, **options: object) -> dict[str, tarfile.TarInfo]:
    data = b"".join(pack_context(folder, **options))  # type: ignore[arg-type]
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {member.name: member for member in tar.getmembers()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    for name in ("Dockerfile", "a.py", "src/b.py", "src/deep/c.pyc", "node_modules/x/y.js"):
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return place


def test_what_goes_along(folder: Path) -> None:
    found = packed(folder)
    assert {"Dockerfile", "a.py", "src", "src/deep/c.pyc", "node_modules/x/y.js"} <= set(found)
    assert all((member.uid, member.gid, member.uname) == (0, 0, "") for member in found.values())
    ignore = folder / ".dockerignore"
    ignore.write_text("# a comment\nnode_modules\n**/*.pyc\n\n!src/deep/c.pyc\n")
    names = set(packed(folder))
    assert {"src/deep/c.pyc", ".dockerignore"} < names
    assert not any(name.startswith("node_modules") for name in names)
    ignore.write_text("*\n")  # what the Engine needs goes along all the same
    (folder / "docker").mkdir()
    (folder / "docker/Other").write_text("FROM scratch")
    assert set(packed(folder)) == {"Dockerfile", ".dockerignore"}
    assert "docker/Other" in packed(folder, file="docker/Other")


def test_what_cannot_be_a_context_is_refused_before_it_is_sent(folder: Path) -> None:
    (folder / "big").write_bytes(bytes(200_000))
    with pytest.raises(sdk_errors.TooLargeError, match="larger than 100000 bytes"):
        list(pack_context(folder, most=100_000))
    with pytest.raises(sdk_errors.NotFoundError, match="no Other in"):
        next(pack_context(folder, file="Other"))
    with pytest.raises(sdk_errors.NotFoundError, match="not a folder"):
        next(pack_context(folder / "nowhere"))


# Each line: the patterns, what they leave out, what they do not. After moby's own table.
PATTERNS = [
    (["*"], ["a", "a/b"], []),
    (["*.txt"], ["a.txt"], ["d/a.txt", "a.txt2"]),
    (["**/*.txt"], ["a.txt", "d/a.txt", "d/e/a.txt"], ["a.md"]),
    (["**"], ["a", "a/b/c"], []),
    (["d/**"], ["d/a", "d/e/f"], ["d2", "d"]),
    (["**/d/*"], ["d/a", "x/d/a"], ["d", "x/d"]),
    (["d"], ["d", "d/a"], ["x/d", "dd"]),
    (["/d/"], ["d", "d/a"], ["x/d"]),
    (["./d"], ["d"], ["x"]),
    (["a?c"], ["abc"], ["ac", "a/c"]),
    (["[a-c]x"], ["ax", "cx"], ["dx"]),
    (["[^a-c]x"], ["dx"], ["ax", "/x"]),
    (["a.c"], ["a.c"], ["abc"]),
    (["a\\*c"], ["a*c"], ["abc"]),
    (["*", "!a"], ["b"], ["a", "a/x"]),
    (["*", "!d/keep"], ["d/other", "x"], ["d/keep"]),
    (["*", "!d", "d/secret"], ["d/secret", "x"], ["d/a"]),
    (["!a"], [], ["a"]),
    (["a(b"], ["a(b"], ["ab"]),
    (["  spaced  "], ["spaced"], [" spaced"]),
    (["#not"], [], ["#not"]),
]


@pytest.mark.parametrize(("lines", "out", "kept"), PATTERNS)
def test_patterns_mean_what_they_mean_to_docker(
    lines: list[str], out: list[str], kept: list[str]
) -> None:
    ignored = Ignored(lines)
    assert [path for path in out if not ignored(path)] == []
    assert [path for path in kept if ignored(path)] == []


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/key").write_text("secret")
    (folder / "link").symlink_to("../secret")
    (folder / "dir").symlink_to(tmp_path / "secrets")
    os.mkfifo(folder / "pipe")
    found = packed(folder)
    assert found["link"].issym() and found["link"].linkname == "../secret"
    assert found["dir"].issym()
    assert "dir/key" not in found and "pipe" not in found


# What comes by the API


def tar(*entries: tuple[str, bytes | str | None], kind: bytes = tarfile.REGTYPE) -> io.BytesIO:
    """(name, content): a file; a text is where a link leads; None: of `kind`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in entries:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            else:
                info.type = tarfile.SYMTYPE if isinstance(content, str) else kind
                info.linkname = content or ""
                archive.addfile(info)
    out.seek(0)
    return out


def test_the_dockerfile_is_found_wherever_it_is() -> None:
    context = tar(("./Dockerfile", b"FROM a"), ("sub/Other", b"FROM b"), ("l", "../../etc"))
    assert check_context(context, "Dockerfile", most=10_000) == "FROM a"
    assert context.tell() == 0
    assert check_context(context, "./sub/Other", most=10_000) == "FROM b"
    with pytest.raises(InvalidError, match="no file 'Missing'"):
        check_context(context, "Missing", most=10_000)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (tar(("/etc/passwd", b"x")), "leaves its folder"),
        (tar(("a/../../b", b"x")), "leaves its folder"),
        (tar(("dev", None), kind=tarfile.CHRTYPE), "no file, folder or link"),
        (tar(("pipe", None), kind=tarfile.FIFOTYPE), "no file, folder or link"),
        (io.BytesIO(b"not a tar" * 1000), "not a tar"),
        (io.BytesIO(tar(("Dockerfile", b"x" * 2000)).getvalue()[:1024]), "cut off"),
        (io.BytesIO(b"\x1f\x8b\x08" + bytes(2000)), "not a tar"),
        (tar(("Dockerfile", b"x"), ("big", bytes(9_000))), "larger than 8000 bytes"),
        (tar(*((f"f{i}", b"") for i in range(5))), "more than 4 entries"),
        (tar(("Dockerfile", b"FROM " + b"a" * 100)), "larger than 50 bytes"),
    ],
)
def test_what_no_honest_context_has_is_refused(
    context: io.BytesIO, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contexts, "MOST_ENTRIES", 4)
    if "50" in message:
        monkeypatch.setattr(contexts, "MOST_DOCKERFILE", 50)
    with pytest.raises(CapsuleError, match=message):
        check_context(context, "Dockerfile", most=8_000)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("FROM a", ["a"]),
        ("from a as b\nFROM b", ["a"]),
        ("FROM --platform=linux/amd64 a:1@sha256:12 AS x", ["a:1@sha256:12"]),
        ("FROM scratch", []),
        ("ARG BASE=python:3.12\nFROM ${BASE}", ["python:3.12"]),
        ('ARG BASE="a"\nFROM $BASE', ["a"]),
        ("ARG GIVEN=a\nFROM $GIVEN-slim", ["other-slim"]),
        ("FROM ${NONE:-fallback}", ["fallback"]),
        ("FROM ${NONE%x}", []),
        ("# FROM x\nFROM \\\n  # in between\n  a", ["a"]),
        ("# escape=`\nFROM `\n a", ["a"]),
        ("FROM a\nARG BASE=b\nRUN echo FROM c", ["a"]),
        ("", []),
    ],
)
def test_bases_are_read_off_a_dockerfile(text: str, found: list[str]) -> None:
    assert bases(text, {"GIVEN": "other"}) == found
