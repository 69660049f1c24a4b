"""The kernel for bash."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.kernel_process import KernelProcess


@pytest.fixture
def bash() -> Iterator[KernelProcess]:
    with KernelProcess("bash", "bash") as process:
        yield process


def test_state_lives_on(bash: KernelProcess) -> None:
    bash.run('x=5; declare -A map=([a]=1); f() { echo "in f: $1"; }; cd /; export Y=1')
    done = bash.run("f $x; pwd; echo ${map[a]}; bash -c 'echo $Y'")
    assert done.stdout == "in f: 5\n/\n1\n1\n"


def test_a_run_ends_with_the_code_of_its_last_command(bash: KernelProcess) -> None:
    for code, exit_code in (("true", 0), ("(exit 3)", 3), ("return 4", 4), ("nope", 127)):
        end = bash.run(code).end
        assert end is not None
        assert (end.code, end.status) == (exit_code, "ok" if exit_code == 0 else "error")


def test_code_arrives_as_it_was_written(bash: KernelProcess) -> None:
    done = bash.run("cat <<'END'\na\\tb \\\\ 'c' \"d\" é $x `y`\n  end \\\nEND\nprintf '%s' ' x '")
    assert done.stdout == "a\\tb \\\\ 'c' \"d\" é $x `y`\n  end \\\n x "


@pytest.mark.parametrize(
    "code",
    [
        "sleep 60 | cat; echo bad",
        "f() { while :; do :; done; }; g() { f; echo bad; }; g; echo bad",
        "x=$(sleep 60; echo bad); echo bad",
        "while true; do sleep 60; echo bad; done",
    ],
)
def test_an_interrupt_ends_a_run(bash: KernelProcess, code: str) -> None:
    bash.run("x=1; shopt -u extdebug")
    done = bash.interrupted(f"echo on; {code}", after="on")
    assert done.end is not None
    assert (done.status, done.end.code, "bad" in done.stdout) == ("interrupted", 130, False)
    again = bash.run("f() { echo fine; }; f; shopt extdebug; trap -p DEBUG")
    assert again.stdout == "fine\nextdebug       \toff\n"


def test_an_interrupt_between_runs_does_nothing(bash: KernelProcess) -> None:
    bash.signal()
    assert bash.run("echo on").stdout == "on\n"


def test_exit_ends_the_interpreter(bash: KernelProcess) -> None:
    bash.begin("exit 5")
    assert bash.wait() == 5


def test_input_is_empty_and_a_trace_shows_the_code_alone(bash: KernelProcess) -> None:
    assert bash.run('cat; read x; echo "[$x]"').stdout == "[]\n"
    done = bash.run("set -x; echo hi")
    assert (done.stdout, done.stderr) == ("hi\n", "++ echo hi\n")
    assert bash.run("set +x").status == "ok"


def test_variables_of_one_run_are_gone_after_it(bash: KernelProcess) -> None:
    show = 'echo "${A-none} ${B-none}"; return 3'
    bash.run("export A=\"it's\"$'\\n'so; set -u")
    during = bash.run(show, A="a 'b' $c `d`\ne", B="")
    assert during.stdout == "a 'b' $c `d`\ne \n" and during.status == "error"
    assert bash.run(show).stdout == "it's\nso none\n"
