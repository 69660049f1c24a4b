"""The registry's files: checked with file, line and field, and read again when they change."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from capsule.config import Config
from capsule.errors import InvalidError, NotFoundError
from capsule.registry_file import KINDS, Agent, Environment, Prompt, Tool, read_entry
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


def write(folder: Path, kind: str, text: str, name: str = "mine.yaml") -> Path:
    path = folder / kind / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
async def registry(tmp_path: Path) -> Registry:
    made = Registry(tmp_path)
    await made.open()
    return made


async def test_what_comes_along_is_whole(registry: Registry) -> None:
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


@pytest.mark.parametrize(
    ("kind", "text", "complaint"),
    [
        ("environments", "description: x\n", "line 1: template: is missing"),
        ("environments", "template: python\ntemplat: x\n", "line 2: templat: unknown field"),
        (
            "environments",
            "template: python\nlimits:\n  memory: lots\n",
            "line 3: limits.memory: 'l",
        ),
        ("environments", "template: python\nlimits: {ram: 1}\n", "line 2: limits.ram: 'ram'"),
        ("environments", "template: [python]\n", "line 1: template: ['python']: expected `str`"),
        ("environments", "template: x\nname: a/b\n", "line 2: name: 'a/b'"),
        ("environments", "template: x\nnetwork: host\n", "line 2: network: 'host' is not one of"),
        ("environments", "template: x\nidle_timeout: soon\n", "line 2: idle_timeout: 'soon'"),
        ("environments", "template: x\nenv:\n  A-B: c\n", "line 3: env.A-B: is not the name"),
        ("environments", "template: x\nenv:\n  A: 1\n", "line 3: env.A: 1 is not a text"),
        ("environments", "- a\n", "line 1: ['a'] is not a mapping"),
        ("environments", "a: b\na: c\n", "line 2: is not YAML: key 'a' comes twice"),
        ("environments", "a: [b\n", "line 2: is not YAML"),
        ("environments", "a: &x [1]\nb: *x\n", "is not YAML: an alias (*name) is not allowed"),
        ("environments", "1: x\n", "line 1: 1: is no text"),
        ("agents", "environment: x\ntools:\n- a\n- 7\n", "line 4: tools.1: 7: expected `str`"),
        ("tools", "parameters: {}\ncommand: [x]\n", "line 1: description: is missing"),
        (
            "tools",
            TOOL.replace("object", "list"),
            "line 4: parameters.type: 'list' is not 'object'",
        ),
        ("tools", TOOL.replace("string", "txt"), "line 6: parameters.properties.text.type: is no"),
        ("tools", TOOL.replace("command: [wc]\n", ""), "action: name either an action or a"),
        ("tools", TOOL + "action: fly\n", "line 7: action: name either an action or a command"),
        ("tools", TOOL.replace("command: [wc]", "action: fly"), "line 2: action: 'fly' is no act"),
        (
            "tools",
            TOOL.replace("command: [wc]", "action: run_command"),
            "needs an argument command",
        ),
        ("tools", TOOL.replace("[wc]", "[]"), "line 2: command: []: expected `array` of length"),
        ("tools", TOOL + "stdin: no\n", "stdin: "),
        ("tools", TOOL + "stdin: other\n", "line 7: stdin: 'other' is no argument"),
        ("tools", TOOL + "timeout: -1\n", "line 7: timeout: -1.0 is out of range"),
        ("tools", TOOL + "name: a b\n", "line 7: name: 'a b'"),
        (
            "tools",
            TOOL.replace("{type: string}", "{$ref: 'http://example.com/x'}"),
            "line 6: parameters.properties.text.$ref: 'http://example.com/x' leads out",
        ),
        ("prompts", "text: ''\n", "line 1: text: ''"),
    ],
)
def test_a_mistake_is_told_with_file_line_and_field(
    tmp_path: Path, kind: str, text: str, complaint: str
) -> None:
    path = write(tmp_path, kind, text)
    with pytest.raises(InvalidError) as refused:
        read_entry(kind, path, str(path))
    assert str(refused.value).startswith(f"registry {path} line ")
    assert complaint in str(refused.value)
    assert refused.value.details["line"] >= 1 and refused.value.details["file"] == str(path)


async def test_a_start_with_a_mistake_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "tools", "nonsense: 1\n")
    with pytest.raises(InvalidError, match=r"mine.yaml line 1"):
        await Registry(tmp_path).open()
    with pytest.raises(InvalidError, match="registry_dir"):
        await Registry(tmp_path / "nowhere").open()


@pytest.mark.parametrize("field", ["tools: [nothing]", "prompt: nothing"])
async def test_what_an_agent_names_has_to_be_there(tmp_path: Path, field: str) -> None:
    write(tmp_path, "agents", f"environment: python\n{field}\n")
    with pytest.raises(InvalidError, match=r"line 2: .*there is no .* 'nothing'"):
        await Registry(tmp_path).open()


async def test_a_name_that_two_files_have(tmp_path: Path) -> None:
    write(tmp_path, "prompts", "name: p\ntext: one\n", "a.yaml")
    write(tmp_path, "prompts", "name: p\ntext: two\n", "b.yaml")
    with pytest.raises(InvalidError, match=r"b.yaml line 1: name: is taken by .*a.yaml"):
        await Registry(tmp_path).open()


async def test_files_are_read_again_when_they_change(registry: Registry, tmp_path: Path) -> None:
    path = write(tmp_path, "tools", TOOL)
    await registry.fresh()
    assert registry.get(Tool, "mine").command == ["wc"]
    path.write_text(TOOL.replace("[wc]", "[wc, -l]"))
    await registry.fresh()
    assert registry.get(Tool, "mine").command == ["wc", "-l"]
    path.write_text(TOOL + "typo: 1\n")
    await registry.fresh()
    assert registry.get(Tool, "mine").command == ["wc", "-l"], "as it was before"
    assert ["line 7: typo" in each.message for each in registry.problems] == [True]
    (told,) = registry.complaints()
    assert told["message"].startswith("registry tools/mine.yaml line 7: typo")
    assert told["details"] == {"file": "tools/mine.yaml", "line": 7, "field": "typo"}
    write(tmp_path, "prompts", "text: hello\n")
    await registry.fresh()
    assert ["typo" in each.message for each in registry.problems] == [True], "still told"
    path.unlink()
    await registry.fresh()
    assert [each.message for each in registry.problems] == []
    with pytest.raises(NotFoundError):
        registry.get(Tool, "mine")


async def test_an_entry_of_ones_own_replaces_the_built_in(tmp_path: Path) -> None:
    write(tmp_path, "environments", "template: bash\n", "python.yaml")
    registry = Registry(tmp_path)
    await registry.open()
    assert registry.get(Environment, "python").template == "bash"


async def test_a_session_is_closed_before_its_sandbox_ends(registry: Registry) -> None:
    nobody = cast(Service, None)
    config = Config(max_ttl=600.0)
    plan = await make_plan(Wish(), registry, nobody, config, (), "default")
    assert plan.idle_timeout == 540.0
    with pytest.raises(InvalidError, match="allowed: 1 to 540 seconds"):
        wish = Wish(idle_timeout=600.0)
        await make_plan(wish, registry, nobody, config, (), "default")


def test_every_kind_has_a_folder() -> None:
    assert list(KINDS) == ["environments", "agents", "tools", "prompts"]
