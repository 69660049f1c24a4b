"""`capsule doctor`: what this machine can do, tried out, with a fix for what it cannot."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import textwrap
from typing import Any

from capsule import agentbin
from capsule.catalog import load_catalog
from capsule.cli import places, show, tty
from capsule.cli.codes import FAILED
from capsule.config import Config, load_config
from capsule.errors import CapsuleError
from capsule.model import Isolation
from capsule.providers.contract import Capabilities
from capsule.providers.local import apparmor
from capsule.providers.registry import make_provider, names

_CANNOT = "cannot run sandboxes here"


def examine(*, as_json: bool) -> int:
    """The configured provider first: its verdict is the exit code."""
    config = load_config()
    ordered = sorted(names(), key=lambda name: (name != config.provider, name))
    reports = [asyncio.run(_probe(name, config)) for name in ordered]
    if as_json:
        show.as_json({"providers": [_plain(report) for report in reports]})
    else:
        for count, report in enumerate(reports):
            print("\n" * (count > 0), end="")
            _print(report)
    first = reports[0]
    return 0 if isinstance(first, Capabilities) and first.usable else FAILED


async def _probe(name: str, config: Config) -> Capabilities | tuple[str, CapsuleError]:
    # In a run directory of its own: a server may be using the real one.
    try:
        with places.scratch(config) as home:
            found = list(places.look(config)) if name == "local" else []
            usable = all(each.ok or places.NOEXEC in each.detail for each in found)
            data = config.data_dir if usable else home / "data"
            own = dataclasses.replace(config, run_dir=home / "run", data_dir=data)
            catalog = load_catalog(config.templates_dir, data_dir=config.data_dir)
            provider = make_provider(name, own, catalog)
            try:
                report = await provider.probe()
            finally:
                await provider.aclose()
    except CapsuleError as error:
        return name, error
    if not usable:
        report = dataclasses.replace(report, usable=False, isolation=Isolation.NONE)
    return dataclasses.replace(report, findings=(*report.findings, *found))


def print_apparmor() -> int:
    print(apparmor.profile(agentbin.find()), end="")
    return 0


def _plain(report: Capabilities | tuple[str, CapsuleError]) -> dict[str, Any]:
    if isinstance(report, tuple):
        return {"provider": report[0], "usable": False, "error": report[1].to_json()}
    return {**dataclasses.asdict(report), "features": sorted(report.features)}


def _print(report: Capabilities | tuple[str, CapsuleError]) -> None:
    if isinstance(report, tuple):
        print(f"provider {show.paint(report[0], show.BOLD)}: {show.paint(_CANNOT, show.RED)}\n")
        _row(False, "usable", report[1].message, report[1].hint or "")
        return
    print(f"provider {show.paint(report.provider, show.BOLD)}: {_verdict(report)}\n")
    width = max(len(finding.name) for finding in report.findings)
    for finding in report.findings:
        _row(finding.ok, finding.name.ljust(width), finding.detail, finding.fix)
    if report.unenforced:
        print("\nlimits that do not hold here as they are meant")
        width = max(len(each.what) for each in report.unenforced)
        for each in report.unenforced:
            _row(False, each.what.ljust(width), each.why, each.fix)


def _verdict(report: Capabilities) -> str:
    if not report.usable:
        return show.paint(_CANNOT, show.RED)
    return f"runs sandboxes at level {show.paint(str(report.isolation), show.GREEN)}"


def _row(ok: bool, name: str, detail: str, fix: str) -> None:
    mark = show.paint("ok     ", show.GREEN) if ok else show.paint("missing", show.YELLOW)
    indent = " " * (len(name) + 13)
    print(_wrap(f"  {'x' * 7}  {name}  {detail}", indent).replace("x" * 7, mark, 1))
    if fix and not ok:
        print(_wrap(f"{indent}fix: {fix}", indent + " " * 5))


def _wrap(text: str, indent: str) -> str:
    if not sys.stdout.isatty():
        return text
    width = max(tty.size()[1], 60)
    return textwrap.fill(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
