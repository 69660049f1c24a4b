"""The conformance tests of a provider, all of them, to be imported into a test module of yours:

    from capsule.testing.suite import *

    @pytest.fixture
    def new_provider():
        return lambda: MyProvider(...)

Run it with pytest and pytest-asyncio in `asyncio_mode=auto`, and in a conftest.py beside it
`pytest.register_assert_rewrite("capsule.testing")`. What a box says it does not enforce is skipped
with its own reason; any other deviation is a failure. fixtures.py says what else can be yours.
"""

from __future__ import annotations

from capsule.testing.boxes import TestAdoption, TestConnections, TestLifecycle
from capsule.testing.details import TestDetail, TestMetadata
from capsule.testing.files import TestAtomicity, TestFullDisk, TestOddFiles, TestReadAndWrite
from capsule.testing.fixtures import launch, leftovers, provider, subject, template
from capsule.testing.kernels import TestKernel
from capsule.testing.killing import TestBackground, TestKill, TestSignals
from capsule.testing.limits import TestLimits, TestStress, TestUsage
from capsule.testing.networking import TestDial, TestListen
from capsule.testing.outputs import TestAttach, TestOutput, TestOutputLimit
from capsule.testing.running import TestCarry, TestExec, TestExit, TestInput
from capsule.testing.terminals import TestTerminal
from capsule.testing.trees import TestLinks, TestListing, TestTrees, TestWatch
from capsule.testing.users import TestRoot

__all__ = [
    "TestAdoption",
    "TestAtomicity",
    "TestAttach",
    "TestBackground",
    "TestCarry",
    "TestConnections",
    "TestDetail",
    "TestDial",
    "TestExec",
    "TestExit",
    "TestFullDisk",
    "TestInput",
    "TestKernel",
    "TestKill",
    "TestLifecycle",
    "TestLimits",
    "TestLinks",
    "TestListen",
    "TestListing",
    "TestMetadata",
    "TestOddFiles",
    "TestOutput",
    "TestOutputLimit",
    "TestReadAndWrite",
    "TestRoot",
    "TestSignals",
    "TestStress",
    "TestTerminal",
    "TestTrees",
    "TestUsage",
    "TestWatch",
    "launch",
    "leftovers",
    "provider",
    "subject",
    "template",
]
