"""The registry's files: checked with file, line and field, and read again when they change."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from capsule.config import Config
from capsule.errors import InvalidError, NotFoundError
from capsule.registry_file import Agent, Environment, Prompt, Tool, read_entry
from capsule.service import Service
from capsule.sessions.plan import Wish, make_plan
from capsule.sessions.registry import Registry

TOOL = """\
description: d
command: [wc]
parameters:
  type: object
  properties:
    text: {type: string}
"""


def write(folder: Path, kind: str, name: str, text: str) -> Path:
    path = folder / kind / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
async def registry(tmp_path: Path) -> Registry:
    made = Registry(tmp_path)
    await made.open()
    return made


async def test_the_built_in_entries_fit_together(registry: Registry) -> None:
    assert len(registry.problems) == 0
    assert len(registry.all(Environment)) >= 2 and len(registry.all(Tool)) >= 3
    assert registry.all(Agent)
    assert registry.all(Prompt)
    for agent in registry.all(Agent):
        assert registry.environment(agent.environment) is not None
    found = registry.environment("Python3")
    assert found is not None and found.template == "python"
    assert registry.environment("python:latest") == found
    with pytest.raises(NotFoundError, match="agent 'x' does not exist"):
        registry.get(Agent, "x")


ENVIRONMENTS = [
    ("description: x\n", "line 1: template: is missing"),
    ("template: python\ntemplat: x\n", "line 2: templat: unknown field"),
    ("template: python\nlimits:\n  memory: lots\n", "line 3: limits.memory: 'l"),
    ("template: python\nlimits: {ram: 1}\n", "line 2: limits.ram: 'ram'"),
    ("template: [python]\n", "line 1: template: ['python']: expected `str`"),
    ("template: x\nname: a/b\n", "line 2: name: 'a/b'"),
    ("template: x\nnetwork: host\n", "line 2: network: 'host' is not one of"),
    ("template: x\nidle_timeout: soon\n", "line 2: idle_timeout: 'soon'"),
    ("template: x\nenv:\n  A-B: c\n", "line 3: env.A-B: is not the name"),
    ("- a\n", "line 1: ['a'] is not a mapping"),
    ("a: b\na: c\n", "line 2: is not YAML: key 'a' comes twice"),
    ("a: [b\n", "line 2: is not YAML"),
    ("a: &x [1]\nb: *x\n", "is not YAML: an alias (*name) is not allowed"),
    ("1: x\n", "line 1: 1: is no text"),
]
TOOLS = [
    ("parameters: {}\ncommand: [x]\n", "line 1: description: is missing"),
    (TOOL.replace("object", "list"), "line 4: parameters.type: 'list' is not 'object'"),
    (TOOL.replace("string", "txt"), "line 6: parameters.properties.text.type: is no"),
    (TOOL + "action: fly\n", "line 7: action: name either an action or a command"),
    (TOOL.replace("command: [wc]", "action: fly"), "line 2: action: 'fly' is no act"),
    (TOOL.replace("command: [wc]", "action: run_command"), "needs an argument command"),
    (TOOL.replace("[wc]", "[]"), "line 2: command: []: expected `array` of length"),
    (TOOL + "stdin: other\n", "line 7: stdin: 'other' is no argument"),
    (TOOL + "timeout: -1\n", "line 7: timeout: -1.0 is out of range"),
    (TOOL.replace("{type: string}", "{$ref: 'http://x/y'}"), "$ref: 'http://x/y' leads out"),
]
MISTAKES = [
    *(("environments", *each) for each in ENVIRONMENTS),
    *(("tools", *each) for each in TOOLS),
    ("agents", "environment: x\ntools:\n- a\n- 7\n", "line 4: tools.1: 7: expected `str`"),
    ("prompts", "text: ''\n", "line 1: text: ''"),
]


@pytest.mark.parametrize(("kind", "text", "complaint"), MISTAKES)
def test_a_mistake_has_its_file_line_and_field(
    tmp_path: Path, kind: str, text: str, complaint: str
) -> None:
    path = write(tmp_path, kind, "mine.yaml", text)
    with pytest.raises(InvalidError) as refused:
        read_entry(kind, path, str(path))
    assert str(refused.value).startswith(f"registry {path} line ")
    assert complaint in str(refused.value)
    assert refused.value.details["line"] >= 1 and refused.value.details["file"] == str(path)


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"tools/x.yaml": "nonsense: 1\n"}, r"x.yaml line 1"),
        (
            {"agents/x.yaml": "environment: python\ntools: [none]\n"},
            "line 2: .*there is no .* 'none'",
        ),
        (
            {"agents/x.yaml": "environment: python\nprompt: none\n"},
            "line 2: .*there is no .* 'none'",
        ),
        (
            {"prompts/a.yaml": "name: p\ntext: one\n", "prompts/b.yaml": "name: p\ntext: two\n"},
            r"b.yaml line 1: name: is taken by .*a.yaml",
        ),
    ],
)
async def test_a_start_with_a_mistake_is_refused(
    tmp_path: Path, files: dict[str, str], complaint: str
) -> None:
    for name, text in files.items():
        kind, _, file = name.partition("/")
        write(tmp_path, kind, file, text)
    with pytest.raises(InvalidError, match=complaint):
        await Registry(tmp_path).open()
    with pytest.raises(InvalidError, match="registry_dir"):
        await Registry(tmp_path / "nowhere").open()


async def test_files_are_read_again_when_they_change(registry: Registry, tmp_path: Path) -> None:
    path = write(tmp_path, "tools", "mine.yaml", TOOL)
    await registry.fresh()
    assert registry.get(Tool, "mine").command == ["wc"]
    path.write_text(TOOL.replace("[wc]", "[wc, -l]"))
    await registry.fresh()
    assert registry.get(Tool, "mine").command == ["wc", "-l"]
    path.write_text(TOOL + "typo: 1\n")
    await registry.fresh()
    assert registry.get(Tool, "mine").command == ["wc", "-l"], "the entry stays as it was"
    assert ["line 7: typo" in each.message for each in registry.problems] == [True]
    (complaint,) = registry.complaints()
    assert complaint["message"].startswith("registry tools/mine.yaml line 7: typo")
    assert complaint["details"] == {"file": "tools/mine.yaml", "line": 7, "field": "typo"}
    write(tmp_path, "prompts", "mine.yaml", "text: hello\n")
    await registry.fresh()
    assert ["typo" in each.message for each in registry.problems] == [True]
    path.unlink()
    await registry.fresh()
    assert [each.message for each in registry.problems] == []
    with pytest.raises(NotFoundError):
        registry.get(Tool, "mine")


async def test_an_own_entry_replaces_the_built_in(tmp_path: Path) -> None:
    write(tmp_path, "environments", "python.yaml", "template: bash\n")
    registry = Registry(tmp_path)
    await registry.open()
    assert registry.get(Environment, "python").template == "bash"


async def test_a_session_is_closed_before_its_sandbox_ends(
    registry: Registry, tmp_path: Path
) -> None:
    no_service = cast(Service, None)
    config = Config(max_ttl=600.0, data_dir=tmp_path, run_dir=Path("/run/capsule"))
    plan = await make_plan(Wish(), registry, no_service, config, (), "default")
    assert plan.idle_timeout == 540.0
    with pytest.raises(InvalidError, match="allowed: 1 to 540 seconds"):
        wish = Wish(idle_timeout=600.0)
        await make_plan(wish, registry, no_service, config, (), "default")
