"""A parser of AppArmor 4, which knows `userns`: Debian's own may be older. It loads nothing."""

from __future__ import annotations

from tests.support.engine import CACHE


def parser() -> list[str]:
    """The command that checks a profile from its standard input."""
    root = CACHE / "apparmor"
    libraries = next(root.glob("usr/lib/*-linux-gnu"))
    loader = next(libraries.glob("ld-linux-*.so.*"))
    own = [str(loader), "--library-path", str(libraries), str(root / "usr/sbin/apparmor_parser")]
    profiles = str(root / "etc/apparmor.d")
    return [*own, "--skip-kernel-load", "--skip-cache", "-Q", "-b", profiles, "-I", profiles]
