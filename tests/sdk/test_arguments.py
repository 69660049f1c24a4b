"""Arguments that make no sense are errors that name them as the caller wrote them."""

from __future__ import annotations

import decimal
import math
import pickle
from typing import Any

import pytest

from capsule_sdk import Capsule, CapsuleClient, CapsuleError, ExecFailedError, InvalidError
from tests.sdk.crooked import crooked_server, result
from tests.sdk.test_rpc import SANDBOX

NO_TIMES = [math.nan, math.inf, True, "5", [], 1j, decimal.Decimal(5), -1, 1e300, 10**400]


@pytest.fixture(scope="module")
def idle() -> Any:
    """A sandbox of a server that gets no request for a wrong argument."""
    with crooked_server(result(SANDBOX)) as server, CapsuleClient(server.url) as client:
        yield client.get("abc12345")
        assert len(server.requests) == 1


def refused(name: str, value: Any, call: Any) -> None:
    with pytest.raises(InvalidError) as caught:
        call()
    assert caught.value.details["field"] == name
    assert caught.value.details["value"] is value
    assert caught.value.message.startswith(f"{name}=")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("time", [*NO_TIMES, 0, 1e-9])
def test_a_timeout_is_a_positive_number_of_seconds(idle: Capsule, time: Any) -> None:
    refused("timeout", time, lambda: idle.run("pass", timeout=time))
    refused("timeout", time, lambda: idle.exec(["true"], timeout=time))
    refused("timeout", time, lambda: idle.stream(["true"], timeout=time))
    commands: list[Any] = ["true", {"cmd": "true", "timeout": time}]
    refused("commands[1].timeout", time, lambda: idle.batch(commands))


@pytest.mark.parametrize("value", [math.nan, math.inf, True, "1", [], 1j])
def test_lifetimes_and_limits_are_numbers(idle: Capsule, value: Any) -> None:
    client = CapsuleClient(idle._driver.target.url)
    for name in ("ttl", "idle_timeout", "memory", "cpus", "processes", "disk", "inodes"):
        options: Any = {name: value}
        refused(name, value, lambda options=options: client.create(**options))
    refused("ttl", value, lambda: idle.set_timeout(value))
    refused("grace", value, lambda: idle.kill("e1", grace=value))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("mode", lambda c: c.write_file("f", "", mode=-1)),
        ("mode", lambda c: c.mkdir("f", mode=0o10000)),
        ("content", lambda c: c.write_file("f", None)),
        ("tty", lambda c: c.stream("true", tty=80)),
        ("tty[1]", lambda c: c.stream("true", tty=(24, 0))),
        ("rows", lambda c: c.connect_terminal(rows=0)),
        ("exec_id", lambda c: c.attach("")),
        ("stdout", lambda c: c.attach("e1", stdout=-1)),
        ("env", lambda c: c.run("x", env={"A": object()})),
        ("output_limit", lambda c: c.run("x", output_limit=10**5000)),
    ],
)
def test_other_arguments(idle: Capsule, name: str, call: Any) -> None:
    with pytest.raises(InvalidError) as caught:
        call(idle)
    assert caught.value.details["field"] == name
    assert caught.value.message.startswith(f"{name}=")


def test_arguments_of_a_client() -> None:
    for retries in (-1, "2", True):
        with pytest.raises(InvalidError, match=r"^retries="):
            CapsuleClient(retries=retries)  # type: ignore[arg-type]
    for key in ("line\nbreak", "schlüssel", "tab\there", "\x00"):
        with pytest.raises(InvalidError, match="CAPSULE_API_KEY") as caught:
            CapsuleClient(api_key=f"{key}-x")
        assert key not in str(caught.value)


def test_what_the_server_refuses_has_the_callers_name(
    client: CapsuleClient, capsule: Capsule
) -> None:
    calls: list[tuple[str, Any]] = [
        (
            r"^ttl=30000000 is out of range, allowed: 1 to 86400 seconds$",
            lambda: client.create(ttl=30_000_000),
        ),
        (r"^memory=1 is ", lambda: client.create(memory=1)),
        (r"^cpus=-1: expected `float` > 0", lambda: client.create(cpus=-1)),
        (
            r"^timeout=1000000 is out of range, allowed: 0\.001 to 3600 s",
            lambda: capsule.run("pass", timeout=1_000_000),
        ),
        (r"^timeout=1000000 is", lambda: list(capsule.stream(["true"], timeout=1_000_000))),
        (r"^on_limit='explode'", lambda: capsule.run("pass", on_limit="explode")),
        (r"^signal='NOPE'", lambda: capsule.start(["true"]).kill("NOPE")),
        (r"^name='no such name!'", lambda: capsule.connect_terminal(name="no such name!")),
        (r"^path=b'\.\./x' has a '\.\.' component", lambda: capsule.read_file(b"../x")),
        (r"^target='x/\.\./\.\./y' has", lambda: capsule.move("x", "x/../../y")),
    ]
    for message, call in calls:
        with pytest.raises(InvalidError, match=message):
            call()


def test_an_error_can_be_pickled(capsule: Capsule) -> None:
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
