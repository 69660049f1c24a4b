"""Volumes through E2B's own SDK: made, mounted, and their files read and written without a
sandbox."""

from __future__ import annotations

import io
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from e2b import CommandExitException, Sandbox, Volume
from e2b.exceptions import (
    NotFoundException,
    SandboxException,
    VolumeException,
    VolumeNotFoundException,
    VolumePathNotFoundException,
)

from tests.support.servers import RealServer

pytestmark = pytest.mark.real


@pytest.fixture
def volume(e2b_env: RealServer) -> Iterator[Volume]:
    made = Volume.create(f"v-{uuid.uuid4().hex[:8]}")
    yield made
    Volume.destroy(made.volume_id)


def test_a_volume_is_made_found_and_destroyed(e2b_env: RealServer) -> None:
    name = f"v-{uuid.uuid4().hex[:8]}"
    made = Volume.create(name)
    assert made.name == name and made.token
    assert (made.volume_id, name) in [(each.volume_id, each.name) for each in Volume.list()]
    assert Volume.get_info(made.volume_id).token == made.token
    assert Volume.connect(made.volume_id).name == name
    with pytest.raises(VolumeException, match=r"409.*exists already"):
        Volume.create(name)
    assert Volume.destroy(made.volume_id) is True
    assert Volume.destroy(made.volume_id) is False
    with pytest.raises(VolumeNotFoundException):
        Volume.connect(made.volume_id)


def test_what_one_sandbox_writes_is_there_for_the_next(volume: Volume, e2b_env: RealServer) -> None:
    with Sandbox.create(volume_mounts={"/mnt/data": volume}) as writer:
        writer.files.write("/mnt/data/hello.txt", "written by the writer")
        writer.commands.run("echo more >> /mnt/data/hello.txt")
        with pytest.raises(CommandExitException):
            writer.commands.run("touch /mnt/x")  # beside it there is nothing to write to
    with Sandbox.create(volume_mounts={"/home/user/deep/data": volume.name}) as reader:
        assert reader.files.read("deep/data/hello.txt") == "written by the writermore\n"
        mounts = reader.get_info().volume_mounts
        assert mounts == [{"name": volume.name, "path": "/home/user/deep/data"}]
        with pytest.raises(VolumeException, match="in use by 1 sandboxes"):
            Volume.destroy(volume.volume_id)
    assert volume.read_file("/hello.txt") == "written by the writermore\n"
    with pytest.raises(SandboxException, match=r"/etc/data.* is no place for a volume.*/mnt"):
        Sandbox.create(volume_mounts={"/etc/data": volume})
    listed = httpx.get(f"{e2b_env.url}/v1/sandboxes").json()["sandboxes"]
    assert volume.name not in str(listed), "what reads the file is none of the user's sandboxes"


def test_files_are_written_and_read(volume: Volume) -> None:
    before = datetime.now(UTC)
    entry = volume.write_file("/a.txt", "Hello, Wörld!")
    assert (entry.name, entry.path, entry.type.value) == ("a.txt", "/a.txt", "file")
    assert (entry.size, entry.mode, entry.uid, entry.gid) == (14, 0o644, 1000, 1000)
    assert before - timedelta(seconds=2) <= entry.mtime <= datetime.now(UTC) + timedelta(seconds=2)
    assert volume.read_file("a.txt") == "Hello, Wörld!"
    assert volume.read_file("/a.txt", format="bytes") == "Hello, Wörld!".encode()
    content = b"0123456789abcdef" * 200_000
    volume.write_file("/big", io.BytesIO(content))
    assert b"".join(volume.read_file("/big", format="stream")) == content
    volume.write_file("/empty", b"")
    assert b"".join(volume.read_file("/empty", format="stream")) == b""
    volume.write_file("/f", "one")
    volume.write_file("/f", "two", force=True)
    volume.write_file("/f", "three")
    with pytest.raises(VolumeException, match="409"):
        volume.write_file("/f", "four", force=False)
    assert volume.read_file("/f") == "three"


def test_modes_are_changed_and_owners_are_not(volume: Volume) -> None:
    assert volume.write_file("/m", "x", uid=1000, gid=1000, mode=0o600).mode == 0o600
    assert volume.update_metadata("/m", mode=0o755).mode == 0o755
    assert volume.update_metadata("/m").mode == 0o755
    assert volume.make_dir("/d", uid=1000, gid=1000, mode=0o777).mode == 0o777
    with pytest.raises(VolumeException, match="1001 cannot own files"):
        volume.update_metadata("/m", uid=1001)
    with pytest.raises(VolumeException, match="0 cannot own files"):
        volume.write_file("/r", "x", gid=0)
    assert volume.exists("/m") and not volume.exists("/r")


def test_folders_are_made_listed_and_removed(volume: Volume) -> None:
    assert volume.make_dir("/one").type.value == "directory"
    with pytest.raises(VolumeException, match="409"):
        volume.make_dir("/one", force=False)
    with pytest.raises(VolumePathNotFoundException):
        volume.make_dir("/no/such/parents")
    volume.make_dir("/deep/er/still", force=True)
    volume.make_dir("/deep/er/still", force=True)
    volume.write_file("/deep/er/file", "x")
    assert [each.path for each in volume.list("/")] == ["/deep", "/one"]
    assert [each.name for each in volume.list("/deep/er")] == ["file", "still"]
    found = [each.path for each in volume.list("/", depth=3)]
    assert found == ["/deep", "/deep/er", "/deep/er/file", "/deep/er/still", "/one"]
    volume.remove("/deep")
    assert [each.name for each in volume.list("/")] == ["one"]
    assert volume.get_info("/").type.value == "directory"


def test_a_missing_path_is_not_found(volume: Volume) -> None:
    assert volume.exists("/nothing") is False
    for call in (
        lambda: volume.read_file("/nothing"),
        lambda: list(volume.read_file("/nothing", format="stream")),
        lambda: volume.list("/nothing"),
        lambda: volume.get_info("/nothing"),
        lambda: volume.remove("/nothing"),
        lambda: volume.update_metadata("/nothing", mode=0o644),
        lambda: volume.write_file("/nothing/below", "x"),
    ):
        with pytest.raises(VolumePathNotFoundException):
            call()


def test_paths_and_links_lead_out_of_no_volume(volume: Volume, e2b_env: RealServer) -> None:
    volume.write_file("/../../up.txt", "x")
    assert [each.path for each in volume.list("/..")] == ["/up.txt"]
    secret = e2b_env.base / "data" / "e2b.secret"
    assert secret.exists()
    with Sandbox.create(volume_mounts={"/mnt/v": volume}) as sandbox:
        made = f"cd /mnt/v && ln -s {secret} file && ln -s {secret.parent} folder && ln -s / root"
        assert sandbox.commands.run(made).exit_code == 0
    info = volume.get_info("/file")
    assert (info.type.value, info.target) == ("symlink", str(secret))
    for path in ("/file", "/folder/e2b.secret", f"/root{secret}"):
        with pytest.raises(NotFoundException):
            volume.read_file(path)
    with pytest.raises(NotFoundException):
        volume.write_file("/folder/new", "x")
    volume.remove("/folder")
    volume.remove("/root")
    assert secret.exists()


def test_only_its_own_token_opens_a_volume(volume: Volume, e2b_env: RealServer) -> None:
    other = Volume.create(f"v-{uuid.uuid4().hex[:8]}")
    try:
        url = f"{e2b_env.url}/volumecontent/{volume.volume_id}/path?path=/"
        for token in ("x", other.token, "va_" + "0" * 40):
            answer = httpx.get(url, headers={"Authorization": f"Bearer {token}"})
            assert answer.status_code == 401
            assert answer.json()["code"] == "401"
        right = httpx.get(url, headers={"Authorization": f"Bearer {volume.token}"})
        assert right.status_code == 200
    finally:
        Volume.destroy(other.volume_id)
