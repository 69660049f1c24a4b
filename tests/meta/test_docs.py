"""The reference is complete and current: what the code has, the documents have."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from starlette.routing import WebSocketRoute

from capsule.config import settings
from capsule.errors import ALL_ERRORS
from tests.support import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "spec").glob("*.md")]
    if path.is_file()
)


def text(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def headings(name: str) -> set[str]:
    return set(re.findall(r"^#+ `(.+?)`$", text(name), re.M))


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(60)
def test_generated_pages_are_current(generate: ModuleType) -> None:
    assert [path.name for path in generate.stale()] == [], "run `make docs`"


def test_every_setting_has_a_heading() -> None:
    assert headings("configuration") == {setting.name for setting in settings()}


def test_every_error_code_has_a_heading() -> None:
    assert headings("errors") == {cls.code for cls in ALL_ERRORS}


def test_every_rpc_method_has_a_heading(generate: ModuleType) -> None:
    methods = generate.build_methods(generate.Nobody(), generate.Nobody())
    assert headings("rpc") == set(methods)


def test_every_served_route_is_in_the_documents(generate: ModuleType) -> None:
    """Also the WebSockets, of which OpenAPI knows nothing."""
    sockets = [r.path for r in generate.site().routes if isinstance(r, WebSocketRoute)]
    assert len(sockets) >= 3
    written = text("rest") + text("terminal")
    for path in [*sockets, *generate.openapi()["paths"]]:
        assert path in written


def test_every_cli_command_has_a_heading() -> None:
    wanted = {"serve", "run", "create", "ls", "exec", "shell", "cp", "rm", "doctor", "version"}
    assert {f"capsule {name}" for name in wanted} <= headings("cli")
    assert any(name.startswith("capsule template") for name in headings("cli"))


def test_nothing_in_words_is_unused(generate: ModuleType) -> None:
    methods = generate.build_methods(generate.Nobody(), generate.Nobody())
    assert set(generate.WORDS["methods"]) == set(methods)
    assert set(generate.WORDS["errors"]) == {cls.code for cls in ALL_ERRORS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    content = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", content):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_exist(page: Path) -> None:
    content = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]+)\)", content):
        other = (page.parent / target) if target else page
        if other.suffix == ".md":
            assert anchor in {slug(line) for line in _heading_lines(other)}, f"{target}#{anchor}"


def _heading_lines(page: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)


def slug(heading: str) -> str:
    """As the usual renderers make anchors."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 90


def test_each_promise_has_its_test() -> None:
    """What tests/README.md names is there."""
    named = re.findall(
        r"`([a-z0-9_]+/test_\w+\.py)(?:::(\w+))?`", (ROOT / "tests/README.md").read_text()
    )
    assert len(named) > 60
    lost = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / "tests" / path).exists()
        or f"def {name}(" not in (ROOT / "tests" / path).read_text() + "def ("
    ]
    assert lost == []
