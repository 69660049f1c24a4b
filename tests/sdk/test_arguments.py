"""Arguments that make no sense: an error of ours that names them as the caller wrote them."""

from __future__ import annotations

import decimal
import fractions
import math
import pickle
from typing import Any

import pytest

from capsule_sdk import (
    AsyncCapsule,
    Capsule,
    CapsuleClient,
    CapsuleError,
    ExecFailedError,
    InvalidError,
)
from tests.sdk.crooked import crooked_server, result
from tests.sdk.test_rpc import EXEC, SANDBOX

NO_TIMES = [math.nan, math.inf, -math.inf, True, False, "5", b"5", [], {}, 1j, decimal.Decimal(5)]
TOO_SHORT = [-1, -0.5, 0, 0.0, 1e-9]
TOO_LONG = [1e300, 10**400]


def check(caught: pytest.ExceptionInfo[InvalidError], name: str, value: Any) -> None:
    error = caught.value
    assert error.details["field"] == name
    assert error.details["value"] is value
    assert error.message.startswith(f"{name}=")
    assert "\n" not in str(error)


@pytest.fixture(scope="module")
def idle() -> Any:
    """A sandbox of a server that is never asked about what is wrong from the start."""
    with crooked_server(result(SANDBOX)) as server, CapsuleClient(server.url) as client:
        yield client.get("abc12345")
        assert len(server.requests) == 1


@pytest.mark.parametrize("timeout", [*NO_TIMES, *TOO_SHORT, *TOO_LONG])
def test_a_timeout_that_is_none(idle: Capsule, timeout: Any) -> None:
    with pytest.raises(InvalidError) as caught:
        idle.run("pass", timeout=timeout)
    check(caught, "timeout", timeout)
    with pytest.raises(InvalidError) as caught:
        idle.exec(["true"], timeout=timeout)
    check(caught, "timeout", timeout)
    with pytest.raises(InvalidError) as caught:
        idle.stream(["true"], timeout=timeout)
    check(caught, "timeout", timeout)
    with pytest.raises(InvalidError) as caught:
        idle.batch(["true", {"cmd": "true", "timeout": timeout}])
    check(caught, "commands[1].timeout", timeout)


@pytest.mark.parametrize("value", [*NO_TIMES, -1, *TOO_LONG])
@pytest.mark.parametrize("name", ["ttl", "idle_timeout"])
def test_a_life_that_is_none(idle: Capsule, name: str, value: Any) -> None:
    client = CapsuleClient(idle._driver.target.url)
    options: Any = {name: value}
    with pytest.raises(InvalidError) as caught:
        client.create(**options)
    check(caught, name, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "1", [], 1j])
@pytest.mark.parametrize("name", ["memory", "cpus", "processes", "disk", "inodes", "open_files"])
def test_a_limit_that_is_none(idle: Capsule, name: str, value: Any) -> None:
    client = CapsuleClient(idle._driver.target.url)
    options: Any = {name: value}
    with pytest.raises(InvalidError) as caught:
        client.create(**options)
    check(caught, name, value)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("ttl", lambda c, v: c.set_timeout(v)),
        ("grace", lambda c, v: c.kill("e1", grace=v)),
        ("grace", lambda c, v: c.attach("e1").kill(grace=v)),
    ],
)
def test_times_of_other_methods(idle: Capsule, name: str, call: Any) -> None:
    for value in (math.nan, "5", True, -1):
        with pytest.raises(InvalidError) as caught:
            call(idle, value)
        check(caught, name, value)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("mode", lambda c: c.write_file("f", "", mode=-1)),
        ("mode", lambda c: c.write_file("f", "", mode="755")),
        ("mode", lambda c: c.mkdir("f", mode=0o10000)),
        ("content", lambda c: c.write_file("f", 3)),
        ("content", lambda c: c.write_file("f", None)),
        ("tty", lambda c: c.stream("true", tty=80)),
        ("tty[1]", lambda c: c.stream("true", tty=(24, 0))),
        ("rows", lambda c: c.connect_terminal(rows=0)),
        ("cols", lambda c: c.connect_terminal(cols="80")),
        ("exec_id", lambda c: c.attach("")),
        ("stdout", lambda c: c.attach("e1", stdout=-1)),
        ("env", lambda c: c.run("x", env={"A": object()})),
        ("env", lambda c: list(c.stream("x", env={"A": object()}))),
        ("output_limit", lambda c: c.run("x", output_limit=math.nan)),
        ("output_limit", lambda c: c.run("x", output_limit=10**5000)),
    ],
)
def test_other_arguments(idle: Capsule, name: str, call: Any) -> None:
    with pytest.raises(InvalidError) as caught:
        call(idle)
    assert caught.value.details["field"] == name
    assert caught.value.message.startswith(f"{name}=")


@pytest.mark.parametrize("options", [{"retries": -1}, {"retries": "2"}, {"retries": True}])
def test_a_client_of_nonsense(options: Any) -> None:
    with pytest.raises(InvalidError, match=r"^retries="):
        CapsuleClient(**options)


@pytest.mark.parametrize("key", ["line\nbreak", "schlüssel", "tab\there", "\x00"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidError, match="CAPSULE_API_KEY") as caught:
        CapsuleClient(api_key=f"{key}-x")
    assert key not in str(caught.value)


def test_a_key_read_from_a_file_may_end_with_its_line() -> None:
    with crooked_server(result(SANDBOX)) as server:
        CapsuleClient(server.url, api_key="from-a-file\n").get("x")
        assert server.requests[0].headers["authorization"] == "Bearer from-a-file"


@pytest.mark.parametrize("seconds", [2, 2.0, fractions.Fraction(2)])
def test_a_time_may_be_any_real_number(seconds: Any) -> None:
    with crooked_server(result(SANDBOX), result(EXEC | {"reason": "exited"})) as server:
        CapsuleClient(server.url).get("x").run("pass", timeout=seconds)
        assert server.requests[1].json["params"]["timeout_ms"] == 2000


def test_what_the_server_finds_out_of_range_is_named_too(client: CapsuleClient) -> None:
    with pytest.raises(
        InvalidError, match=r"^ttl=30000000 is out of range, allowed: 1 to 86400 seconds$"
    ) as ttl:
        client.create(ttl=30_000_000)
    check(ttl, "ttl", 30_000_000)
    with pytest.raises(InvalidError, match=r"^ttl=0\.5 is out of range, allowed: 1 to "):
        client.create(ttl=0.5)
    with pytest.raises(InvalidError, match=r"^memory=1 is "):
        client.create(memory=1)
    with pytest.raises(InvalidError, match=r"^memory=1\.5: expected `int`"):
        client.create(memory=1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidError, match=r"^cpus=-1: expected `float` > 0"):
        client.create(cpus=-1)


def test_and_so_it_is_with_programs(capsule: Capsule) -> None:
    long = 1_000_000
    with pytest.raises(
        InvalidError, match=r"^timeout=1000000 is out of range, allowed: 0\.001 to 3600 s"
    ):
        capsule.run("pass", timeout=long)
    with pytest.raises(InvalidError, match=r"^timeout=1000000 is out of range"):
        list(capsule.stream(["true"], timeout=long))
    with pytest.raises(InvalidError, match=r"^timeout=1000000 is out of range"):
        capsule.start(["true"], timeout=long)
    with pytest.raises(InvalidError, match=r"^ttl=10000000 is out of range"):
        capsule.set_timeout(10_000_000)
    with pytest.raises(InvalidError, match=r"^on_limit='explode'"):
        capsule.run("pass", on_limit="explode")
    with pytest.raises(InvalidError, match=r"^timeuot=3: unknown field"):
        capsule.run("pass", timeuot=3)  # type: ignore[call-arg]
    with pytest.raises(InvalidError, match=r"^signal='NOPE'"):
        capsule.start(["true"]).kill("NOPE")
    with pytest.raises(InvalidError, match=r"^name='no such name!'"):
        capsule.connect_terminal(name="no such name!")


async def test_the_async_one_says_the_same(async_capsule: AsyncCapsule) -> None:
    with pytest.raises(InvalidError, match=r"^timeout=nan is not a number of seconds"):
        await async_capsule.run("pass", timeout=math.nan)
    with pytest.raises(InvalidError, match=r"^timeout=1000000 is out of range"):
        await async_capsule.run("pass", timeout=1_000_000)


def test_an_error_survives_a_process_pool(capsule: Capsule) -> None:
    with pytest.raises(ExecFailedError) as failed:
        capsule.run("1 / 0").check()
    with pytest.raises(InvalidError) as invalid:
        capsule.run("pass", timeout=-1)
    for caught in (failed.value, invalid.value):
        copy: CapsuleError = pickle.loads(pickle.dumps(caught))
        assert type(copy) is type(caught)
        assert (str(copy), copy.code, copy.details) == (str(caught), caught.code, caught.details)
    copied = pickle.loads(pickle.dumps(failed.value))
    assert copied.result == failed.value.result
