"""The ways to start a container that people have, each with what it is to give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsule.model import Isolation
from tests.containers.options import container
from tests.support import ROOT
from tests.support.engine import EngineApi

AT = "/opt/capsule"
INSIDE = f"{AT}/tests/containers/inside.py"
USER = "--user 1000:1000"
NOTHING = f"{USER} --cap-drop ALL --security-opt no-new-privileges"
PROFILE = "--security-opt seccomp=deploy/seccomp/capsule.json"
UNCONFINED = "--security-opt seccomp=unconfined"
UNMASKED = "--security-opt systempaths=unconfined"
KEPT = " ".join(f"--cap-add {each}" for each in "CHOWN SETUID SETGID FOWNER".split())
WIDE = " ".join(
    f"--cap-add {each}"
    for each in "SYS_ADMIN NET_ADMIN SYS_PTRACE SYS_CHROOT MKNOD DAC_READ_SEARCH".split()
)
NAMESPACES, LANDLOCK, NONE = Isolation.NAMESPACES, Isolation.LANDLOCK, Isolation.NONE


@dataclass(frozen=True, slots=True)
class Way:
    name: str
    options: str
    level: Isolation
    alone: bool = False  # each sandbox has uids of its own
    attacked: str = ""  # the cell of tests/escape whose attempts are made there
    refused: str = ""  # what the server says where there is no level
    why: str = ""  # that, for the table
    needs: str = ""


WAYS = (
    Way("root", "", LANDLOCK, alone=True, attacked="landlock-root"),
    Way("user", USER, LANDLOCK, attacked="landlock-user"),
    Way("user-without-capabilities", NOTHING, LANDLOCK),
    Way("read-only", f"{NOTHING} --read-only --tmpfs /tmp", LANDLOCK),
    Way("nowhere-to-write", f"{NOTHING} --read-only", NONE, refused="CAPSULE_DATA_DIR",
        why="no folder can be written"),
    Way("no-home", "--user 123456", LANDLOCK),
    Way("root-unfiltered", UNCONFINED, LANDLOCK, alone=True),
    Way("user-unfiltered", f"{USER} {UNCONFINED}", LANDLOCK),
    Way("limits", "-m 512m --cpus 1 --pids-limit 256", LANDLOCK, alone=True),
    Way("no-capabilities", "--cap-drop ALL", LANDLOCK),
    Way("no-kill", f"--cap-drop ALL {KEPT}", LANDLOCK),
    Way("kept-capabilities", f"--cap-drop ALL {KEPT} --cap-add DAC_OVERRIDE --cap-add KILL",
        LANDLOCK, alone=True),
    Way("profile", f"{NOTHING} {PROFILE} {UNMASKED}", NAMESPACES, attacked="namespaces-user"),
    Way("profile-masked", f"{NOTHING} {PROFILE}", LANDLOCK),
    Way("profile-read-only", f"{NOTHING} {PROFILE} {UNMASKED} --read-only --tmpfs /tmp",
        NAMESPACES),
    Way("root-unmasked", f"{UNCONFINED} {UNMASKED}", NAMESPACES),
    Way("user-unmasked", f"{USER} {UNCONFINED} {UNMASKED}", NAMESPACES),
    Way("admin", f"--cap-add SYS_ADMIN {UNMASKED}", LANDLOCK, alone=True),
    Way("admin-unfiltered", f"--cap-add SYS_ADMIN {UNCONFINED} {UNMASKED}", NAMESPACES,
        alone=True, attacked="namespaces-root"),
    Way("privileged", "--privileged", NAMESPACES, alone=True),
    Way("wide", f"{WIDE} {UNCONFINED} {UNMASKED}", NAMESPACES, alone=True),
    Way("gvisor", "--runtime runsc", NONE, refused="gVisor", why="see below",
        needs="gvisor"),
    Way("gvisor-user", f"{USER} --runtime runsc", NONE, refused="gVisor", why="see below",
        needs="gvisor"),
)  # fmt: skip
BY_NAME = {way.name: way for way in WAYS}


def places(folders: list[str]) -> list[str]:
    """Binds of the tree and of its packages, from folders that everybody may read."""
    source, sdk, packages = folders
    pairs = {
        source: "src",
        sdk: "sdk/python/src",
        packages: "site-packages",
        f"{Path(source).parent}/agent/build": "agent/build",
        f"{ROOT}/tests": "tests",
        f"{ROOT}/pyproject.toml": "pyproject.toml",
    }
    return [f"{outside}:{AT}/{inside}:ro" for outside, inside in pairs.items()]


@contextmanager
def started(
    engine: EngineApi, image: str, binds: list[str], options: str, *command: str, **env: str
) -> Iterator[str]:
    """A container with the tree in it; it is gone afterwards."""
    body = container(options)
    host = body.pop("HostConfig")
    paths = ("src", "sdk/python/src", "site-packages", "")
    more = {
        "PYTHONPATH": ":".join(f"{AT}/{path}".rstrip("/") for path in paths),
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        **env,
    }
    body["Env"] += [f"{name}={value}" for name, value in more.items()]
    made = engine.run(
        image,
        *command,
        runtime=host.pop("Runtime"),
        HostConfig={"NetworkMode": "none", **host, "Binds": binds},
        Tty=True,
        WorkingDir="/",
        **body,
    )
    try:
        yield made
    finally:
        engine.remove(made)


def output(engine: EngineApi, made: str, within: float) -> str:
    """Of a container that ends by itself."""
    engine.client.post(f"/containers/{made}/wait", timeout=within).raise_for_status()
    logs = engine.client.get(f"/containers/{made}/logs", params={"stdout": 1, "stderr": 1})
    return logs.text.replace("\r\n", "\n")


def report(
    engine: EngineApi, image: str, binds: list[str], options: str, *only: str
) -> dict[str, Any]:
    """What inside.py found; `only`: what "doctor" says, or what a "crowd" meets."""
    with started(engine, image, binds, options, "python3", INSIDE, *only) as made:
        text = output(engine, made, within=100)
    try:
        found: dict[str, Any] = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        raise AssertionError(f"it says no more than this: {text[-3000:]}") from None
    return found
