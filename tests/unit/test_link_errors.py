"""What the agent's refusals mean, in the words of whoever asked."""

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


def test_a_failed_move_names_both_ends() -> None:
    body = {"code": "not_found", "message": "No such file or directory", "errno": 2}
    error = to_error(body, path="a", target="/tmp/a")
    assert error.message == "no such file or directory: a to /tmp/a"


@pytest.mark.parametrize("code", sorted(AGENT_ERRORS))
def test_each_code_becomes_its_error(code: str) -> None:
    error = to_error({"code": code, "message": "open: a", "stage": "open", "errno": 13}, path="a")
    assert type(error) is AGENT_ERRORS[code]
    assert type(error) in ALL_ERRORS
    assert error.message == "open: a"
    assert error.details.items() >= {
        "cause": code, "stage": "open", "errno": "EACCES", "path": "a"
    }.items()  # fmt: skip


@pytest.mark.parametrize("code", [None, 7, "", "brand_new", ["invalid"]])
def test_an_unknown_code_is_our_bug(code: object) -> None:
    assert type(to_error({"code": code, "message": "x"})) is InternalError


@pytest.mark.parametrize("path", ["a", "file", "or", "directory"])
def test_a_path_is_named_although_the_words_have_it_by_chance(path: str) -> None:
    error = to_error({"code": "not_found", "message": "No such file or directory"}, path=path)
    assert error.message == f"no such file or directory: {path}"


def test_an_error_without_words_still_says_something() -> None:
    assert to_error({"code": "denied"}).message == "agent said denied"


def test_bytes_that_are_no_text_can_be_printed_and_sent_on() -> None:
    error = to_error({"code": "not_found", "message": "open: caf\udce9"}, path="caf\udce9")
    json.dumps(error.to_json(), ensure_ascii=False).encode()
    assert error.message == "open: caf\\udce9"


json_values = st.none() | st.integers() | st.text() | st.lists(st.text()) | st.booleans()


@given(st.dictionaries(st.sampled_from(["code", "message", "stage", "errno"]), json_values))
def test_whatever_the_agent_sends_it_is_one_of_our_errors(body: dict[str, object]) -> None:
    error = to_error(body, path="x")
    assert isinstance(error, CapsuleError)
    json.dumps(error.to_json(), ensure_ascii=False).encode()


def explained(code: str, stage: str, number: int = 2) -> CapsuleError:
    request = ExecRequest(("nosuch", "-x"), ExecId("e1"), cwd="/workspace/sub")
    body = {"code": code, "message": "No such file or directory", "stage": stage, "errno": number}
    return explain_exec(request)(body)


def test_a_missing_program_is_named() -> None:
    error = explained("not_found", "exec")
    assert type(error) is NotFoundError
    assert error.message == "program not found: nosuch"
    assert error.details["exec_id"] == "e1"
    assert error.hint is not None and "PATH" in error.hint


def test_a_missing_working_directory_is_named() -> None:
    error = explained("not_found", "chdir")
    assert (type(error), error.message) == (
        NotFoundError,
        "working directory not found: /workspace/sub",
    )


def test_a_file_that_is_no_program_is_named() -> None:
    assert type(explained("denied", "exec", 13)) is ForbiddenError
    assert explained("denied", "exec", 13).message == "program not executable: nosuch"
    assert type(explained("invalid", "exec", 8)) is InvalidError
    assert "nosuch" in explained("invalid", "exec", 8).message


def test_other_stages_keep_the_agents_words() -> None:
    assert explained("limit", "fork", 11).message == "No such file or directory"
