"""E2B's code interpreter, with the SDK as users install it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection

import httpx
import pytest
from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import Execution, Sandbox

from capsule.edge.e2b.access import Access
from tests.e2b.conftest import parameters
from tests.support.servers import RealServer

pytestmark = pytest.mark.real


@pytest.fixture(scope="session")
def interpreter(place: RealServer) -> Iterator[Sandbox]:
    """One for all tests: a test that changes a context makes its own."""
    made = Sandbox.create(timeout=1800, **parameters(place))
    yield made
    made.kill()


def test_the_last_value_is_the_result(interpreter: Sandbox) -> None:
    context = interpreter.create_code_context()
    ran = interpreter.run_code("x = 40\nx + 2", context=context)
    assert (ran.text, ran.execution_count) == ("42", 1)
    (result,) = ran.results
    assert result.is_main_result and list(result.formats()) == ["text"]
    assert ran.error is None and ran.logs.stdout == []
    again = interpreter.run_code("    y = x\n    f'it is \"{y}\"'", context=context)
    assert (again.text, again.execution_count) == ('it is "40"', 2)


def test_output_and_errors_come_as_they_are_made(interpreter: Sandbox) -> None:
    code = "import sys\nprint('out')\nprint('err', file=sys.stderr)\ndisplay(7)\n1 / 0"
    heard: list[tuple[str, object]] = []
    ran = interpreter.run_code(
        code,
        on_stdout=lambda m: heard.append(("stdout", m.line)),
        on_stderr=lambda m: heard.append(("stderr", m.line)),
        on_result=lambda r: heard.append(("result", r.text)),
        on_error=lambda e: heard.append(("error", e.name)),
    )
    # Output and results come by different ways, and may overtake each other.
    assert sorted(heard) == [
        ("error", "ZeroDivisionError"),
        ("result", "7"),
        ("stderr", "err\n"),
        ("stdout", "out\n"),
    ]
    assert heard.index(("result", "7")) < heard.index(("error", "ZeroDivisionError"))
    assert (ran.logs.stdout, ran.logs.stderr) == (["out\n"], ["err\n"])
    assert ran.error is not None
    assert ran.error.value == "division by zero" and "line 5" in ran.error.traceback
    assert not ran.results[0].is_main_result


FORMS = """
class Everything:
    def __repr__(self): return "text"
    def _repr_html_(self): return "<b>html</b>"
    def _repr_markdown_(self): return "**markdown**"
    def _repr_svg_(self): return "<svg/>"
    def _repr_png_(self): return b"png"
    def _repr_jpeg_(self): return b"jpeg"
    def _repr_pdf_(self): return b"pdf"
    def _repr_latex_(self): return "$latex$"
    def _repr_json_(self): return {"json": 1}
    def _repr_javascript_(self): return "1"
Everything()
"""


def test_every_form_of_a_result_arrives(interpreter: Sandbox) -> None:
    (result,) = interpreter.run_code(FORMS).results
    assert (result.text, result.html, result.markdown) == ("text", "<b>html</b>", "**markdown**")
    assert (result.svg, result.latex, result.javascript) == ("<svg/>", "$latex$", "1")
    assert (result.png, result.jpeg, result.pdf) == ("cG5n", "anBlZw==", "cGRm")
    assert result.json == {"json": 1}


def test_languages(interpreter: Sandbox) -> None:
    bash = interpreter.run_code("echo from bash; false", language="bash")
    assert bash.logs.stdout == ["from bash\n"]
    assert bash.error is not None and bash.error.value == "1"
    for language in ("r", "java", "typescript", "ts", "cobol"):
        with pytest.raises(SandboxException, match="is not in this sandbox; it has:"):
            interpreter.run_code("1", language=language)


@pytest.mark.needs("node")
def test_javascript(server: RealServer) -> None:
    with Sandbox.create(**parameters(server)) as made:
        ran = made.run_code("const a = 2; console.log('hi'); await Promise.resolve(a * 3)", "js")
    assert (ran.text, ran.logs.stdout) == ("6", ["hi\n"])


def test_variables_of_the_environment_are_for_one_run(interpreter: Sandbox) -> None:
    context = interpreter.create_code_context()
    code = "import os; (os.environ.get('A'), os.environ.get('HOME'))"
    envs = {"A": "it's $1", "HOME": "/elsewhere"}
    ran = interpreter.run_code(code, context=context, envs=envs)
    assert ran.text == "(\"it's $1\", '/elsewhere')"
    assert interpreter.run_code(code, context=context).text == "(None, '/home/user')"


def test_contexts_come_and_go(interpreter: Sandbox) -> None:
    cwd = "/home/user/not/there/yet"
    context = interpreter.create_code_context(cwd=cwd, language="python")
    assert (context.language, context.cwd) == ("python", cwd)
    assert interpreter.run_code("import os; z = 1; os.getcwd()", context=context).text == cwd
    listed = interpreter.list_code_contexts()
    assert (listed[-1].id, listed[-1].cwd) == (context.id, cwd)
    assert {each.language for each in listed} >= {"python", "javascript"}
    interpreter.run_code("z = 1")
    (default,) = [each for each in listed if each.id == "default-python"]
    for each in (context, default):
        assert interpreter.run_code("z", context=each).text == "1"
        interpreter.restart_code_context(each)
        gone = interpreter.run_code("z", context=each)
        assert gone.error is not None and gone.error.name == "NameError"
    interpreter.remove_code_context(context)
    assert context.id not in [each.id for each in interpreter.list_code_contexts()]
    for call in (interpreter.remove_code_context, interpreter.restart_code_context):
        with pytest.raises(NotFoundException, match=f"Context {context.id} not found"):
            call(context)
    with pytest.raises(NotFoundException, match=f"Context {context.id} not found"):
        interpreter.run_code("1", context=context)


def test_a_timeout_interrupts_the_run(interpreter: Sandbox) -> None:
    context = interpreter.create_code_context()
    interpreter.run_code("kept = 1", context=context)
    with pytest.raises(TimeoutException):
        interpreter.run_code("import time; time.sleep(60)", context=context, timeout=1)
    assert interpreter.run_code("kept", context=context).text == "1"


def test_an_interpreter_that_died_begins_again(interpreter: Sandbox) -> None:
    context = interpreter.create_code_context()
    died = interpreter.run_code("import os; os._exit(3)", context=context)
    assert died.error is not None and "exited with code 3" in died.error.value
    assert interpreter.run_code("'alive'", context=context).text == "alive"
    interpreter.run_code("exit()", context=context)
    assert interpreter.run_code("'alive'", context=context).text == "alive"


def test_lines_of_ipython(interpreter: Sandbox) -> None:
    context = interpreter.create_code_context()

    def run(code: str) -> Execution:
        return interpreter.run_code(code, context=context)

    ran = run("!echo $((6 * 7))\nif True:\n    !echo 'in' \"it\"\n%matplotlib inline")
    assert "".join(ran.logs.stdout) == "42\nin it\n" and ran.results == []
    assert run("%cd /tmp\nimport os\nos.getcwd()").text == "/tmp"
    assert run("%env E2B_ENV=set\nos.environ['E2B_ENV']").text == "set"
    assert run("x = '''\n!not a command\n'''\nx").error is None
    with pytest.raises(SandboxException, match="%timeit is not known here"):
        run("%timeit 1")


def test_the_display_functions_of_ipython(interpreter: Sandbox) -> None:
    code = "from IPython.display import HTML, Image, Markdown, display\n"
    (raw,) = interpreter.run_code(code + "display({'text/latex': '$x$'}, raw=True)").results
    assert (list(raw.formats()), raw.latex) == (["latex"], "$x$")
    (html,) = interpreter.run_code("HTML('<b>so</b>')").results
    assert html.html == "<b>so</b>" and html.is_main_result
    shown = interpreter.run_code("display(Markdown('*m*'), Image(b'\\xff\\xd8'))").results
    assert (shown[0].markdown, bool(shown[1].jpeg)) == ("*m*", True)


def test_another_connection_finds_the_same_variables_and_files(place: RealServer) -> None:
    options = parameters(place)
    made = Sandbox.create(envs={"GIVEN": "yes"}, **options)
    try:
        made.files.write("data.txt", "from outside")
        made.run_code("import os; kept = os.environ['GIVEN']")
        again = Sandbox.connect(made.sandbox_id, **options)
        assert again.run_code("kept + open('data.txt').read()").text == "yesfrom outside"
    finally:
        made.kill()
    with pytest.raises(TimeoutException, match="was not found"):
        made.run_code("1")


def door(id: str, **more: str) -> dict[str, str]:
    named = {name.replace("_", "-"): value for name, value in more.items()}
    return {"e2b-sandbox-id": id, "e2b-sandbox-port": "49999", **named}


def test_a_refusal_leaves_its_connection_open(server: RealServer, box: str, access: Access) -> None:
    bare = door(box, content_type="application/json")
    headers = bare | {"x-access-token": access.token(box)}
    refused = [
        ({"code": "1", "context_id": "nosuch"}, headers, 404, b"Context nosuch not found"),
        ({"code": "1", "language": "cobol"}, headers, 400, b"Language cobol is not in"),
        ({"code": "1", "context_id": "a", "language": "python"}, headers, 400, b""),
        ({"code": 1}, headers, 400, b"code: "),
        ({"code": "1"}, bare, 401, b""),
    ]
    with closing(HTTPConnection("127.0.0.1", server.port, timeout=10)) as connection:
        connection.connect()
        kept = connection.sock
        for body, sent, status, begin in refused:
            connection.request("POST", "/execute", json.dumps(body), sent)
            answer = connection.getresponse()
            assert answer.read().startswith(begin) and answer.status == status
        connection.request(
            "POST", "/execute", json.dumps({"code": "echo hi", "language": "bash"}), headers
        )
        assert b'"text":"hi\\n"' in connection.getresponse().read()
        assert connection.sock is kept


@pytest.mark.slow  # a keepalive comes after 5 seconds
async def test_a_silent_run_is_kept_alive(server: RealServer, access: Access) -> None:
    sandbox = Sandbox.create(**parameters(server))
    try:
        headers = door(sandbox.sandbox_id, x_access_token=access.token(sandbox.sandbox_id))
        body = {"code": "import time; time.sleep(5.3)"}
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=30) as http:
            answer, lines = await asyncio.gather(
                http.post("/execute", json=body), lines_of_a_run_that_never_began(http)
            )
        kinds = [json.loads(line)["type"] for line in answer.text.splitlines()]
        assert kinds == ["number_of_executions", "keepalive", "end_of_execution"]
        error, end = lines
        assert (error["type"], error["name"]) == ("error", "UnexpectedEndOfExecution")
        assert error["value"].endswith("was deleted; create another")
        assert end == {"type": "end_of_execution"}
    finally:
        sandbox.kill()


async def lines_of_a_run_that_never_began(http: httpx.AsyncClient) -> list[dict[str, str]]:
    """It waits behind another, and was answered before their context is deleted."""
    made = (await http.post("/contexts", json={})).json()
    body = {"code": "print('on')\nimport time; time.sleep(60)", "context_id": made["id"]}
    async with http.stream("POST", "/execute", json=body) as first:
        lines = first.aiter_lines()
        while json.loads(await anext(lines))["type"] != "stdout":
            pass
        async with http.stream("POST", "/execute", json=body) as second:
            assert second.status_code == 200
            await http.delete(f"/contexts/{made['id']}")
            return [json.loads(line) async for line in second.aiter_lines()]
