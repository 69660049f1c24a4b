"""The files of one sandbox. Everything happens inside it, as its user."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AbstractAsyncContextManager

from capsule.link.link import Change, FileReader, Listing
from capsule.model import FileStat
from capsule.service.values import TarResult


class Files:
    """Paths are absolute, or relative to /workspace; `..` and NUL are refused.

    Every method raises NotFoundError and GoneError for the sandbox and the file, ForbiddenError,
    InvalidError, ConflictError, NoSpaceError as the file system says, UnavailableError.
    """

    def read(
        self, path: str, *, offset: int = 0, length: int = -1
    ) -> AbstractAsyncContextManager[FileReader]:
        raise NotImplementedError

    async def read_bytes(self, path: str, *, limit: int) -> bytes:
        """The whole file. Raises TooLargeError above `limit`."""
        raise NotImplementedError

    async def write(
        self,
        path: str,
        data: bytes | AsyncIterable[bytes],
        *,
        mode: int = 0o644,
        parents: bool = True,
        append: bool = False,
        exclusive: bool = False,
    ) -> FileStat:
        """Atomic: the old content or the new, never a part of it (not with `append`)."""
        raise NotImplementedError

    async def list(self, path: str, *, recursive: bool = False, limit: int = 100_000) -> Listing:
        raise NotImplementedError

    async def stat(self, path: str, *, follow: bool = False) -> FileStat:
        raise NotImplementedError

    async def mkdir(self, path: str, *, parents: bool = True, mode: int = 0o755) -> None:
        raise NotImplementedError

    async def move(self, source: str, target: str, *, overwrite: bool = True) -> None:
        raise NotImplementedError

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        raise NotImplementedError

    async def chmod(self, path: str, mode: int) -> None:
        raise NotImplementedError

    async def symlink(self, path: str, target: str) -> None:
        raise NotImplementedError

    def watch(
        self, path: str, *, recursive: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[Change]]:
        raise NotImplementedError

    def tar_out(self, path: str) -> AsyncIterator[bytes]:
        """A pax archive of a folder or file, as a stream. Sockets, FIFOs and devices are left out."""
        raise NotImplementedError

    async def tar_in(self, path: str, chunks: AsyncIterable[bytes]) -> TarResult:
        """Unpack a tar stream below `path`. Raises InvalidError naming the first entry it refuses."""
        raise NotImplementedError
