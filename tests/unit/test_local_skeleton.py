"""The directory every box is mounted on: complete, the same for all, and never half made."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from capsule.model import User
from capsule.providers.local import skeleton
from capsule.providers.local.skeleton import (
    Made,
    Node,
    Tree,
    for_user,
    host_tree,
    image_tree,
    prepare,
)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A small host with a merged /usr, and secrets in /etc."""
    root = tmp_path / "host"
    for name in ("usr/bin", "usr/lib", "lib64", "etc/ssl/certs", "etc/alternatives", "etc/java-17"):
        (root / name).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "lib").symlink_to("usr/lib")
    (root / "etc/ssl/certs/ca.pem").write_text("certificate")
    (root / "etc/alternatives/vi").symlink_to("/usr/bin/vim")
    (root / "etc/java-17/java.security").write_text("policy")
    (root / "etc/ld.so.cache").write_text("cache")
    (root / "etc/localtime").symlink_to("/usr/share/zoneinfo/Etc/UTC")
    for name in ("shadow", "pip.conf", "npmrc", "gitconfig", "hostname"):
        (root / "etc" / name).write_text("secret")
    return root


def test_every_mount_point_is_there(host: Path, tmp_path: Path) -> None:
    made = prepare(host_tree(host), tmp_path / "roots", "host")
    for name in ("proc", "sys", "dev/pts", "dev/shm", "tmp", "var/tmp", "workspace", "usr"):
        assert (made / name).is_dir(), name
    for name in skeleton.DEVICES:
        assert (made / "dev" / name).is_file(), name


def test_links_of_a_merged_usr_stay_links(host: Path, tmp_path: Path) -> None:
    made = prepare(host_tree(host), tmp_path / "roots", "host")
    assert os.readlink(made / "bin") == "usr/bin"
    assert (made / "lib64").is_dir() and not (made / "lib64").is_symlink()
    assert skeleton.own_dirs(host) == ("lib64",)


def test_python_is_there_by_its_short_name_too(host: Path) -> None:
    link = "opt/capsule/bin/python"
    assert link not in host_tree(host).nodes
    (host / "usr/bin/python3").touch()
    assert link in host_tree(host).nodes
    (host / "usr/bin/python").touch()
    assert link not in host_tree(host).nodes


def test_etc_has_what_languages_need_and_no_secret(host: Path, tmp_path: Path) -> None:
    made = prepare(host_tree(host), tmp_path / "roots", "host")
    assert (made / "etc/ssl/certs/ca.pem").read_text() == "certificate"
    assert (made / "etc/java-17/java.security").read_text() == "policy"
    assert os.readlink(made / "etc/alternatives/vi") == "/usr/bin/vim"
    assert os.readlink(made / "etc/localtime") == "/usr/share/zoneinfo/Etc/UTC"
    assert "capsule:x:1000:1000" in (made / "etc/passwd").read_text()
    assert (made / "etc/hostname").read_text() == "capsule\n"
    files = [path for path in (made / "etc").rglob("*") if not path.is_symlink() and path.is_file()]
    assert not [path for path in files if b"secret" in path.read_bytes()]


def test_another_user_shares_all_but_its_names(host: Path, tmp_path: Path) -> None:
    tree, user = host_tree(host), User("user", "/home/user")
    plain = Made(tree, prepare(tree, tmp_path / "roots", "host"))
    made = prepare(for_user(tree, user), tmp_path / "roots", "host", like=plain)
    assert made != plain.path and (made / "home/user").is_dir()
    assert "\nuser:x:1000:1000:user:/home/user:/bin/bash\n" in (made / "etc/passwd").read_text()
    assert "\nuser:x:1000:\n" in (made / "etc/group").read_text()
    assert "capsule:" in (plain.path / "etc/passwd").read_text()
    assert (made / "etc/ssl/certs/ca.pem").samefile(plain.path / "etc/ssl/certs/ca.pem")
    assert for_user(tree, User()).digest() == tree.digest()


def test_an_image_gives_way_to_a_user_of_the_template(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    (layer / "etc").mkdir(parents=True)
    (layer / "etc/passwd").write_text(
        "node:x:1000:1000::/home/node:/bin/sh\nuser:x:7:7::/:/bin/sh\n"
    )
    found = image_tree([layer], User("user", "/home/user")).nodes["etc/passwd"].data.decode()
    lines = [line.split(":")[:3] for line in found.splitlines()]
    assert ["user", "x", "1000"] in lines and [name for name, *_ in lines].count("user") == 1
    assert not [line for line in lines if line[0] == "node"]
    assert b"node:x:1000" in image_tree([layer]).nodes["etc/passwd"].data


def test_a_file_that_not_everyone_may_read_is_not_copied(host: Path) -> None:
    (host / "etc/ssl/certs/private.key").write_text("secret")
    (host / "etc/ssl/certs/private.key").chmod(0o640)
    assert "etc/ssl/certs/private.key" not in host_tree(host).nodes


def test_a_change_on_the_host_is_noticed(host: Path) -> None:
    paths = skeleton.copied_paths(host)
    before, digest = skeleton.signature(paths, host), host_tree(host).digest()
    (host / "etc/ssl/certs/new.pem").write_text("another")
    assert skeleton.signature(paths, host) != before
    assert host_tree(host).digest() != digest


def test_an_unchanged_host_has_an_unchanged_signature(host: Path) -> None:
    paths = skeleton.copied_paths(host)
    assert skeleton.signature(paths, host) == skeleton.signature(paths, host)


def test_many_servers_at_once_make_one_skeleton(host: Path, tmp_path: Path) -> None:
    roots, tree = tmp_path / "roots", host_tree(host)
    with ThreadPoolExecutor(16) as pool:
        made = set(pool.map(lambda _: prepare(tree, roots, "host"), range(64)))
    assert len(made) == 1
    assert os.listdir(roots) == [made.pop().name]


def test_a_skeleton_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    tree = Tree()
    tree.file("x" * 300)
    with pytest.raises(OSError, match="too long"):
        prepare(tree, tmp_path / "roots", "host")
    assert os.listdir(tmp_path / "roots") == []


def test_modes_are_exact_whatever_the_umask(tmp_path: Path) -> None:
    tree = Tree()
    tree.dir("closed", 0o700)
    tree.file("open", "text", 0o444)
    old = os.umask(0o077)
    try:
        made = prepare(tree, tmp_path, "t")
    finally:
        os.umask(old)
    assert made.stat().st_mode & 0o777 == 0o755
    assert (made / "closed").stat().st_mode & 0o777 == 0o700
    assert (made / "open").stat().st_mode & 0o777 == 0o444


def test_an_image_keeps_its_users_and_gets_ours(tmp_path: Path) -> None:
    top, bottom = tmp_path / "top", tmp_path / "bottom"
    (top / "usr").mkdir(parents=True)
    (bottom / "etc").mkdir(parents=True)
    (bottom / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\nweb:x:33:33::/:/bin/sh")
    passwd = image_tree([top, bottom]).nodes["etc/passwd"].data.decode()
    assert "web:x:33:33" in passwd and "capsule:x:1000:1000" in passwd
    assert passwd.count(":0:0:") == 1


def test_an_image_that_calls_uid_1000_its_own_name_keeps_it(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("node:x:1000:1000::/home/node:/bin/bash\n")
    passwd = image_tree([tmp_path]).nodes["etc/passwd"].data.decode()
    assert "node:x:1000" in passwd and "capsule:" not in passwd


def test_a_link_in_an_image_is_not_followed_on_the_host(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("leak:x:7:7::/:/bin/sh\n")
    layer = tmp_path / "layer"
    (layer / "etc").mkdir(parents=True)
    (layer / "etc/passwd").symlink_to(secret)
    assert b"leak" not in image_tree([layer]).nodes["etc/passwd"].data


def test_sudo_lies_over_an_images_own_but_over_no_link(tmp_path: Path) -> None:
    (tmp_path / "usr/local/bin").mkdir(parents=True)
    nodes = image_tree([tmp_path], sudo=b"agent").nodes
    assert nodes["opt/capsule/bin/sudo"] == Node("file", 0o755, b"agent")
    assert nodes["usr/local/bin/sudo"].data == b"/opt/capsule/bin/sudo"
    assert "usr/local/bin/sudo" not in image_tree([tmp_path]).nodes
    other = tmp_path / "other"
    other.mkdir()
    (other / "usr").symlink_to("elsewhere")
    nodes = image_tree([other, tmp_path], sudo=b"agent").nodes
    assert "opt/capsule/bin/sudo" in nodes and "usr/local/bin/sudo" not in nodes
    (tmp_path / "opt").symlink_to("usr/share")  # all that it leads to would be hidden
    nodes = image_tree([other, tmp_path], sudo=b"agent").nodes
    assert not [path for path in nodes if path.startswith("opt") or path.endswith("sudo")]
