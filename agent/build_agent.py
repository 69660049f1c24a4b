#!/usr/bin/env python3
"""Builds the agent: one static binary from agent/*.c, with whatever C compiler there is.

The machine's own compiler comes first (glibc or musl, it must be able to link statically); where
there is none, and for another architecture, the `ziglang` package is one. The Makefile, the wheel
and an editable install all build through here, so the flags in flags.txt are the only ones.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SANITIZE = [
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
]
# The kernel's own headers are needed besides the C library's.
PROBE = """\
#include <linux/loop.h>
#include <stdio.h>
int main(void) { return puts("") < 0; }
"""
NO_COMPILER = (
    "no C compiler that can link statically, and no ziglang package; hint: install one"
    " (Debian, Ubuntu: gcc libc6-dev; Alpine: gcc musl-dev linux-headers), or: pip install ziglang"
)


def machine() -> str:
    name = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def flags() -> list[str]:
    """The words of flags.txt; a line may end in a comment that says why."""
    text = (HERE / "flags.txt").read_text()
    return [word for line in text.splitlines() for word in shlex.split(line, comments=True)]


def links(compiler: list[str], *options: str) -> bool:
    """Whether this compiler makes an executable with these options, found out by doing it."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "probe.c")
        source.write_text(PROBE)
        command = [*compiler, *options, str(source), "-o", str(source.with_suffix(""))]
        try:
            return subprocess.run(command, capture_output=True, check=False).returncode == 0
        except OSError:
            return False


def native_compiler() -> list[str] | None:
    """The first of $CC, cc, gcc, clang, musl-gcc that is there and can link statically."""
    named = shlex.split(os.environ.get("CC", ""))
    # Debian's musl-gcc does not look where the kernel's headers are.
    system = ["/usr/include", *map(str, Path("/usr/include").glob("*-linux-gnu"))]
    headers = [word for folder in system for word in ("-idirafter", folder)]
    for candidate in [named, ["cc"], ["gcc"], ["clang"], ["musl-gcc"]]:
        if not candidate or not shutil.which(candidate[0]):
            continue
        for found in (candidate, [*candidate, *headers]):
            if links(found, "-static"):
                return found
    return None


def zig(arch: str) -> list[str] | None:
    if importlib.util.find_spec("ziglang") is None:
        return None
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{arch}-linux-musl"]


def compiler_for(arch: str) -> list[str]:
    native = native_compiler() if arch == machine() else None
    found = native or zig(arch)
    if found is None:
        raise SystemExit(f"build_agent.py: {NO_COMPILER}")
    return found


def build(target: Path, *, arch: str | None = None, sanitize: bool = False) -> None:
    """Compile everything at once: it is small, and there is no stale object to think of."""
    arch = arch or machine()
    compiler = compiler_for(arch)
    if sanitize and not links(compiler, *SANITIZE):
        # Not our failure: tests that need it are skipped with this reason, and fail in CI.
        print(f"{' '.join(compiler)} has no sanitizers here, not built: {target}", file=sys.stderr)
        return
    options = [*flags(), *(SANITIZE if sanitize else ["-static", "-s"])]
    target.parent.mkdir(parents=True, exist_ok=True)
    # Linked beside and renamed over: the old one may be running.
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    sources = sorted(str(path) for path in HERE.glob("*.c"))
    print(f"building {target.name} for {arch} with {' '.join(compiler)}", file=sys.stderr)
    try:
        subprocess.run([*compiler, *options, *sources, "-o", str(fresh)], check=True)
        fresh.replace(target)
    except subprocess.CalledProcessError as error:
        status = f"{compiler[0]} failed with status {error.returncode}"
        raise SystemExit(f"build_agent.py: {status}") from None
    finally:
        fresh.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="build capsule-agent")
    parser.add_argument("target", type=Path, nargs="?", default=HERE / "build" / "capsule-agent")
    parser.add_argument("--arch", help="x86_64 or aarch64; this machine's when left out")
    parser.add_argument("--sanitize", action="store_true", help="with AddressSanitizer and UBSan")
    parser.add_argument("--can", action="store_true", help="only tell by the exit status")
    options = parser.parse_args()
    if options.can:
        sys.exit(0 if native_compiler() or zig(machine()) else 1)
    build(options.target, arch=options.arch, sanitize=options.sanitize)


if __name__ == "__main__":
    main()
