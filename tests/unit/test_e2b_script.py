"""E2B's steps as a Dockerfile: no step can add an instruction."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from capsule.edge.e2b.script import E2bStep, context, script
from capsule.errors import InvalidError, TooLargeError

HASH = "ab" * 32


def step(type: str, *args: str, hash: str | None = None) -> E2bStep:
    return E2bStep(type=type, args=list(args), files_hash=hash)


def lines(*steps: E2bStep) -> list[str]:
    """The lines of the steps, without those of every template."""
    made = script("image", steps)
    return [line for line, mark in zip(made.lines, made.marks, strict=True) if mark.isdecimal()]


def test_a_command_is_one_word_of_json() -> None:
    (line,) = lines(step("RUN", 'echo "a"\nUSER root \\\n'))
    assert line.startswith("RUN [") and line.endswith(r', "echo \"a\"\nUSER root \\\n"]')


def test_another_user_is_for_one_step() -> None:
    found = lines(step("USER", "app"), step("RUN", "true", "root"), step("RUN", "true"))
    begins = [line.split("[")[0].strip() for line in found]
    assert begins == ["USER app", "USER root", "RUN", "USER app", "RUN"]


def test_values_are_literal() -> None:
    assert lines(step("ENV", "A", '$B "c" \\')) == ['ENV A="\\$B \\"c\\" \\\\"']
    (copied,) = lines(step("COPY", "a b", "/opt/$x", "root", "0755", hash=HASH))
    assert copied == r'COPY --chown=root:root ["files/0/a b", "/opt/\\$x"]'


@pytest.mark.parametrize(
    "wrong",
    [
        step("RUN"),
        step("RUN", "true", "root\nRUN true"),
        step("ENV", "A"),
        step("ENV", "A B", "1"),
        step("ENV", "A", "1\nUSER root"),
        step("WORKDIR", "/a\nUSER root"),
        step("USER", "root\n"),
        step("COPY", "../up", "/up", hash=HASH),
        step("COPY", "/etc", "/up", hash=HASH),
        step("COPY", "a", "b"),
        step("COPY", "a", "b", "user", "rwx", hash=HASH),
        step("ADD", "a", "b"),
    ],
    ids=repr,
)
def test_what_is_no_step_is_refused(wrong: E2bStep) -> None:
    with pytest.raises(InvalidError):
        script("image", [wrong])


def test_an_upload_becomes_a_folder_of_the_context(tmp_path: Path) -> None:
    member = tarfile.TarInfo("./dir/file")
    member.size, member.mode = 3, 0o4777
    upload(tmp_path, (member, b"abc"))
    made = script("image", [step("COPY", "dir", "/x", "", "0640", hash=HASH)])
    with context(made, tmp_path, tmp_path, 1000) as file, tarfile.open(fileobj=file) as tar:
        assert tar.getnames() == ["Dockerfile", "files/0/dir/file"]
        assert tar.getmember("files/0/dir/file").mode == 0o640


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    member = tarfile.TarInfo("zeros")
    member.size = 2_000_000
    upload(tmp_path, (member, bytes(member.size)))
    made = script("image", [step("COPY", "zeros", "/x", hash=HASH)])
    with pytest.raises(TooLargeError):
        context(made, tmp_path, tmp_path, 1_000_000)


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/../../b"])
def test_an_upload_stays_in_its_folder(tmp_path: Path, name: str) -> None:
    upload(tmp_path, (tarfile.TarInfo(name), b""))
    made = script("image", [step("COPY", "a", "/x", hash=HASH)])
    with pytest.raises(InvalidError, match="leaves its folder"):
        context(made, tmp_path, tmp_path, 1000)


def upload(folder: Path, *members: tuple[tarfile.TarInfo, bytes]) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member, content in members:
            tar.addfile(member, io.BytesIO(content))
    (folder / HASH).write_bytes(gzip.compress(out.getvalue()))
