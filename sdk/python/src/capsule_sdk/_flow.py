"""How the client's logic is written once: as generators that yield steps and receive the answers.

    flow ──yields──▶ Call, Open, Read, Sleep, Work, Emit ──▶ driver (sync or async) does it
         ◀──receives── Answer, Handle, bytes, …          ◀──

A driver closes whatever a flow opened when the flow ends, however it ends; so a flow never has to
yield in a `finally`, which a closed generator could not do.
"""

from __future__ import annotations

import functools
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Mapping,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    IO,
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    overload,
)

if TYPE_CHECKING:
    from ._drivers import AsyncDriver, SyncDriver

P = ParamSpec("P")
T = TypeVar("T")
V = TypeVar("V", covariant=True)

Body = bytes | Path | IO[bytes] | Iterable[bytes]


@dataclass(slots=True)
class Call:
    """One request; answered with an Answer."""

    method: str
    path: str
    body: Body | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None  # how long the server may be silent


@dataclass(slots=True)
class Open:
    """One request whose response is read piece by piece; answered with a Handle."""

    call: Call


@dataclass(slots=True)
class Read:
    """The next bytes of an open response; b"" at its end."""

    handle: Handle


@dataclass(slots=True)
class Sleep:
    seconds: float


@dataclass(slots=True)
class Work:
    """Something that touches the local disk: the async driver does it in a thread."""

    do: Callable[[], Any]


@dataclass(slots=True)
class Emit(Generic[V]):
    """Hand a value to whoever iterates."""

    value: V


@dataclass(slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class Handle:
    """An open response. `pieces` is what the driver that opened it reads from."""

    status: int
    headers: Mapping[str, str]
    pieces: Any


Step = Call | Open | Read | Sleep | Work | Emit[Any]
Flow = Generator[Step, Any, T]
Emitting = Generator[Call | Open | Read | Sleep | Work | Emit[T], Any, None]


def work(do: Callable[[], T]) -> Flow[T]:
    result: T = yield Work(do)
    return result


class Pump(Generic[T]):
    """Turns a flow's crank: `next` gives the step to do, `with pump:` takes what came of it."""

    result: T

    def __init__(self, flow: Flow[T]) -> None:
        self._flow = flow
        self._error: Exception | None = None
        self.reply: Any = None

    def next(self) -> Step | None:
        """The next step; None when the flow is done and `result` is set."""
        reply, self.reply = self.reply, None
        error, self._error = self._error, None
        try:
            return self._flow.throw(error) if error else self._flow.send(reply)
        except StopIteration as stop:
            self.result = stop.value
            return None

    def __enter__(self) -> None: ...

    def __exit__(self, _: type | None, error: BaseException | None, __: object) -> bool:
        # An interrupt or a cancellation is not an answer: it ends the driver, and so the flow.
        if not isinstance(error, Exception):
            return False
        self._error = error
        return True


def drain(flow: Flow[None], take: Callable[[Any], None]) -> Flow[None]:
    """Run an emitting flow to its end inside another one; `take` gets what it emits."""
    pump = Pump(flow)
    while (step := pump.next()) is not None:
        if isinstance(step, Emit):
            take(step.value)
            continue
        with pump:
            pump.reply = yield step


class SyncBound(Protocol):
    @property
    def _driver(self) -> SyncDriver: ...


class AsyncBound(Protocol):
    @property
    def _driver(self) -> AsyncDriver: ...


class method(Generic[P, T]):
    """A flow as a method: plain on an object with a sync driver, a coroutine with an async one."""

    def __init__(self, flow: Callable[Concatenate[Any, P], Flow[T]]) -> None:
        self.flow = flow
        functools.update_wrapper(self, flow)  # for help() and inspect

    def __call__(self, instance: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As `Capsule.run(capsule, …)`."""
        return self.__get__(instance, type(instance))(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> method[P, T]: ...
    @overload
    def __get__(self, instance: SyncBound, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: AsyncBound, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, instance: SyncBound | AsyncBound | None, owner: type) -> Any:
        if instance is None:
            return self
        flow = self.flow.__get__(instance)
        run = instance._driver.run

        @functools.wraps(flow)
        def bound(*args: P.args, **kwargs: P.kwargs) -> Any:
            return run(flow(*args, **kwargs))

        return bound


class iterator(Generic[P, T]):
    """A flow that emits, as a method: for `for`, or with an async driver for `async for`."""

    def __init__(self, flow: Callable[Concatenate[Any, P], Emitting[T]]) -> None:
        self.flow = flow
        functools.update_wrapper(self, flow)  # for help() and inspect

    def __call__(self, instance: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        """As `Capsule.run(capsule, …)`."""
        return self.__get__(instance, type(instance))(*args, **kwargs)

    @overload
    def __get__(self, instance: None, owner: type) -> iterator[P, T]: ...
    @overload
    def __get__(
        self, instance: SyncBound, owner: type
    ) -> Callable[P, Generator[T, None, None]]: ...
    @overload
    def __get__(
        self, instance: AsyncBound, owner: type
    ) -> Callable[P, AsyncGenerator[T, None]]: ...
    def __get__(self, instance: SyncBound | AsyncBound | None, owner: type) -> Any:
        if instance is None:
            return self
        flow = self.flow.__get__(instance)
        iterate = instance._driver.iterate

        @functools.wraps(flow)
        def bound(*args: P.args, **kwargs: P.kwargs) -> Any:
            return iterate(flow(*args, **kwargs))

        return bound
