"""gzip, both ways, piece by piece."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, AsyncIterable

from capsule.errors import InvalidError

_GZIP = 31  # how zlib is told of gzip's header
_PIECE = 256 * 1024
_FAST = 1


async def inflated(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Never more than a piece at once, whatever is in it. Raises InvalidError."""
    unpack = zlib.decompressobj(_GZIP)
    try:
        async for piece in pieces:
            while piece:
                if unpack.eof:  # a further member, as gzip allows
                    unpack = zlib.decompressobj(_GZIP)
                if plain := unpack.decompress(piece, _PIECE):
                    yield plain
                piece = unpack.unconsumed_tail or unpack.unused_data
        while plain := unpack.decompress(unpack.unconsumed_tail, _PIECE):
            yield plain
    except zlib.error as error:
        raise InvalidError(f"the body is not gzip: {error}") from None
    if not unpack.eof:
        raise InvalidError("the body ends in the middle of its gzip")


async def deflated(pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    pack = zlib.compressobj(_FAST, wbits=_GZIP)
    async for piece in pieces:
        if packed := pack.compress(piece):
            yield packed
    yield pack.flush()
