"""What settings are by default depending on the machine, and which of them do not go together."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from capsule import surroundings
from capsule.errors import InvalidError
from capsule.settings import brief

if TYPE_CHECKING:
    from capsule.config import Config

# A Unix socket's path has at most 107 bytes: run_dir + "/boxes/<id>/agent.sock", and some room.
RUN_DIR_MAX = 70
API_KEY_MIN = 16
JWT_SECRET_MIN = 32
_RATE = re.compile(r"[1-9][0-9]{0,6}/(second|minute|hour|day)", re.ASCII)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def default_dirs(env: Mapping[str, str], uid: int | None = None) -> dict[str, Path]:
    """Root's are the system's, others' are XDG's. Where a socket would not fit below the run
    directory it is in /tmp, and `service.lock` refuses it unless it is ours alone. So are both
    where theirs cannot be made: in a container with a read-only root, for a user without a home."""
    if uid is not None:
        return _usual_dirs(env, uid)
    uid = os.geteuid()
    dirs = _usual_dirs(env, uid)
    if not may_be(dirs["run_dir"]):
        dirs["run_dir"] = Path(f"/tmp/capsule-{uid}")
    # A home that is there may be closed for a moment: data must not seem to be lost then.
    home = env.get("HOME", "/")
    homeless = home == "/" or not os.path.isdir(home)
    if not may_be(dirs["data_dir"]) and (homeless or surroundings.find().contained):
        dirs["data_dir"] = Path(f"/tmp/capsule-home-{uid}")
    return dirs


def may_be(path: Path) -> bool:
    """It is there, whoever may use it, or could be made."""
    return os.path.lexists(path) or os.access(nearest(path), os.W_OK | os.X_OK)


def nearest(path: Path) -> Path:
    """Itself, or what it would be made in."""
    return next(p for p in (path, *path.absolute().parents) if os.path.lexists(p))


def _usual_dirs(env: Mapping[str, str], uid: int) -> dict[str, Path]:
    if uid == 0:
        return {"data_dir": Path("/var/lib/capsule"), "run_dir": Path("/run/capsule")}
    home = env.get("HOME") or f"/tmp/capsule-home-{uid}"
    run = Path(env.get("XDG_RUNTIME_DIR") or "/nonexistent", "capsule")
    if len(os.fsencode(run)) > RUN_DIR_MAX or not run.parent.is_dir():
        run = Path(f"/tmp/capsule-{uid}")
    return {
        "data_dir": Path(env.get("XDG_DATA_HOME") or Path(home, ".local/share"), "capsule"),
        "run_dir": run,
    }


def check_together(config: Config) -> None:
    for small, large in (
        ("ttl", "max_ttl"),
        ("exec_timeout", "max_exec_timeout"),
        ("output_limit", "max_output_limit"),
    ):
        a, b = getattr(config, small), getattr(config, large)
        if a > b:
            raise InvalidError(f"setting {small}: {a} is over {large}, which is {b}", field=small)
    length = len(os.fsencode(config.run_dir))
    if length > RUN_DIR_MAX:
        raise InvalidError(
            f"setting run_dir: {config.run_dir} has {length} bytes, allowed: {RUN_DIR_MAX}",
            hint="a Unix socket's path must fit below it; take a shorter one",
            field="run_dir",
        )
    if not all(len(k) >= API_KEY_MIN and k.isascii() and k.isprintable() for k in config.api_keys):
        raise InvalidError(
            f"setting api_keys: each key needs {API_KEY_MIN} printable ASCII characters or more",
            hint="python3 -c 'import secrets; print(secrets.token_urlsafe(32))' makes one",
            field="api_keys",
        )
    if config.jwt_secret is not None and len(config.jwt_secret) < JWT_SECRET_MIN:
        raise InvalidError(
            f"setting jwt_secret: it needs {JWT_SECRET_MIN} characters or more", field="jwt_secret"
        )
    if config.jwt_jwks_url and not config.jwt_jwks_url.startswith(("https://", "http://")):
        raise InvalidError(
            f"setting jwt_jwks_url: {config.jwt_jwks_url[:80]!r} is no address of the web",
            hint="it begins with https://",
            field="jwt_jwks_url",
        )
    _check_rates(config)
    if config.isolation and config.isolation.weaker_than(config.min_isolation):
        raise InvalidError(
            f"setting isolation: {config.isolation} is below min_isolation, "
            f"which is {config.min_isolation}",
            field="isolation",
        )


def _check_rates(config: Config) -> None:
    for name in ("rate_limit_key", "rate_limit_address"):
        rate = getattr(config, name)
        if rate is not None and not _RATE.fullmatch(rate):
            raise InvalidError(
                f"setting {name}: {brief(rate)} is no rate",
                hint="write it like 600/minute; second, minute, hour or day",
                field=name,
            )
    for proxy in config.trusted_proxies:
        try:
            ipaddress.ip_network(proxy, strict=False)
        except ValueError:
            raise InvalidError(
                f"setting trusted_proxies: {brief(proxy)} is no address and no network",
                field="trusted_proxies",
            ) from None
