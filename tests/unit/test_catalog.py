"""Templates: the built-in ones, custom ones, and every mistake in one clear line."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from capsule.catalog import (
    Origin,
    as_mapping,
    image_template,
    load_catalog,
    read_template,
    shipped,
    write_template,
)
from capsule.errors import InvalidError
from capsule.model import Language, Limits, Template, User
from capsule.providers.local.seccomp import load_profile
from capsule.service.entry import environment
from tests.support.folders import SHARED

BUILT_IN = ("base", "bash", "code-interpreter-v1", "datascience", "go", "node", "python")
OF_E2B = ("base", "code-interpreter-v1")
LANGUAGE = {"file": "{id}.x", "command": ["x", "{file}"]}
MINIMAL = {"languages": {"x": LANGUAGE}}


def write(folder: Path, content: Any, name: str = "mine.yaml") -> Path:
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


# The built-in ones


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_template_makes_sense(name: str, tmp_path: Path) -> None:
    template = load_catalog()[name]
    assert template.name == name
    assert template.default_language in template.languages
    assert template.languages["bash"].carry == "sh"
    assert environment(template, {})["HOME"] == template.user.home
    assert template.user == (User("user", "/home/user") if name in OF_E2B else User())
    assert template.env["LANG"] == "C.UTF-8"
    assert template.root == ("image:datascience" if name == "datascience" else "host")
    assert template.ttl == 600.0
    load_profile(template.seccomp)
    dockerfile = shipped()[name]["Dockerfile"].decode()
    assert dockerfile.count("ARG BASE=") == 1 and "FROM ${BASE}" in dockerfile
    assert "WORKDIR /workspace" in dockerfile
    copy = replace(template, name="copy", description="ünïcode: #yes")
    path = write_template(tmp_path, copy)
    assert read_template(path) == copy
    assert as_mapping(read_template(path)) == as_mapping(copy)
    assert os.listdir(tmp_path) == ["copy.yaml"]


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("python", {"py": "python", "python3": "python", "sh": "bash"}),
        ("node", {"js": "javascript", "node": "javascript", "mjs": "module"}),
        ("go", {"golang": "go"}),
        ("bash", {"shell": "bash", "sh": "sh"}),
    ],
)
def test_languages_have_other_names(template: str, names: dict[str, str]) -> None:
    languages = load_catalog()[template].languages
    assert {name: languages[name].name for name in names} == names


@pytest.mark.slow  # compiles; other languages run in sandboxes, in tests/cli
@pytest.mark.needs("go")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("exec_id", ["e1", "x_test", "-dash", "_linux"])
def test_go_runs_whatever_the_name_of_its_file(exec_id: str, tmp_path: Path) -> None:
    """With its arguments, and with the program's own exit code."""
    found = load_catalog()["go"]
    go, built = found.languages["go"], tmp_path / "built"
    built.mkdir()
    file = tmp_path / go.filename.replace("{id}", exec_id)
    file.write_text('package main\nimport "os"\nfunc main() { os.Exit(len(os.Args)) }\n')
    argv = [word.replace("{file}", str(file)) for word in go.command]
    # Go's own runtime is compiled once for all tests.
    cache = Path(os.environ[SHARED], f"go-cache-{os.geteuid()}")
    env = {**found.env, "HOME": str(tmp_path), "GOCACHE": str(cache), "GOTMPDIR": str(built)}
    ended = subprocess.run([*argv, "a", "b c"], env=env, capture_output=True, text=True)
    assert ended.returncode == 3, ended.stderr
    assert os.listdir(built) == []


# Custom ones


def test_a_folder_adds_templates(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL)
    write(tmp_path, MINIMAL, "other.yml")
    write(tmp_path, "not: [a template", "notes.txt")
    write(tmp_path, "not: [a template", ".hidden.yaml")
    catalog = load_catalog(tmp_path)
    assert sorted(catalog) == sorted([*BUILT_IN, "mine", "other"])
    assert catalog["mine"].default_language == "x"
    assert catalog["mine"].languages["x"] == Language("x", "{id}.x", ("x", "{file}"))
    assert catalog["mine"].limits == Limits()
    with pytest.raises(InvalidError, match="nowhere"):
        load_catalog(tmp_path / "nowhere")
    assert tuple(load_catalog(data_dir=tmp_path / "nowhere")) == BUILT_IN


def test_every_key_is_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
        name: full.1-a
        description: all of it
        root: image:debian
        needs: [x, y]
        default_language: x
        languages:
          x: {file: "d/{id}.x", command: [x, "-f", "{file}"], carry: python, aliases: [ex, "x++"]}
        shell: [/bin/x]
        limits: {memory: 1.5GiB, cpus: 2, processes: 9, disk: 10MB, inodes: 100, open_files: 64}
        env: {A: b, EMPTY: ""}
        network: none
        seccomp: my-profile
        ttl: 1h
        """,
    )
    language = Language("x", "d/{id}.x", ("x", "-f", "{file}"), "python")
    assert read_template(path) == Template(
        name="full.1-a",
        description="all of it",
        root="image:debian",
        languages={"x": language, "ex": language, "x++": language},
        default_language="x",
        needs=("x", "y"),
        shell=("/bin/x",),
        limits=Limits(1610612736, 2.0, 9, 10_000_000, 100, 64),
        env={"A": "b", "EMPTY": ""},
        seccomp="my-profile",
        ttl=3600.0,
    )


def test_a_name_is_taken_once_and_a_built_in_one_on_purpose(tmp_path: Path) -> None:
    path = write(tmp_path, {"name": "python", **MINIMAL})
    with pytest.raises(InvalidError, match="'python' is taken by a built-in") as caught:
        load_catalog(tmp_path)
    assert "override: true" in str(caught.value) and str(path) in str(caught.value)
    write(tmp_path, {"name": "python", "override": True, **MINIMAL})
    assert list(load_catalog(tmp_path)["python"].languages) == ["x"]
    write(tmp_path, {"name": "python", "override": True, **MINIMAL}, "z.yaml")
    with pytest.raises(InvalidError, match=r"z\.yaml: name: 'python' is taken by .*mine\.yaml"):
        load_catalog(tmp_path)


def language(**changes: Any) -> dict[str, Any]:
    return {"languages": {"x": {**LANGUAGE, **changes}}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a mapping"),
        ("a: [", "not YAML"),
        ("a: !!python/object/apply:os.system [id]", "not YAML"),
        ("name: a\nname: b", "key 'name' comes twice"),
        ("languages:\n  x: {file: a, file: b}", "key 'file' comes twice"),
        ("x" * 300_000, "larger than"),
        ({}, "languages: None is not a mapping"),
        ({"languages": {}}, "languages: {} is empty"),
        ({"langauges": {}, **MINIMAL}, "unknown key: 'langauges'; hint: did you mean languages"),
        (language(comand=["x"]), "unknown key in languages.x: 'comand'; .* command"),
        (language(file="main.x"), "languages.x.file: 'main.x' is not a file name"),
        (language(file=3), "languages.x.file: 3"),
        (language(command=["x"]), "does not mention {file}"),
        (language(command="x {file}"), "is not a list of texts"),
        (language(carry="ruby"), "languages.x.carry: 'ruby' is not one of sh, python, node"),
        (language(aliases=["x"]), "'x' already means x"),
        (language(aliases=["Not A Name"]), "'Not A Name' is not a name"),
        ({"name": "Upper", **MINIMAL}, "name: 'Upper' is not lower-case"),
        ({"name": "../x", **MINIMAL}, "name: '../x'"),
        ({"root": "relative", **MINIMAL}, "root: 'relative' is not host"),
        ({"root": "dir:relative", **MINIMAL}, "root: 'dir:relative'"),
        ({"root": "image:../x", **MINIMAL}, "root: 'image:../x'"),
        ({"default_language": "y", **MINIMAL}, "default_language: 'y' is not one of x"),
        ({"network": "full", **MINIMAL}, "network: 'full' is not one of none"),
        ({"seccomp": "../x", **MINIMAL}, "seccomp: '../x'"),
        ({"needs": "x", **MINIMAL}, "needs: 'x' is not a list"),
        ({"shell": [], **MINIMAL}, r"shell: \[\] is empty"),
        ({"limits": {"memroy": 1}, **MINIMAL}, "unknown limit: 'memroy'; .* memory"),
        ({"limits": {"memory": "lots"}, **MINIMAL}, "limits.memory: 'lots' is not a size"),
        ({"limits": {"cpus": True}, **MINIMAL}, "limits.cpus: True is not a number"),
        ({"limits": [1], **MINIMAL}, "limits: .* is not a mapping"),
        ({"env": {"A": 1}, **MINIMAL}, "env.A: 1 is not a text; hint: put it in quotes"),
        ({"env": {"A B": "x"}, **MINIMAL}, "env: 'A B' is not the name of a variable"),
        ({"env": {"A": "x\0"}, **MINIMAL}, "env.A"),
        ({"ttl": "soon", **MINIMAL}, "ttl: 'soon' is not a time"),
        ({"override": "yes", **MINIMAL}, "override: 'yes' is not true or false"),
        ({"description": ["x"], **MINIMAL}, "description"),
        ({"user": {"name": "root"}, **MINIMAL}, "user.name"),
        ({"user": {"name": "a b"}, **MINIMAL}, "user.name"),
        ({"user": {"home": "/etc"}, **MINIMAL}, "user.home"),
        ({"user": {"home": "/home/../etc"}, **MINIMAL}, "user.home"),
        ({"user": {"uid": 5}, **MINIMAL}, "uid"),
        (b"\xff\xfe\0", "not YAML"),
    ],
)
def test_a_mistake_names_file_field_and_value(content: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InvalidError, match=message) as caught:
        load_catalog(tmp_path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text and len(text) < 700


# Those made of an image


def image(programs: set[str], **env: str) -> Template:
    return image_template(
        "mine", "debian", env=env, programs=frozenset(programs), like=load_catalog()["python"]
    )


def test_an_image_has_the_languages_of_its_programs(tmp_path: Path) -> None:
    full = image({"python3", "node", "go", "bash", "sh"})
    assert full.default_language == "python"
    assert {"python", "py", "js", "mjs", "go", "bash", "sh"} <= set(full.languages)
    assert (full.shell, full.root) == (("/bin/bash", "-l"), "image:debian")
    alpine = image({"sh", "node"})
    assert alpine.default_language == "javascript"
    assert alpine.languages["sh"].command == ("sh", "{file}")
    assert not {"python", "bash", "go"} & set(alpine.languages)
    assert (alpine.shell, alpine.needs) == (("/bin/sh", "-l"), ("node", "sh"))
    with pytest.raises(InvalidError, match="none of python3, node, go, bash and sh"):
        image(set())
    none = image_template(
        "mine", "x", env={}, programs=frozenset(), like=load_catalog()["bash"], bare=True
    )
    assert (none.languages, none.default_language) == ({}, "")
    assert read_template(write_template(tmp_path, none)) == none
    with pytest.raises(InvalidError, match=r"languages: \{\} is empty"):
        read_template(write(tmp_path, {"languages": {}, "root": "host"}))


def test_an_image_keeps_its_path_but_not_its_home() -> None:
    template = image({"sh"}, PATH="/opt/bin:/bin", HOME="/root", EXTRA="1", **{"BAD-NAME": "x"})
    assert template.env["PATH"] == "/opt/bin:/bin"
    assert template.env["HOME"] == "/workspace"
    assert template.env["EXTRA"] == "1"
    assert "BAD-NAME" not in template.env
    assert image({"sh"}).env["PATH"] == load_catalog()["python"].env["PATH"]


# While it is used


def test_what_another_process_writes_is_found(tmp_path: Path) -> None:
    catalog, other = load_catalog(data_dir=tmp_path), load_catalog(data_dir=tmp_path)
    assert not catalog.stale()
    mine = replace(other["bash"], name="mine")
    other.add(mine)
    assert "mine" not in catalog  # before a refresh
    assert catalog.stale()
    catalog.refresh()
    assert catalog["mine"] == mine and not catalog.stale()
    assert (catalog.origin("mine"), catalog.origin("bash")) == (Origin.MADE, Origin.BUILT_IN)
    other.add(replace(mine, description="changed"), replace=True)
    assert catalog.stale()
    catalog.refresh()
    assert catalog["mine"].description == "changed"
    other.discard("mine")
    assert catalog.stale()
    catalog.refresh()
    assert "mine" not in catalog and len(catalog) == len(BUILT_IN)


def test_a_file_that_becomes_wrong_counts_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = load_catalog(data_dir=tmp_path)
    path = catalog.add(replace(catalog["bash"], name="mine"))
    before, python = catalog["mine"], catalog["python"]
    path.write_text("languages: [wrong")
    write(path.parent, "also: wrong", "other.yaml")
    write(path.parent, {"name": "python", **MINIMAL}, "sly.yaml")
    catalog.refresh()
    assert (catalog["mine"], catalog["python"]) == (before, python)
    assert "other" not in catalog
    assert str(path) in caplog.text
    assert not catalog.stale(), "it is not read again and again"
    with pytest.raises(InvalidError):
        load_catalog(data_dir=tmp_path)  # a start of the server is the time to say so
