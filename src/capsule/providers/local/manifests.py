"""Which layers make up the image in an archive: `docker save`, an OCI layout, or a plain root."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from capsule.errors import InvalidError, NotSupportedError, TooLargeError
from capsule.providers.local.archive import Archive, Extent, Layer
from capsule.providers.local.seccomp import native_arch

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
_GO_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}
_MOST_NESTED = 4  # indexes within indexes
_NAMES = ("io.containerd.image.name", "org.opencontainers.image.ref.name")


@dataclass(frozen=True, slots=True)
class Contents:
    """An image as its archive describes it, the lowest layer first."""

    kind: str  # docker, oci or rootfs
    layers: tuple[Layer, ...]
    config: Mapping[str, Any] = field(default_factory=dict)  # Env, Cmd … as Docker names them
    document: str = ""  # the whole configuration, by its name in the archive


def read_contents(archive: Archive, tag: str | None = None) -> Contents:
    """`tag` chooses when there are several images in the archive.

    Raises InvalidError, NotSupportedError (for another architecture or system), TooLargeError.
    """
    if "manifest.json" in archive and _is_docker(found := archive.json("manifest.json")):
        return _docker(archive, found, tag)
    if "oci-layout" in archive and "index.json" in archive:
        return _oci(archive, tag)
    if tag is not None:
        raise InvalidError(f"the archive is a plain root file system, without tags: {tag!r}")
    return Contents("rootfs", (Layer(Extent(0, archive.size)),))


def _is_docker(manifest: Any) -> bool:
    """A root file system may have a file of that name as well."""
    return isinstance(manifest, list) and all(
        isinstance(each, dict) and {"Config", "Layers"} <= each.keys() for each in manifest
    )


def _docker(archive: Archive, manifest: list[dict[str, Any]], tag: str | None) -> Contents:
    tags = [_strings(each.get("RepoTags") or [], "RepoTags") for each in manifest]
    image = manifest[_pick(tags, tag)]
    names = _strings(image["Layers"], "Layers")
    return _assemble(archive, "docker", _string(image["Config"], "Config"), names)


def _oci(archive: Archive, tag: str | None) -> Contents:
    found = _platform_manifests(archive, archive.json("index.json"), _MOST_NESTED)
    names = [[text for key in _NAMES if (text := names.get(key))] for _, names in found]
    manifest = found[_pick(names, tag)][0]
    document = _blob(_mapping(manifest.get("config"), "config"))
    layers = [_blob(_mapping(each, "layer")) for each in _list(manifest.get("layers"), "layers")]
    return _assemble(archive, "oci", document, layers)


def _platform_manifests(
    archive: Archive, index: Any, nested: int
) -> list[tuple[Mapping[str, Any], Mapping[str, str]]]:
    """The manifests for this machine, each with its annotations."""
    found: list[tuple[Mapping[str, Any], Mapping[str, str]]] = []
    seen: list[str] = []
    for each in _list(_mapping(index, "index").get("manifests"), "manifests"):
        descriptor = _mapping(each, "manifest")
        platform = _mapping(descriptor.get("platform") or {}, "platform")
        if platform and (platform.get("os"), platform.get("architecture")) != native():
            seen.append(f"{platform.get('os')}/{platform.get('architecture')}")
            continue
        annotations = _mapping(descriptor.get("annotations") or {}, "annotations")
        content = _mapping(archive.json(_blob(descriptor)), "manifest")
        if "manifests" not in content:
            found.append((content, annotations))
        elif nested:
            inner = _platform_manifests(archive, content, nested - 1)
            found += [(manifest, {**annotations, **own}) for manifest, own in inner]
    if not found:
        raise NotSupportedError(
            f"no image for {'/'.join(native())} in the archive; there is: {', '.join(seen)[:200]}",
            hint=f"pull with --platform {'/'.join(native())} and save again",
        )
    return found


def _pick(names: list[list[str]], tag: str | None) -> int:
    listed = ", ".join(name for image in names for name in image)[:300]
    if tag is not None:
        for i, image in enumerate(names):
            if any(name == tag or name.endswith(f"/{tag}") for name in image):
                return i
        raise InvalidError(f"no image {tag!r} in the archive", hint=f"there is: {listed}")
    if len(names) != 1:
        raise InvalidError(
            f"the archive has {len(names)} images: {listed}",
            hint="save one image, or say which one by its tag",
        )
    return 0


def _assemble(archive: Archive, kind: str, document: str, names: list[str]) -> Contents:
    config = _mapping(archive.json(document), "config")
    system, arch = config.get("os", "linux"), config.get("architecture", native()[1])
    if (system, arch) != native():
        raise NotSupportedError(
            f"the image is for {system}/{arch}, this machine is {'/'.join(native())}",
            hint=f"pull with --platform {'/'.join(native())} and save again",
        )
    if len(names) > archive.caps.layers:
        raise TooLargeError(f"the image has {len(names)} layers, limit {archive.caps.layers}")
    rootfs = _mapping(config.get("rootfs") or {}, "rootfs")
    diff_ids = _strings(rootfs.get("diff_ids") or [], "diff_ids")
    if diff_ids and len(diff_ids) != len(names):
        raise InvalidError(f"the image has {len(names)} layers, but {len(diff_ids)} digests")
    promised: list[str | None] = [_hex(each) for each in diff_ids]
    promised = promised or [None] * len(names)
    layers = (archive.layer(name, id) for name, id in zip(names, promised, strict=True))
    defaults = _mapping(config.get("config") or {}, "config")
    return Contents(kind, tuple(layers), defaults, document)


def native() -> tuple[str, str]:
    return "linux", _GO_ARCH[native_arch()]


def _blob(descriptor: Mapping[str, Any]) -> str:
    return f"blobs/sha256/{_hex(_string(descriptor.get('digest'), 'digest'))}"


def _hex(digest: str) -> str:
    found = _DIGEST.fullmatch(digest)
    if found is None:
        raise InvalidError(f"not a digest that is supported: {digest[:100]!r}", hint="sha256:…")
    return found[1]


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidError(f"the image archive is malformed: {what} is not an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidError(f"the image archive is malformed: {what} is not a list")
    return value


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidError(f"the image archive is malformed: {what} is not a text")
    return value


def _strings(value: Any, what: str) -> list[str]:
    return [_string(each, what) for each in _list(value, what)]
