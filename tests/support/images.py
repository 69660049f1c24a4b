"""Images for tests, made here, because no registry can be asked.

An Engine gets them as `docker load` would give them to it. `python`, `node` and `go` stand on the
same Debian; tests/support/layers.py makes what they consist of.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tarfile
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from tests.support.engine import EngineApi
from tests.support.layers import layer, locked

PREFIX = "capsule-test/"
LABEL = "capsule.test"
IMAGES: dict[str, tuple[str, ...]] = {
    "python": ("debian",),
    "node": ("debian", "node"),
    "go": ("debian", "go"),
    "alpine": ("busybox",),  # like it: a shell, but no glibc, and nobody is uid 1000
    "empty": (),  # FROM scratch: not even a folder
}


class Images:
    """The tests' images in one Engine, loaded when first asked for."""

    def __init__(self, api: EngineApi, notes: Path | None = None) -> None:
        """`notes`: a file in which those who share the Engine write down what they loaded."""
        self._api = api
        self._notes = notes
        self._there: set[str] = set()

    @property
    def python(self) -> str:
        return self.name("python")

    @property
    def node(self) -> str:
        return self.name("node")

    @property
    def go(self) -> str:
        return self.name("go")

    @property
    def alpine(self) -> str:
        return self.name("alpine")

    @property
    def empty(self) -> str:
        return self.name("empty")

    def name(self, image: str) -> str:
        """Its name in the Engine, where it is by now."""
        if image not in self._there:
            with locked(self._notes) if self._notes else nullcontext():
                self._bring(image, f"{PREFIX}{image}:latest")
            self._there.add(image)
        return PREFIX + image

    def _bring(self, image: str, tag: str) -> None:
        config = _config(image)
        there = self._api.image(tag)
        if there is not None:
            made_here = LABEL in (there["Config"].get("Labels") or {})
            if there["Id"] == f"sha256:{hashlib.sha256(config).hexdigest()}" or not made_here:
                return  # also what somebody else gave this name: it is theirs
            self._api.call("DELETE", f"/images/{tag}", force=1)
        self._api.load(_archive(tag, image, config))
        if self._notes is not None:
            with self._notes.open("a") as notes:
                notes.write(f"{tag}\n")


def _config(image: str) -> bytes:
    """The image's description. Its digest is the image's id: the same layers, the same id."""
    digests = [layer(name).with_suffix(".sha256").read_text() for name in IMAGES[image]]
    arch = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    env = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
    if image == "go":
        env.append("CGO_ENABLED=0")  # there is no C compiler in it
    body = {
        "architecture": arch,
        "os": "linux",
        "created": "2024-01-01T00:00:00Z",
        "config": {"Env": env, "Cmd": ["sh"] if digests else None, "Labels": {LABEL: image}},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        "history": [{"created_by": name} for name in IMAGES[image]],
    }
    return json.dumps(body, sort_keys=True).encode()


def _archive(tag: str, image: str, config: bytes) -> Iterator[bytes]:
    """What `docker save` would have written."""
    layers = {f"{name}.tar": layer(name) for name in IMAGES[image]}
    manifest = [{"Config": "config.json", "RepoTags": [tag], "Layers": list(layers)}]
    for name, content in (
        ("config.json", config),
        ("manifest.json", json.dumps(manifest).encode()),
    ):
        yield from _entry(name, len(content), iter([content]))
    for name, path in layers.items():
        with path.open("rb") as file:
            yield from _entry(name, path.stat().st_size, iter(lambda: file.read(1 << 20), b""))
    yield bytes(2 * tarfile.BLOCKSIZE)


def _entry(name: str, size: int, content: Iterator[bytes]) -> Iterator[bytes]:
    entry = tarfile.TarInfo(name)
    entry.size = size
    yield entry.tobuf()
    yield from content
    yield bytes(-size % tarfile.BLOCKSIZE)
