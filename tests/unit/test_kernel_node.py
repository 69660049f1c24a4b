"""The kernel for JavaScript."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from capsule.service import kernel_wire as wire
from tests.support import wait_for
from tests.unit.kernel_process import KernelProcess, nodes, plain

pytestmark = pytest.mark.needs("node")


@pytest.fixture
def node() -> Iterator[KernelProcess]:
    with KernelProcess("node", "node") as process:
        yield process


@pytest.fixture(params=nodes())
def any_node(request: pytest.FixtureRequest) -> Iterator[KernelProcess]:
    with KernelProcess("node", request.param) as process:
        yield process


def test_names_live_on_and_may_be_declared_again(node: KernelProcess) -> None:
    node.run("const a = 1; let b = 2; function f() { return a + b; } class C {}")
    assert node.run("const a = 40; let b = 2; f()").text == "42"
    assert node.run("class C { x = 1 }; new C()").text == "C { x: 1 }"
    assert node.run("undefined").shown == []


def test_values_and_awaits(node: KernelProcess) -> None:
    for code, text in (
        ("await new Promise(done => setTimeout(done, 5, 'later'))", "'later'"),
        ("Promise.resolve([1, 2])", "[ 1, 2 ]"),
        ("10n", "10n"),
        ("null", "null"),
        ("({a: {b: 1}})", "{ a: { b: 1 } }"),
        ("(await import('node:os')).EOL", r"'\n'"),
        ("require('path').join('a', 'b')", "'a/b'"),
    ):
        assert node.run(code).text == text


def test_output_of_console_and_children(node: KernelProcess) -> None:
    code = """
console.log('out'); console.error('err');
require('child_process').execSync('echo child; cat', {stdio: 'inherit'});
"""
    done = node.run(code)
    assert (done.stdout, done.stderr) == ("out\nchild\n", "err\n")


def test_output_is_complete_when_the_run_ends(node: KernelProcess) -> None:
    done = node.run("console.log('x'.repeat(3_000_000)); console.error('y'.repeat(3_000_000))")
    assert (len(done.stdout), len(done.stderr)) == (3_000_001, 3_000_001)
    code = "(async () => { for (let i = 0; i < 50; i++) await i; console.log('done') })(); 1"
    assert node.run(code).stdout == "done\n"


def test_errors_have_no_frames_of_the_kernel(node: KernelProcess) -> None:
    done = node.run("function f() { throw new TypeError('no') }\nf()")
    assert done.error is not None
    assert (done.status, done.error.name, done.error.value) == ("error", "TypeError", "no")
    lines = done.error.traceback.splitlines()
    assert lines == ["TypeError: no", "    at f (run-1.js:1:22)", "    at run-1.js:2:1"]
    for code, name, value in (
        ("throw 3", "number", "3"),
        ("Promise.reject(new Error('rejected'))", "Error", "rejected"),
        ("a +", "SyntaxError", ""),
        ("import fs from 'fs'", "SyntaxError", "; use require() or await import()"),
    ):
        error = node.run(code).error
        assert error is not None and error.name == name and error.value.endswith(value)


FOREVER = "; await new Promise(() => {})"
ENDLESS = {
    "busy": "while (true) {}",
    "waiting": FOREVER,
    "busy after a wait": "await 1; while (true) {}",
    "busy in promises": "for (;;) await null",
    "a timer": "setTimeout(() => { console.log('on'); while (true) {} }, 1)" + FOREVER,
    "a callback": "require('fs').stat('/', () => { console.log('on'); for (;;); })" + FOREVER,
    "printing": "await 1; for (;;) console.log('x'.repeat(100))",
    "a lock": "await 1; Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0)",
    "a child": "await 1; require('child_process').execSync('sleep 60')",
    "the end of the stack": "(function f() { try { f() } catch { for (;;); } })()",
}
QUICK = ("busy", "waiting", "busy after a wait")
SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ENDLESS if each not in QUICK]


@pytest.mark.parametrize("what", [*QUICK, *SLOW])
def test_an_interrupt_ends_a_run_and_keeps_the_names(any_node: KernelProcess, what: str) -> None:
    any_node.run("const x = 7")
    code = ENDLESS[what] if "'on'" in ENDLESS[what] else f"console.log('on'); {ENDLESS[what]}"
    done = any_node.interrupted(code, after="on")
    assert done.error is not None
    assert (done.status, done.error.name) == ("interrupted", "Interrupted")
    after = any_node.run("console.log('out'); console.error('err'); x")
    assert (after.text, after.stdout, after.stderr) == ("7", "out\n", "err\n")


def test_a_timer_of_an_earlier_run_can_be_interrupted(
    any_node: KernelProcess, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    busy = f"require('fs').writeFileSync('{begun}', ''); while (true) {{}}"
    any_node.run(f"const x = 7; setTimeout(() => {{ {busy} }}, 5)")
    any_node.begin("await new Promise((go) => setTimeout(go, 60_000))")
    wait_for(begun.exists, what="the timer runs")
    any_node.interrupt()
    assert any_node.finish().status == "interrupted"
    assert any_node.run("x").text == "7"


def test_an_interrupt_is_for_its_run_and_its_children(node: KernelProcess) -> None:
    waits = "require('child_process').spawn('sleep', ['60']); await new Promise(() => {})"
    node.begin(waits)
    node.raw(wire.interrupt("node", node.number - 1))  # of a run before it
    node.raw(wire.interrupt("node", node.number))
    assert node.finish().status == "interrupted"
    children = "require('fs').readFileSync(`/proc/self/task/${process.pid}/children`, 'utf8')"
    wait_for(lambda: node.run(children).text == "''", what="the child is interrupted too")
    node.begin("console.log('on'); for (const end = Date.now() + 200; Date.now() < end; ); 5")
    node.hear_printed("on")
    node.raw(wire.interrupt("node", node.number - 1))
    assert node.finish().text == "5"


@pytest.mark.parametrize(
    "code",
    [
        "process.removeAllListeners('SIGINT')",
        "Promise.prototype.then = () => { throw new Error('x') }",
        "globalThis.setImmediate = null",
    ],
)
def test_code_that_changes_what_the_kernel_uses(node: KernelProcess, code: str) -> None:
    node.run(code)
    for endless in ("await new Promise(() => {})", "for (;;);"):
        done = node.interrupted(f"console.log('on'); {endless}", after="on")
        assert done.status == "interrupted"
    assert node.run("7").text == "7"


def test_forms_by_mime_type(node: KernelProcess) -> None:
    code = """
display({ toMime: () => ({ 'text/html': '<b>', 'image/png': Buffer.from('png') }) });
({ [Symbol.for('Jupyter.display')]() { return { 'application/json': { a: 1 } }; } })
"""
    first, second = node.run(code).shown
    assert (first.main, first.html, first.png) == (False, "<b>", "cG5n")
    assert (second.main, plain(second.json)) == (True, {"a": 1})
    (bad,) = node.run("({ toMime() { throw new Error('no'); } })").shown
    assert plain(bad.errors) == {"bundle": "Error: no"}


def test_a_late_error_does_not_end_the_interpreter(node: KernelProcess) -> None:
    later = "setTimeout(() => { throw new Error('late') }, 1)"
    done = node.run(f"{later}; await new Promise(done => setTimeout(done, 30))")
    assert "Uncaught Error: late" in done.stderr
    assert node.run("1 + 1").text == "2"


def test_variables_of_one_run_are_gone_after_it(node: KernelProcess) -> None:
    code = "[process.env.A, process.env.HOME].join()"
    before = node.run(code).text
    assert node.run(code, A="1", HOME="/h").text == "'1,/h'"
    assert node.run(code).text == before
