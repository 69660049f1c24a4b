"""`sandbox.files` of E2B's SDK."""

from __future__ import annotations

import io
import os
from datetime import UTC, datetime, timedelta
from urllib.request import Request, urlopen

import pytest
from e2b import (
    AuthenticationException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotEnoughSpaceException,
    Sandbox,
    SandboxException,
)

pytestmark = pytest.mark.real


@pytest.fixture
def folder(shared: Sandbox) -> str:
    """A folder for this test."""
    name = f"/tmp/{os.urandom(6).hex()}"
    shared.files.make_dir(name)
    return name


def test_text_and_bytes_come_back(shared: Sandbox, folder: str) -> None:
    written = shared.files.write(f"{folder}/a.txt", "héllo")
    assert (written.name, written.path) == ("a.txt", f"{folder}/a.txt")
    assert written.type == FileType.FILE
    assert shared.files.read(f"{folder}/a.txt") == "héllo"
    data = bytes(range(256)) * 10
    shared.files.write(f"{folder}/new/er/b", data)
    assert bytes(shared.files.read(f"{folder}/new/er/b", format="bytes")) == data
    shared.files.write(f"{folder}/new/er/b", "short")
    assert shared.files.read(f"{folder}/new/er/b") == "short"
    shared.files.write(f"{folder}/empty", "")
    assert shared.files.read(f"{folder}/empty") == ""
    assert list(shared.files.read(f"{folder}/empty", format="stream")) == []


def test_a_file_keeps_its_mode_when_it_is_replaced(shared: Sandbox, folder: str) -> None:
    shared.commands.run(f"echo x > {folder}/run; chmod 755 {folder}/run")
    shared.files.write(f"{folder}/run", "#!/bin/sh\necho ran\n")
    assert shared.commands.run(f"{folder}/run").stdout == "ran\n"


@pytest.mark.parametrize(("gzip", "octets"), [(False, False), (False, True), (True, True)])
def test_every_way_of_transfer_gives_the_same_bytes(
    shared: Sandbox, folder: str, gzip: bool, octets: bool
) -> None:
    data = os.urandom(300_000) + b"\r\n--boundary" * 1000
    shared.files.write(f"{folder}/x", data, gzip=gzip, use_octet_stream=octets)
    assert bytes(shared.files.read(f"{folder}/x", format="bytes", gzip=gzip)) == data
    with shared.files.read(f"{folder}/x", format="stream", gzip=gzip) as stream:
        assert b"".join(stream) == data


def test_streams_are_written(shared: Sandbox, folder: str) -> None:
    shared.files.write(f"{folder}/io", io.BytesIO(b"from a file"))
    assert shared.files.read(f"{folder}/io") == "from a file"
    shared.files.write(f"{folder}/gen", (b"%d," % n for n in range(1000)))
    assert shared.files.read(f"{folder}/gen").startswith("0,1,2,")
    shared.files.write(f"{folder}/gz", (b"z" * 100_000 for _ in range(20)), gzip=True)
    assert shared.files.get_info(f"{folder}/gz").size == 2_000_000


def test_a_missing_file_or_one_of_another_type_is_an_error(shared: Sandbox, folder: str) -> None:
    nothing, file = f"{folder}/nothing", f"{folder}/file"
    shared.files.write(file, "")
    for missing in (
        lambda: shared.files.read(nothing),
        lambda: shared.files.get_info(nothing),
        lambda: shared.files.list(nothing),
        lambda: shared.files.rename(nothing, f"{folder}/other"),
    ):
        with pytest.raises(FileNotFoundException):
            missing()
    for wrong in (
        lambda: shared.files.read(folder),
        lambda: shared.files.list(file),
        lambda: shared.files.make_dir(file),
    ):
        with pytest.raises(InvalidArgumentException):
            wrong()


def test_an_entry_has_size_mode_owner_and_time(shared: Sandbox, folder: str) -> None:
    shared.files.write(f"{folder}/a.txt", "12345")
    info = shared.files.get_info(f"{folder}/a.txt")
    assert (info.name, info.type, info.size) == ("a.txt", FileType.FILE, 5)
    assert (info.mode, info.permissions) == (0o644, "-rw-r--r--")
    assert (info.owner, info.group, info.symlink_target) == ("user", "user", None)
    assert abs(datetime.now(UTC) - info.modified_time) < timedelta(minutes=1)
    above = shared.files.get_info(folder)
    assert (above.type, above.permissions) == (FileType.DIR, "drwxr-xr-x")


def test_metadata_stay_with_a_file(shared: Sandbox, folder: str) -> None:
    path, metadata = f"{folder}/a", {"Author": "me & you", "version": "1"}
    lower = {"author": "me & you", "version": "1"}
    assert shared.files.write(path, "x", metadata=metadata).metadata == lower
    assert shared.files.get_info(path).metadata == lower
    assert shared.files.list(folder)[0].metadata == lower
    assert shared.files.rename(path, f"{folder}/b").metadata == lower
    shared.files.write(f"{folder}/b", b"y" * 1_000_000, metadata={"k": "v"}, use_octet_stream=True)
    assert shared.files.get_info(f"{folder}/b").metadata == {"k": "v"}
    shared.files.write(f"{folder}/b", "z")
    assert shared.files.get_info(f"{folder}/b").metadata is None
    with pytest.raises(SandboxException):
        shared.files.write(path, "x", metadata={"k": "v" * 5000})
    code = f"import os; os.setxattr('{folder}/b', 'user.e2b.by', b'a program')"
    shared.commands.run(f'python3 -c "{code}"')
    assert shared.files.get_info(f"{folder}/b").metadata == {"by": "a program"}


def test_folders_are_listed_to_a_depth(shared: Sandbox, folder: str) -> None:
    shared.commands.run(f"mkdir -p {folder}/a/b/c; touch {folder}/a/b/c/deep {folder}/z")
    assert [e.name for e in shared.files.list(folder)] == ["a", "z"]
    assert [e.path for e in shared.files.list(folder, depth=3)] == [
        f"{folder}/{name}" for name in ("a", "a/b", "a/b/c", "z")
    ]


def test_files_and_folders_are_made_renamed_and_removed(shared: Sandbox, folder: str) -> None:
    assert shared.files.make_dir(f"{folder}/x/y") is True
    assert shared.files.make_dir(f"{folder}/x/y") is False
    assert shared.files.exists(f"{folder}/x/y") is True
    shared.files.write(f"{folder}/old", "x")
    info = shared.files.rename(f"{folder}/old", f"{folder}/sub/new")
    assert info.path == f"{folder}/sub/new" and not shared.files.exists(f"{folder}/old")
    shared.files.remove(f"{folder}/sub")
    shared.files.remove(f"{folder}/sub")
    assert not shared.files.exists(f"{folder}/sub")


def test_paths_begin_at_home(shared: Sandbox) -> None:
    home = shared.commands.run("echo $HOME").stdout.strip()
    name = os.urandom(6).hex()
    assert shared.files.write(name, "x").path == f"{home}/{name}"
    assert shared.files.read(f"~/{name}") == "x"
    assert shared.files.get_info(f"./x/../{name}").path == f"{home}/{name}"
    shared.files.remove(name)


@pytest.mark.slow  # it writes a gigabyte
def test_a_full_disk_is_an_error_of_its_own(sandbox: Sandbox) -> None:
    limit = sandbox.commands.run("df -B1 --output=avail ~ | tail -1").stdout
    pieces = int(limit) // 1_000_000 + 20
    if pieces > 5000:
        pytest.skip("its disk has no end worth reaching")
    sandbox.commands.run(f"head -c {int(limit) - 2_000_000} /dev/zero > ~/fill")
    with pytest.raises(NotEnoughSpaceException):
        sandbox.files.write("x", b"x" * 8_000_000)


def test_signed_links_need_no_token(shared: Sandbox, folder: str) -> None:
    shared.files.write(f"{folder}/s é.txt", "signed")
    link = shared.download_url(f"{folder}/s é.txt", use_signature_expiration=100)
    assert urlopen(link).read() == b"signed"
    part = b'Content-Disposition: form-data; name="file"; filename="n"'
    body = b"--b\r\n" + part + b"\r\n\r\nup\r\n--b--\r\n"
    request = Request(
        shared.upload_url(f"{folder}/up"),
        data=body,
        headers={"content-type": "multipart/form-data; boundary=b"},
    )
    assert urlopen(request).status == 200
    assert shared.files.read(f"{folder}/up") == "up"


def test_an_unknown_user_is_refused(shared: Sandbox) -> None:
    with pytest.raises(AuthenticationException, match="invalid username: 'stranger'"):
        shared.files.list("/", user="stranger")
    with pytest.raises(AuthenticationException, match="invalid username: 'stranger'"):
        shared.files.read("/etc/hostname", user="stranger")
    assert shared.files.list("/", user="user")
