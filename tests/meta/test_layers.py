"""Imports point down, and each layer keeps to its own words."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from capsule.model import SUDO_FOLDER
from tests.support import ROOT

SOURCE = ROOT / "src" / "capsule"
SDK = ROOT / "sdk" / "python" / "src" / "capsule_sdk"

# What a layer may import besides itself: whatever stands at its own height or lower.
HEIGHT = {
    "errors": 0,
    "model": 0,
    "agentbin": 1,
    "catalog": 1,
    "host_errors": 0,
    "surroundings": 0,
    "tracing": 0,
    "chain": 0,
    "settings": 0,
    "sources": 0,
    "cloud_settings": 1,
    "storage_settings": 1,
    "template_file": 1,
    "config": 1,
    "config_checks": 1,
    "tenant_settings": 1,
    "link": 2,
    "kernels": 2,
    "profiles": 2,
    "templates": 2,
    "providers": 3,
    "service": 4,
    "testing": 4,
    "registry_file": 4,
    "sessions": 5,
    "webhooks": 5,
    "audit": 5,
    "edge": 6,
    "app": 7,
    "orchestrator": 8,
    "cli": 8,
    "__main__": 9,
}
pytestmark = pytest.mark.timeout(120)  # each test reads every module
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")

# errors.py is the one table that says what each error is called on every surface.
HTTP_WORDS = re.compile(
    r"(?<!^aio)https?$|^http|status_code|starlette|fastapi|uvicorn|websocket", re.I
)
# `namespaces` and `landlock` are levels of the model, and may be named anywhere.
BACKEND_WORDS = re.compile(
    r"docker|container|kubernetes|cgroup|seccomp|unshare|pivot_root|sudo_folder", re.I
)


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(tree: ast.AST, *, relative: bool = False) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                assert relative, "imports are absolute"
                continue
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names(tree: ast.AST) -> Iterator[str]:
    """Every identifier: what code calls things. Text in strings is for people and may say more."""
    for node in ast.walk(tree):
        for field in ("id", "attr", "name", "arg", "module"):
            if isinstance(value := getattr(node, field, None), str):
                yield value


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_every_module_has_a_layer() -> None:
    assert {layer_of(path) for path in MODULES} <= HEIGHT.keys()


def found(paths: Iterable[Path], wrong: Callable[[Path], Iterable[str]]) -> dict[str, list[str]]:
    """What is wrong, by module. One test looks at all of them: a test each would be hundreds."""
    seen = {str(path.relative_to(ROOT)): sorted(wrong(path)) for path in paths}
    assert seen, "there is nothing to look at"
    return {path: words for path, words in seen.items() if words}


def test_imports_point_down() -> None:
    def upwards(path: Path) -> Iterable[str]:
        own = HEIGHT[layer_of(path)]
        ours = {name.split(".")[1] for name in imported(parse(path)) if name.startswith("capsule.")}
        # `from capsule import x` names a module or a value of the package itself.
        return {name for name in ours if HEIGHT.get(name, 0) > own}

    assert found(MODULES, upwards) == {}


def test_no_http_word_below_the_edge() -> None:
    def is_a_client(path: Path) -> bool:
        """Of other servers; or the table of errors."""
        cloud = path.relative_to(SOURCE).parts[:2] == ("providers", "e2b")
        return cloud or layer_of(path) in ("errors", "webhooks")

    below = [path for path in MODULES if HEIGHT[layer_of(path)] < HEIGHT["edge"]]
    plain = [path for path in below if not is_a_client(path)]
    assert found(plain, lambda path: filter(HTTP_WORDS.search, names(parse(path)))) == {}


def test_no_backend_word_above_the_providers() -> None:
    above = [path for path in MODULES if layer_of(path) in ("service", "edge")]
    assert found(above, lambda path: filter(BACKEND_WORDS.search, names(parse(path)))) == {}


def test_the_service_does_not_know_what_is_in_a_root() -> None:
    """`root: host` is for a template's file and for providers to read, and so are its folders."""

    def knows(path: Path) -> Iterable[str]:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Constant) and node.value in ("host", SUDO_FOLDER):
                yield f"{node.lineno}: {node.value!r}"

    assert found([path for path in MODULES if layer_of(path) == "service"], knows) == {}


def test_the_sdk_does_not_need_the_server() -> None:
    def of_the_server(path: Path) -> Iterable[str]:
        return [
            name for name in imported(parse(path), relative=True) if name.split(".")[0] == "capsule"
        ]

    assert found(SDK.rglob("*.py"), of_the_server) == {}


def test_importing_the_package_does_no_work() -> None:
    """A bare call at the top of a module is work done at import; only cli may register things."""
    for path in (path for path in MODULES if layer_of(path) not in ("cli", "__main__")):
        for node in parse(path).body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                pytest.fail(f"{path.relative_to(SOURCE)}:{node.lineno} calls something at import")
