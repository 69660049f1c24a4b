"""The snippets of the SDK's README run."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.servers import RealServer

SNIPPET = """\
from capsule_sdk import CapsuleClient

client = CapsuleClient("http://localhost:8080")

# Context manager auto-deletes on exit
with client.create("python") as capsule:
    result = capsule.run("print(sum(range(10)))")
    print(result.stdout)  # "45\\n"

    # File operations
    capsule.write_file("/workspace/app.py", "print('hello')")
    content = capsule.read_file_text("/workspace/app.py")
    files = capsule.list_dir("/workspace")
"""


def test_the_snippet_works(server: RealServer, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(SNIPPET.replace("http://localhost:8080", server.url), names)
    assert capsys.readouterr().out == "45\n\n"
    assert names["content"] == "print('hello')"
    assert [file.name for file in names["files"]] == ["app.py"]
    assert names["capsule"].id not in [each.id for each in names["client"].list()]


def test_the_readme_has_it_and_its_other_snippets_run(
    server: RealServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAPSULE_URL", server.url)
    readme = (ROOT / "sdk/python/README.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert snippets[0] == SNIPPET
    for snippet in snippets:
        exec(snippet.replace("http://localhost:8080", server.url), {"__name__": "readme"})
