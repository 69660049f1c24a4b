"""Settings: their sources, their bounds, and the errors for wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from capsule.config import (
    Config,
    check_exposure,
    check_limit,
    default_dirs,
    is_loopback,
    load_config,
    settings,
)
from capsule.errors import ForbiddenError, InvalidError
from capsule.model import GIB, MIB, Limits
from capsule.settings import parse_bytes, parse_seconds

KEY = "0123456789abcdef-key"


def test_overrides_beat_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "capsule.yaml"
    file.write_text("port: 1\nttl: 1m\nmax_execs: 7\nmax_limits: {memory: 1GiB, cpus: 2}\n")
    env = {
        "CAPSULE_CONFIG": str(file),
        "CAPSULE_TTL": "2m",
        "CAPSULE_MAX_EXECS": "8",
        "CAPSULE_MAX_LIMITS_CPUS": "3.5",
        "CAPSULE_API_KEYS": f"{KEY}-1, {KEY}-2",
        "PATH": "/bin",
    }
    config = load_config(env, max_execs=9, drain=None)
    assert (config.port, config.ttl, config.max_execs) == (1, 120.0, 9)
    assert (config.max_limits.memory, config.max_limits.cpus) == (GIB, 3.5)
    assert config.max_limits.disk == 100 * GIB
    assert config.api_keys == (f"{KEY}-1", f"{KEY}-2")
    assert load_config({}, file=file).max_execs == 7


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"CAPSULE_PROT": "1"}, "unknown setting in the environment: 'prot'.*did you mean port"),
        ({"CAPSULE_PORT": "99999"}, "setting port: '99999' is out of range, allowed: 0 to 65535"),
        ({"CAPSULE_PORT": "http"}, "setting port: .* is not a whole number"),
        ({"CAPSULE_PORT": "8080.5"}, "is not a whole number"),
        ({"CAPSULE_TTL": "nan"}, "setting ttl: 'nan' is not a time such as"),
        ({"CAPSULE_TTL": "-5"}, "setting ttl"),
        ({"CAPSULE_TTL": "2d"}, "setting ttl: 172800.0 is over max_ttl, which is 86400.0"),
        ({"CAPSULE_OUTPUT_LIMIT": "10 parsecs"}, "setting output_limit: .* is not a size such as"),
        ({"CAPSULE_DRAIN": "explode"}, "setting drain: 'explode' is not one of keep, delete"),
        (
            {"CAPSULE_MIN_ISOLATION": "none"},
            "not one of cloud, gvisor, namespaces, container, landlock",
        ),
        ({"CAPSULE_MAX_LIMITS_MEMORY": "1"}, "setting max_limits.memory: '1' is out of range"),
        ({"CAPSULE_MAX_LIMITS_MEMROY": "1"}, "unknown setting"),
        ({"CAPSULE_RUN_DIR": "/" + "x" * 80}, "setting run_dir: /x+ has 81 bytes, allowed: 70"),
        ({"CAPSULE_HOST": ""}, "setting host"),
        ({"CAPSULE_CONFIG": "/nowhere/capsule.yaml"}, "cannot read the configuration /nowhere"),
        (
            {"CAPSULE_ISOLATION": "landlock", "CAPSULE_MIN_ISOLATION": "namespaces"},
            "landlock is below min_isolation",
        ),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(env: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidError, match=text) as caught:
        load_config(env)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("prot: 1", "unknown setting in .*: 'prot'"),
        ("- a\n- b", "not a mapping"),
        ("port: [1", "not YAML"),
        ("max_limits: {memry: 1}", "unknown limit in max_limits: 'memry'"),
        ("max_limits: 5", "setting max_limits: 5 is not a mapping"),
        ("port: true", "setting port: True is not a whole number"),
        ("api_keys: [1]", "setting api_keys: the value is not a list of texts"),
        ("[" * 500, "not YAML"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with pytest.raises(InvalidError, match=text):
        load_config({}, file=file)


def test_keys_are_never_printed() -> None:
    config = Config(api_keys=(KEY,))
    assert KEY not in repr(config)
    assert KEY not in str(config)
    assert "api_keys=<secret>" in repr(config)
    with pytest.raises(InvalidError) as caught:
        Config(api_keys=("short", KEY))
    assert "short" not in caught.value.message.replace("shorter", "")
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("key", ["", "short", "ü" * 20, "with\nnewline-and-more", 5])
def test_weak_keys_are_refused(key: Any) -> None:
    with pytest.raises(InvalidError, match="api_keys"):
        Config(api_keys=(key,))


def test_variables_of_others_are_left_alone() -> None:
    load_config(
        {
            "CAPSULE_URL": "http://x",
            "CAPSULE_API_KEY": "k",
            "CAPSULE_AGENT": "/x",
            "CAPSULE_SERVICE_HOST": "10.0.0.1",
            "CAPSULE_PORT": "tcp://10.0.0.1:80",
            "CAPSULE_PORT_8080_TCP": "tcp://x",
            "CAPSULE_TEST_SKIPS": "/x",
            "OTHER": "1",
        }
    )


SIZES = {"1": 1, "512MiB": 512 * MIB, "1.5g": 3 * GIB // 2, "2 kB": 2000, "0": 0}
TIMES = {"30": 30.0, "500ms": 0.5, "10m": 600.0, "1.5h": 5400.0, "1d": 86400.0}
SPECIAL = {
    "jwt_secret": "x" * 32,
    "jwt_jwks_url": "https://x",
    "rate_limit_key": "5/second",
    "rate_limit_address": "5/second",
    "trusted_proxies": "10.0.0.0/8",
    "tenant_cpu_period": "day",
}


def test_every_setting_can_be_set_by_its_variable() -> None:
    values = {"list": KEY, "path": "/tmp/x", "text": "x", "bytes": "64MiB", "seconds": "901"}
    for setting in settings():
        choice = setting.type.rpartition("| ")[2]
        number = "64" if setting.type in ("integer", "number") else choice
        value = values.get(setting.type, number)
        value = SPECIAL.get(setting.name, value)
        env = {setting.env: value}
        config = load_config(env)
        owner, _, limit = setting.name.partition(".")
        found = getattr(config, owner)
        found = getattr(found, limit) if limit else found
        assert found != setting.default or found in (64, "landlock"), setting.name


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert is_loopback(host)
    check_exposure(Config(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com", "localhost.x"])
def test_listening_to_others_needs_keys(host: str) -> None:
    with pytest.raises(ForbiddenError, match="without API keys"):
        check_exposure(Config(host=host))
    check_exposure(Config(host=host, api_keys=(KEY,)))
    check_exposure(Config(host=host, jwt_secret="x" * 32))
    check_exposure(Config(host=host), stored=True)


def test_a_secret_for_tokens_is_long_and_does_not_show() -> None:
    with pytest.raises(InvalidError, match="jwt_secret: it needs 32"):
        Config(jwt_secret="short")
    assert "x" * 32 not in repr(Config(jwt_secret="x" * 32, e2b_api_key="x" * 32))
    with pytest.raises(InvalidError, match="jwt_jwks_url"):
        Config(jwt_jwks_url="file:///etc/passwd")


def test_directories_depend_on_who_runs_it(tmp_path: Path) -> None:
    assert default_dirs({}, uid=0)["run_dir"] == Path("/run/capsule")
    mine = default_dirs({"HOME": "/home/ann", "XDG_RUNTIME_DIR": "/run"}, uid=1000)
    assert mine == {
        "data_dir": Path("/home/ann/.local/share/capsule"),
        "run_dir": Path("/run/capsule"),
    }
    long = tmp_path / ("x" * 60)
    long.mkdir()
    for odd in ({"XDG_RUNTIME_DIR": str(long)}, {"XDG_RUNTIME_DIR": "/nowhere"}, {}):
        assert default_dirs(odd, uid=1000)["run_dir"] == Path("/tmp/capsule-1000")


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        *((parse_bytes, text, value) for text, value in SIZES.items()),
        *((parse_seconds, text, value) for text, value in TIMES.items()),
    ],
)
def test_sizes_and_times(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == value


def test_a_limit_is_checked_against_floor_and_ceiling() -> None:
    most = Limits(memory=GIB, cpus=2.0)
    assert check_limit("memory", "512MiB", most) == 512 * MIB
    assert check_limit("cpus", 2, most) == 2.0
    for name, value in (("memory", 2 * GIB), ("memory", 1), ("cpus", 2.1), ("cpus", float("nan"))):
        with pytest.raises(InvalidError, match=f"limits.{name}: .* out of range, allowed: "):
            check_limit(name, value, most)
    with pytest.raises(InvalidError, match="unknown limit: 'gpus'"):
        check_limit("gpus", 1, most)
