"""The registry's files: YAML that says what there is, and holds no logic.

    environments/NAME.yaml   what a session's sandbox starts from
    agents/NAME.yaml         an environment with tools, limits, network and a prompt
    tools/NAME.yaml          what a model may call: a description, a schema, what is run
    prompts/NAME.yaml        a text

Every complaint names the file, the line, the field and the value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import yaml
from msgspec import Meta

from capsule.config import check_limit
from capsule.errors import InvalidError
from capsule.model import Limits
from capsule.settings import about, brief, check, parse_seconds, unknown
from capsule.template_file import NETWORKS, Loader

MAX_FILE = 256 * 1024
MAX_DEPTH = 40

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]  # as models take them
Text = Annotated[str, Meta(min_length=1)]

# What a tool can do without a program of its own, and the arguments that it needs for it.
ACTIONS: Mapping[str, tuple[str, ...]] = {
    "execute_code": ("code",),
    "run_command": ("command",),
    "read_file": ("path",),
    "write_file": ("path", "content"),
    "list_files": (),
}
_MOST = Limits(2**50, 4096.0, 2**22, 2**60, 2**40, 2**20)  # what makes sense, not what is allowed
_IDLE = about("seconds", "how long it may be unused", low=1.0)
_TIMEOUT = about("seconds", "how long it may take", low=0.001)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class Environment(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    name: Name
    template: Text
    description: str = ""
    aliases: list[Text] = []
    provider: Text | None = None
    language: Text | None = None
    network: str = "none"
    limits: dict[str, Any] = {}
    env: dict[str, Any] = {}  # texts, as is checked with their lines
    idle_timeout: float | str | None = None


class Agent(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    name: Name
    environment: Text
    description: str = ""
    tools: list[Text] = []
    prompt: Text | None = None
    network: str = "none"
    limits: dict[str, Any] = {}
    env: dict[str, Any] = {}  # texts, as is checked with their lines
    idle_timeout: float | str | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`action` or `command`. A command gets its arguments as JSON on its input, or one of them
    (`stdin`) as it is; they are no part of its words."""

    name: ToolName
    description: Text
    parameters: dict[str, Any]
    action: str | None = None
    command: Annotated[list[Text], Meta(min_length=1)] | None = None
    stdin: str | None = None
    timeout: float | str | None = None


class Prompt(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    name: Name
    text: Text
    description: str = ""


Entry = Environment | Agent | Tool | Prompt
KINDS: Mapping[str, type[Entry]] = {
    "environments": Environment,
    "agents": Agent,
    "tools": Tool,
    "prompts": Prompt,
}


@dataclass(frozen=True, slots=True)
class Document:
    """One file: what is in it, and on which line each thing stands."""

    file: str
    content: Any
    lines: Mapping[tuple[str, ...], int] = field(default_factory=dict)

    def wrong(self, where: tuple[str, ...], what: str, hint: str | None = None) -> NoReturn:
        line = self.line(where)
        path = ".".join(where)
        text = f"registry {self.file} line {line}: {path + ': ' if path else ''}{what}"
        raise InvalidError(text, hint=hint, file=self.file, line=line, field=path)

    def line(self, where: tuple[str, ...]) -> int:
        """Of a field; of what it would stand in, if it is missing."""
        while where and where not in self.lines:
            where = where[:-1]
        return self.lines.get(where, 1)


def read_entry(kind: str, file: Path | Traversable, label: str) -> tuple[Entry, Document]:
    """Raises InvalidError."""
    document = read_document(file, label)
    stem = re.sub(r"\.ya?ml$", "", file.name)
    entry = _convert(document, KINDS[kind], {"name": stem, **document.content})
    match entry:
        case Tool():
            _check_tool(document, entry)
        case Environment() | Agent():
            _check_place(document, entry)
    return entry, document


def read_document(file: Path | Traversable, label: str) -> Document:
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            Document(label, None).wrong((), f"has more than {MAX_FILE} bytes")
        loader = Loader(data.decode("utf-8"))
        node = loader.get_single_node()
        lines = {} if node is None else dict(_lines(node, (), set()))
        content = None if node is None else loader.construct_document(node)
    except OSError as error:
        Document(label, None).wrong((), f"cannot be read: {error.strerror}")
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        Document(label, None, {(): line}).wrong((), f"is not YAML: {error.problem}")
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        Document(label, None).wrong((), f"is not YAML: {' '.join(str(error).split())[:200]}")
    document = Document(label, content, lines)
    if not isinstance(content, dict):
        document.wrong((), f"{brief(content)} is not a mapping")
    for key in content:
        if not isinstance(key, str):
            document.wrong((str(key),), "is no text", "put it in quotes")
    return document


def _lines(
    node: yaml.Node, where: tuple[str, ...], seen: set[int]
) -> list[tuple[tuple[str, ...], int]]:
    """Where each field stands, by its path."""
    if id(node) in seen or len(where) > MAX_DEPTH:
        problem = "an alias (*name) is not allowed here" if id(node) in seen else "is too deep"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    seen.add(id(node))
    found = [(where, node.start_mark.line + 1)]
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = _lines(value, (*where, str(key.value)), seen)
            found += [(below[0][0], key.start_mark.line + 1), *below[1:]]
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            found += _lines(value, (*where, str(index)), seen)
    return found


_AT = re.compile(r" - at `(?P<path>[^`]*)`$")
_FIELD = re.compile(r"\.(\w+)|\[(\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")


def _convert(document: Document, kind: type[Entry], content: Mapping[str, Any]) -> Entry:
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        said = str(error)
        at = _AT.search(said)
        path = at["path"] if at else "$"
        where = tuple(a or b for a, b in _FIELD.findall(path))
        problem = said[: at.start()] if at else said
        if found := _UNKNOWN.fullmatch(problem):
            known = [f.name for f in msgspec.structs.fields(kind)]
            wrong = unknown(found["name"], known, "field")
            document.wrong((*where, found["name"]), wrong.message, wrong.hint)
        if found := _MISSING.fullmatch(problem):
            document.wrong((*where, found["name"]), "is missing")
        value = _value(content, where)
        document.wrong(where, f"{brief(value)}: {problem[:1].lower()}{problem[1:]}")


def _value(content: Any, where: tuple[str, ...]) -> Any:
    for step in where:
        if isinstance(content, Mapping):
            content = content.get(step)
        elif isinstance(content, list) and step.isdigit() and int(step) < len(content):
            content = content[int(step)]
        else:
            return content
    return content


def _check_place(document: Document, entry: Environment | Agent) -> None:
    if entry.network not in NETWORKS:
        document.wrong(("network",), f"{brief(entry.network)} is not one of {', '.join(NETWORKS)}")
    for name, value in entry.limits.items():
        _translated(document, ("limits", name), check_limit, name, value, _MOST)
    for name, value in entry.env.items():
        if not _VARIABLE.fullmatch(name):
            document.wrong(("env", name), "is not the name of a variable")
        if not isinstance(value, str) or "\0" in value:
            document.wrong(("env", name), f"{brief(value)} is not a text", "put it in quotes")
    if entry.idle_timeout is not None:
        _translated(document, ("idle_timeout",), check, "time", _IDLE, entry.idle_timeout)


def _check_tool(document: Document, tool: Tool) -> None:
    if (tool.action is None) == (tool.command is None):
        document.wrong(("action",), "name either an action or a command", _actions())
    if tool.action is not None and tool.action not in ACTIONS:
        document.wrong(("action",), f"{brief(tool.action)} is no action", _actions())
    _check_schema(document, tool.parameters)
    properties = tool.parameters.get("properties", {})
    for name in ACTIONS.get(tool.action or "", ()):
        if name not in properties or name not in tool.parameters.get("required", ()):
            document.wrong(
                ("parameters", "properties", name),
                f"the action {tool.action} needs an argument {name}, listed under `required`",
            )
    if tool.stdin is not None and (tool.stdin not in properties or tool.command is None):
        document.wrong(("stdin",), f"{brief(tool.stdin)} is no argument of a command")
    if tool.timeout is not None:
        _translated(document, ("timeout",), check, "time", _TIMEOUT, tool.timeout)


def _actions() -> str:
    return f"actions are {', '.join(ACTIONS)}"


def _check_schema(document: Document, schema: Mapping[str, Any]) -> None:
    import jsonschema  # a twentieth of a second, which only servers need

    if schema.get("type") != "object":
        document.wrong(("parameters", "type"), f"{brief(schema.get('type'))} is not 'object'")
    for where, value in _refs(schema, ("parameters",)):
        if not str(value).startswith("#"):
            document.wrong(where, f"{brief(value)} leads out of this file")
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = ("parameters", *(str(step) for step in error.absolute_path))
        document.wrong(where, f"is no JSON Schema: {error.message[:200]}")


def _refs(value: Any, where: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    found: list[tuple[tuple[str, ...], Any]] = []
    if isinstance(value, Mapping):
        for key, below in value.items():
            if key in ("$ref", "$dynamicRef"):
                found.append(((*where, key), below))
            found += _refs(below, (*where, str(key)))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            found += _refs(below, (*where, str(index)))
    return found


def seconds_of(value: float | str | None) -> float | None:
    """Of a field that was checked."""
    return parse_seconds(value) if isinstance(value, str) else value


def _translated(document: Document, where: tuple[str, ...], function: Any, *arguments: Any) -> Any:
    """The complaints of settings.py do not know the file: add it."""
    try:
        return function(*arguments)
    except InvalidError as error:
        document.wrong(where, error.message.partition(": ")[2] or error.message, error.hint)
