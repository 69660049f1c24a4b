"""The conformance tests of a provider, all of them, to be imported into a test module of yours:

    from capsule.testing.suite import *

    @pytest.fixture
    def new_provider():
        return lambda: MyProvider(...)

Run it with pytest and pytest-asyncio in `asyncio_mode=auto`. What a box says it does not enforce is
skipped with its own reason; any other deviation is a failure.
"""

from __future__ import annotations

from capsule.testing.fixtures import launch, provider, subject
from capsule.testing.killing import TestBackground, TestKill, TestSignals
from capsule.testing.outputs import TestAttach, TestOutput, TestOutputLimit
from capsule.testing.running import TestCarry, TestExec, TestExit, TestInput
from capsule.testing.terminals import TestTerminal

__all__ = [
    "TestAttach",
    "TestBackground",
    "TestCarry",
    "TestExec",
    "TestExit",
    "TestInput",
    "TestKill",
    "TestOutput",
    "TestOutputLimit",
    "TestSignals",
    "TestTerminal",
    "launch",
    "provider",
    "subject",
]
