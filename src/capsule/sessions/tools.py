"""Tools of the registry, carried out in a session.

Arguments are checked against the tool's schema before anything runs. They go to a program as data,
on its standard input; no text is ever put together from them. The one exception is `run_command`,
whose argument is a command line because that is what the tool is for.
"""

from __future__ import annotations

import itertools
import posixpath
from collections.abc import Mapping
from typing import Any

import msgspec

from capsule.errors import InvalidError
from capsule.model import WORKSPACE
from capsule.registry_file import Tool, seconds_of
from capsule.service import Service
from capsule.sessions.records import Outcome, Session
from capsule.sessions.running import run_code, run_program
from capsule.settings import brief

MAX_LISTED = 10_000
SHELL: tuple[str, ...] = ("/bin/sh", "-c")


def check_arguments(tool: Tool, arguments: Any) -> Mapping[str, Any]:
    """Blocks. Raises InvalidError naming the argument."""
    import jsonschema  # loaded with the registry

    validator = jsonschema.Draft202012Validator(tool.parameters)
    some = itertools.islice(validator.iter_errors(arguments), 50)
    problem = jsonschema.exceptions.best_match(some)
    if problem is not None:
        where = ".".join(("arguments", *(str(step) for step in problem.absolute_path)))
        raise InvalidError(
            f"{where}: {problem.message[:300]}",
            hint=f"GET /api/registry/tools/{tool.name} has the schema",
            field=where,
        )
    checked: Mapping[str, Any] = arguments
    return checked


async def run_tool(
    service: Service, session: Session, tool: Tool, arguments: Mapping[str, Any], *, limit: int
) -> Outcome:
    """`limit`: the largest file that is read as a whole."""
    timeout = seconds_of(tool.timeout)
    match tool.action:
        case "execute_code":
            language = _text(arguments, "language", "") or None
            return await run_code(service, session, _text(arguments, "code"), language, timeout)
        case "run_command":
            argv = (*SHELL, _text(arguments, "command"))
            return await run_program(service, session, argv, timeout=timeout)
        case "read_file":
            return await _read(service, session, _text(arguments, "path"), limit)
        case "write_file":
            return await _write(service, session, arguments)
        case "list_files":
            return await _list(service, session, _text(arguments, "path", WORKSPACE))
        case _:
            argv = tuple(tool.command or ())
            data = _input(tool, arguments)
            return await run_program(service, session, argv, stdin=data, timeout=timeout)


def _input(tool: Tool, arguments: Mapping[str, Any]) -> bytes:
    if tool.stdin is None:
        return msgspec.json.encode(arguments)
    given = arguments.get(tool.stdin, "")
    return given.encode() if isinstance(given, str) else msgspec.json.encode(given)


def _text(arguments: Mapping[str, Any], name: str, default: str | None = None) -> str:
    """Whatever its schema says: an action needs text here."""
    value = arguments.get(name, default)
    if not isinstance(value, str):
        where = f"arguments.{name}"
        raise InvalidError(f"{where}: {brief(value)} is not a text", field=where)
    return value


async def _read(service: Service, session: Session, path: str, limit: int) -> Outcome:
    content = await service.files(session.sandbox_id).read_bytes(path, limit=limit)
    return Outcome("ok", stdout=content.data)


async def _write(service: Service, session: Session, arguments: Mapping[str, Any]) -> Outcome:
    path, data = _text(arguments, "path"), _text(arguments, "content").encode()
    stat = await service.files(session.sandbox_id).write(path, data)
    return Outcome("ok", stdout=f"wrote {stat.size} bytes to {path}\n".encode())


async def _list(service: Service, session: Session, path: str) -> Outcome:
    found = await service.files(session.sandbox_id).list(path, recursive=True, limit=MAX_LISTED)
    folder = posixpath.join(WORKSPACE, path).rstrip("/")
    lines = [f"{folder}/{e.path}{'/' if e.type == 'dir' else ''}" for e in found.entries]
    text = "".join(f"{line}\n" for line in sorted(lines))
    return Outcome("ok", stdout=text.encode("utf-8", "surrogateescape"))
