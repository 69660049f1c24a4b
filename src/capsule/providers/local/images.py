"""Images: archives unpacked into layers that sandboxes start from.

To mount one: overlayfs, read-only, `lowerdir` = `layers(...)`, which is the top first, with the
option `userxattr` (a must in a user namespace). unpack.py says what becomes of owners, modes and
deletions, image_store.py how it is kept on disk.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from capsule.errors import ConflictError, InternalError, NotFoundError
from capsule.host_errors import host_error
from capsule.providers.local.archive import Archive, Layer, opened
from capsule.providers.local.image_store import (
    Amount,
    Image,
    ImageConfig,
    ImageStore,
    check_name,
)
from capsule.providers.local.manifests import Contents, read_contents
from capsule.providers.local.merged import find_programs
from capsule.providers.local.tarball import Tar
from capsule.providers.local.unpack import Caps, LayerWriter, Tally, is_opaque, whiteouts_work

__all__ = ["Caps", "Image", "ImageConfig", "Unpacked", "find_programs", "importing"]
__all__ += ["layers", "list_images", "remove_image"]

_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOUNT_BUDGET = 3000  # bytes of `lowerdir=`: mount(2) takes one page of options


class Unpacked(NamedTuple):
    image: Image
    layers: list[Path]  # the top first


@contextmanager
def importing(
    source: Path | BinaryIO,
    name: str,
    store_dir: Path,
    *,
    tag: str | None = None,
    replace: bool = False,
    caps: Caps | None = None,
) -> Iterator[Unpacked]:
    """Unpack an archive (`docker save`, an OCI layout or a plain root, gzipped or not) as `name`.

    The image is in the store when the block ends. If that or anything before it fails, there is no
    new image, and one that it was to replace is still there. Blocks: call it from a command or a
    thread. Several may run at once. Raises InvalidError, TooLargeError, NotSupportedError,
    ConflictError, NotFoundError, NoSpaceError, UnavailableError.
    """
    check_name(name)
    store = ImageStore(store_dir)
    if not replace and store.exists(name):
        raise ConflictError(
            f"image {name} exists already", hint="remove it, or choose another name"
        )
    with _plain_errors(), store.importing() as work:
        with opened(source, work / "archive", caps or Caps()) as archive:
            image = _Import(archive, store, work).run(name, read_contents(archive, tag))
        with store.recording(image, replace=replace):
            yield Unpacked(image, _folders(store, image))


def layers(name: str, store_dir: Path) -> list[Path]:
    """The folders of an image's layers, the top first. Raises NotFoundError."""
    store = ImageStore(store_dir)
    return _folders(store, store.read(name))


def _folders(store: ImageStore, image: Image) -> list[Path]:
    found: list[Path] = []
    for id in reversed(image.layers):
        found.append(store.layer(id))
        if not found[-1].is_dir():
            raise InternalError(f"image {image.name} lacks a layer: {id}", hint="import it again")
        if is_opaque(found[-1]):
            break  # it hides all that is below
    return found


def list_images(store_dir: Path) -> list[Image]:
    """By name. Who is removed meanwhile is not among them."""
    store, found = ImageStore(store_dir), []
    for name in store.names():
        with suppress(NotFoundError):
            found.append(store.read(name))
    return found


def remove_image(name: str, store_dir: Path) -> None:
    """Remove an image, and the layers that no other one has. Waits for imports under way.

    Whoever runs from it loses what is not open: ask that nobody does. Raises NotFoundError.
    """
    with _plain_errors():
        ImageStore(store_dir).remove(name)


class _Import:
    """One archive on its way into the store."""

    def __init__(self, archive: Archive, store: ImageStore, work: Path) -> None:
        self._archive, self._store, self._work = archive, store, work
        self._total = Amount()

    def run(self, name: str, contents: Contents) -> Image:
        flatten = self._must_flatten(contents.layers)
        if flatten:
            ids = [self._unpack_flat(contents.layers)]
        else:
            ids = [self._unpack(layer) for layer in contents.layers]
        return Image(
            name=name,
            kind=contents.kind,
            layers=_last_of_each(ids),
            flattened=flatten,
            amount=self._total,
            created=time.time(),
            config=_config(contents.config),
        )

    def _must_flatten(self, found: Sequence[Layer]) -> bool:
        if len(found) < 2:
            return False
        length = len(found) * (len(os.fsencode(self._store.layer("x" * 64))) + 1)
        with self._folder() as (_, fd):
            return length > _MOUNT_BUDGET or not whiteouts_work(fd)

    def _unpack(self, layer: Layer) -> str:
        """The layer's id. One that is here already is only checked."""
        known = self._store.amount(layer.diff_id) if layer.diff_id else None
        if layer.diff_id and known:
            self._archive.digest(layer)
            self._total += known
            return layer.diff_id
        tally = self._tally()
        with self._folder() as (folder, root):
            writer = LayerWriter(root, tally)
            with self._archive.open_layer(layer) as stream:
                writer.write(Tar(stream))
                id = stream.drain()
            writer.finish()
        return self._put(folder, id, tally)

    def _unpack_flat(self, found: Sequence[Layer]) -> str:
        tally = self._tally()
        ids: list[str] = []
        with self._folder() as (folder, root):
            writer = LayerWriter(root, tally, flatten=True)
            for layer in found:
                with self._archive.open_layer(layer) as stream:
                    writer.write(Tar(stream))
                    ids.append(stream.drain())
            writer.finish()
        return self._put(folder, hashlib.sha256(" ".join(ids).encode()).hexdigest(), tally)

    def _put(self, folder: Path, id: str, tally: Tally) -> str:
        amount = Amount(
            tally.bytes - self._total.bytes,
            tally.entries - self._total.entries,
            tally.left_out - self._total.left_out,
        )
        self._store.put_layer(folder, id, amount)
        self._total += amount
        return id

    @contextmanager
    def _folder(self) -> Iterator[tuple[Path, int]]:
        path = Path(tempfile.mkdtemp(dir=self._work))
        fd = os.open(path, _DIR)
        try:
            yield path, fd
        finally:
            os.close(fd)

    def _tally(self) -> Tally:
        total = self._total
        return Tally(self._archive.caps, total.bytes, total.entries, total.left_out)


def _last_of_each(ids: Sequence[str]) -> tuple[str, ...]:
    """Overlayfs takes a layer once. The upper of two equal ones decides; the lower adds nothing."""
    return tuple(id for i, id in enumerate(ids) if id not in ids[i + 1 :])


def _config(raw: Mapping[str, Any]) -> ImageConfig:
    """Whatever is not of the form Docker writes is left out: these are defaults, nothing more."""
    pairs = (text.partition("=") for text in _texts(raw.get("Env")))
    return ImageConfig(
        env={key: value for key, equals, value in pairs if key and equals},
        working_dir=_text(raw.get("WorkingDir")),
        entrypoint=_texts(raw.get("Entrypoint")),
        cmd=_texts(raw.get("Cmd")),
        user=_text(raw.get("User")),
    )


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(x for x in value if _text(x)) if isinstance(value, list) else ()


def _text(value: Any) -> str:
    return value if isinstance(value, str) and "\0" not in value else ""


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {error.filename}") from error
    except OSError as error:
        raise host_error("cannot unpack the image", error) from error
