"""One sandbox for an agent, in three calls: `create_session`, `execute`, `cleanup`.

client = SandboxClient("http://localhost:8080")
client.create_session()
result = client.execute("ls -la")
print(result["exit_code"], result["output"])
client.cleanup()

`with SandboxClient(url) as client:` does the first and the last by itself.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Self, TypedDict, cast

from ._arguments import RemotePath, millis, path_bytes
from ._client import _target
from ._drivers import SyncDriver
from ._flow import Answer, Call, Flow
from ._rpc import JSON_HEADERS, failure, naming, new_key, parse, persist, to_json
from ._sandbox import _LONGEST_EXEC, _SLACK
from .errors import GoneError, InvalidError, NotFoundError, WrongStateError


class CommandResult(TypedDict):
    exit_code: int  # 124: it ran into its timeout
    output: str  # of both streams, in the order in which it was written


class SandboxClient:
    """A session on a Capsule server: 512 MiB of memory, half a core, one hour, no network.

    `base_url` defaults to CAPSULE_URL, then to http://localhost:8080; `api_key` to
    CAPSULE_API_KEY. What has `session_id` may go on with it later, also in another process.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        session_id: str | None = None,
        template: str | None = None,
        retries: int = 2,
    ) -> None:
        self._driver = SyncDriver(_target(base_url, api_key, retries))
        self._template = template
        self.session_id = session_id

    def create_session(self) -> str:
        """A new session, and its id. One that this client had before is ended."""
        self.cleanup()
        params = {} if self._template is None else {"template": self._template}
        body = self._run(self._post("/create_session", params, key=new_key()))
        self.session_id = str(body["session_id"])
        return self.session_id

    def execute(self, command: str, *, timeout: float | None = None) -> CommandResult:
        """Run a shell command in /workspace and wait for its end. `timeout` is in seconds; the
        server's is 30 unless configured otherwise.
        """
        params: dict[str, Any] = {"session_id": self._session(), "command": command}
        patience = _LONGEST_EXEC
        if timeout is not None:
            params["timeout_ms"] = millis("timeout", timeout)
            patience = timeout + _SLACK
        given = {"command": command, "timeout": timeout}
        asked = self._post("/execute", params, key=new_key(), patience=patience, given=given)
        return cast(CommandResult, self._run(asked))

    def upload(self, path: RemotePath, content: bytes | str) -> str:
        """Write a file, relative to /workspace; its absolute path."""
        data = content.encode() if isinstance(content, str) else content
        boundary = secrets.token_hex(16)
        fields = {"session_id": self._session().encode(), "path": path_bytes(path)}
        body = _form(boundary, fields, data)
        headers = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        call = Call("POST", "/upload", body, headers)
        return str(self._run(self._ask(call))["files"][0]["path"])

    def cleanup(self) -> None:
        """End the session, if there is one; nothing of it is left."""
        session, self.session_id = self.session_id, None
        if session is None:
            return
        try:
            self._run(self._post("/cleanup", {"session_id": session}))
        except (GoneError, NotFoundError):  # its hour was over
            return

    def close(self) -> None:
        """Close the connections; a session that was not cleaned up lives on."""
        self._driver.close()

    def __enter__(self) -> Self:
        if self.session_id is None:
            self.create_session()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.cleanup()
        finally:
            self.close()

    def _session(self) -> str:
        if self.session_id is None:
            raise WrongStateError("there is no session", hint="call create_session() first")
        return self.session_id

    def _run(self, flow: Flow[dict[str, Any]]) -> dict[str, Any]:
        return self._driver.run(flow)

    def _post(
        self,
        path: str,
        params: Mapping[str, Any],
        *,
        key: str | None = None,
        patience: float | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> Flow[dict[str, Any]]:
        """With a key, doing it twice is the same as once."""
        named = params if given is None else given
        headers = {**JSON_HEADERS, **({"Idempotency-Key": key} if key else {})}
        call = Call("POST", path, to_json(params, named), headers, patience)
        return naming(self._ask(call), named)

    def _ask(self, call: Call) -> Flow[dict[str, Any]]:
        return persist(lambda: _once(call), retries=self._driver.target.retries, repeatable=True)


def _once(call: Call) -> Flow[dict[str, Any]]:
    answer: Answer = yield call
    if answer.status != 200:
        raise failure(answer)
    return parse(answer)


def _form(boundary: str, fields: Mapping[str, bytes], content: bytes) -> bytes:
    if not isinstance(content, bytes):
        raise InvalidError("content is neither str nor bytes", field="content")
    dashes = f"--{boundary}".encode()
    lines = [
        line
        for name, value in fields.items()
        for line in (dashes, f'Content-Disposition: form-data; name="{name}"'.encode(), b"", value)
    ]
    file = b'Content-Disposition: form-data; name="file"; filename="file"'
    return b"\r\n".join([*lines, dashes, file, b"", content, dashes + b"--", b""])
