"""What E2B's SDK raises, as ours: each says what the caller can do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from e2b import (
    AuthenticationException,
    InvalidArgumentException,
    NotEnoughSpaceException,
    NotFoundException,
    RateLimitException,
    SandboxException,
    TimeoutException,
)
from e2b.exceptions import SandboxNotRunningException, SandboxUnreachableException
from pyqwest import ReadError, StreamError, WriteError

try:
    from e2b.exceptions import ServiceBusyException
except ImportError:  # an SDK before it had a name for this

    class ServiceBusyException(Exception):  # type: ignore[no-redef]
        pass


from capsule.errors import (
    CapacityError,
    CapsuleError,
    ForbiddenError,
    InvalidError,
    NoSpaceError,
    NotFoundError,
    UnavailableError,
)
from capsule.providers.contract import OutOfReachError

LONGEST_TEXT = 300
TRANSPORT = (httpx.TransportError, OSError, ReadError, WriteError, StreamError)

NO_KEY = "set CAPSULE_E2B_API_KEY, or give a key with the create; keys are at e2b.dev/dashboard"
REFUSED = "see whether the key is right, and whether it is for this cloud (CAPSULE_E2B_API_URL)"
UNREACHABLE = "see whether this host reaches it, and CAPSULE_E2B_API_URL, _SANDBOX_URL and _DOMAIN"
QUOTA = "wait, end sandboxes that are not needed, or ask E2B for a higher quota"


class LostError(NotFoundError):
    """The cloud has no such sandbox: it was killed, or its time was over."""


def no_key() -> InvalidError:
    return InvalidError("no key for E2B", hint=NO_KEY, field="provider_key")


@contextmanager
def cloud_errors(what: str) -> Iterator[None]:
    """Around one call of the SDK's. `what` could not be done."""
    try:
        yield
    except (CapsuleError, TimeoutError):  # TimeoutError: a deadline of ours
        raise
    except Exception as exc:  # it raises bare ones, too
        raise translated(what, exc) from exc


@contextmanager
def in_doubt(*, or_lost: bool = False) -> Iterator[None]:
    """Around what is asked of a box that exists: a key that is refused, or a cloud that is full,
    says nothing about it. So it is never given up for that. `or_lost`: LostError is for the caller.
    """
    try:
        yield
    except LostError as exc:
        if or_lost:
            raise
        raise UnavailableError(exc.message) from exc
    except (ForbiddenError, InvalidError, CapacityError) as exc:
        raise OutOfReachError(exc.message, hint=exc.hint) from exc


def translated(what: str, exc: Exception) -> CapsuleError:
    text = f"{what}: {_text(exc)}"
    match exc:
        case AuthenticationException():
            return ForbiddenError(f"E2B refused the key: {text}", hint=REFUSED)
        case RateLimitException() | ServiceBusyException():
            return CapacityError(f"E2B has no room: {text}", hint=QUOTA, retry_after=5.0)
        case SandboxNotRunningException():
            return LostError(text)
        case SandboxUnreachableException() | httpx.TimeoutException():
            return OutOfReachError(f"E2B does not answer: {text}", hint=UNREACHABLE)
        case TimeoutException():
            return OutOfReachError(f"E2B took too long: {text}", hint=UNREACHABLE)
        case NotFoundException():
            return LostError(text)
        case NotEnoughSpaceException():
            return NoSpaceError(text)
        case InvalidArgumentException():
            return InvalidError(text)
        case SandboxException():
            return _by_status(text, exc.status_code)
        case _ if isinstance(exc, TRANSPORT) or isinstance(exc.__cause__, TRANSPORT):
            return OutOfReachError(f"E2B cannot be reached: {text}", hint=UNREACHABLE)
        case _:
            return UnavailableError(f"E2B answered unexpectedly: {text}")


def _by_status(text: str, status: int | None) -> CapsuleError:
    match status:
        case 400:
            return InvalidError(text)
        case 403:
            return ForbiddenError(text, hint=REFUSED)
        case 404:
            return LostError(text)
        case 502 | 504:
            return OutOfReachError(text, hint=UNREACHABLE)
        case _:
            return UnavailableError(text)


def _text(exc: Exception) -> str:
    text = str(exc).strip() or type(exc).__name__
    return text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " …"
