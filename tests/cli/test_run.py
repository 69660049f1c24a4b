"""`capsule run`: a program in a sandbox, as if it ran here, and nothing left afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.cli.conftest import Cli
from tests.cli.terminal import at_terminal
from tests.support import wait_for
from tests.support.servers import CAPSULE
from tests.support.users import User

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]


def test_code_is_run_and_its_output_passed_on(cli: Cli) -> None:
    done = cli("run", "print(1+1)")
    assert (done.code, done.out, done.err) == (0, "2\n", "")
    assert cli.leftovers() == []


def test_the_exit_code_is_the_programs_own(cli: Cli) -> None:
    assert cli("run", "import sys; print('gone', file=sys.stderr); sys.exit(7)").code == 7
    assert cli("run", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)").code == 143


def test_signals_that_we_were_started_to_ignore_reach_the_program(cli: Cli) -> None:
    """As after `nohup` or `&`; otherwise nothing in a sandbox could be interrupted."""
    (cli.cwd / "signals.sh").write_text("exec grep -E '^Sig(Blk|Ign)' /proc/self/status")
    background = ["env", "--ignore-signal=INT,QUIT,HUP,TERM", "--block-signal=USR1,CHLD"]
    command = [*background, *CAPSULE, "run", "signals.sh"]
    done = subprocess.run(command, env=cli.env, cwd=cli.cwd, capture_output=True, check=True)
    zeros = "0" * 16
    assert done.stdout.decode().split() == ["SigBlk:", zeros, "SigIgn:", zeros]


def test_a_script_keeps_its_name_and_gets_its_arguments(cli: Cli) -> None:
    (cli.cwd / "hello.py").write_text("import sys; print(__file__, sys.argv[1:])")
    done = cli("run", "hello.py", "--", "one", "--two", "th ree")
    assert done.out == "/workspace/hello.py ['one', '--two', 'th ree']\n"
    (cli.cwd / "hi.sh").write_text('echo "$1 from ${BASH_VERSION:+bash}"')
    assert cli("run", "hi.sh", "--", "hi").out == "hi from bash\n"


def test_code_and_input_come_from_pipes(cli: Cli) -> None:
    assert cli("run", "-", input="print(3)").out == "3\n"
    code = "import sys; print(repr(sys.stdin.read()))"
    assert cli("run", code, input="two\nlines").out == "'two\\nlines'\n"
    assert cli("run", code).out == "''\n"


def test_output_is_passed_on_byte_by_byte_and_each_to_its_stream(cli: Cli) -> None:
    code = "import os; os.write(1, bytes(range(256))); os.write(2, b'\\xff\\n')"
    done = subprocess.run(
        [*CAPSULE, "run", code], env=cli.env, capture_output=True, stdin=subprocess.DEVNULL
    )
    assert (done.stdout, done.stderr) == (bytes(range(256)), b"\xff\n")
    assert len(cli("run", "for n in range(1500): print('x' * 9999)").out) == 15_000_000


def test_output_comes_while_the_program_runs(cli: Cli) -> None:
    with cli.popen("run", "print('now'); input()", stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        assert process.poll() is None
        process.communicate("\n", timeout=10)
        assert process.returncode == 0


GO = 'package main\nfunc main() { println("42") }'


@pytest.mark.parametrize(
    ("template", "code"),
    [
        ("bash", "echo $((6 * 7))"),
        pytest.param("node", "console.log(6 * 7)", marks=pytest.mark.needs("node")),
        # Go compiles its library at the first use.
        pytest.param("go", GO, marks=[pytest.mark.needs("go"), pytest.mark.slow]),
    ],
    ids=["bash", "node", "go"],
)
def test_other_templates(cli: Cli, template: str, code: str) -> None:
    done = cli("run", "--template", template, "--timeout", "100", code)
    assert (done.code, (done.out + done.err).strip()) == (0, "42")


def test_a_language_finds_its_template(cli: Cli) -> None:
    assert cli("run", "--language", "bash", "echo $BASH_VERSINFO").out.strip().isdigit()
    done = cli("run", "-l", "cobol", "x")
    assert done.code == 125
    assert done.err.startswith("error: no template runs cobol\nhint: there is ")


def test_a_timeout_ends_it_with_124(cli: Cli) -> None:
    done = cli("run", "--timeout", "3000ms", "print('begun', flush=True)\nwhile True: pass")
    assert (done.code, done.out) == (124, "begun\n")
    said = r"error: timed out after 3\.\d s\nhint: give it more with --timeout 10m\n"
    assert re.fullmatch(said, done.err)
    assert cli.leftovers() == []


def test_memory_cpus_and_processes_are_limited(cli: Cli) -> None:
    assert cli("run", "--cpus", "1", "import os; print(os.cpu_count())").out == "1\n"
    forks = "import os, signal\ntry:\n  while os.fork(): pass\nexcept OSError: print('no more')"
    assert "no more" in cli("run", "--processes", "8", forks).out
    done = cli("run", "--memory", "64MiB", "x = bytearray(1 << 30)")
    assert done.code != 0
    assert "out of memory" in done.err or "MemoryError" in done.err


def test_files_folders_and_variables_are_given(cli: Cli) -> None:
    code = "import os; print(os.environ['A'], 'SECRET' in os.environ)"
    assert cli("run", "--env", "A=1=2", code, SECRET="x").out == "1=2 False\n"
    (cli.cwd / "data.csv").write_text("a,b\n1,2\n")
    (cli.cwd / "pkg" / "sub").mkdir(parents=True)
    (cli.cwd / "pkg" / "sub" / "mod.py").write_text("VALUE = 42")
    code = "from pkg.sub.mod import VALUE; print(VALUE, open('data.csv').read())"
    done = cli("run", "--file", "data.csv", "-f", "pkg", code)
    assert done.out == "42 a,b\n1,2\n\n"


def test_json_is_one_document(cli: Cli) -> None:
    done = cli("run", "--json", "import sys; print('o'); print('e', file=sys.stderr); sys.exit(3)")
    body = json.loads(done.out)
    assert done.code == 3
    assert (body["stdout"], body["stderr"], body["exit_code"]) == ("o\n", "e\n", 3)
    assert (body["reason"], body["timed_out"]) == ("exited", False)
    wrong = cli("run", "--json", "--template", "nosuch", "x")
    assert json.loads(wrong.out)["error"]["code"] == "not_found"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["run"], 2, "error: missing argument"),
        (["run", "--memory", "lots", "x"], 2, "not a size: 'lots'"),
        (["run", "--env", "novalue", "x"], 2, "write it like NAME=value"),
        (["run", "--timeout", "-3", "x"], 2, "not a time"),
        (["run", "missing.py"], 125, "error: no such file: missing.py"),
        (["run", "--file", "nothing.csv", "x"], 125, "error: no such file: nothing.csv"),
        (["run", "--template", "nosuch", "x"], 125, "error: no such template: nosuch"),
        (["run", "--memory", "1KiB", "x"], 125, "error: --memory 1024 is out of range"),
        (["run", "--cpus", "nan", "x"], 125, "error: --cpus nan is out of range"),
        (["run", "--timeout", "0", "x"], 125, "error: --timeout 0"),
    ],
)
def test_an_error_has_two_lines(cli: Cli, args: list[str], code: int, message: str) -> None:
    done = cli(*args)
    assert (done.code, done.out) == (code, ""), done.err
    assert message.lower() in done.err.lower()
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) <= 2


def test_a_reader_that_does_not_read_does_not_block_the_end(cli: Cli) -> None:
    with cli.popen("run", "while True: print('y' * 999)") as process:
        assert process.stdout is not None
        # FIONREAD cannot tell: a pipe is full when its pages are taken, and they may hold less.
        pipe = os.open(f"/proc/self/fd/{process.stdout.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
        wait_for(lambda: not select.select([], [pipe], [], 0)[1], what="the pipe is full")
        os.close(pipe)
        process.terminate()
        assert process.wait(30) == 143
    assert cli.leftovers() == []


def running(mark: str) -> bool:
    """Whether a process with this argument lives anywhere on the host."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


@contextlib.contextmanager
def begun(cli: Cli, script: str) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A run whose program has printed its first line, and its output."""
    with cli.popen("run", "-l", "bash", f"echo begun; {script}") as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            yield process, process.stdout
        finally:
            process.kill()


@contextlib.contextmanager
def sleeper(cli: Cli, mark: str) -> Iterator[subprocess.Popen[str]]:
    """A run whose program sleeps with a recognisable argument and ignores signals."""
    with begun(cli, f"trap '' TERM HUP; sleep {mark}") as (process, _):
        wait_for(lambda: running(mark), what="the program runs")
        yield process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_and_cleans_up(cli: Cli, number: signal.Signals) -> None:
    mark = f"86400.{os.getpid()}{int(number)}"
    with sleeper(cli, mark) as process:
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert not running(mark)
    assert cli.leftovers() == []


def test_an_interrupt_goes_to_the_program(cli: Cli) -> None:
    script = "trap 'echo caught; exit 9' INT; echo ready; while :; do sleep 0.1; done"
    with begun(cli, script) as (process, out):
        assert out.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert out.readline() == "caught\n"
        assert process.wait(30) == 9


def test_a_second_interrupt_kills_a_program_that_ignores_it(cli: Cli) -> None:
    with begun(cli, "trap 'echo no' INT; echo ready; while :; do :; done") as (process, out):
        assert out.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert out.readline() == "no\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 137
    assert cli.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_repeated_signals_leave_nothing(cli: Cli, number: signal.Signals) -> None:
    mark = f"86400.{os.getpid()}{int(number)}"
    with begun(cli, f"trap '' INT; sleep {mark}") as (process, _):
        wait_for(lambda: running(mark), what="the program runs")
        while process.poll() is None:
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.002)
    assert not running(mark)
    assert cli.leftovers() == []


def test_leftovers_of_a_killed_run_are_removed_by_the_next(cli: Cli) -> None:
    mark = f"86400.{os.getpid()}9"
    with sleeper(cli, mark) as process:
        process.kill()
    (home,) = cli.runs.iterdir()
    assert running(mark)
    long_ago = time.time() - 3600
    os.utime(home, (long_ago, long_ago))
    assert cli("run", "print(1)").out == "1\n"
    assert not running(mark)
    assert cli.leftovers() == []


def test_an_ordinary_user_can_run_too(as_user: User) -> None:
    done = as_user.run(*as_user.capsule("run", "print(6 * 7)"), stdin=subprocess.DEVNULL)
    if "allows no isolation level" in done.stderr:
        pytest.skip("this host gives an ordinary user no isolation level")
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_keys_at_a_terminal_reach_the_program(cli: Cli) -> None:
    code = (
        "import time\ntry:\n  print('up'); time.sleep(60)\nexcept KeyboardInterrupt: print('int')"
    )
    with at_terminal([*CAPSULE, "run", code], cli.env, cli.cwd) as screen:
        screen.wait_for("up")
        screen.type("\x03")
        screen.wait_for("int\r\n")
        assert screen.finish() == 0
    code = "print('got', repr(input('? ')))"
    with at_terminal([*CAPSULE, "run", "-i", code], cli.env, cli.cwd) as screen:
        screen.wait_for("? ")
        screen.type("me\n")
        screen.wait_for("got 'me'")
        assert screen.finish() == 0


def test_it_imports_nothing_of_a_server(cli: Cli) -> None:
    """These would cost every run a tenth of a second."""
    code = (
        "import sys; from capsule.cli.main import execute; code = execute(['run', 'print(1)']);"
        "heavy = {'fastapi', 'uvicorn', 'starlette', 'pydantic', 'rich', 'httpx', 'typer'};"
        "print(sorted(heavy & set(sys.modules)), code)"
    )
    done = subprocess.run(
        [CAPSULE[0], "-c", code],
        env=cli.env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout == "1\n[] 0\n", done.stderr
