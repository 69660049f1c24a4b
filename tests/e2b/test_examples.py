"""E2B's published examples and ours for it run unchanged; and smolagents with its executor."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.e2b.programs import run, run_node_tests, settings
from tests.support import ROOT
from tests.support.servers import RealServer

pytestmark = pytest.mark.real

EXAMPLES = ROOT / "examples/e2b"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("commands", ["Hello from E2B!"]),
        ("interpreter", ["2"]),
        ("web_server", ["open http://3000-", "<h1>Served from a sandbox</h1>"]),
        ("stream", ["code: step 0", "code: step 2", "result: 28", "command: command 3"]),
    ],
)
def test_an_example_in_python(place: RealServer, name: str, said: list[str]) -> None:
    written = run(sys.executable, str(EXAMPLES / f"{name}.py"), env=settings(place))
    assert all(line in written for line in said), written


@pytest.mark.parametrize(("name", "said"), [("commands", "Hello from E2B!"), ("interpreter", "2")])
def test_an_example_in_javascript(place: RealServer, node: Path, name: str, said: str) -> None:
    script = Path(shutil.copy(EXAMPLES / f"{name}.mjs", node))
    assert said in run("node", str(script), env=settings(place), cwd=node)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", ["sandbox", "interpreter", "volume"])
def test_the_sdk_for_node(place: RealServer, node: Path, name: str) -> None:
    run_node_tests(node, name, settings(place))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_smolagents_run_their_code_in_sandboxes(place: RealServer, frameworks: Path) -> None:
    kept = str(frameworks.parents[1] / "bytecode")
    env = settings(place, PYTHONPATH=str(EXAMPLES), PYTHONPYCACHEPREFIX=kept, HF_HUB_OFFLINE="1")
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    script = ROOT / "tests/e2b/scripted_smolagent.py"
    seen = json.loads(run(str(frameworks), str(script), env=env, within=110).splitlines()[-1])
    assert (seen["answer"], seen["saw"]) == (25, True)


def test_the_examples_are_all_run() -> None:
    names = {path.stem for path in EXAMPLES.iterdir() if path.suffix in (".py", ".mjs")}
    assert names == {"commands", "interpreter", "web_server", "stream", "smolagents_agent"}
    assert os.access(EXAMPLES, os.R_OK)
