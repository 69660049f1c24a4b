"""What the agent's refusals mean to the caller."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from capsule.errors import (
    ALL_ERRORS,
    CapsuleError,
    ForbiddenError,
    InternalError,
    InvalidError,
    NotFoundError,
)
from capsule.link.errors_map import AGENT_ERRORS, to_error
from capsule.link.requests import explain_exec
from capsule.model import ExecId, ExecRequest
from tests.support import ROOT


def documented_codes() -> set[str]:
    text = (ROOT / "spec" / "agent-protocol.md").read_text()
    section = text.split("## Errors")[1].split("`errno`")[0]
    return set(re.findall(r"`([a-z_]+)`", section)) - {"code"}


def test_every_documented_code_has_a_meaning_and_no_other() -> None:
    assert set(AGENT_ERRORS) == documented_codes()


@pytest.mark.parametrize("code", sorted(AGENT_ERRORS))
def test_each_code_becomes_its_error(code: str) -> None:
    error = to_error({"code": code, "message": "open: a", "stage": "open", "errno": 13}, path="a")
    assert type(error) is AGENT_ERRORS[code]
    assert type(error) in ALL_ERRORS
    assert error.message == "open: a"
    assert error.details.items() >= {
        "cause": code, "stage": "open", "errno": "EACCES", "path": "a"
    }.items()  # fmt: skip


@pytest.mark.parametrize(
    ("body", "about", "message"),
    [
        ({"message": "No such file"}, {"path": "a"}, "no such file: a"),
        ({"message": "No such file"}, {"path": "file"}, "no such file: file"),
        ({"message": "No such file"}, {"path": "a", "target": "/b"}, "no such file: a to /b"),
        ({"message": "open: caf\udce9"}, {"path": "caf\udce9"}, "open: caf\\udce9"),
        ({}, {}, "agent said not_found"),
    ],
)
def test_the_message_names_the_path_once(
    body: dict[str, str], about: dict[str, str], message: str
) -> None:
    error = to_error({"code": "not_found", **body}, **about)
    assert error.message == message
    json.dumps(error.to_json(), ensure_ascii=False).encode()


json_values = st.none() | st.integers() | st.text() | st.lists(st.text()) | st.booleans()


@given(st.dictionaries(st.sampled_from(["code", "message", "stage", "errno"]), json_values))
def test_whatever_the_agent_sends_it_is_one_of_our_errors(body: dict[str, object]) -> None:
    error = to_error(body, path="x")
    known = {None, *AGENT_ERRORS} & {code for code in [body.get("code")] if isinstance(code, str)}
    assert isinstance(error, CapsuleError if known else InternalError)
    json.dumps(error.to_json(), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("code", "stage", "number", "kind", "message"),
    [
        ("not_found", "exec", 2, NotFoundError, "program not found: nosuch"),
        ("not_found", "chdir", 2, NotFoundError, "working directory not found: /workspace/sub"),
        ("denied", "exec", 13, ForbiddenError, "program not executable: nosuch"),
        ("invalid", "exec", 8, InvalidError, "nosuch"),
        ("limit", "fork", 11, CapsuleError, "No such file or directory"),
    ],
)
def test_a_program_that_cannot_start_is_explained(
    code: str, stage: str, number: int, kind: type[CapsuleError], message: str
) -> None:
    request = ExecRequest(("nosuch", "-x"), ExecId("e1"), cwd="/workspace/sub")
    body = {"code": code, "message": "No such file or directory", "stage": stage, "errno": number}
    error = explain_exec(request)(body)
    assert isinstance(error, kind) and message in error.message
    assert error.details["exec_id"] == "e1"
