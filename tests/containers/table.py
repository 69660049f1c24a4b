"""The table of docs/containers.md. `python -m tests.containers.table` tries all and writes it."""

from __future__ import annotations

from typing import Any

from tests.containers.ways import WAYS, Way, places, report
from tests.support import ROOT, supervisor
from tests.support.engine import EngineApi, EngineError
from tests.support.users import readable_capsule

PAGE = ROOT / "docs" / "containers.md"
START, END = "<!-- table -->\n", "<!-- end -->\n"
HEAD = """\
| options of `docker run` | level | host uids | limits that do not hold for each sandbox |
|---|---|---|---|
"""


def short(way: Way) -> str:
    """A way's options as one reads them: each kind is named once."""
    words = way.options.replace("--security-opt ", "").replace("deploy/seccomp/", "")
    for option in ("--cap-add", "--cap-drop"):
        before, found, after = words.partition(f"{option} ")
        words = before + found + after.replace(f"{option} ", "")
    return f"`{words}`" if words else "nothing"


def row(way: Way, found: dict[str, Any]) -> str:
    used = found["serve"].get("used")
    if used is None:
        return f"| {short(way)} | none: {way.why} | | |"
    local = next(each for each in found["doctor"]["providers"] if each["provider"] == "local")
    own = next(each["ok"] for each in local["findings"] if each["name"] == "uid ranges")
    open_ = ", ".join(used["unenforced"])
    return f"| {short(way)} | {used['isolation']} | {'own' if own else 'shared'} | {open_} |"


def rows() -> list[str]:
    supervisor.own_the_run()
    shared = supervisor.acquire()
    api = EngineApi(shared.url)
    image = shared.images(api).python
    found = []
    try:
        with readable_capsule() as (_, folders):
            for way in WAYS:
                try:
                    tried = report(api, image, places(folders), way.options)
                except EngineError:  # a machine may itself lack what --privileged asks for
                    found.append(f"| {short(way)} | not tried: no Engine here may do so | | |")
                else:
                    found.append(row(way, tried))
    finally:
        api.close()
        supervisor.release()
    return found


if __name__ == "__main__":
    text = PAGE.read_text()
    before, _, rest = text.partition(START)
    table = HEAD + "".join(f"{line}\n" for line in rows())
    PAGE.write_text(before + START + table + END + rest.partition(END)[2])
