"""The AppArmor profile that lets this agent, and no other program, have user namespaces.

Ubuntu from 23.10 on gives an ordinary user's namespaces no capabilities unless the program has a
profile that says so. To switch that off for everybody opens more than Capsule needs.
"""

from __future__ import annotations

import re
from pathlib import Path

SYSCTL = "kernel.apparmor_restrict_unprivileged_userns"
FILE = "/etc/apparmor.d/capsule-agent"
PROFILE = """\
# Lets Capsule's agent have user namespaces with capabilities, and nothing besides.
# Whoever can write the program at this path gets them for any program.
abi <abi/4.0>,
include <tunables/global>

profile capsule-agent {path} flags=(unconfined) {{
  userns,

  include if exists <local/capsule-agent>
}}
"""
# Takes the profile from its standard input.
INSTALL = f"sudo sh -c 'tee {FILE} | apparmor_parser -r'"


def profile(agent: Path) -> str:
    return PROFILE.format(path=_literal(str(agent.resolve())))


def _literal(path: str) -> str:
    """AppArmor reads some characters as patterns, and ends a name at a space."""
    escaped = re.sub(r'([\\{}\[\]*?^@"])', r"\\\1", path)
    return f'"{escaped}"' if re.search(r"[\s\\,#]", escaped) else escaped
