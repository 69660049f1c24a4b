"""The kernels for JavaScript and for bash."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator

import pytest

from capsule.service import kernel_wire as wire
from tests.support import component_missing, wait_for
from tests.unit.kernel_process import KernelProcess, nodes, plain


def started(kernel: str, program: str) -> Iterator[KernelProcess]:
    if shutil.which(program) is None:
        component_missing(f"no {program}")
    with KernelProcess(kernel, program) as process:
        yield process


@pytest.fixture
def node() -> Iterator[KernelProcess]:
    yield from started("node", "node")


@pytest.fixture(params=nodes())
def any_node(request: pytest.FixtureRequest) -> Iterator[KernelProcess]:
    yield from started("node", request.param)


@pytest.fixture
def bash() -> Iterator[KernelProcess]:
    yield from started("bash", "bash")


def test_javascript_names_live_on_and_may_be_declared_again(node: KernelProcess) -> None:
    node.run("const a = 1; let b = 2; function f() { return a + b; } class C {}")
    assert node.run("const a = 40; let b = 2; f()").text == "42"
    assert node.run("class C { x = 1 }; new C()").text == "C { x: 1 }"
    assert node.run("undefined").shown == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("await new Promise(done => setTimeout(done, 5, 'later'))", "'later'"),
        ("Promise.resolve([1, 2])", "[ 1, 2 ]"),
        ("10n", "10n"),
        ("NaN", "NaN"),
        ("null", "null"),
        ("Symbol('s')", "Symbol(s)"),
        ("({a: {b: 1}})", "{ a: { b: 1 } }"),
        ("(await import('node:os')).EOL", r"'\n'"),
        ("require('path').join('a', 'b')", "'a/b'"),
    ],
)
def test_javascript_values(node: KernelProcess, code: str, text: str) -> None:
    assert node.run(code).text == text


def test_javascript_output_of_console_and_children(node: KernelProcess) -> None:
    code = """
console.log('out'); console.error('err');
require('child_process').execSync('echo child; cat', {stdio: 'inherit'});
"""
    done = node.run(code)
    assert (done.stdout, done.stderr) == ("out\nchild\n", "err\n")


def test_javascript_output_is_all_there_when_the_run_ends(node: KernelProcess) -> None:
    done = node.run("console.log('x'.repeat(3_000_000)); console.error('y'.repeat(3_000_000))")
    assert (len(done.stdout), len(done.stderr)) == (3_000_001, 3_000_001)
    assert node.run("1").stdout == ""


def test_javascript_errors_come_without_our_frames(node: KernelProcess) -> None:
    done = node.run("function f() { throw new TypeError('no') }\nf()")
    assert done.error is not None
    assert (done.status, done.error.name, done.error.value) == ("error", "TypeError", "no")
    lines = done.error.traceback.splitlines()
    assert lines == ["TypeError: no", "    at f (run-1.js:1:22)", "    at run-1.js:2:1"]
    thrown = node.run("throw 3")
    assert thrown.error is not None
    assert (thrown.error.name, thrown.error.value) == ("number", "3")
    rejected = node.run("Promise.reject(new Error('rejected'))")
    assert rejected.error is not None
    assert rejected.error.value == "rejected"
    wrong = node.run("a +")
    assert wrong.error is not None
    assert wrong.error.name == "SyntaxError"
    statement = node.run("import fs from 'fs'")
    assert statement.error is not None
    assert statement.error.value.endswith("; use require() or await import()")


FOREVER = "; await new Promise(() => {})"
ENDLESS = {
    "busy": "while (true) {}",
    "waiting": FOREVER,
    "busy after a wait": "await 1; while (true) {}",
    "busy in promises": "for (;;) await null",
    "promises that make promises": "(function f() { Promise.resolve().then(f) })()" + FOREVER,
    "a timer": "setTimeout(() => { console.log('on'); while (true) {} }, 1)" + FOREVER,
    "a timer again and again": "setInterval(() => { console.log('on'); for (;;); }, 1)" + FOREVER,
    "a callback": "require('fs').stat('/', () => { console.log('on'); for (;;); })" + FOREVER,
    "ticks": "process.nextTick(function f() { process.nextTick(f); slow() })" + FOREVER,
    "printing": "await 1; for (;;) console.log('x'.repeat(100))",
    "showing": "await 1; for (;;) display({ a: 1 })",
    "a pattern": "await 1; /(a+)+$/.test('a'.repeat(60) + 'b')",
    "a lock": "await 1; Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0)",
    "a child": "await 1; require('child_process').execSync('sleep 60')",
    "a module": "await import('data:text/javascript,for(;;);')",
    "the end of the stack": "(function f() { try { f() } catch { for (;;); } })()",
    "a scope": "await 1; await als.run(1, async () => { await 1; for (;;); })",
    "a scope of a timer": "als.run(1, setTimeout, () => { console.log('on'); for (;;); })"
    + FOREVER,
    "the value's own text": "({ [Symbol.for('nodejs.util.inspect.custom')]() { for (;;); } })",
}
STATE = """
const x = 7;
const als = new (require('async_hooks').AsyncLocalStorage)();
als.run(1, () => {}); // from now on Node checks its scopes
function slow() { for (const end = Date.now() + 5; Date.now() < end; ); }
"""


QUICK = ("busy", "waiting", "busy after a wait")
MOST = [each for each in ENDLESS if each not in QUICK]


@pytest.mark.parametrize(
    "what", [*QUICK, *(pytest.param(it, marks=pytest.mark.slow) for it in MOST)]
)
def test_javascript_is_interrupted(any_node: KernelProcess, what: str) -> None:
    any_node.run(STATE)
    code = ENDLESS[what]
    done = any_node.interrupted(
        code if "'on'" in code else f"console.log('on'); {code}", after="on"
    )
    assert done.error is not None
    assert (done.status, done.error.name) == ("interrupted", "Interrupted")
    after = any_node.run("console.log('out'); console.error('err'); [x, als.getStore()]")
    assert (after.text, after.stdout, after.stderr) == ("[ 7, undefined ]", "out\n", "err\n")


def test_javascript_that_was_left_behind_gives_way_to_an_interrupt(any_node: KernelProcess) -> None:
    """Its run has ended long ago; the one that is interrupted cannot begin."""
    any_node.run("const x = 7; setTimeout(() => { while (true) {} }, 5)")
    any_node.begin("await new Promise((go) => setTimeout(go, 60_000))")
    time.sleep(0.05)
    any_node.interrupt()
    assert any_node.finish().status == "interrupted"
    assert any_node.run("x").text == "7"


@pytest.mark.slow
def test_javascript_can_be_interrupted_at_any_moment(any_node: KernelProcess) -> None:
    busy = "for (const end = Date.now() + 22; Date.now() < end; ) {0}; 5"
    kinds = [busy.format(each) for each in ("", "await null")]
    kinds += [f"await 1; {kinds[0]}", "await new Promise((go) => setTimeout(go, 22)); 5"]
    pick, seen = random.Random(1), set()
    for _ in range(60):
        any_node.begin(pick.choice(kinds))
        time.sleep(pick.uniform(0, 0.03))
        any_node.interrupt()
        done = any_node.finish()
        seen.add(done.status)
        assert done.status == "interrupted" or done.text == "5"
        assert any_node.run("await new Promise((go) => setTimeout(go, 1)); 7").text == "7"
    assert seen == {"interrupted", "ok"}


def test_javascript_that_nothing_will_wake_is_not_collected(any_node: KernelProcess) -> None:
    collect = "require('v8').setFlagsFromString('--expose-gc'); var gc = require('vm')"
    any_node.run(f"{collect}.runInNewContext('gc')")
    code = "setTimeout(() => { gc(); gc(); console.log('on'); }, 20)"
    assert any_node.interrupted(code + FOREVER, after="on").status == "interrupted"
    assert any_node.run("gc(); gc(); 7").text == "7"


def test_javascript_ends_when_it_is_told_to(any_node: KernelProcess) -> None:
    any_node.interrupted("console.log('on'); while (true) {}", after="on")
    any_node.begin("process.exit(5)")
    assert any_node.wait() == 5


def test_javascript_that_need_not_wait_is_done_when_its_run_ends(node: KernelProcess) -> None:
    code = "(async () => { for (let i = 0; i < 50; i++) await i; console.log('done') })(); 1"
    assert node.run(code).stdout == "done\n"
    assert "Uncaught Error: no" in node.run("Promise.reject(new Error('no')).finally(); 1").stderr


def test_javascript_that_waits_is_told_of_an_interrupt(node: KernelProcess) -> None:
    waits = "require('child_process').spawn('sleep', ['60']); await new Promise(() => {})"
    node.begin(waits)
    node.raw(wire.interrupt("node", node.number - 1))  # of a run before it
    node.raw(wire.interrupt("node", node.number))
    done = node.finish()
    assert done.status == "interrupted"
    children = "require('fs').readFileSync(`/proc/self/task/${process.pid}/children`, 'utf8')"
    wait_for(lambda: node.run(children).text == "''", what="the child got it, too")
    node.raw(wire.interrupt("node", node.number))  # of one that is over
    assert node.run("await new Promise((go) => setTimeout(go, 50)); 7").text == "7"


def test_javascript_is_not_interrupted_for_another_run(node: KernelProcess) -> None:
    node.run("1")
    node.begin("console.log('on'); for (const end = Date.now() + 200; Date.now() < end; ); 5")
    node.hear_printed("on")
    node.raw(wire.interrupt("node", node.number - 1))
    assert node.finish().text == "5"


@pytest.mark.slow
def test_javascript_presses_in_a_row_are_for_one_run(node: KernelProcess) -> None:
    """The child of the next run gets its own."""
    spawns = "child = require('child_process').spawn('sleep', ['60']); console.log('on')"
    for _ in range(5):
        node.begin(f"{spawns}; await new Promise(() => {{}})")
        node.hear_printed("on")
        node.interrupt()
        time.sleep(0.0012)
        node.interrupt()
        assert node.finish().status == "interrupted"
        gone = "child.signalCode || await new Promise((go) => child.on('exit', (c, s) => go(s)))"
        assert node.run(gone).text == "'SIGINT'"


@pytest.mark.parametrize(
    "code",
    [
        "process.removeAllListeners('SIGINT')",
        "process.kill = () => { throw new Error('x') }",
        "Promise.prototype.then = () => { throw new Error('x') }",
        "Promise.resolve = () => { throw new Error('x') }",
        "globalThis.setImmediate = null",
    ],
)
def test_javascript_that_changes_what_we_use(node: KernelProcess, code: str) -> None:
    node.run(code)
    done = node.interrupted("console.log('on'); await new Promise(() => {})", after="on")
    assert done.status == "interrupted"
    done = node.interrupted("console.log('on'); for (;;);", after="on")
    assert done.status == "interrupted"
    assert node.run("7").text == "7"


def test_javascript_forms_by_mime_type(node: KernelProcess) -> None:
    code = """
display({ toMime: () => ({ 'text/html': '<b>', 'image/png': Buffer.from('png') }) });
({ [Symbol.for('Jupyter.display')]() { return { 'application/json': { a: 1 } }; } })
"""
    first, second = node.run(code).shown
    assert (first.main, first.html, first.png) == (False, "<b>", "cG5n")
    assert (second.main, plain(second.json)) == (True, {"a": 1})
    (bad,) = node.run("({ toMime() { throw new Error('no'); } })").shown
    assert plain(bad.errors) == {"bundle": "Error: no"}


def test_javascript_that_fails_later_does_not_end_the_interpreter(node: KernelProcess) -> None:
    later = "setTimeout(() => { throw new Error('late') }, 1)"
    done = node.run(f"{later}; await new Promise(done => setTimeout(done, 30))")
    assert "Uncaught Error: late" in done.stderr
    assert node.run("1 + 1").text == "2"


def test_bash_state_lives_on(bash: KernelProcess) -> None:
    bash.run('x=5; declare -A map=([a]=1); f() { echo "in f: $1"; }; cd /; export Y=1')
    done = bash.run("f $x; pwd; echo ${map[a]}; bash -c 'echo $Y'")
    assert done.stdout == "in f: 5\n/\n1\n1\n"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("true", 0), ("false", 1), ("(exit 3)", 3), ("return 4", 4), ("nope", 127)],
)
def test_bash_says_how_the_last_command_ended(
    bash: KernelProcess, code: str, exit_code: int
) -> None:
    done = bash.run(code)
    assert done.end is not None
    assert (done.end.code, done.end.status) == (exit_code, "ok" if exit_code == 0 else "error")


def test_bash_code_arrives_as_it_was_written(bash: KernelProcess) -> None:
    done = bash.run("cat <<'END'\na\\tb \\\\ 'c' \"d\" é $x `y`\n  end \\\nEND\nprintf '%s' ' x '")
    assert done.stdout == "a\\tb \\\\ 'c' \"d\" é $x `y`\n  end \\\n x "


@pytest.mark.parametrize(
    "code",
    [
        "sleep 60; echo bad",
        "sleep 60 | cat; echo bad",
        "f() { while :; do :; done; }; g() { f; echo bad; }; g; echo bad",
        "x=$(sleep 60; echo bad); echo bad",
        "while true; do sleep 60; echo bad; done",
    ],
)
def test_bash_is_interrupted_in_the_middle(bash: KernelProcess, code: str) -> None:
    bash.run("x=1; shopt -u extdebug")
    done = bash.interrupted(f"echo on; {code}", after="on")
    assert done.end is not None
    assert (done.status, done.end.code, "bad" in done.stdout) == ("interrupted", 130, False)
    again = bash.run("f() { echo fine; }; f; shopt extdebug; trap -p DEBUG")
    assert again.stdout == "fine\nextdebug       \toff\n"


def test_bash_ignores_an_interrupt_between_runs(bash: KernelProcess) -> None:
    for _ in range(3):
        bash.signal()
        assert bash.run("echo on").stdout == "on\n"


def test_bash_exits_when_it_is_told_to(bash: KernelProcess) -> None:
    bash.begin("exit 5")
    assert bash.wait() == 5


def test_bash_has_no_input(bash: KernelProcess) -> None:
    assert bash.run('cat; read x; echo "[$x]"').stdout == "[]\n"


def test_bash_traces_the_code_and_hardly_us(bash: KernelProcess) -> None:
    done = bash.run("set -x; echo hi")
    assert (done.stdout, done.stderr) == ("hi\n", "++ echo hi\n")
    assert bash.run("set +x").status == "ok"


def test_variables_of_one_run_are_gone_after_it(node: KernelProcess, bash: KernelProcess) -> None:
    code = "[process.env.A, process.env.HOME].join()"
    before = node.run(code).text
    assert node.run(code, A="1", HOME="/h").text == "'1,/h'"
    assert node.run(code).text == before
    show = 'echo "${A-none} ${B-none}"; return 3'
    bash.run("export A=\"it's\"$'\\n'so; set -u")
    during = bash.run(show, A="a 'b' $c `d`\ne", B="")
    assert during.stdout == "a 'b' $c `d`\ne \n" and during.status == "error"
    assert bash.run(show).stdout == "it's\nso none\n"
