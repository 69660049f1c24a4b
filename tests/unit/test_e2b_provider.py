"""The parts of the E2B provider that need no cloud."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import e2b
import e2b.exceptions
import httpx
import pyqwest
import pytest

from capsule.errors import (
    CapacityError,
    CapsuleError,
    ForbiddenError,
    InvalidError,
    UnavailableError,
)
from capsule.providers.contract import OutOfReachError
from capsule.providers.e2b.errors import LostError, cloud_errors, in_doubt, translated
from capsule.providers.e2b.keys import Keys
from capsule.providers.e2b.settings import E2bSettings


@pytest.mark.parametrize(
    ("raised", "ours"),
    [
        (e2b.AuthenticationException("401"), ForbiddenError),
        (e2b.RateLimitException("429"), CapacityError),  # type: ignore[no-untyped-call]
        (e2b.exceptions.ServiceBusyException("503"), CapacityError),
        (e2b.TimeoutException("slow"), OutOfReachError),
        (e2b.exceptions.SandboxNotFoundException("404"), LostError),
        (e2b.exceptions.SandboxNotRunningException("502"), LostError),
        (e2b.exceptions.SandboxUnreachableException("502"), OutOfReachError),
        (e2b.SandboxException("no", status_code=404), LostError),
        (e2b.SandboxException("no", status_code=403), ForbiddenError),
        (e2b.SandboxException("no", status_code=500), UnavailableError),
        (httpx.ConnectError("refused"), OutOfReachError),
        (httpx.ReadTimeout("slow"), OutOfReachError),
        (ConnectionRefusedError("refused"), OutOfReachError),
        (pyqwest.ReadError("cut"), OutOfReachError),
        (Exception("Body of the request is None"), UnavailableError),
    ],
    ids=repr,
)
def test_an_error_of_the_sdk_becomes_one_of_ours(
    raised: Exception, ours: type[CapsuleError]
) -> None:
    assert type(translated("x", raised)) is ours


def test_every_exception_of_the_sdk_is_translated_and_cut() -> None:
    for _, kind in inspect.getmembers(e2b.exceptions, inspect.isclass):
        if issubclass(kind, Exception):
            with pytest.raises(CapsuleError, match="nothing can be done: yyy") as caught:
                with cloud_errors("nothing can be done"):
                    raise kind("y" * 10_000)
            assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "raised", [ForbiddenError("x"), InvalidError("x"), CapacityError("x"), LostError("x")]
)
def test_no_box_is_given_up_in_doubt(raised: CapsuleError) -> None:
    with pytest.raises(UnavailableError), in_doubt():
        raise raised
    with pytest.raises(LostError), in_doubt(or_lost=True):
        raise LostError("x")


def test_a_key_is_kept_sealed(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    sealed = keys.seal("e2b_secret")
    assert "secret" not in sealed
    assert Keys(tmp_path).open(sealed) == "e2b_secret"
    assert (tmp_path / "e2b-seal").stat().st_mode & 0o777 == 0o600
    nothing: list[Any] = [None, "", "x", 7, sealed[:-4]]
    assert [keys.open(each) for each in nothing] == [None] * 5
    assert keys.seal("") == ""
    assert "e2b_x" not in repr(E2bSettings(tmp_path, tmp_path, tmp_path, api_key="e2b_x"))
