"""Templates: the built-in ones, custom ones, and every mistake in one clear line."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from capsule.catalog import (
    CARRY_KINDS,
    Origin,
    as_mapping,
    image_template,
    load_catalog,
    read_template,
    shipped,
    write_template,
    written_folder,
)
from capsule.errors import CapacityError, ConflictError, InvalidError
from capsule.model import GIB, MIB, SYSTEM_PATH, Language, Limits, Template, User
from capsule.providers.local.seccomp import load_profile
from capsule.service.entry import environment
from capsule.template_file import read_document

BUILT_IN = ("base", "bash", "code-interpreter-v1", "datascience", "go", "node", "python")
OF_E2B = ("base", "code-interpreter-v1")
LANGUAGE = {"file": "{id}.x", "command": ["x", "{file}"]}
MINIMAL = {"languages": {"x": LANGUAGE}}


def write(folder: Path, content: Any, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


# The built-in ones


def test_the_built_in_templates_are_there() -> None:
    assert tuple(load_catalog()) == BUILT_IN


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_template_makes_sense(name: str) -> None:
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


def test_the_path_begins_where_sudo_is_if_there_is_one(tmp_path: Path) -> None:
    def path(**keys: Any) -> str:
        template = read_template(write(tmp_path, {**MINIMAL, **keys}))
        return environment(template, {})["PATH"]

    ours, usual = "/opt/capsule/bin", SYSTEM_PATH
    assert path() == usual
    assert path(sudo=True) == f"{ours}:{usual}"
    assert path(sudo=True, env={"PATH": "/bin"}) == f"{ours}:/bin"
    assert path(sudo=True, env={"PATH": f"/bin:{ours}"}) == f"/bin:{ours}"
    assert path(sudo=True, root="dir:/x") == usual
    base = load_catalog()["base"]
    assert environment(base, {})["PATH"] == f"{ours}:{usual}"
    assert environment(base, {"PATH": "/mine"})["PATH"] == "/mine"


def test_the_defaults_are_those_of_the_design() -> None:
    for name in ("python", "node", "bash"):
        assert load_catalog()[name].limits == Limits(512 * MIB, 0.5, 128, GIB, 65_536, 1024)
    for name in OF_E2B:  # two hundred commands at once, of several processes each
        assert load_catalog()[name].limits == Limits(512 * MIB, 2.0, 1024, GIB, 65_536, 1024)


def test_a_user_and_a_home_are_checked(tmp_path: Path) -> None:
    for user, field in (
        ("{name: root}", "user.name"),
        ("{name: 'a b'}", "user.name"),
        ("{home: /etc}", "user.home"),
        ("{home: /home/../etc}", "user.home"),
        ("{uid: 5}", "uid"),
    ):
        path = tmp_path / "bad.yaml"
        path.write_text(f"root: image:x\nlanguages: {{}}\nuser: {user}\n")
        with pytest.raises(InvalidError, match=field):
            read_template(path)


def test_go_gets_room_for_its_compiler() -> None:
    limits = load_catalog()["go"].limits
    assert limits.memory == GIB and limits.cpus == 1.0


@pytest.mark.parametrize(
    ("template", "spoken", "language"),
    [
        ("python", "py", "python"),
        ("python", "python3", "python"),
        ("python", "sh", "bash"),
        ("node", "js", "javascript"),
        ("node", "node", "javascript"),
        ("node", "mjs", "module"),
        ("go", "golang", "go"),
        ("bash", "shell", "bash"),
        ("bash", "sh", "sh"),
    ],
)
def test_languages_have_other_names(template: str, spoken: str, language: str) -> None:
    assert load_catalog()[template].languages[spoken].name == language


CODE = {
    "python": "import helper; print('ran', helper.VALUE)",
    "javascript": "console.log('ran', require('./helper.js').VALUE)",
    "module": "import { VALUE } from './helper.mjs'; console.log('ran', VALUE)",
    "go": 'package main\nimport "fmt"\nfunc main() { fmt.Println("ran", 7) }\n',
    "bash": "[[ -n $BASH ]] && echo ran $((3 + 4))",
    "sh": "echo ran $((3 + 4))",
}
HELPERS = {
    "helper.py": "VALUE = 7",
    "helper.js": "exports.VALUE = 7",
    "helper.mjs": "export const VALUE = 7",
}


@pytest.mark.slow  # compilers and interpreters, each several times
@pytest.mark.parametrize("exec_id", ["e1", "x_test", "-dash", "_linux"])
@pytest.mark.parametrize(
    ("template", "language"),
    [
        (name, language.name)
        for name, template in load_catalog().items()
        for key, language in template.languages.items()
        if key == language.name
    ],
)
def test_every_declared_language_runs(
    template: str, language: str, exec_id: str, tmp_path: Path
) -> None:
    """As the service does it, without a sandbox; modules beside the code are found."""
    found = load_catalog()[template]
    speech = found.languages[language]
    program = shutil.which(speech.command[0], path=found.env["PATH"])
    if program is None:
        pytest.skip(f"{speech.command[0]} is not installed")
    for name, text in HELPERS.items():
        (tmp_path / name).write_text(text)
    file = tmp_path / speech.filename.replace("{id}", exec_id)
    file.write_text(CODE[language])
    argv = [word.replace("{file}", str(file)) for word in speech.command]
    env = {**found.env, "HOME": str(tmp_path), "GOCACHE": str(tmp_path / "cache")}
    ended = subprocess.run(
        argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=20, check=False
    )
    assert ended.stdout == "ran 7\n", ended.stderr


def test_go_ends_with_the_programs_own_exit_code_and_takes_its_arguments(tmp_path: Path) -> None:
    found = load_catalog()["go"]
    if shutil.which("go", path=found.env["PATH"]) is None:
        pytest.skip("go is not installed")
    file = tmp_path / "main.go"
    file.write_text('package main\nimport "os"\nfunc main() { os.Exit(len(os.Args)) }\n')
    argv = [word.replace("{file}", str(file)) for word in found.languages["go"].command]
    env = {**found.env, "HOME": str(tmp_path), "GOCACHE": str(tmp_path / "cache")}
    env["GOTMPDIR"] = str(tmp_path / "built")
    (tmp_path / "built").mkdir()
    ended = subprocess.run([*argv, "a", "b c"], env=env, timeout=20, check=False)
    assert ended.returncode == 3
    assert not list((tmp_path / "built").iterdir())


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


def test_a_built_in_name_is_only_replaced_on_purpose(tmp_path: Path) -> None:
    path = write(tmp_path, {"name": "python", **MINIMAL})
    with pytest.raises(InvalidError, match="'python' is taken by a built-in") as caught:
        load_catalog(tmp_path)
    assert "override: true" in str(caught.value)
    assert str(path) in str(caught.value)
    write(tmp_path, {"name": "python", "override": True, **MINIMAL})
    assert list(load_catalog(tmp_path)["python"].languages) == ["x"]


def test_two_files_cannot_have_one_name(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        write(tmp_path, {"name": "same", "override": True, **MINIMAL}, name)
    with pytest.raises(InvalidError, match=r"b\.yaml: name: 'same' is taken by .*a\.yaml"):
        load_catalog(tmp_path)


def test_a_missing_folder_is_an_error_but_imports_need_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="nowhere"):
        load_catalog(tmp_path / "nowhere")
    assert tuple(load_catalog(data_dir=tmp_path)) == BUILT_IN


def language(**changes: Any) -> dict[str, Any]:
    return {"languages": {"x": {**LANGUAGE, **changes}}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a mapping"),
        ("[1, 2]", "not a mapping"),
        ("a: [", "not YAML"),
        ("a: !!python/object/apply:os.system [id]", "not YAML"),
        ("name: a\nname: b", "key 'name' comes twice"),
        ("languages:\n  x: {file: a, file: b}", "key 'file' comes twice"),
        ("x" * 300_000, "larger than"),
        ({}, "languages: None is not a mapping"),
        ({"languages": {}}, "languages: {} is empty"),
        ({"languages": {"x": "y"}}, "languages.x: 'y' is not a mapping"),
        ({"langauges": {}, **MINIMAL}, "unknown key: 'langauges'; hint: did you mean languages"),
        (language(comand=["x"]), "unknown key in languages.x: 'comand'; .* command"),
        (language(file="main.x"), "languages.x.file: 'main.x' is not a file name"),
        (language(file="../{id}"), "is not a file name"),
        (language(file=3), "languages.x.file: 3"),
        (language(command=[]), "languages.x.command"),
        (language(command=["x"]), "does not mention {file}"),
        (language(command="x {file}"), "is not a list of texts"),
        (language(command=["x", 1, "{file}"]), "is not a list of texts"),
        (language(carry="ruby"), "languages.x.carry: 'ruby' is not one of sh, python, node"),
        (language(aliases=["x"]), "'x' already means x"),
        (language(aliases=["Not A Name"]), "'Not A Name' is not a name"),
        ({"name": "Upper", **MINIMAL}, "name: 'Upper' is not lower-case"),
        ({"name": "../x", **MINIMAL}, "name: '../x'"),
        ({"name": 3, **MINIMAL}, "name: 3 is not a text"),
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
        ({"limits": {"memory": -1}, **MINIMAL}, "limits.memory: -1 is out of range"),
        ({"limits": {"cpus": True}, **MINIMAL}, "limits.cpus: True is not a number"),
        ({"limits": [1], **MINIMAL}, "limits: .* is not a mapping"),
        ({"env": {"A": 1}, **MINIMAL}, "env.A: 1 is not a text; hint: put it in quotes"),
        ({"env": {"A B": "x"}, **MINIMAL}, "env: 'A B' is not the name of a variable"),
        ({"env": {"A": "x\0"}, **MINIMAL}, "env.A"),
        ({"ttl": "soon", **MINIMAL}, "ttl: 'soon' is not a time"),
        ({"ttl": 0, **MINIMAL}, "ttl: 0 is out of range"),
        ({"override": "yes", **MINIMAL}, "override: 'yes' is not true or false"),
        ({"description": ["x"], **MINIMAL}, "description"),
    ],
)
def test_a_mistake_names_file_field_and_value(content: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InvalidError, match=message) as caught:
        load_catalog(tmp_path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text and len(text) < 700


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\0")
    with pytest.raises(InvalidError, match="not YAML"):
        load_catalog(tmp_path)


def test_carry_kinds_are_the_ones_templates_use() -> None:
    used = {
        language.carry
        for template in load_catalog().values()
        for language in template.languages.values()
        if language.carry
    }
    assert used == set(CARRY_KINDS)


# Written ones


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_is_written_reads_the_same(name: str, tmp_path: Path) -> None:
    template = replace(load_catalog()[name], name="copy", description="ünïcode: #yes")
    path = write_template(tmp_path, template)
    assert read_template(path) == template
    assert as_mapping(read_template(path)) == as_mapping(template)
    assert [file.name for file in tmp_path.iterdir()] == ["copy.yaml"]


def test_writing_replaces_only_when_asked(tmp_path: Path) -> None:
    template = replace(load_catalog()["bash"], name="mine")
    write_template(tmp_path, template)
    changed = replace(template, description="changed")
    with pytest.raises(ConflictError, match="mine exists already"):
        write_template(tmp_path, changed)
    assert read_template(tmp_path / "mine.yaml") == template
    write_template(tmp_path, changed, replace=True)
    assert read_template(tmp_path / "mine.yaml") == changed
    assert len(list(tmp_path.iterdir())) == 1


def test_imported_templates_are_part_of_the_catalog(tmp_path: Path) -> None:
    write_template(written_folder(tmp_path), replace(load_catalog()["bash"], name="mine"))
    assert "mine" in load_catalog(None, data_dir=tmp_path)


def image(programs: set[str], **env: str) -> Template:
    return image_template(
        "mine", "debian", env=env, programs=frozenset(programs), like=load_catalog()["python"]
    )


def test_an_image_speaks_what_its_programs_speak() -> None:
    full = image({"python3", "node", "go", "bash", "sh"})
    assert full.default_language == "python"
    assert {"python", "py", "js", "mjs", "go", "bash", "sh"} <= set(full.languages)
    assert full.shell == ("/bin/bash", "-l")
    assert full.root == "image:debian"
    alpine = image({"sh", "node"})
    assert alpine.default_language == "javascript"
    assert alpine.languages["sh"].command == ("sh", "{file}")
    assert not {"python", "bash", "go"} & set(alpine.languages)
    assert alpine.shell == ("/bin/sh", "-l")
    assert alpine.needs == ("node", "sh")


def test_an_image_keeps_its_path_but_not_its_home() -> None:
    template = image({"sh"}, PATH="/opt/bin:/bin", HOME="/root", EXTRA="1", **{"BAD-NAME": "x"})
    assert template.env["PATH"] == "/opt/bin:/bin"
    assert template.env["HOME"] == "/workspace"
    assert template.env["EXTRA"] == "1"
    assert "BAD-NAME" not in template.env
    assert image({"sh"}).env["PATH"] == load_catalog()["python"].env["PATH"]


def test_an_image_without_a_language_is_refused() -> None:
    with pytest.raises(InvalidError, match="none of python3, node, go, bash and sh"):
        image(set())


def test_an_image_without_a_language_may_be_wanted(tmp_path: Path) -> None:
    none = image_template(
        "mine", "x", env={}, programs=frozenset(), like=load_catalog()["bash"], bare=True
    )
    assert (none.languages, none.default_language) == ({}, "")
    assert read_template(write_template(tmp_path, none)) == none
    with pytest.raises(InvalidError, match=r"languages: \{\} is empty"):
        read_template(write(tmp_path, {"languages": {}, "root": "host"}))


# Dockerfiles that come along


def test_every_template_can_be_built() -> None:
    assert tuple(shipped()) == BUILT_IN


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_dockerfile_lets_another_base_be_given(name: str) -> None:
    text = shipped()[name]["Dockerfile"].decode()
    assert text.count("ARG BASE=") == 1 and "FROM ${BASE}" in text
    assert "WORKDIR /workspace" in text


def test_templates_of_e2b_bring_the_same_sudo() -> None:
    base, other = (shipped()[name]["sudo"] for name in OF_E2B)
    assert base == other and base.startswith(b"#!/bin/sh\n")


def test_what_datascience_is_about_is_in_it() -> None:
    wanted = shipped()["datascience"]["requirements.txt"].decode()
    names = {line.partition("~=")[0] for line in wanted.splitlines()}
    assert names == {"numpy", "pandas", "matplotlib", "scikit-learn"}


# While it is used


def test_what_another_process_writes_is_found(tmp_path: Path) -> None:
    catalog, other = load_catalog(data_dir=tmp_path), load_catalog(data_dir=tmp_path)
    assert not catalog.stale()
    mine = replace(other["bash"], name="mine")
    other.add(mine)
    assert "mine" not in catalog  # until somebody looks
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


def test_two_changes_at_once_are_both_seen(tmp_path: Path) -> None:
    """A folder's time has a grain: the second change must not hide behind the first."""
    catalog, other = load_catalog(data_dir=tmp_path), load_catalog(data_dir=tmp_path)
    for i in range(20):
        other.add(replace(other["bash"], name=f"t{i}"))
        assert catalog.stale()
        catalog.refresh()
        assert f"t{i}" in catalog


def test_a_host_that_has_nothing_left_says_nothing_about_a_template(tmp_path: Path) -> None:
    catalog, other = load_catalog(data_dir=tmp_path), load_catalog(data_dir=tmp_path)
    file = other.add(replace(other["bash"], name="mine"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        with pytest.raises(CapacityError, match="Too many open files"):
            catalog.refresh()
        with pytest.raises(CapacityError, match="Too many open files"):
            read_document(file)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    catalog.refresh()
    assert "mine" in catalog


def test_a_file_that_becomes_wrong_counts_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    catalog = load_catalog(data_dir=tmp_path)
    path = catalog.add(replace(catalog["bash"], name="mine"))
    before = catalog["mine"]
    path.write_text("languages: [wrong")
    write(path.parent, "also: wrong", "other.yaml")
    catalog.refresh()
    assert catalog["mine"] == before
    assert "other" not in catalog
    assert len(caplog.records) == 2 and str(path) in caplog.text
    assert not catalog.stale()  # nobody reads it again and again
    with pytest.raises(InvalidError):
        load_catalog(data_dir=tmp_path)  # a start is the time to say so


def test_a_name_that_is_taken_is_not_replaced_behind_ones_back(tmp_path: Path) -> None:
    catalog = load_catalog(data_dir=tmp_path)
    written_folder(tmp_path).mkdir()
    write(written_folder(tmp_path), {"name": "python", **MINIMAL}, "sly.yaml")
    before = catalog["python"]
    catalog.refresh()
    assert catalog["python"] == before
