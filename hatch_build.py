"""Puts the agent's binary into the wheel, built at that moment by agent/build_agent.py.

CAPSULE_TARGET_ARCH (x86_64, aarch64) builds for another machine. CAPSULE_SKIP_AGENT leaves the
agent of an editable install to the Makefile, which builds it only when its sources changed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent / "agent"))
import build_agent

# A static binary asks nothing of the C library: both families of tags hold.
TAG = "py3-none-manylinux_2_17_{arch}.manylinux2014_{arch}.musllinux_1_1_{arch}"


class AgentBuildHook(BuildHookInterface[Any]):
    def dependencies(self) -> list[str]:
        """What pip must fetch before it builds: a compiler, where the machine has none."""
        if self.target_name != "wheel" or os.environ.get("CAPSULE_SKIP_AGENT"):
            return []
        native = self._arch() == build_agent.machine() and build_agent.native_compiler()
        return [] if native else ["ziglang"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        if version == "editable":
            if not os.environ.get("CAPSULE_SKIP_AGENT"):
                build_agent.build(build_agent.HERE / "build" / "capsule-agent")
            return
        self._scratch = tempfile.TemporaryDirectory()
        binary = Path(self._scratch.name, "capsule-agent")
        build_agent.build(binary, arch=self._arch())
        build_data["force_include"][str(binary)] = "capsule/_bin/capsule-agent"
        build_data["pure_python"] = False
        build_data["tag"] = TAG.format(arch=self._arch())

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "_scratch"):
            self._scratch.cleanup()

    def _arch(self) -> str:
        return os.environ.get("CAPSULE_TARGET_ARCH") or build_agent.machine()
