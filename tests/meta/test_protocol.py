"""The protocol's numbers are the same in the document, in Python and in C, and do not change."""

from __future__ import annotations

import re

from capsule.link import protocol
from tests.support import ROOT

SPEC = (ROOT / "spec" / "agent-protocol.md").read_text(encoding="utf-8")
HEADER = (ROOT / "agent" / "agent.h").read_text(encoding="utf-8")

# Version 1 is frozen: a change here is a new version, not an edit.
VERSION_1 = {
    "HELLO": 1,
    "REQUEST": 2,
    "REPLY": 3,
    "ERROR": 4,
    "DATA": 5,
    "EOF": 6,
    "EVENT": 7,
    "EXIT": 8,
    "CONTROL": 9,
}


def test_frame_types_of_version_1_are_frozen() -> None:
    assert {member.name: member.value for member in protocol.FrameType} == VERSION_1


def test_the_document_lists_the_same_frame_types() -> None:
    rows = re.findall(r"^\| (\d+) \| `([A-Z]+)` \|", SPEC, re.M)
    assert {name: int(number) for number, name in rows} == VERSION_1


def test_the_agent_has_the_same_frame_types() -> None:
    found = re.search(r"enum frame_type \{(.*?)\}", HEADER, re.S)
    assert found is not None
    listed = [word.split("=")[0].strip().removeprefix("F_") for word in found[1].split(",")]
    assert listed == list(VERSION_1)
    assert "F_HELLO = 1" in found[1]


def test_both_ends_have_the_same_bounds() -> None:
    assert protocol.HEADER_SIZE == 16
    assert "#define HEADER_SIZE 16" in HEADER
    assert protocol.MAX_PAYLOAD == 1 << 20
    assert "#define MAX_PAYLOAD (1u << 20)" in HEADER
    assert f"#define PROTOCOL_VERSION {protocol.VERSION}" in HEADER
