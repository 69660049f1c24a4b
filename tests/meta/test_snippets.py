"""Snippets work when pasted: of README, docs/, the examples and the server's greeting."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.support import ROOT, clean_env, component_missing, free_port, wait_for
from tests.support.servers import RealServer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(150)]

EXAMPLES = {
    "quickstart": "45\nRome\n['data.csv']\n",
    "stream": "tick 0\ntick 1\ntick 2\nexited with 0\n42\n",
    "terminal": "True\n",
    "notebook": "13.6\n<3 rows> <table><tr><td>Rome</td>",
    "judge": "ada: correct\nbob: wrong answer\neve: too slow\nmallory: ",
    "fork": "selection ",
    "session": "tools: run_python, run_command, read_file, write_file, list_files\n"
    "write_file ok\nrun_python ok\nrun_python ok 7\nrun_python ok 1\ntotal.txt 7\n",
    "undo": "0 as it began\n1 /bin/bash -c mkdir report",
}


def blocks(page: Path, language: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
    return "\n".join(found)


def here(text: str, server: RealServer) -> str:
    return text.replace("localhost:8080", f"localhost:{server.port}")


def run(server: RealServer, *argv: str, stdin: str = "") -> str:
    env = clean_env(CAPSULE_URL=server.url, PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run(
        argv, input=stdin, env=env, cwd=server.base, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


PAGES = ["README.md", "docs/python-sdk.md", "docs/agents.md", "docs/sessions.md"]


@pytest.mark.parametrize("name", PAGES)
def test_python_snippets_run(name: str, server: RealServer) -> None:
    code = here(blocks(ROOT / name, "python"), server)
    assert "CapsuleClient" in code or "SandboxClient" in code
    run(server, sys.executable, "-W", "error", "-", stdin=code)


@pytest.mark.parametrize("name", ["docs/snapshots.md", "docs/volumes.md"])
def test_python_snippets_about_kept_files_run(name: str, server: RealServer) -> None:
    with urlopen(f"{server.url}/v1/capabilities", timeout=5) as answer:
        if b'"snapshot"' not in answer.read():
            component_missing("this host keeps no files of sandboxes")
    before = "from pathlib import Path\nfrom capsule_sdk import CapsuleClient\n"
    code = f"{before}client = CapsuleClient()\n{blocks(ROOT / name, 'python')}"
    run(server, sys.executable, "-W", "error", "-", stdin=code)


def test_the_readme_prints_what_it_says(server: RealServer) -> None:
    code = here(blocks(ROOT / "README.md", "python"), server)
    assert run(server, sys.executable, "-", stdin=code) == "45\n\n"


def test_the_readmes_curl_snippet_runs(server: RealServer) -> None:
    script = "\n".join(
        line for line in blocks(ROOT / "README.md", "sh").splitlines() if "curl" in line
    )
    told = run(server, "bash", "-euo", "pipefail", "-c", here(script, server))
    assert '"stdout":"42\\n"' in told.replace(" ", "")
    assert '"deleted":true' in told.replace(" ", "")


def test_the_agents_curl_snippet_runs(server: RealServer) -> None:
    script = here(blocks(ROOT / "docs/agents.md", "sh"), server)
    told = run(server, "bash", "-euo", "pipefail", "-c", script)
    assert '{"exit_code":0,"output":"total ' in told
    assert '{"files":[{"path":"/workspace/data.csv","size":4}]}{"status":"removed"}' in told


@pytest.mark.needs("node")
def test_the_playgrounds_curl_snippet_runs(server: RealServer) -> None:
    script = here(blocks(ROOT / "docs/playground.md", "sh"), server)
    told = run(server, "bash", "-euo", "pipefail", "-c", script)
    assert '"message":"container created"' in told
    assert '"written":["src/lib.js"]' in told
    assert '"output":"42\\n"' in told
    assert '{"success":true,"message":"container removed"}' in told


def test_quickstart_serves_as_make_run_does(server: RealServer) -> None:
    port = free_port()
    env = {
        **server.env,
        "CAPSULE_DATA_DIR": f"{server.base}/d2",
        "CAPSULE_RUN_DIR": f"{server.base}/r2",
    }
    argv = [str(ROOT / "quickstart.sh"), "--port", str(port)]
    with subprocess.Popen(argv, env=env, start_new_session=True) as process:
        try:
            wait_for(lambda: answers(port), what="it serves", within=120)
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def answers(port: int) -> bool:
    with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
        return bool(answer.status == 200)
    return False


def test_the_greetings_example_works_when_pasted(server: RealServer) -> None:
    greeting = (server.base / "log").read_text()
    assert f"localhost:{server.port}" in greeting
    assert "namespaces" in greeting or "landlock" in greeting
    script = "\n".join(line for line in greeting.splitlines() if "curl" in line)
    assert len(script.splitlines()) == 3
    told = run(server, "bash", "-euo", "pipefail", "-c", script)
    assert "42" in told and "deleted" in told


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_run(name: str, server: RealServer) -> None:
    told = run(server, sys.executable, "-W", "error", str(ROOT / "examples" / f"{name}.py"))
    assert told.startswith(EXAMPLES[name])


def test_every_example_is_tested() -> None:
    others = {"langgraph_agent", "deep_agent"}  # in tests/sdk/test_agents.py
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*EXAMPLES, *others}


def test_capsule_run_prints_2_and_needs_no_server(server: RealServer) -> None:
    command = [sys.executable, "-c", "from capsule.cli.main import main; main()", "run"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("CAPSULE_")}
    done = subprocess.run([*command, "print(1+1)"], env=env, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("2\n", 0), done.stderr
