"""The keys of this server in memory, so that a request costs no look into a file.

Tasks, owned by `Keys` and ended by `aclose`:
  keys   every second: whether another process (`capsule key`) has changed the file, which is then
         read again; every minute: when keys were last used is written down
"""

from __future__ import annotations

import asyncio
import functools
import hmac
from collections.abc import Awaitable, Callable

import structlog

from capsule.errors import CapsuleError, UnauthenticatedError
from capsule.service.accounts import AccountFile, Key, NewKey, Watch, digest_of, split
from capsule.service.caller import Caller, widened
from capsule.service.clock import Clock
from capsule.service.tasks import Tasks

log = structlog.get_logger(__name__)

LOOK_EVERY = 1.0
NOTE_EVERY = 60.0
_NO_DIGEST = bytes(32)


class Keys:
    def __init__(self, file: AccountFile, clock: Clock) -> None:
        self._file = file
        self._clock = clock
        self._watch = Watch(file)
        self._known: dict[str, Key] = {}
        self._callers: dict[str, Caller] = {}
        self._used: dict[str, float] = {}
        # What was read before a key was revoked must not be taken in after.
        self._changing = asyncio.Lock()
        # What else is read when somebody has written to the file.
        self.also: list[Callable[[], Awaitable[None]]] = []
        self.tasks = Tasks()  # also of who reads the keys of others

    async def open(self) -> None:
        await self.look()
        self.tasks.spawn(self._run(), "keys")

    async def aclose(self) -> None:
        await self.tasks.aclose()
        try:
            await self._note_use()
        finally:
            await asyncio.to_thread(self._watch.close)

    def now(self) -> float:
        return self._clock.now()

    @property
    def any(self) -> bool:
        """Also when all are over: to revoke the last key opens nothing."""
        return bool(self._known)

    def caller(self, token: str) -> Caller | None:
        """None: no such key. Raises UnauthenticatedError when it is over."""
        if not self._known:
            return None
        id, secret = split(token)
        key = self._known.get(id)
        # Against something in any case: the time does not tell which ids there are.
        same = hmac.compare_digest(key.digest if key else _NO_DIGEST, digest_of(secret))
        if key is None or not same:
            return None
        now = self._clock.now()
        if (state := key.state(now)) != "active":
            raise UnauthenticatedError(f"API key {id} is {state}", hint="ask for a new one")
        self._used[id] = now
        return self._callers[id]

    async def list(self, tenant: str | None = None) -> list[Key]:
        """Oldest first, also those that are over; of all tenants if none is named."""
        await self._note_use()
        return await asyncio.to_thread(self._file.keys, tenant)

    async def create(
        self, *, tenant: str, scopes: tuple[str, ...], name: str = "", ttl: float | None = None
    ) -> NewKey:
        """`ttl` is its life in seconds; None: it has no end. Raises InvalidError."""
        now = self._clock.now()
        expires = None if ttl is None else now + ttl
        make = functools.partial(
            self._file.create_key, tenant=tenant, scopes=scopes, name=name, expires=expires, now=now
        )
        async with self._changing:
            made = await asyncio.to_thread(make)
            self._learn(made.key)
        return made

    async def revoke(self, id: str) -> Key:
        """Refused from now on. Raises NotFoundError."""
        async with self._changing:
            key = await asyncio.to_thread(self._file.revoke_key, id, self._clock.now())
            self._learn(key)
        return key

    async def look(self) -> None:
        """Read the file again if somebody has written to it."""
        async with self._changing:
            if await asyncio.to_thread(self._watch.changed):
                known = await asyncio.to_thread(self._file.keys)
                self._known.clear()
                for key in known:
                    self._learn(key)
                for read in self.also:
                    await read()

    def _learn(self, key: Key) -> None:
        self._known[key.id] = key
        self._callers[key.id] = Caller(key.tenant, widened(key.scopes), key.id)

    async def _note_use(self) -> None:
        used, self._used = self._used, {}
        if used:
            await asyncio.to_thread(self._file.note_use, used)

    async def _run(self) -> None:
        rounds = round(NOTE_EVERY / LOOK_EVERY)
        while True:
            for _ in range(rounds):
                await asyncio.sleep(LOOK_EVERY)
                await self._try_look()
            try:
                await self._note_use()
            except CapsuleError as error:
                log.warning("use of keys not noted", reason=error.message)

    async def _try_look(self) -> None:
        try:
            await self.look()
        except CapsuleError as error:
            log.warning("keys not read", reason=error.message)
