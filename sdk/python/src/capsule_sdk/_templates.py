"""Templates of the server: `client.templates`. Builds are followed line by line."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, Unpack
from urllib.parse import quote, urlencode

from ._arguments import wrong
from ._context import pack_context
from ._drivers import AsyncDriver, SyncDriver
from ._flow import Call, Emit, Emitting, Flow, Handle, Open, Read, drain, method
from ._rpc import accepted, naming, rpc
from ._sse import Decoder, ServerEvent
from .errors import UnavailableError, WrongStateError, from_json
from .values import TemplateInfo

TAR = {"Content-Type": "application/x-tar"}


class BuildOptions(TypedDict, total=False):
    file: str  # the Dockerfile, relative to the folder
    args: Mapping[str, str] | None  # build arguments
    cache: bool  # take over steps of earlier builds; True
    pull: bool  # look for newer base images; False
    provider: str | None  # whose sandboxes are to start from it; the server's own otherwise


class TemplateMethods:
    _driver: SyncDriver | AsyncDriver

    @method
    def list(self) -> Flow[list[TemplateInfo]]:
        """Everything that a sandbox can start from."""
        body = yield from self._ask("list", {})
        return [TemplateInfo.from_json(each) for each in body["templates"]]

    @method
    def get(self, name: str) -> Flow[TemplateInfo]:
        """One template, with its images."""
        return TemplateInfo.from_json((yield from self._ask("get", {"name": name})))

    @method
    def delete(self, name: str) -> Flow[None]:
        """Remove a template that was built or imported, and its images.

        Raises ConflictError while sandboxes run from it; `details["sandbox_ids"]` names them.
        """
        yield from self._ask("delete", {"name": name}, repeatable=False)

    def _ask(self, name: str, params: Mapping[str, Any], *, repeatable: bool = True) -> Flow[Any]:
        retries = self._driver.target.retries
        return rpc(f"template.v1.{name}", params, retries=retries, repeatable=repeatable)


class BuildFollower:
    """One build: the request, and what we have heard of it."""

    def __init__(self, name: str, folder: Path | None, query: Mapping[str, Any]) -> None:
        self.template: TemplateInfo | None = None
        self._name = name
        self._folder = folder
        self._query = query
        self._begun = False
        self._rest = ""  # of a line that has no end yet
        self._parts: dict[str, str] = {}

    def follow(self) -> Emitting[str]:
        if self._begun:
            raise WrongStateError("a build is followed once", hint="build again")
        self._begun = True
        yield from naming(self._listen(), {"name": self._name})

    def _listen(self) -> Emitting[str]:
        handle: Handle = yield Open(self._call())
        yield from accepted(handle)
        decoder = Decoder()
        while self.template is None:
            chunk: bytes = yield Read(handle)
            if not chunk:
                raise UnavailableError("the server ended the stream before the build ended")
            for event in decoder.feed(chunk):
                for line in self._hear(event):
                    yield Emit(line)

    def _call(self) -> Call:
        given = {key: value for key, value in self._query.items() if value is not None}
        query = urlencode({"stream": "sse", **given}, doseq=True)
        path = f"/v1/templates/{quote(self._name, safe='')}/build?{query}"
        if self._folder is None:
            return Call("POST", path)
        return Call("POST", path, pack_context(self._folder, file=self._query["file"]), TAR)

    def _hear(self, event: ServerEvent) -> Iterator[str]:
        body = event.json()
        match event.event:
            case "step":
                yield from self._end_line()
                yield f"[{body['number']}/{body['total']}] {body['text']}"
            case "log":
                *lines, self._rest = (self._rest + body["text"]).split("\n")
                yield from lines
            case "fetch":
                if self._parts.get(body["part"]) != body["status"]:
                    self._parts[body["part"]] = body["status"]
                    yield ": ".join(filter(None, (body["part"], body["status"])))
            case "built":
                yield from self._end_line()
                self.template = TemplateInfo.from_json(
                    {**body["template"], "images": [body["image"]]}
                )
            case "error":
                raise from_json(body)

    def _end_line(self) -> Iterator[str]:
        if self._rest:
            yield self._rest
            self._rest = ""


class BuildMethods:
    _driver: SyncDriver | AsyncDriver
    _follower: BuildFollower

    @property
    def template(self) -> TemplateInfo | None:
        """What was built; None before its end."""
        return self._follower.template

    @method
    def wait(self) -> Flow[TemplateInfo]:
        """Wait for the end, without its words."""
        if self._follower.template is None:
            yield from drain(self._follower.follow(), lambda line: None)
        assert self._follower.template is not None  # the flow ends with it, or raises
        return self._follower.template


class Build(BuildMethods):
    """A build on its way: iterate over its lines, or `wait`. It begins with either; leaving the
    loop cancels it."""

    _driver: SyncDriver

    def __init__(self, driver: SyncDriver, follower: BuildFollower) -> None:
        self._driver = driver
        self._follower = follower

    def __iter__(self) -> Generator[str, None, None]:
        return self._driver.iterate(self._follower.follow())


class AsyncBuild(BuildMethods):
    """As Build, for `async for` and `await`."""

    _driver: AsyncDriver

    def __init__(self, driver: AsyncDriver, follower: BuildFollower) -> None:
        self._driver = driver
        self._follower = follower

    def __aiter__(self) -> AsyncGenerator[str, None]:
        return self._driver.iterate(self._follower.follow())


class Templates(TemplateMethods):
    _driver: SyncDriver

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver

    def build(
        self, name: str, folder: str | Path | None = None, **options: Unpack[BuildOptions]
    ) -> Build:
        """Build template `name` from the Dockerfile in a folder, or without one from the Dockerfile
        that Capsule brings.

        What the folder's .dockerignore names is not sent. Iterating or waiting raises InvalidError
        with the failing step and its output in `details`.
        """
        return Build(self._driver, build_follower(name, folder, options))


class AsyncTemplates(TemplateMethods):
    _driver: AsyncDriver

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    def build(
        self, name: str, folder: str | Path | None = None, **options: Unpack[BuildOptions]
    ) -> AsyncBuild:
        """As Templates.build; not awaited itself: `async for line in …`, or `await ….wait()`."""
        return AsyncBuild(self._driver, build_follower(name, folder, options))


def build_follower(name: str, folder: str | Path | None, options: BuildOptions) -> BuildFollower:
    for option in set(options) - set(BuildOptions.__annotations__):
        raise TypeError(f"build() got an unexpected keyword argument {option!r}")
    if not isinstance(name, str) or not name:
        raise wrong("name", name, "is no name of a template")
    args = options.get("args") or {}
    if not isinstance(args, Mapping):
        raise wrong("args", args, "is not a mapping")
    query = {
        "file": options.get("file") or "Dockerfile",
        "arg": [f"{key}={value}" for key, value in args.items()] or None,
        "cache": _flag(options.get("cache", True)),
        "pull": _flag(options.get("pull", False)),
        "provider": options.get("provider"),
    }
    return BuildFollower(name, None if folder is None else Path(folder), query)


def _flag(value: Any) -> str:
    return "true" if value else "false"
