"""What the Engine says while it builds: every word understood, none of them trusted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.errors import (
    CapsuleError,
    InternalError,
    InvalidError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
)
from capsule.providers.docker import build_stream
from capsule.providers.docker.build_stream import BuildStream, Lines
from capsule.providers.images import Fetch, Log, Progress, Step, Tail


def heard(*said: dict[str, Any]) -> tuple[BuildStream, list[Progress]]:
    stream = BuildStream("mine")
    return stream, [event for each in said for event in stream.hear(json.dumps(each).encode())]


def stream(text: str) -> dict[str, Any]:
    return {"stream": text}


def failing(message: str, *, step: str = "RUN x", code: int | None = None) -> CapsuleError:
    detail = {"message": message} | ({"code": code} if code else {})
    said = [stream(f"Step 2/3 : {step}"), stream("\n"), stream("what it said\n")]
    with pytest.raises(CapsuleError) as caught:
        heard(*said, {"errorDetail": detail, "error": message})
    return caught.value


@pytest.mark.parametrize(
    "removing", ["Removing intermediate container ", " ---> Removed intermediate container "]
)
def test_steps_pulls_and_what_they_print_are_told_apart(removing: str) -> None:
    found, events = heard(
        stream("Step 1/2 : FROM base"),
        stream("\n"),
        {"status": "Downloading", "progressDetail": {"current": 5, "total": 10}, "id": "a1"},
        {"status": "Digest: sha256:1", "progressDetail": None},
        stream(" ---> 2014fb7904d8\n"),
        stream("Step 2/2 : RUN echo \\\n  hello"),
        stream("\n"),
        stream(" ---> Running in 99d5c59558d1\n"),
        stream("\x1b[91merr\n\x1b[0m"),
        stream("hello\n"),
        stream(f"{removing}99d5c59558d1\n"),
        stream(" ---> 2290aee0e365\n"),
        {"aux": {"ID": "sha256:22"}},
        stream("Successfully built 2290aee0e365\n"),
    )
    assert events == [
        Step(1, 2, "FROM base"),
        Fetch("a1", "Downloading", 5, 10),
        Fetch("", "Digest: sha256:1"),
        Step(2, 2, "RUN echo \\ hello"),
        Log("err\n"),
        Log("hello\n"),
    ]
    assert found.images == ["2014fb7904d8", "2290aee0e365"]
    assert found.containers == ["99d5c59558d1"]
    found.ended()


def test_endless_output_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_stream, "MOST_LOG", 10)
    _, events = heard(*(stream("abcd\n") for _ in range(5)))
    assert events[:2] == [Log("abcd\n"), Log("abcd\n")]
    assert len(events) == 3 and "left out" in events[2].text  # type: ignore[union-attr]
    monkeypatch.setattr(build_stream, "MOST_LINE", 100)
    with pytest.raises(InternalError):
        Lines().feed(b"x" * 101)
    tail = Tail(10)
    for i in range(100):
        tail.add(f"{i:03}\n")
    assert str(tail) == "7\n098\n099\n"


def test_a_stream_that_just_ends_is_no_success() -> None:
    found, _ = heard(
        stream("Step 1/2 : FROM base"), {"aux": {"ID": "x"}}, stream("Step 2/2 : RUN x")
    )
    with pytest.raises(UnavailableError, match="was cut off") as caught:
        found.ended()
    assert caught.value.details["step"] == "RUN x"


@pytest.mark.parametrize(
    ("step", "message", "kind"),
    [
        ("FROM x", 'Get "https://registry/v2/": dial tcp: no such host', UnavailableError),
        ("FROM x", "toomanyrequests: You have reached your pull rate limit", UnavailableError),
        ("FROM x", "pull access denied for x, repository does not exist", NotFoundError),
        ("FROM x", "manifest for x:9 not found: manifest unknown", NotFoundError),
        ("COPY a b", "COPY failed: file not found in build context", InvalidError),
        ("RUN x", "write /a: No space left on device", NoSpaceError),
        ("RUN --mount=x y", "the --mount option requires BuildKit", InvalidError),
    ],
)
def test_failures_say_what_to_do_next(step: str, message: str, kind: type[CapsuleError]) -> None:
    error = failing(message, step=step)
    assert type(error) is kind
    assert step in error.message and error.hint
    assert error.details["output"] == "what it said\n"


def test_a_failing_command_is_named_with_its_exit_code() -> None:
    error = failing("The command returned a non-zero code: 3", code=3)
    assert isinstance(error, InvalidError)
    assert error.message == "step 2 of 3 failed (RUN x): the command ended with 3"
    assert error.details.items() >= {"step": "RUN x", "number": 2, "exit_code": 3}.items()


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_lines_are_whole_however_they_come(pieces: list[bytes]) -> None:
    lines = Lines()
    found = [line for piece in pieces for line in lines.feed(piece)]
    whole = b"".join(pieces).split(b"\n")[:-1]
    assert found == [line for line in whole if line.strip()]


@given(st.binary(max_size=200))
def test_nonsense_is_no_crash(line: bytes) -> None:
    try:
        list(BuildStream("mine").hear(line))
    except CapsuleError as error:
        assert isinstance(error, UnavailableError | InvalidError)
