"""What the tests' images consist of: layers made from Debian's packages, kept outside the clone.

Run as a module this makes all that are missing, so that they are there when a test asks.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from functools import partial
from pathlib import Path

from tests.support.engine import CACHE, EngineMissing

DEBIAN = ("usr-is-merged", "python3", "procps")
PACKAGES = {"node": "nodejs", "go": "golang-go"}
# What no test reads. Go's tools and archives of its own compiler are half of it.
LEFT_OUT = ("usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/lintian")
LEFT_OUT_OF_GO = (
    "usr/share/go-*/api",
    "usr/share/go-*/misc",
    "usr/share/go-*/test",
    "usr/share/go-*/src/cmd",
    "usr/lib/go-*/pkg/linux_*/cmd",
    *(f"usr/lib/go-*/pkg/tool/*/{tool}" for tool in ("api", "dist", "doc", "pprof", "trace")),
    "*_test.go",
    "testdata",
)
HOOK = Path("/usr/share/mmdebstrap/hooks/maybe-merged-usr")
UNUSED_DAYS = 30


def prepare() -> None:
    """Make every layer that is missing, some at the same time. Raises EngineMissing."""
    names = ("debian", *PACKAGES, "busybox")  # the slowest first
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(layer, names))


def layer(name: str) -> Path:
    """The layer's tar file in the cache; its digest is in a file beside it."""
    folder = CACHE / "layers"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{_key(name)}.tar"
    with locked(folder / f"{name}.lock"):
        if not (path.exists() and path.with_suffix(".sha256").exists()):
            _make(name, path)
            _forget_unused(folder)
    os.utime(path)
    return path


def _make(name: str, path: Path) -> None:
    recipes: dict[str, Callable[[Path, Path], None]]
    recipes = {"debian": _debian, "busybox": _busybox}
    make = recipes.get(name) or partial(_packages, name)
    for interrupted in path.parent.glob(f"{name}-*/"):  # ours alone: we hold its lock
        shutil.rmtree(interrupted)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{name}-") as scratch:
        made = Path(scratch, "layer.tar")
        try:
            make(Path(scratch, "first"), made)
        except EngineMissing:
            if os.getuid() != 0:
                raise
            _update_lists()  # they may be absent, or name files that are not offered any more
            make(Path(scratch, "second"), made)
        with made.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        made.rename(path)
    path.with_suffix(".sha256").write_text(digest)


def _update_lists() -> None:
    with locked(CACHE / "apt.lock"):
        _run("apt-get", "update", "-qq")


def _key(name: str) -> str:
    """Of all that goes into it: this recipe, and what it is made from."""
    source = Path("/etc/os-release").read_bytes() + platform.machine().encode()
    if name == "busybox":
        source = _static_busybox().read_bytes()
    recipe = Path(__file__).read_bytes()
    return hashlib.sha256(recipe + source).hexdigest()[:16]


def _forget_unused(folder: Path) -> None:
    for path in folder.glob("*.tar"):
        if path.stat().st_mtime < time.time() - UNUSED_DAYS * 86_400:
            path.with_suffix(".sha256").unlink(missing_ok=True)
            path.unlink()


def _debian(scratch: Path, made: Path) -> None:
    """A small Debian of the host's own release, with Python and `ps`."""
    scratch.mkdir()
    sources = scratch / "sources.list"
    sources.write_text("".join(f"deb {source} main\n" for source in _sources()))
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(DEBIAN)}"]
    command += [f"--dpkgopt=path-exclude=/{folder}/*" for folder in (*LEFT_OUT, "usr/share/locale")]
    command += ["--dpkgopt=force-unsafe-io", '--aptopt=Acquire::Languages "none"']
    command += ["--skip=output/dev"]  # devices are the Engine's matter
    if HOOK.is_dir():
        command.append(f"--hook-dir={HOOK}")
    _run(*command, _codename(), str(made), str(sources))


def _packages(name: str, scratch: Path, made: Path) -> None:
    """What a package needs beyond the Debian below it, unpacked: nothing has to be set up."""
    below = _closure(*DEBIAN, "apt", "?essential")
    above = _closure(PACKAGES[name])
    wanted = [f"{package}={version}" for package, version in above.items() if package not in below]
    debs, root = scratch / "debs", scratch / "root"
    debs.mkdir(parents=True)
    root.mkdir()
    _run("apt-get", "download", "-qq", *wanted, cwd=debs)
    left_out = LEFT_OUT + (LEFT_OUT_OF_GO if name == "go" else ())
    exclude = [f"--exclude={pattern}" for pattern in left_out]
    for deb in debs.iterdir():
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", deb], stdout=subprocess.PIPE) as tar:
            _run("tar", "-x", "-C", str(root), *exclude, stdin=tar.stdout)
        if tar.returncode != 0:
            raise EngineMissing(f"{deb.name} cannot be unpacked")
    beside = [entry.name for entry in root.iterdir() if entry.name != "usr"]
    assert not beside, f"{name}: {beside} would hide the links of a merged /usr"
    owner = ("--owner=0", "--group=0", "--numeric-owner")
    _run("tar", "-c", "-f", str(made), "-C", str(root), "--sort=name", *owner, "usr")


def _closure(*packages: str) -> dict[str, str]:
    """Package → version of all that these need, on a machine that has nothing yet."""
    empty = ("-o", "Dir::State::status=/dev/null")
    install = ("-s", "-qq", "--no-install-recommends", "install")
    told = _run("apt-get", *empty, *install, *packages)
    lines = [line.split() for line in told.splitlines() if line.startswith("Inst ")]
    return {words[1]: words[2].strip("(") for words in lines}


def _sources() -> list[str]:
    """Where this machine's own packages come from: address and suite."""
    release = _codename()
    form = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    told = _run("apt-get", "indextargets", "--format", form, "Identifier: Packages")
    found = [line.split() for line in dict.fromkeys(told.splitlines())]
    suites = [f"{release}{part}" for part in ("", "-updates", "-security")]
    chosen = [f"{uri} {suite}" for uri, suite, kind in found if suite in suites and kind == "main"]
    if not chosen:
        raise EngineMissing(f"apt knows no source of {release} (apt-get update)")
    return chosen


def _codename() -> str:
    lines = Path("/etc/os-release").read_text().splitlines()
    fields = dict(line.split("=", 1) for line in lines if "=" in line)
    return fields.get("VERSION_CODENAME", "stable").strip('"')


def _busybox(scratch: Path, made: Path) -> None:
    program = _static_busybox()
    applets = subprocess.check_output([program, "--list"], text=True).split()
    with tarfile.open(made, "w") as tar:
        for folder in ("bin", "dev", "etc", "home", "proc", "root", "sys", "tmp", "usr", "var"):
            _add(tar, folder, type=tarfile.DIRTYPE, mode=0o1777 if folder == "tmp" else 0o755)
        _add(tar, "bin/busybox", program.read_bytes(), mode=0o755)
        for applet in applets:
            if applet != "busybox":
                _add(tar, f"bin/{applet}", type=tarfile.SYMTYPE, linkname="busybox")
        _add(tar, "etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")
        _add(tar, "etc/group", b"root:x:0:\n")


def _static_busybox() -> Path:
    found = shutil.which("busybox")
    if found is None:
        raise EngineMissing("busybox is not installed (Debian: busybox-static)")
    if subprocess.run(["ldd", found], capture_output=True).returncode == 0:
        raise EngineMissing(f"{found} is not static (Debian: busybox-static)")
    return Path(found)


def _add(tar: tarfile.TarFile, name: str, content: bytes = b"", **fields: object) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    for field, value in fields.items():
        setattr(entry, field, value)
    tar.addfile(entry, io.BytesIO(content))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One at a time, also among processes."""
    with path.open("a") as lock:
        flock(lock, LOCK_EX)
        yield


def _run(*command: str, **options: object) -> str:
    """Its output. Raises EngineMissing if there is no such program, or it fails."""
    env = {**os.environ, "LC_ALL": "C.UTF-8"}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, env=env, **options)  # type: ignore[call-overload]
    except FileNotFoundError:
        raise EngineMissing(
            f"the images of the tests are made with {command[0]}, which is not installed"
        ) from None
    if ended.returncode != 0:
        raise EngineMissing(f"{' '.join(command[:2])} failed: {ended.stderr.strip()[-1000:]}")
    return str(ended.stdout)


if __name__ == "__main__":
    try:
        prepare()
    except EngineMissing as missing:
        sys.exit(f"layers: {missing}")
