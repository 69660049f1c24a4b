"""Forms as `curl -F` and browsers send them, read while they come: no part is kept as a whole.

async for part in parts(request, hint="with curl: -F file=@NAME"):
    text = await part.text(limit=100)      # or
    async for piece in part: ...           # what is left unread is skipped
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from capsule.edge.body import chunks
from capsule.edge.errors import HttpError, invalid_field
from capsule.errors import InvalidError, TooLargeError

MEDIA_TYPE = "multipart/form-data"
MAX_PARTS = 1000


class _Begin(NamedTuple):
    name: str
    filename: str | None


class _End(NamedTuple):
    pass


_Event = _Begin | bytes | _End


class Part:
    """One field of a form, or one file. Iterate it once."""

    def __init__(self, about: _Begin, form: _Form) -> None:
        self.name = about.name
        self.filename = about.filename  # None: a plain field
        self._form = form
        self._over = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self._over:
            event = await self._form.next()
            if isinstance(event, bytes):
                yield event
            else:
                self._over = True

    async def text(self, *, limit: int) -> str:
        data = bytearray()
        async for piece in self:
            data += piece
            if len(data) > limit:
                raise TooLargeError(
                    f"{self.name}: more than {limit} bytes", field=self.name, limit=limit
                )
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise invalid_field(self.name, "not UTF-8") from None


async def parts(request: Request, *, hint: str) -> AsyncIterator[Part]:
    """`hint`: how such a form is sent. Raises HttpError (not a form), InvalidError (broken, or cut
    short), TooLargeError."""
    form = _Form(chunks(request.receive), _boundary(request, hint))
    count = 0
    while (event := await form.next(at_end=True)) is not None:
        if not isinstance(event, _Begin):
            continue  # the rest of a part that nobody wanted to the end
        count += 1
        if count > MAX_PARTS:
            raise TooLargeError(f"form: more than {MAX_PARTS} parts", limit=MAX_PARTS)
        yield Part(event, form)


def _boundary(request: Request, hint: str) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type"))
    sent = kind[:60].decode("latin-1") or "missing"
    if kind != MEDIA_TYPE.encode():
        raise HttpError(415, "invalid", f"content-type: {sent}, must be {MEDIA_TYPE}", hint=hint)
    if not options.get(b"boundary"):
        raise HttpError(415, "invalid", f"content-type: {sent} without a boundary", hint=hint)
    return options[b"boundary"]


class _Form:
    """What the parser finds, in order."""

    def __init__(self, source: AsyncIterator[bytes], boundary: bytes) -> None:
        self._source = source
        self._events: deque[_Event] = deque()
        self._field, self._value = bytearray(), bytearray()
        self._disposition = b""
        self._complete = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                    "on_header_end": self._header,
                    "on_headers_finished": self._headers,
                    "on_part_data": lambda data, start, end: self._events.append(data[start:end]),
                    "on_part_end": lambda: self._events.append(_End()),
                    "on_end": self._finish,
                },
            )
        except FormParserError as error:
            raise _broken(str(error)) from None

    async def next(self, *, at_end: bool = False) -> _Event | None:
        """None: there are no more parts, which only `at_end` expects."""
        while not self._events:
            piece = await anext(self._source, None)
            if piece is None:
                if at_end and self._complete:
                    return None
                raise _broken("it ends in the middle")
            try:
                self._parser.write(piece)
            except FormParserError as error:
                raise _broken(str(error)) from None
        return self._events.popleft()

    def _begin(self) -> None:
        self._disposition = b""

    def _header(self) -> None:
        if bytes(self._field).lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._field.clear()
        self._value.clear()

    def _headers(self) -> None:
        _, options = parse_options_header(self._disposition.decode("latin-1"))
        name, filename = options.get(b"name"), options.get(b"filename")
        if name is None:
            raise _broken("a part has no name")
        shown = None if filename is None else filename.decode("utf-8", "surrogateescape")
        self._events.append(_Begin(name.decode("utf-8", "replace"), shown))

    def _finish(self) -> None:
        self._complete = True


def _broken(problem: str) -> InvalidError:
    return InvalidError(f"form: {problem[:1].lower()}{problem[1:200]}")
