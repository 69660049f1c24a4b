"""`docker run`'s options as the Engine's API takes them: a way is tried as it is written."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from tests.support import ROOT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-u", "--user", default="")
    parser.add_argument("-e", "--env", action="append", default=[])
    parser.add_argument("-m", "--memory", default="0")
    parser.add_argument("--cpus", type=float, default=0)
    parser.add_argument("--pids-limit", type=int, default=0)
    parser.add_argument("--cap-add", action="append", default=[])
    parser.add_argument("--cap-drop", action="append", default=[])
    parser.add_argument("--security-opt", action="append", default=[])
    parser.add_argument("--read-only", action="store_true")
    parser.add_argument("--privileged", action="store_true")
    parser.add_argument("--tmpfs", action="append", default=[])
    parser.add_argument("--runtime", default="")
    return parser


def container(words: str) -> dict[str, Any]:
    """The body of a create request. Raises SystemExit or ValueError for words of another kind."""
    given = _parser().parse_args(shlex.split(words))
    host: dict[str, Any] = {
        "Memory": _bytes(given.memory),
        "NanoCpus": int(given.cpus * 1e9),
        "PidsLimit": given.pids_limit or None,
        "CapAdd": given.cap_add,
        "CapDrop": given.cap_drop,
        "ReadonlyRootfs": given.read_only,
        "Privileged": given.privileged,
        "Tmpfs": dict(_pair(each, ":") for each in given.tmpfs),
        "SecurityOpt": [],
        "Runtime": given.runtime,
    }
    for option in given.security_opt:
        name, value = _pair(option, "=")
        if option == "systempaths=unconfined":  # the command's own word: the API has these two
            host |= {"MaskedPaths": [], "ReadonlyPaths": []}
        elif name == "seccomp" and value != "unconfined":
            host["SecurityOpt"].append(f"seccomp={_profile(value)}")
        else:
            host["SecurityOpt"].append(option)
    return {"User": given.user, "Env": given.env, "HostConfig": host}


def _pair(text: str, separator: str) -> tuple[str, str]:
    name, _, value = text.partition(separator)
    return name, value


def _profile(path: str) -> str:
    """The command reads the file, not the Engine."""
    return json.dumps(json.loads((ROOT / Path(path)).read_text()))


def _bytes(text: str) -> int:
    units = {"k": 10, "m": 20, "g": 30}
    return int(text[:-1]) << units[text[-1]] if text[-1] in units else int(text)
