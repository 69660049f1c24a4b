"""Imports of images: honest archives come whole, hostile ones are refused and leave nothing."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import platform
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capsule.errors import (
    CapsuleError,
    ConflictError,
    InvalidError,
    NotFoundError,
    NotSupportedError,
    TooLargeError,
)
from capsule.providers.local import images
from capsule.providers.local.images import Caps, importing, layers, list_images, remove_image
from capsule.providers.local.removal import remove_tree

ARCH = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
OTHER_ARCH = "arm64" if ARCH == "amd64" else "amd64"
MTIME = 1_600_000_000

Entry = tarfile.TarInfo | tuple[tarfile.TarInfo, bytes]


def info(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.mtime = MTIME
    for key, value in fields.items():
        setattr(member, key, value)
    return member


def file(name: str, data: bytes = b"x", **fields: Any) -> Entry:
    return info(name, size=len(data), **fields), data


def folder(name: str, **fields: Any) -> tarfile.TarInfo:
    return info(name, tarfile.DIRTYPE, **{"mode": 0o755, **fields})


def symlink(name: str, target: str) -> tarfile.TarInfo:
    return info(name, tarfile.SYMTYPE, linkname=target)


def hardlink(name: str, target: str) -> tarfile.TarInfo:
    return info(name, tarfile.LNKTYPE, linkname=target)


def tar(*entries: Entry, format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for entry in entries:
            member, data = entry if isinstance(entry, tuple) else (entry, b"")
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def config_of(layer_tars: Iterable[bytes], **changes: Any) -> bytes:
    config = {
        "os": "linux",
        "architecture": ARCH,
        "config": {
            "Env": ["PATH=/opt/bin:/usr/bin", "A=b=c", "broken"],
            "WorkingDir": "/srv",
            "Cmd": ["python3"],
            "Entrypoint": None,
            "User": "app",
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha(each)}" for each in layer_tars]},
    }
    return json.dumps({**config, **changes}).encode()


def docker_save(*layer_tars: bytes, config: bytes | None = None) -> bytes:
    """As Docker before 25 wrote it."""
    config = config or config_of(layer_tars)
    names = [f"{i:064x}/layer.tar" for i in range(len(layer_tars))]
    manifest = [{"Config": f"{sha(config)}.json", "RepoTags": ["app:1"], "Layers": names}]
    return tar(
        file(f"{sha(config)}.json", config),
        *(file(name, data) for name, data in zip(names, layer_tars, strict=True)),
        file("manifest.json", json.dumps(manifest).encode()),
    )


def blob(data: bytes) -> Entry:
    return file(f"blobs/sha256/{sha(data)}", data)


def descriptor(data: bytes, **more: Any) -> dict[str, Any]:
    return {"digest": f"sha256:{sha(data)}", "size": len(data), **more}


def oci_manifest(*packed: bytes, config: bytes) -> bytes:
    found = {"config": descriptor(config), "layers": [descriptor(each) for each in packed]}
    return json.dumps({"schemaVersion": 2, **found}).encode()


def oci_layout(index: dict[str, Any], *blobs: bytes) -> bytes:
    return tar(
        file("oci-layout", b'{"imageLayoutVersion": "1.0.0"}'),
        file("index.json", json.dumps(index).encode()),
        *(blob(each) for each in blobs),
    )


def oci(*layer_tars: bytes, compress: Callable[[bytes], bytes] = gzip.compress) -> bytes:
    packed = [compress(each) for each in layer_tars]
    config = config_of(layer_tars)
    manifest = oci_manifest(*packed, config=config)
    return oci_layout({"manifests": [descriptor(manifest)]}, manifest, config, *packed)


BASE = tar(
    folder("./"),
    folder("etc"),
    file("etc/passwd", b"root"),
    folder("usr"),
    folder("usr/bin"),
    file("usr/bin/python3", b"#!", mode=0o755),
    file("usr/bin/gone", b"old", mode=0o755),
    symlink("bin", "usr/bin"),
    hardlink("usr/bin/python", "usr/bin/python3"),
    folder("data"),
    file("data/old", b"old"),
    file("data/sub/deep", b"deep"),
)
TOP = tar(
    folder("usr"),
    folder("usr/bin"),
    file("usr/bin/.wh.gone", b""),
    file("data/.wh..wh..opq", b""),
    file("data/new", b"new"),
    file("etc/passwd", b"changed"),
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def load(data: bytes, store: Path, name: str = "app", **options: Any) -> images.Image:
    with importing(io.BytesIO(data), name, store, **options) as unpacked:
        return unpacked.image


def tree(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


# What honest archives become


@pytest.mark.parametrize("pack", [docker_save, oci], ids=["docker", "oci"])
def test_layers_are_unpacked_with_the_top_first(pack: Callable[..., bytes], store: Path) -> None:
    image = load(pack(BASE, TOP), store)
    top, base = layers("app", store)
    assert image.layers == (sha(BASE), sha(TOP))
    assert (base.name, top.name) == image.layers
    assert (base / "etc/passwd").read_bytes() == b"root"
    assert (top / "etc/passwd").read_bytes() == b"changed"
    assert os.readlink(base / "bin") == "usr/bin"
    assert (base / "usr/bin/python").samefile(base / "usr/bin/python3")
    assert not left_behind(store)


def left_behind(store: Path) -> list[Path]:
    """What is in a store's folder of work in progress."""
    return list((store / "work").iterdir())


def kept_layers(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "layers").iterdir() if path.is_dir())


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_plain_root_is_one_layer(compress: Callable[[bytes], bytes], store: Path) -> None:
    image = load(compress(BASE), store)
    assert (image.kind, image.layers) == ("rootfs", (sha(BASE),))
    assert (layers("app", store)[0] / "etc/passwd").read_bytes() == b"root"


@pytest.mark.parametrize(
    "format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT], ids=str
)
def test_every_tar_dialect_is_read(format: int, store: Path) -> None:
    long = "a" * 90 + "/" + "b" * 90 + ("" if format == tarfile.USTAR_FORMAT else "/" + "c" * 200)
    load(tar(file(long, b"far"), symlink("l", "t" * 99), format=format), store)
    (layer,) = layers("app", store)
    assert (layer / long).read_bytes() == b"far"


def test_modes_and_times_are_kept_and_special_bits_dropped(store: Path) -> None:
    entries = (
        folder("secret", mode=0o710),
        file("secret/key", mode=0o600),
        file("su", mode=0o4755),
        folder("tmp", mode=0o1777),
    )
    load(tar(*entries), store)
    (layer,) = layers("app", store)
    modes = {name: stat.S_IMODE((layer / name).lstat().st_mode) for name in tree(layer)}
    assert modes == {"secret": 0o710, "secret/key": 0o600, "su": 0o755, "tmp": 0o777}
    assert stat.S_IMODE(layer.stat().st_mode) == 0o755
    assert {(layer / name).lstat().st_mtime for name in modes} == {MTIME}
    assert {(layer / name).lstat().st_uid for name in modes} == {os.getuid()}


def test_devices_and_fifos_are_left_out_and_counted(store: Path) -> None:
    device = info("dev/sda", tarfile.BLKTYPE, devmajor=8)
    whiteout = info("dev/zero-zero", tarfile.CHRTYPE)
    image = load(tar(device, whiteout, info("pipe", tarfile.FIFOTYPE), file("kept")), store)
    assert tree(layers("app", store)[0]) == ["kept"]
    assert image.amount.left_out == 3


def test_deletions_become_what_overlayfs_takes_for_them(store: Path) -> None:
    load(docker_save(BASE, TOP), store)
    top, _ = layers("app", store)
    gone = (top / "usr/bin/gone").lstat()
    assert stat.S_ISCHR(gone.st_mode) and gone.st_rdev == 0
    assert os.getxattr(top / "data", "user.overlay.opaque") == b"y"
    assert tree(top / "data") == ["new"]
    anew, deletion = (folder("data"), file("data/new")), file(".wh.data")
    for name, entries in {"first": (deletion, *anew), "last": (*anew, deletion)}.items():
        load(docker_save(BASE, tar(*entries)), store, name)
        assert os.getxattr(layers(name, store)[0] / "data", "user.overlay.opaque") == b"y"
    load(docker_save(BASE, tar(file(".wh..wh..opq"), file("only"))), store, "all")
    assert [tree(layer) for layer in layers("all", store)] == [["only"]]


MERGED = {
    *("bin", "data", "data/new", "etc", "etc/passwd"),
    *("usr", "usr/bin", "usr/bin/python", "usr/bin/python3"),
}


@pytest.mark.parametrize("why", ["no whiteouts", "too many layers"])
def test_layers_are_flattened_where_they_must(
    why: str, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "no whiteouts":
        monkeypatch.setattr(images, "whiteouts_work", lambda _: False)
    else:
        monkeypatch.setattr(images, "_MOUNT_BUDGET", 100)
    image = load(docker_save(BASE, TOP), store)
    (flat,) = layers("app", store)
    assert image.flattened
    assert set(tree(flat)) == MERGED
    assert (flat / "etc/passwd").read_bytes() == b"changed"


def test_the_config_is_kept_for_template_defaults(store: Path) -> None:
    config = load(docker_save(BASE), store).config
    assert config.env == {"PATH": "/opt/bin:/usr/bin", "A": "b=c"}
    assert (config.working_dir, config.user) == ("/srv", "app")
    assert (config.entrypoint, config.cmd) == ((), ("python3",))
    (listed,) = list_images(store)
    assert listed.config == config


def test_programs_are_found_through_links_that_stay_inside(store: Path) -> None:
    base = tar(
        file("opt/tool/run", mode=0o755),
        file("opt/plain", mode=0o644),
        symlink("usr/bin/absolute", "/opt/tool/run"),
        symlink("usr/bin/relative", "../../opt/tool/run"),
        symlink("usr/bin/above", "../../../../../../../opt/tool/run"),
        symlink("usr/bin/dangling", "/bin/sh"),
        symlink("usr/bin/plain", "/opt/plain"),
        symlink("usr/bin/round", "round"),
        symlink("usr/bin/hidden", "/gone/run"),
        symlink("sbin", "usr/bin"),
        file("gone/run", mode=0o755),
    )
    load(docker_save(base, tar(file(".wh.gone"))), store)
    wanted = ["absolute", "relative", "above", "dangling", "plain", "round", "hidden", "sh"]
    for path in ("/usr/bin", "/sbin"):
        found = images.find_programs(layers("app", store), wanted, path)
        assert found == {"absolute", "relative", "above"}
    load(docker_save(BASE, TOP), store, "other")
    wanted = ["python3", "gone", "node", "bin"]
    assert images.find_programs(layers("other", store), wanted, "/usr/bin:/bin:/usr") == {"python3"}


def test_the_platform_of_this_machine_is_picked(store: Path) -> None:
    mine, other = tar(file("mine")), tar(file("other"))
    blobs: list[bytes] = []
    manifests = []
    for arch, layer in ((OTHER_ARCH, other), (ARCH, mine)):
        config = config_of([layer], architecture=arch)
        manifest = oci_manifest(layer, config=config)
        blobs += [layer, config, manifest]
        platform_ = {"os": "linux", "architecture": arch}
        manifests.append(descriptor(manifest, platform=platform_))
    note = descriptor(b"{}", platform={"os": "unknown", "architecture": "unknown"})
    inner = json.dumps({"manifests": [note, *manifests]}).encode()
    load(oci_layout({"manifests": [descriptor(inner)]}, inner, *blobs), store)
    assert tree(layers("app", store)[0]) == ["mine"]


def test_one_of_several_images_is_picked_by_its_tag(store: Path) -> None:
    other = tar(file("other"))
    listed = []
    entries = []
    for name, layer in (("app:1", BASE), ("other:2", other)):
        config = config_of([layer])
        entries += [file(f"{sha(config)}.json", config), file(f"{name}.tar", layer)]
        listed.append(
            {"Config": f"{sha(config)}.json", "RepoTags": [name], "Layers": [f"{name}.tar"]}
        )
    data = tar(*entries, file("manifest.json", json.dumps(listed).encode()))
    with pytest.raises(InvalidError, match=r"2 images: app:1, other:2"):
        load(data, store)
    assert load(data, store, tag="other:2").layers == (sha(other),)


# The store


def test_layers_are_shared_and_dropped_with_their_last_image(store: Path) -> None:
    load(docker_save(BASE, TOP), store, "one")
    load(oci(BASE), store, "two")
    remove_image("one", store)
    gone = store / "images" / "gone.json"
    gone.symlink_to("nowhere")  # an image that is removed meanwhile
    assert [image.name for image in list_images(store)] == ["two"]
    assert kept_layers(store) == [sha(BASE)]
    gone.unlink()
    remove_image("two", store)
    assert not kept_layers(store) and not left_behind(store)


def test_a_name_is_taken_once_unless_it_is_to_be_replaced(store: Path) -> None:
    load(docker_save(BASE), store)
    with pytest.raises(ConflictError, match="exists already"):
        load(docker_save(TOP), store)
    assert load(docker_save(TOP), store, replace=True).layers == (sha(TOP),)


def test_a_failed_replacement_leaves_the_image_that_was_there(store: Path) -> None:
    load(docker_save(BASE), store)
    with (
        pytest.raises(ZeroDivisionError),
        importing(io.BytesIO(docker_save(TOP)), "app", store, replace=True) as unpacked,
    ):
        assert [folder.name for folder in unpacked.layers] == [sha(TOP)]
        raise ZeroDivisionError
    assert [folder.name for folder in layers("app", store)] == [sha(BASE)]
    assert not (store / "layers" / sha(TOP)).exists()
    assert not left_behind(store)
    with pytest.raises(InvalidError):
        load(bad_checksum(), store, replace=True)
    assert (layers("app", store)[0] / "etc/passwd").read_bytes() == b"root"


def test_names_are_checked_and_missing_images_named(store: Path, tmp_path: Path) -> None:
    for name in ("", "..", ".hidden", "a/b", "A", "x" * 129, "a\0", "a b"):
        with pytest.raises(InvalidError, match="not a name"):
            load(BASE, store, name)
        with pytest.raises(InvalidError, match="not a name"):
            layers(name, store)
    with pytest.raises(NotFoundError, match="no image: app"):
        layers("app", store)
    missing = importing(tmp_path / "nowhere.tar", "app", store)
    with pytest.raises(NotFoundError, match="nowhere"), missing:
        pass
    assert list_images(store) == []


KILLED_IMPORT = """
import os, sys
from pathlib import Path
from capsule.providers.local import images
step, archive, store = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
count = 0
def trace(frame, event, argument):
    global count
    if event == "call" and "capsule" in frame.f_code.co_filename:
        count += 1
        if count == step:
            os.kill(os.getpid(), 9)
sys.setprofile(trace)
with images.importing(archive, "app", store):
    pass
"""


@pytest.mark.slow  # an importer is killed again and again
@pytest.mark.timeout(60)
def test_a_killed_import_leaves_no_image_and_the_next_one_clears_up(
    store: Path, tmp_path: Path
) -> None:
    archive = tmp_path / "image.tar"
    archive.write_bytes(docker_save(BASE, TOP))
    killed = 0
    for step in range(5, 400, 40):
        run = subprocess.run([sys.executable, "-c", KILLED_IMPORT, str(step), archive, store])
        if run.returncode == 0:
            break
        killed += 1
        for image in list_images(store):  # it was killed after the record: then all is there
            assert len(layers(image.name, store)) == 2
            remove_image(image.name, store)
    assert killed > 5
    load(docker_save(BASE), store, "other")
    assert not left_behind(store)
    assert sha(BASE) in kept_layers(store)


# Hostile archives


OUTSIDE = "../../../outside"


def bad_checksum() -> bytes:
    data = bytearray(BASE)
    data[0] ^= 1
    return bytes(data)


def without_end() -> bytes:
    data = BASE.rstrip(b"\0")
    return data + bytes(-len(data) % 512)


def pax_bomb() -> bytes:
    """An extended header that claims 8 GiB."""
    header = info("x", tarfile.XHDTYPE, size=2**33)
    return header.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def negative_size() -> bytes:
    header = bytearray(info("x", size=0).tobuf())
    header[124:136] = b"\xff" * 12
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + bytes(1024)


INVALID = {
    "parent folder": (tar(file(OUTSIDE)), "leaves its root"),
    "parent in the middle": (tar(file("a/../../outside")), "leaves its root"),
    "absolute link": (tar(symlink("out", "{outside}"), file("out/evil")), "behind a link"),
    "relative link": (tar(symlink("out", "../../.."), file("out/outside/x")), "behind a link"),
    "link in the middle": (
        tar(folder("a"), symlink("a/b", "{outside}"), file("a/b/c/d")),
        "behind a link",
    ),
    "folder through a link": (tar(symlink("o", "{outside}"), folder("o/x")), "behind a link"),
    "deletion by a link": (tar(symlink("o", "{outside}"), file("o/.wh.victim")), "behind a link"),
    "opaque by a link": (tar(symlink("o", "{outside}"), file("o/.wh..wh..opq")), "behind a link"),
    "hard link outside": (tar(hardlink("x", OUTSIDE + "/victim")), "leaves its root"),
    "hard link, absolute": (tar(hardlink("x", "{outside}/victim")), "missing file"),
    "hard link by a link": (
        tar(symlink("out", "{outside}"), hardlink("x", "out/victim")),
        "behind a link",
    ),
    "hard link to a folder": (tar(folder("d"), hardlink("x", "d")), "no file"),
    "hard link to the root": (tar(hardlink("x", "/")), "its root"),
    "links in a circle": (tar(symlink("a", "b"), symlink("b", "a"), file("a/x")), "behind a link"),
    "a link as the root": (tar(symlink(".", "/etc")), "the root itself"),
    "deletion of ..": (tar(file("a/.wh...")), "cannot be"),
    "deletion of .": (tar(file("a/.wh..")), "cannot be"),
    "deletion of nothing": (tar(file("a/.wh.")), "cannot be"),
    "inside a deletion": (tar(file(".wh.a/b")), "deleted folder"),
    "pax bomb": (pax_bomb(), "extended header of"),
    "negative size": (negative_size(), "damaged"),
    "bad checksum": (bad_checksum(), "checksum"),
    "cut off": (BASE[:700], "cut off"),
    "cut off, gzip": (gzip.compress(BASE)[:-20], "damaged"),
    "no end": (without_end(), "cut off"),
    "empty": (b"", "cut off"),
    "not a tar": (b"hello world" * 100, "not a tar"),
    "sparse": (tar(info("s", tarfile.GNUTYPE_SPARSE)), "sparse"),
}
TOO_LARGE = {
    "byte bomb": (tar(file("big", bytes(1_500_000))), "more than 1000000 bytes"),
    "gzip bomb": (gzip.compress(tar(file("big", bytes(9_000_000)))), "more than"),
    "entry bomb": (tar(*(folder(f"d{i}") for i in range(600))), "more than 500"),
    "implicit folders": (
        tar(*(file(f"{i}/" + "d/" * 50 + "f") for i in range(12))),
        "more than 500",
    ),
    "too deep": (tar(file("d/" * 100 + "f")), "64 folders deep"),
    "too long a name": (tar(file("n" * 256)), "too long a name"),
    "too long a path": (tar(file(("n" * 200 + "/") * 30 + "x")), "too long a name"),
}
NOT_SUPPORTED = {
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(600), "zstd.*docker save"),
    "xz": (b"\xfd7zXZ\0" + bytes(600), "xz"),
}
HOSTILE: dict[str, tuple[type[CapsuleError], bytes, str]] = {
    name: (error, *attack)
    for error, attacks in {
        InvalidError: INVALID,
        TooLargeError: TOO_LARGE,
        NotSupportedError: NOT_SUPPORTED,
    }.items()
    for name, attack in attacks.items()
}
SMALL = Caps(bytes=1_000_000, entries=500, depth=64)


@pytest.mark.parametrize("attack", HOSTILE)
@pytest.mark.parametrize("flatten", [False, True], ids=["layers", "flat"])
def test_hostile_archives_are_refused_and_leave_nothing(
    attack: str, flatten: bool, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error, data, message = HOSTILE[attack]
    outside = tmp_path / "outside"
    outside.mkdir()
    victim = outside / "victim"
    victim.write_text("alive")
    if b"{outside}" in data:
        data = retargeted(data, str(outside))
    if flatten:
        monkeypatch.setattr(images, "whiteouts_work", lambda _: False)
        data = docker_save(tar(file("first")), data) if b"ustar" in data[:512] else data
    with pytest.raises(error, match=message):
        load(data, store, caps=SMALL)
    assert list_images(store) == [] and not left_behind(store)
    assert tree(outside) == ["victim"]
    assert (victim.read_text(), victim.stat().st_nlink) == ("alive", 1)


def retargeted(data: bytes, outside: str) -> bytes:
    """The same archive with links that lead to this test's folder."""
    entries: list[Entry] = []
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for member in archive:
            member.linkname = member.linkname.replace("{outside}", outside)
            stream = archive.extractfile(member) if member.isreg() else None
            entries.append((member, stream.read()) if stream else member)
    return tar(*entries)


def test_a_link_of_a_lower_layer_is_not_followed_by_the_next(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    lower, upper = tar(symlink("out", str(outside))), tar(file("out/evil"))
    load(docker_save(lower, upper), store)  # each layer has a folder of its own
    monkeypatch.setattr(images, "whiteouts_work", lambda _: False)
    with pytest.raises(InvalidError, match="behind a link"):
        load(docker_save(lower, upper), store, "flat")
    assert tree(outside) == []


def test_later_members_replace_earlier_ones_and_stay_inside(store: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("alive")
    entries = (
        *(symlink("x", str(victim)), file("x", b"evil", mode=0o777)),
        *(file("first", b"1"), hardlink("second", "first"), file("second", b"2")),
        *(file("a/b/c"), file("a"), file("d"), folder("d"), file("d/e")),
        *(file("/etc/capsule-was-here"), file("//slashes")),
    )
    load(tar(*entries), store)
    (layer,) = layers("app", store)
    inside = ["a", "d", "d/e", "etc", "etc/capsule-was-here", "first", "second", "slashes", "x"]
    assert tree(layer) == inside and not (layer / "x").is_symlink()
    assert [(layer / name).read_bytes() for name in ("x", "first", "second")] == [
        b"evil",
        b"1",
        b"2",
    ]
    assert victim.read_text() == "alive" and not Path("/etc/capsule-was-here").exists()


def flipped(data: bytes, inside: bytes) -> bytes:
    """One bit of `inside` changed, wherever it is in `data`."""
    at = data.index(inside) + len(inside) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("pack", [docker_save, oci], ids=["docker", "oci"])
def test_a_flipped_bit_is_noticed(pack: Callable[..., bytes], store: Path) -> None:
    layer = tar(file("data", os.urandom(4000)))
    packed = layer if pack is docker_save else gzip.compress(layer)
    load(pack(layer), store, "honest")  # a layer that is there already is checked all the same
    for changed in (packed[1000:2000], b'"/srv"'):
        with pytest.raises(InvalidError, match=r"digest|damaged"):
            load(flipped(pack(layer), changed), store)
    assert [image.name for image in list_images(store)] == ["honest"]


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ([{"Config": "missing.json", "Layers": []}], "incomplete"),
        ([{"Config": "c.json", "Layers": ["missing.tar"]}], "incomplete|1 layers, but 0"),
        ([{"Config": "c.json", "Layers": "x"}], "not a list"),
        ([{"Config": 3, "Layers": []}], "not a text"),
        ([{"Config": "c.json", "Layers": ["../../../../etc/passwd"]}], "incomplete"),
        ([{"Config": "loop", "Layers": []}], "incomplete"),
        ([], "0 images"),
    ],
)
def test_manifests_that_lie_are_refused(manifest: Any, message: str, store: Path) -> None:
    data = tar(
        file("c.json", config_of([])),
        symlink("loop", "loop"),
        file("manifest.json", json.dumps(manifest).encode()),
    )
    with pytest.raises(InvalidError, match=message):
        load(data, store)


def test_images_for_other_machines_are_refused(store: Path) -> None:
    foreign = config_of([BASE], architecture=OTHER_ARCH)
    with pytest.raises(NotSupportedError, match=OTHER_ARCH):
        load(docker_save(BASE, config=foreign), store)
    note = {"os": "linux", "architecture": OTHER_ARCH}
    with pytest.raises(NotSupportedError, match=f"linux/{OTHER_ARCH}"):
        load(oci_layout({"manifests": [descriptor(b"{}", platform=note)]}, b"{}"), store)


def test_json_bombs_are_refused(store: Path) -> None:
    deep = b"[" * 200_000
    with pytest.raises(InvalidError, match="not JSON"):
        load(tar(file("manifest.json", deep)), store)
    with pytest.raises(TooLargeError, match=r"manifest\.json"):
        load(tar(file("manifest.json", b" " * 5_000_000)), store)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_archives_are_imported_or_refused_never_a_crash(data: st.DataObject) -> None:
    archive = bytearray(data.draw(st.sampled_from([BASE, TOP, docker_save(BASE, TOP), oci(BASE)])))
    for _ in range(data.draw(st.integers(1, 8))):
        # Mostly in headers, which are most of these archives.
        at = data.draw(st.integers(0, len(archive) - 1))
        archive[at] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            repair_checksum(archive, at - at % 512)
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(CapsuleError):
        load(bytes(archive), Path(folder), caps=SMALL)


def repair_checksum(archive: bytearray, start: int) -> None:
    header = archive[start : start + 512]
    header[148:156] = b" " * 8
    archive[start + 148 : start + 156] = b"%06o\0 " % sum(header)


# Removal of trees


def test_removal_follows_no_link_and_minds_no_name(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("alive")
    top = tmp_path / "top"
    (top / "sub").mkdir(parents=True)
    (top / "sub/link").symlink_to(outside)
    (top / "link").symlink_to(outside, target_is_directory=True)
    os.mkfifo(top / "fifo")
    (top / os.fsdecode(b"\xff\n")).mkdir()
    remove_tree(top)
    assert tree(tmp_path) == ["outside", "outside/victim"]
    remove_tree(top)
