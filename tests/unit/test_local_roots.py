"""What a box is shown: its root and its programs."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from capsule.model import Template, User
from capsule.providers.local.programs import missing_on_host
from capsule.providers.local.skeleton import (
    Made,
    Node,
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
    (root / "etc/ssl/certs/private.key").write_text("secret")
    (root / "etc/ssl/certs/private.key").chmod(0o640)
    for name in ("shadow", "pip.conf", "npmrc", "gitconfig", "hostname"):
        (root / "etc" / name).write_text("secret")
    return root


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


def users_of(*layers: str | None, user: User | None = None, at: Path) -> list[tuple[str, str]]:
    """Names and uids of an image with these `/etc/passwd`, topmost layer first."""
    folders = [at / f"{n}" for n in range(len(layers))]
    for folder, passwd in zip(folders, layers, strict=True):
        (folder / "etc").mkdir(parents=True)
        if passwd:
            (folder / "etc/passwd").write_text(passwd)
    found = image_tree(folders, user or User()).nodes["etc/passwd"].data.decode()
    return [(line.split(":")[0], line.split(":")[2]) for line in found.splitlines()]


def test_an_image_keeps_its_users_and_gets_ours(tmp_path: Path) -> None:
    root, web = "root:x:0:0:root:/root:/bin/sh", "web:x:33:33::/:/bin/sh"
    node = "node:x:1000:1000::/home/node:/bin/sh\n"
    ours = users_of(None, f"{root}\n{web}", at=tmp_path / "a")
    assert {("web", "33"), ("capsule", "1000")} < set(ours)
    assert [uid for _, uid in ours].count("0") == 1
    named = users_of(node, at=tmp_path / "b")
    assert ("node", "1000") in named and "capsule" not in dict(named)
    wanted = User("user", "/home/user")
    theirs = users_of(f"{node}user:x:7:7::/:/bin/sh\n", user=wanted, at=tmp_path / "c")
    assert dict(theirs)["user"] == "1000" and "node" not in dict(theirs)
    assert len(theirs) == len(dict(theirs))


def test_many_servers_at_once_make_one_skeleton(host: Path, tmp_path: Path) -> None:
    roots, tree = tmp_path / "roots", host_tree(host)
    with ThreadPoolExecutor(16) as pool:
        made = set(pool.map(lambda _: prepare(tree, roots, "host"), range(64)))
    assert len(made) == 1
    assert os.listdir(roots) == [made.pop().name]


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


@pytest.fixture
def usr(tmp_path: Path) -> Path:
    """A folder that boxes see, beside one that they do not."""
    for name in ("usr/bin", "usr/lib", "home/bin"):
        (tmp_path / name).mkdir(parents=True)
        program = tmp_path / name / "real"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return tmp_path / "usr"


def is_missing(usr: Path, name: str = "tool", *, path: str = "usr/bin") -> bool:
    places = ":".join(str(usr.parent / place) for place in path.split(":"))
    template = Template("t", needs=(name,), env={"PATH": places})
    return missing_on_host(template, visible=(f"{usr}/",)) == [name]


def test_programs_are_there_where_a_box_finds_them(usr: Path) -> None:
    tool = usr / "bin/tool"
    assert not is_missing(usr, "real")
    assert is_missing(usr, "real", path="home/bin")
    assert not is_missing(usr, "real", path="home/bin:usr/bin")
    tool.symlink_to("../lib/real")
    assert not is_missing(usr)
    for target in ("nowhere", "../../home/bin/real", "tool", "../lib"):
        tool.unlink()
        tool.symlink_to(target)
        assert is_missing(usr), target
    tool.unlink()
    tool.write_text("no program")
    assert is_missing(usr)
