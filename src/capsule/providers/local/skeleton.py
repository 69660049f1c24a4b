"""The empty house a box is furnished in: directories to mount on, and a synthetic /etc.

A skeleton is a directory named by the hash of what is in it, made beside and renamed into place: it
is whole or absent, never changed, and two servers that make it at once agree. Small files of the
host's /etc that languages need are copied rather than mounted, which saves a dozen mounts per box;
a changed host file gives a new hash, so that no box sees a stale one.
"""

from __future__ import annotations

import glob
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from capsule.model import MOUNTS, SUDO_FOLDER, User
from capsule.providers.local.folders import make_folder, new_folder
from capsule.providers.local.settled import sync_file

# Part of every hash: raise it when the meaning of a tree changes but its text does not.
FORMAT = 1
SYNCS = 16  # threads that wait for the disk

MAX_COPIED_FILE = 4 * 1024 * 1024
MAX_COPIED_ENTRIES = 5000

# Where a merged /usr has symlinks and others have directories of their own.
SYSTEM_DIRS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")

SUDO = f"{SUDO_FOLDER.lstrip('/')}/sudo"
USUAL = "usr/local/bin"  # in every path, and before an image's own programs

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")

# What languages read, and what holds no secret: no pip.conf, npmrc, gitconfig or php.ini, which may
# carry credentials. Only files that everyone may read are copied.
ETC_COPIES = (
    "alternatives",
    "ca-certificates",
    "crypto-policies",
    "debian_version",
    "fonts",
    "host.conf",
    "inputrc",
    "java-*",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "locale.conf",
    "lsb-release",
    "magic",
    "magic.mime",
    "mime.types",
    "os-release",
    "perl",
    "pki/ca-trust/extracted",
    "pki/java",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "pki/tls/openssl.cnf",
    "protocols",
    "python3*",
    "services",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)

PASSWD = """\
root:x:0:0:root:/root:/bin/bash
{user.name}:x:1000:1000:{user.name}:{user.home}:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""

GROUP = """\
root:x:0:
tty:x:5:
{user.name}:x:1000:
nogroup:x:65534:
"""

PROFILE = """\
export PATH="${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"
umask 022
if [ -n "${BASH_VERSION-}" ] && [ -n "${PS1-}" ] && [ -r /etc/bash.bashrc ]; then
  . /etc/bash.bashrc
fi
"""

BASHRC = r"""
[ -n "${PS1-}" ] || return 0
shopt -s checkwinsize
PS1='\[\e[32m\]\u@\h\[\e[0m\]:\[\e[34m\]\w\[\e[0m\]\$ '
alias ls='ls --color=auto' ll='ls -la'
"""

ETC_TEXTS: Mapping[str, str] = {
    "hosts": "127.0.0.1\tlocalhost capsule\n::1\tlocalhost ip6-localhost\n",
    "hostname": "capsule\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\nservices: files\n",
    "resolv.conf": "",
    "shells": "/bin/sh\n/bin/bash\n",
    "profile": PROFILE,
    "bash.bashrc": BASHRC.lstrip(),
}


_NOBODY_ELSE = User()


class Node(NamedTuple):
    kind: str  # dir, file, link
    mode: int
    data: bytes = b""


@dataclass(slots=True)
class Tree:
    """A directory tree as a value; parents of what is added come by themselves."""

    nodes: dict[str, Node] = field(default_factory=dict)

    def dir(self, path: str, mode: int = 0o755) -> None:
        self.nodes[path] = Node("dir", mode)

    def file(self, path: str, data: bytes | str = b"", mode: int = 0o644) -> None:
        self.nodes[path] = Node("file", mode, data.encode() if isinstance(data, str) else data)

    def link(self, path: str, target: str) -> None:
        self.nodes[path] = Node("link", 0o777, os.fsencode(target))

    def digest(self) -> str:
        seen = hashlib.sha256(b"%d\0" % FORMAT)
        for path, node in sorted(self.nodes.items()):
            seen.update(
                b"%s\0%s\0%o\0%d\0"
                % (os.fsencode(path), node.kind.encode(), node.mode, len(node.data))
            )
            seen.update(node.data)
        return seen.hexdigest()[:20]


class Made(NamedTuple):
    """A tree, and where it is."""

    tree: Tree
    path: Path


def prepare(tree: Tree, parent: Path, name: str, *, like: Made | None = None) -> Path:
    """The directory `parent/name-<hash>` with the tree in it, made if it is not there. Blocks.

    Files that `like` has as well get a further name instead of a copy: nobody changes either.
    """
    target = parent / f"{name}-{tree.digest()}"
    if target.is_dir():
        return target
    make_folder(parent, 0o755)
    draft = parent / f".{name}-{secrets.token_hex(8)}"
    try:
        write_tree(tree, draft, like)
        os.rename(draft, target)
    except OSError:
        # Somebody else was first: a directory does not replace one that is not empty.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def write_tree(tree: Tree, root: Path, like: Made | None = None) -> None:
    _make_dir(root, 0o755)
    folders, written = {""}, []
    for path, node in sorted(tree.nodes.items()):
        at = root / path
        _make_parents(path, root, folders)
        match node.kind:
            case "dir":
                _make_dir(at, node.mode)
                folders.add(path)
            case "file" if like is not None and like.tree.nodes.get(path) == node:
                os.link(like.path / path, at)
            case "file":
                _make_file(at, node)
                written.append(at)
            case _:
                os.symlink(os.fsdecode(node.data), at)
    # The rename must not survive a power cut that the content did not. Many at once: what waits
    # for the disk together waits once.
    with ThreadPoolExecutor(SYNCS) as threads:
        for _ in threads.map(sync_file, written):
            pass


def _make_parents(path: str, root: Path, made: set[str]) -> None:
    """Those that the tree does not name itself."""
    above = os.path.dirname(path)
    if above not in made:
        _make_parents(above, root, made)
        new_folder(root / above, 0o755)
        made.add(above)


def _make_dir(at: Path, mode: int) -> None:
    at.mkdir(exist_ok=True)
    at.chmod(mode)


def _make_file(at: Path, node: Node) -> None:
    with open(at, "xb") as file:
        file.write(node.data)
        os.fchmod(file.fileno(), node.mode)


def mount_points(tree: Tree, user: User) -> None:
    """What every box needs to be there before anything can be mounted."""
    for name in ("proc", "sys", "dev/pts", "dev/shm", "tmp", "var/tmp", "run", "workspace", "root"):
        tree.dir(name)
    tree.dir(MOUNTS.lstrip("/"))
    tree.dir(user.home.lstrip("/"))
    for name in DEVICES:
        tree.file(f"dev/{name}")
    for name, target in (
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
        ("ptmx", "pts/ptmx"),
    ):
        tree.link(f"dev/{name}", target)


def host_tree(host: Path = Path("/"), *, sudo: bytes = b"") -> Tree:
    """The skeleton for boxes that see the host's own /usr, and whose user has no other name.

    `sudo` is the agent's binary, for templates whose path begins where it is: the host's own has
    no use in a sandbox.
    """
    tree = Tree()
    for name in ("home", "opt", "srv", "usr", "var/cache", "var/lib", "var/log"):
        tree.dir(name)
    tree.link("var/run", "../run")
    for name in SYSTEM_DIRS:
        at = host / name
        if at.is_symlink():
            tree.link(name, os.readlink(at))
        elif at.is_dir():
            tree.dir(name)
    for path in copied_paths(host):
        _copy(tree, host, path)
    for name, text in ETC_TEXTS.items():
        tree.file(f"etc/{name}", text)
    tree.link("etc/mtab", "../proc/self/mounts")
    if sudo:
        tree.file(SUDO, sudo, 0o755)
    if python := _python_of(host):
        tree.link(f"{os.path.dirname(SUDO)}/python", python)
    return for_user(tree, _NOBODY_ELSE)


def _python_of(host: Path) -> str | None:
    """For the same templates, what `python` is where the host has none of that name."""
    places = [Path("/usr/local/bin"), Path("/usr/bin")]
    known = {
        name: [at / name for at in places if (host / at.relative_to("/") / name).exists()]
        for name in ("python", "python3")
    }
    return None if known["python"] or not known["python3"] else str(known["python3"][0])


def for_user(tree: Tree, user: User) -> Tree:
    """The same skeleton for boxes with another user."""
    other = Tree({**tree.nodes})
    other.file("etc/passwd", PASSWD.format(user=user))
    other.file("etc/group", GROUP.format(user=user))
    mount_points(other, user)
    return other


def own_dirs(host: Path = Path("/")) -> tuple[str, ...]:
    """The system directories that are no symlinks here, and so are mounted beside /usr."""
    return tuple(n for n in SYSTEM_DIRS if not (host / n).is_symlink() and (host / n).is_dir())


def copied_paths(host: Path = Path("/")) -> tuple[str, ...]:
    """What of the host's /etc goes into the skeleton, where it exists."""
    paths: list[str] = []
    for name in ETC_COPIES:
        found = glob.glob(name, root_dir=host / "etc") if "*" in name else [name]
        paths += (f"etc/{each}" for each in sorted(found))
    return tuple(paths)


def signature(paths: Iterable[str], host: Path = Path("/")) -> tuple[object, ...]:
    """Changes when the host's system does (a package installed, certificates renewed). Cheap."""
    return tuple(_stamp(os.path.join(host, path)) for path in paths)


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.lstat(path)
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_ino)


def _copy(tree: Tree, host: Path, path: str) -> None:
    """Takes over files everyone may read, and links as they are; the rest is left out."""
    try:
        found = os.lstat(host / path)
        if stat.S_ISLNK(found.st_mode):
            tree.link(path, os.readlink(host / path))
        elif len(tree.nodes) > MAX_COPIED_ENTRIES or not found.st_mode & stat.S_IROTH:
            return
        elif stat.S_ISDIR(found.st_mode):
            tree.dir(path)
            for name in sorted(os.listdir(host / path)):
                _copy(tree, host, f"{path}/{name}")
        elif stat.S_ISREG(found.st_mode) and found.st_size <= MAX_COPIED_FILE:
            tree.file(path, (host / path).read_bytes(), 0o755 if found.st_mode & 1 else 0o644)
    except OSError:
        return


def image_tree(layers: Sequence[Path], user: User = _NOBODY_ELSE, *, sudo: bytes = b"") -> Tree:
    """What is laid over a template's own root: mount points, and files that must be ours."""
    tree = Tree()
    mount_points(tree, user)
    if sudo and takes_sudo(layers):
        tree.file(SUDO, sudo, 0o755)
        if _are_plain_folders(layers, USUAL):
            tree.link(f"{USUAL}/sudo", f"/{SUDO}")
    for name in ("hosts", "hostname", "resolv.conf"):
        tree.file(f"etc/{name}", ETC_TEXTS[name])
    for name, ours in (("passwd", PASSWD), ("group", GROUP)):
        tree.file(f"etc/{name}", _with_user(_read_plain(layers, f"etc/{name}"), ours, user))
    return tree


def takes_sudo(layers: Sequence[Path]) -> bool:
    """Whether ours can be laid where the agent looks for it."""
    return _are_plain_folders(layers, os.path.dirname(SUDO))


def _are_plain_folders(layers: Sequence[Path], path: str) -> bool:
    """What is laid over a link would hide all that it leads to."""
    steps = [path, *map(str, Path(path).parents)]
    return not any((layer / step).is_symlink() for layer in layers for step in steps)


def _with_user(own: bytes, ours: str, user: User) -> bytes:
    """The image's table, with our entries for the ids that it does not know. A user whom the
    template names is in it, whatever the image calls this id or whoever has the name there."""
    lines = own.splitlines()
    if user != _NOBODY_ELSE:
        lines = [line for line in lines if not _is(line, user)]
    known = {line.split(b":")[2] for line in lines if line.count(b":") >= 2}
    added = ours.format(user=user).encode().splitlines()
    lines += (line for line in added if line.split(b":")[2] not in known)
    return b"\n".join(lines) + b"\n"


def _is(line: bytes, user: User) -> bool:
    parts = line.split(b":")
    return parts[0] == user.name.encode() or parts[2:3] == [b"1000"]


def _read_plain(layers: Sequence[Path], path: str) -> bytes:
    """A regular file of the topmost layer that has it. Images are not trusted: no link counts."""
    for layer in layers:
        at = layer / path
        try:
            if at.parent.is_symlink():
                continue
            fd = os.open(at, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        with open(fd, "rb") as file:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return file.read(MAX_COPIED_FILE)
    return b""
