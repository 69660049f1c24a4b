"""What all commands have in common, and doctor, template and completion."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.support.servers import CAPSULE

pytestmark = pytest.mark.timeout(60)
COMMANDS = (
    "serve", "run", "create", "ls", "exec", "shell", "cp", "rm", "doctor", "version", "completion",
    "template ls", "template show", "template build", "template import", "template export",
    "template rm",
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_offers_json(cli: Cli, command: str) -> None:
    done = cli(*command.split(), "--help")
    assert done.code == 0
    assert "--json" in done.out
    assert f"capsule {command}" in done.out
    words = " ".join(done.out.split())
    assert ("--url" in words) == ("CAPSULE_URL" in words) == ("CAPSULE_API_KEY" in words)


@pytest.mark.parametrize("args", [["nosuch"], ["ls", "--nosuch"], ["template", "nosuch"]])
def test_wrong_usage_is_exit_code_2_with_a_hint(cli: Cli, args: list[str]) -> None:
    done = cli(*args)
    assert (done.code, done.out) == (2, "")
    first, second = done.err.splitlines()
    assert first.startswith("error: ")
    assert second.startswith("hint: see `capsule")


def test_version(cli: Cli) -> None:
    assert re.fullmatch(r"capsule \d+\.\d+\.\d+\S*\n", cli("version").out)
    assert json.loads(cli("version", "--json").out)["version"]
    assert cli("--version").out == cli("version").out


def test_what_the_terminal_cannot_show_is_escaped(cli: Cli) -> None:
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    body = json.loads(cli("run", "--json", "print('ü✓😀')", **ascii_only).out)
    assert body["stdout"] == "ü✓😀\n"
    (cli.cwd / "t").mkdir()
    shown = cli("template", "show", "python").out
    (cli.cwd / "t" / "odd.yaml").write_text(
        shown.replace("name: python", "name: odd").replace("Python 3", "Pythön 3")
    )
    done = cli("template", "ls", CAPSULE_TEMPLATES_DIR=str(cli.cwd / "t"), **ascii_only)
    assert (done.code, done.err) == (0, "")
    assert "Pyth\\xf6n" in done.out


def test_a_reader_that_has_left_is_no_error(cli: Cli) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*CAPSULE, "template", "ls"], env=cli.env, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_output_that_cannot_be_written_is_an_error(cli: Cli) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*CAPSULE, "version"], env=cli.env, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_a_bug_has_a_traceback_and_its_own_exit_code(cli: Cli) -> None:
    broken = "import capsule.cli.run as r; r.run_job = None; from capsule.cli.main import main;"
    command = [CAPSULE[0], "-c", f"{broken} main()", "run", "print(1)"]
    done = subprocess.run(command, env=cli.env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 125
    assert done.stderr.startswith("Traceback")


def test_doctor_shows_levels_and_fixes(cli: Cli) -> None:
    wrong = cli("doctor", CAPSULE_PROT="1")
    assert (wrong.code, "did you mean" in wrong.err) == (1, True)
    said = cli("doctor").out
    assert re.search(r"(ok|missing)\s+level namespaces", said)
    assert re.search(r"(ok|missing)\s+level landlock", said)
    assert "\x1b[" not in said
    for line in said.splitlines():
        assert not line.strip().startswith("missing") or line.split(maxsplit=1)[1]
    done = cli("doctor", "--json")
    first, *_ = json.loads(done.out)["providers"]
    assert (first["provider"], first["usable"]) == ("local", done.code == 0)
    assert all(found["ok"] or found["fix"] for found in first["findings"])


def test_templates_are_listed_and_shown(cli: Cli) -> None:
    listed = cli("template", "ls").out.splitlines()
    assert {line.split()[0] for line in listed[1:]} >= {"python", "node", "go", "bash"}
    assert "needs:" in cli("template", "show", "python").out
    shown = json.loads(cli("template", "show", "python", "--json").out)
    assert shown["default_language"] == "python"
    names = [each["name"] for each in json.loads(cli("template", "ls", "--json").out)["templates"]]
    assert "node" in names
    done = cli("template", "show", "nosuch")
    assert (done.code, done.err.splitlines()[0]) == (1, "error: no such template: nosuch")


def image(path: Path) -> Path:
    """A root file system with busybox."""
    busybox = shutil.which("busybox")
    assert busybox is not None
    with tarfile.open(path, "w") as tar:
        for name in ("bin", "tmp", "etc", "usr", "usr/bin"):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        content = Path(busybox).read_bytes()
        for name in ("bin/busybox", "bin/sh", "bin/echo", "bin/cat"):
            info = tarfile.TarInfo(name)
            info.mode, info.size = 0o755, len(content)
            tar.addfile(info, io.BytesIO(content))
        info = tarfile.TarInfo("etc/os-release")
        info.size = 8
        tar.addfile(info, io.BytesIO(b"ID=tiny\n"))
    return path


@pytest.mark.needs("busybox")
def test_an_image_becomes_a_template_and_is_removed(cli: Cli) -> None:
    (cli.cwd / "x.tar").write_bytes(b"not an archive" * 100)
    wrong = cli("template", "import", "x.tar")
    assert wrong.code == 1 and len(wrong.err.splitlines()) <= 2
    archive = image(cli.cwd / "tiny-1.0.tar")
    done = cli("template", "import", archive)
    assert done.code == 0, done.err
    try:
        assert cli("template", "import", archive).code == 1
        nothing = cli.cwd / "nothing.tar"
        tarfile.open(nothing, "w").close()
        again = cli("template", "import", nothing, "--name", "tiny-1.0", "--replace")
        assert (again.code, "none of python3" in again.err) == (1, True), again.err
        assert "tiny-1.0" in cli("template", "ls").out
        ran = cli("run", "-t", "tiny-1.0", "-l", "sh", "cat /etc/os-release")
        if "needs overlay" not in ran.err:
            assert (ran.code, ran.out) == (0, "ID=tiny\n"), ran.err
    finally:
        assert cli("template", "rm", "tiny-1.0").code == 0
    assert "tiny-1.0" not in cli("template", "ls").out
    assert cli("template", "rm", "python").code == 1


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(cli: Cli, shell: str) -> None:
    assert "_CAPSULE_COMPLETE" in cli("completion", shell).out
    assert json.loads(cli("completion", shell, "--json").out)["shell"] == shell
    assert cli("completion", "cmd.exe").code == 2


def test_bash_completes_commands_options_and_values(cli: Cli) -> None:
    (cli.cwd / "capsule").write_text(f"#!/bin/sh\nexec '{CAPSULE[0]}' -c '{CAPSULE[2]}' \"$@\"\n")
    (cli.cwd / "capsule").chmod(0o755)

    def complete(line: str) -> list[str]:
        words = line.split(" ")
        script = (
            f"PATH={cli.cwd}:$PATH; source <(capsule completion bash); COMP_WORDS=({line} '');"
            f'COMP_WORDS=("${{COMP_WORDS[@]:0:{len(words)}}}"); COMP_CWORD={len(words) - 1};'
            '_capsule_completion capsule; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", script], env=cli.env, capture_output=True, text=True, timeout=60
        )
        return done.stdout.split()

    assert complete("capsule do") == ["doctor"]
    assert complete("capsule run --tim") == ["--timeout"]
    assert complete("capsule run --template no") == ["node"]
    assert complete("capsule template im") == ["import"]
