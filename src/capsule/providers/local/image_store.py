"""Where images are kept on disk.

    STORE/images/NAME.json    the record; an image exists when this does
    STORE/layers/ID/          a layer, shared by all images that have it
    STORE/layers/ID.json      how much is in it
    STORE/work/               imports under way, and leftovers of killed ones
    STORE/lock                held shared by imports, exclusively to clear up

An import unpacks below work/, moves whole layers into place, and renames the record into place
last: until then the image that had the name before is still there. What a killed import leaves is
cleared by the next import or removal that is alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from capsule.errors import ConflictError, InternalError, InvalidError, NotFoundError
from capsule.providers.local.folders import make_folder
from capsule.providers.local.removal import remove_tree

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}", re.ASCII)


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What the image itself asks for: defaults of a template made from it."""

    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    user: str = ""


@dataclass(frozen=True, slots=True)
class Amount:
    """What was unpacked; `left_out` counts devices and FIFOs that were not."""

    bytes: int = 0
    entries: int = 0
    left_out: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.bytes + other.bytes, self.entries + other.entries, self.left_out + other.left_out
        )


@dataclass(frozen=True, slots=True)
class Image:
    name: str
    kind: str  # docker, oci or rootfs: what the archive was
    layers: tuple[str, ...]  # ids, the lowest first
    flattened: bool  # all layers in one: too many for a mount, or deletions cannot be expressed
    amount: Amount
    created: float
    config: ImageConfig = field(default_factory=ImageConfig)


class ImageStore:
    def __init__(self, root: Path) -> None:
        self._images, self._layers = root / "images", root / "layers"
        self._work, self._lock = root / "work", root / "lock"

    def layer(self, id: str) -> Path:
        return self._layers / id

    def names(self) -> list[str]:
        if not self._images.is_dir():
            return []
        return sorted(file.stem for file in self._images.glob("*.json") if file.name[0] != ".")

    def read(self, name: str) -> Image:
        """Raises NotFoundError."""
        check_name(name)
        try:
            record = json.loads(self._record(name).read_bytes())
        except FileNotFoundError:
            known = ", ".join(self.names())
            raise NotFoundError(
                f"no image: {name}",
                hint=f"there is: {known}" if known else "`capsule template import` makes one",
            ) from None
        return _image(name, record)

    def exists(self, name: str) -> bool:
        return self._record(name).exists()

    @contextmanager
    def importing(self) -> Iterator[Path]:
        """A folder of one's own for an import, gone afterwards. Nothing is cleared meanwhile."""
        self._make_folders()
        self.clear(wait=False)
        try:
            with _locked(self._lock, fcntl.LOCK_SH):
                work = Path(tempfile.mkdtemp(dir=self._work))
                try:
                    yield work
                finally:
                    remove_tree(work)
        except BaseException:
            self.clear(wait=False)  # of the layers that came before it failed
            raise

    def amount(self, id: str) -> Amount | None:
        """How much is in a layer; None: there is no such layer."""
        if not self.layer(id).is_dir():
            return None
        return Amount(**json.loads(self._sidecar(id).read_bytes()))

    def put_layer(self, folder: Path, id: str, amount: Amount) -> None:
        """Move a complete layer into place. If another import was faster, its layer is used."""
        with _replacing(self._sidecar(id), asdict(amount)):
            pass
        try:
            folder.rename(self.layer(id))
        except OSError:
            if not self.layer(id).is_dir():
                raise

    @contextmanager
    def recording(self, image: Image, *, replace: bool) -> Iterator[None]:
        """When the block ends, the image exists; if it fails, nothing has changed.

        Raises ConflictError.
        """
        with _replacing(self._record(image.name), asdict(image), replace=replace):
            yield

    def remove(self, name: str) -> None:
        """Raises NotFoundError."""
        self.read(name)
        self._record(name).unlink(missing_ok=True)
        self.clear(wait=True)

    def clear(self, *, wait: bool) -> None:
        """Remove layers that no image has, and what killed imports left. Without `wait` it does
        nothing while an import is under way."""
        try:
            with _locked(self._lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)):
                self._clear_alone()
        except BlockingIOError:
            return

    def _clear_alone(self) -> None:
        used = {id for name in self.names() for id in self.read(name).layers}
        for path in self._layers.iterdir():
            if path.name.removesuffix(".json") not in used:
                # Out of sight in one step, so that no half-removed layer is ever found.
                path.rename(self._work / f"{path.name}-{secrets.token_hex(4)}")
        for path in (*self._work.iterdir(), *self._images.glob(".*")):
            remove_tree(path)

    def _record(self, name: str) -> Path:
        return self._images / f"{name}.json"

    def _sidecar(self, id: str) -> Path:
        return self._layers / f"{id}.json"

    def _make_folders(self) -> None:
        # Readable by all: a box is mounted with the rights of a user of its own.
        for folder in (self._images, self._layers):
            make_folder(folder, 0o755)
        self._work.mkdir(mode=0o700, exist_ok=True)


def check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidError(
            f"not a name for an image: {name[:100]!r}",
            hint="up to 64 lower-case letters, digits, . _ and -, starting with a letter or digit",
            field="name",
        )


@contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)


@contextmanager
def _replacing(path: Path, value: Mapping[str, Any], *, replace: bool = True) -> Iterator[None]:
    """Written before the block, so that after it there is only a rename left that could fail."""
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        temporary.write_text(json.dumps(value, indent=1), encoding="utf-8")
        yield
        if replace:
            temporary.replace(path)
        elif not _link(temporary, path):
            raise ConflictError(
                f"image {path.stem} exists already", hint="remove it, or choose another name"
            )
    finally:
        temporary.unlink(missing_ok=True)


def _link(source: Path, path: Path) -> bool:
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    return True


def _image(name: str, record: Any) -> Image:
    try:
        config = record["config"]
        return Image(
            **{
                **record,
                "layers": tuple(record["layers"]),
                "amount": Amount(**record["amount"]),
                "config": ImageConfig(
                    **{
                        **config,
                        "entrypoint": tuple(config["entrypoint"]),
                        "cmd": tuple(config["cmd"]),
                    }
                ),
            }
        )
    except (KeyError, TypeError) as error:
        raise InternalError(f"the record of image {name} is damaged: {error!r}") from error
