"""Server-Sent Events, as far as the Capsule server speaks them. Sans-I/O: bytes in, events out."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .errors import InternalError

# One event is one chunk of output in base64, far below this; more is not our server speaking.
LARGEST_EVENT = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ServerEvent:
    event: str
    data: str
    id: str

    def json(self) -> Any:
        try:
            return json.loads(self.data)
        except ValueError as error:
            raise InternalError(f"the server sent an event that is no JSON: {error}") from error


class Decoder:
    def __init__(self) -> None:
        self._rest = b""
        self._event = ""
        self._id = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[ServerEvent]:
        """Every event that is complete with this chunk."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LARGEST_EVENT:
            raise InternalError(f"the server sent an event of over {LARGEST_EVENT} bytes")
        return [event for line in lines if (event := self._line(line.rstrip(b"\r"))) is not None]

    def _line(self, line: bytes) -> ServerEvent | None:
        if not line:
            return self._complete()
        name, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        match name:
            case "event":
                self._event = value
            case "data":
                self._data.append(value)
            case "id":
                self._id = value
        return None  # a comment (empty name) keeps the connection alive and says nothing

    def _complete(self) -> ServerEvent | None:
        event = ServerEvent(self._event or "message", "\n".join(self._data), self._id)
        spoke = bool(self._data)
        self._event, self._data = "", []
        return event if spoke else None
