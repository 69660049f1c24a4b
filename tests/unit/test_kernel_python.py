"""The kernel for Python."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.unit.kernel_process import KernelProcess, plain, pythons


@pytest.fixture(params=pythons())
def every(request: pytest.FixtureRequest) -> Iterator[KernelProcess]:
    with KernelProcess("python", request.param) as kernel:
        yield kernel


@pytest.fixture
def kernel() -> Iterator[KernelProcess]:
    with KernelProcess("python", "python3") as kernel:
        yield kernel


def test_names_live_on_and_the_last_expression_is_the_result(every: KernelProcess) -> None:
    assert every.run("import math\ndef f(x): return x + 1\nx = 1").shown == []
    assert every.run("f(x)").text == "2"
    assert every.run("_ + math.floor(1.5)").text == "3"
    assert every.run("x;").shown == []
    assert every.run("None").shown == []
    assert every.run("__name__").text == "'__main__'"


def test_top_level_await(every: KernelProcess) -> None:
    done = every.run("import asyncio\nasync def f(): return 5\nawait asyncio.sleep(0)\nawait f()")
    assert (done.text, done.status) == ("5", "ok")
    assert every.run("async with asyncio.Lock() as lock: y = 7").status == "ok"
    assert every.run("y, asyncio.run(f())").text == "(7, 5)"
    begun = every.run(
        "tasks = [asyncio.create_task(f()) for _ in 'ab']\nawait asyncio.gather(*tasks)"
    )
    assert (begun.text, begun.error, begun.stderr) == ("[5, 5]", None, "")
    left = every.run("import sys\nawait f()\nsys.exit(3)")
    assert left.error is not None and left.stderr == ""


def test_output_of_children_and_of_c_code_comes_in_order(every: KernelProcess) -> None:
    code = """
import ctypes, os, sys
print("python"); os.system("echo child; echo oops >&2")
ctypes.CDLL(None).puts(b"from C")
display("shown"); print("after", end=""); sys.stderr.write("error")
"""
    done = every.run(code)
    assert done.stdout == "python\nchild\nfrom C\nafter"
    assert done.stderr == "oops\nerror"


def test_errors_have_no_frames_of_the_kernel(every: KernelProcess) -> None:
    every.run("def f(key):\n    return {}[key]")
    done = every.run("x = 1\nf('a')")
    assert done.error is not None
    assert (done.status, done.error.name, done.error.value) == ("error", "KeyError", "'a'")
    assert "return {}[key]" in done.error.traceback
    assert done.error.traceback.count("File ") == 2
    assert "<string>" not in done.error.traceback
    ended = every.run("import sys; sys.exit(3)").error
    assert ended is not None and (ended.name, ended.value) == ("SystemExit", "3")
    assert every.run("x").text == "1"
    wrong = every.run("def f(:").error
    assert wrong is not None and wrong.name == "SyntaxError"
    assert wrong.traceback.startswith('  File "<run ') and "\n    def f(:" in wrong.traceback


def test_an_interrupt_between_two_lines_of_the_kernel_is_reported(kernel: KernelProcess) -> None:
    code = """
import sys
def interrupt(frame, event, argument):
    if frame.f_code.co_name == "rest":
        sys.setprofile(None)
        raise KeyboardInterrupt
sys.setprofile(interrupt)
"""
    done = kernel.run(code)
    assert done.status == "interrupted"
    assert done.error is not None and done.error.name == "KeyboardInterrupt"


def test_an_interrupt_ends_a_run_and_keeps_the_names(every: KernelProcess) -> None:
    every.run("x = 41")
    code = "print('on', flush=True)\nwhile True: pass"
    done = every.interrupted(code, after="on")
    assert done.error is not None
    assert (done.status, done.error.name) == ("interrupted", "KeyboardInterrupt")
    assert "in interrupt" not in done.error.traceback
    awaiting = "import asyncio\nprint('on', flush=True)\nawait asyncio.sleep(60)"
    assert every.interrupted(awaiting, after="on").status == "interrupted"
    assert every.run("x + 1").text == "42"


def test_an_interrupt_that_python_drops_comes_again(every: KernelProcess) -> None:
    """Python ignores it in a `__del__` and in callbacks of weak references."""
    slow = "class Slow:\n  def __del__(self):\n    print('on', flush=True)\n    while True: pass"
    done = every.interrupted(f"{slow}\nSlow()\nimport time\ntime.sleep(60)", after="on")
    assert (done.status, done.stderr) == ("interrupted", "")
    assert every.run("1 + 1").text == "2"


def test_input_is_empty_and_says_so(every: KernelProcess) -> None:
    done = every.run("import sys; print(repr(sys.stdin.read())); input('name? ')")
    assert done.stdout == "''\n"
    assert done.error is not None
    assert done.error.name == "EOFError"
    assert "has no input" in done.error.value
    assert every.run("import os; os.system('cat')").text == "0"


def test_a_fork_of_user_code_sends_no_messages(kernel: KernelProcess) -> None:
    code = "import os\npid = os.fork()\nprint('child' if not pid else os.waitpid(pid, 0)[1])"
    done = kernel.run(code)
    assert (sorted(done.stdout.split()), done.status) == (["0", "child"], "ok")
    done = kernel.run("pid = os.fork()\nif pid: os.waitpid(pid, 0)\n'once'")
    assert [each.text for each in done.shown] == ["'once'"]
    assert kernel.run("1 + 1").text == "2"


FORMS = """
class Rich:
    def __repr__(self): return "rich"
    def _repr_html_(self): return "<b>rich</b>"
    def _repr_markdown_(self): return "**rich**"
    def _repr_svg_(self): return "<svg/>"
    def _repr_png_(self): return b"\\x89PNG"
    def _repr_jpeg_(self): return b"\\xff\\xd8"
    def _repr_latex_(self): return "$x$"
    def _repr_json_(self): return {"a": [1, float("nan"), (2, "\\ud800")]}
    def _repr_pdf_(self): return b"%PDF"
    def _repr_javascript_(self): return "alert(1)"
Rich()
"""


def test_a_value_comes_in_every_form_it_offers(every: KernelProcess) -> None:
    (shown,) = every.run(FORMS).shown
    assert (shown.main, shown.text, shown.html) == (True, "rich", "<b>rich</b>")
    assert (shown.markdown, shown.svg, shown.latex) == ("**rich**", "<svg/>", "$x$")
    binary = [base64.b64decode(str(each)) for each in (shown.png, shown.jpeg, shown.pdf)]
    assert binary == [b"\x89PNG", b"\xff\xd8", b"%PDF"]
    assert plain(shown.json) == {"a": [1, None, [2, "?"]]}
    assert shown.javascript == "alert(1)"
    bundle = """
class Bundle:
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"text/html": "<i>", "text/plain": "plain", "application/x-other": "?"}, {}
display(1, 'two')
Bundle()
"""
    first, second, last = every.run(bundle).shown
    assert [(each.text, each.main) for each in (first, second)] == [("1", False), ("'two'", False)]
    assert (last.html, last.text, last.main) == ("<i>", "plain", True)


@pytest.mark.parametrize("raised", ["ValueError('no')", "SystemExit(1)"])
def test_an_error_in_one_form_leaves_the_others(kernel: KernelProcess, raised: str) -> None:
    code = f"""
class Bad:
    def __repr__(self): raise {raised}
    def _repr_html_(self): return "<b>"
    def _repr_png_(self): return 5
Bad()
"""
    done = kernel.run(code)
    (shown,) = done.shown
    errors = plain(shown.errors)
    assert done.status == "ok"
    assert (shown.html, shown.text) == ("<b>", msgspec.UNSET)
    assert errors["text"].startswith(raised.split("(")[0])
    assert errors["png"] == "TypeError: png as int, not as text or bytes"


def test_a_value_that_is_too_large_is_cut_or_an_error(kernel: KernelProcess) -> None:
    code = """
class Big:
    def __repr__(self): return "x" * 3_000_000
    def _repr_html_(self): return "y" * 5_000_000
    def _repr_json_(self): return ["z" * 100] * 20_000
Big()
"""
    (shown,) = kernel.run(code).shown
    assert str(shown.text).endswith("… (1951424 more characters)")
    assert plain(shown.errors) == {
        "html": "ValueError: too large: 5000000 characters, limit 4194304",
        "json": "too large: 2060001 bytes, limit 1048576",
    }


def test_a_table_has_its_columns_and_rows(kernel: KernelProcess) -> None:
    code = """
import types
class Part:
    columns, index = ["a", "b"], [0, 1]
    def itertuples(self, index, name): return iter([(1, "x"), (float("nan"), None)])
class Rows:
    def __getitem__(self, where): return Part()
class DataFrame:
    shape, iloc = (2000, 2), Rows()
    def __repr__(self): return "frame"
    def _repr_html_(self): return "<table>"
DataFrame.__module__ = "pandas.core.frame"
DataFrame()
"""
    (shown,) = kernel.run(code).shown
    assert shown.html == "<table>"
    assert plain(shown.data) == {
        "columns": ["a", "b"],
        "index": [0, 1],
        "rows": [[1, "x"], [None, None]],
        "total_rows": 2000,
        "total_columns": 2,
        "truncated": True,
    }


@pytest.fixture
def scientific(notebook: Path) -> Iterator[KernelProcess]:
    """A kernel with matplotlib and pandas."""
    with KernelProcess(
        "python", sys.executable, PYTHONPATH=str(notebook), MPLCONFIGDIR="/tmp/mpl"
    ) as kernel:
        yield kernel


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_frame_of_pandas_is_html_and_data(scientific: KernelProcess) -> None:
    frame = "import pandas as pd\npd.DataFrame({'n': [1, 2], 's': ['a', None]})"
    (shown,) = scientific.run(frame).shown
    assert "<table" in str(shown.html)
    data = plain(shown.data)
    assert (data["columns"], data["rows"]) == (["n", "s"], [[1, "a"], [2, None]])
    for missing in ("[1.5, None]", "[1.5, pd.NA]", "[1.5, pd.NaT]"):
        (series,) = scientific.run(f"pd.Series({missing}, name='v')").shown
        assert plain(series.data)["rows"] == [[1.5], [None]], missing


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_figure_is_an_image_and_a_chart(scientific: KernelProcess) -> None:
    line = """
import matplotlib.pyplot as plt
plt.plot([1, 2], [3, 4], label="up"); plt.title("T"); plt.xlabel("X"); plt.yscale("log")
"""
    (figure,) = [each for each in scientific.run(line).shown if not each.main]
    assert base64.b64decode(str(figure.png)).startswith(b"\x89PNG")
    chart = plain(figure.chart)
    ticks = {axis: (chart[axis].pop("ticks"), chart[axis].pop("tick_labels")) for axis in "xy"}
    assert ticks["x"][0][:2] == [0.8, 1.0] and ticks["x"][1][:2] == ["0.8", "1.0"]
    assert chart == {
        "type": "line",
        "title": "T",
        "x": {"label": "X", "scale": "linear"},
        "y": {"label": "", "scale": "log"},
        "series": [{"label": "up", "x": [1, 2], "y": [3, 4]}],
    }
    stacked = "plt.plot([0], [0]); plt.bar([1], [3]); plt.bar([1], [5], bottom=[3]);"
    (both,) = [plain(each.chart) for each in scientific.run(stacked).shown]
    assert [each["type"] for each in both["charts"]] == ["bar", "line"]
    assert [each.get("base") for each in both["charts"][0]["series"]] == [None, [3]]
    endless = scientific.run("import numpy\nplt.plot(numpy.array([1, numpy.inf]));")
    assert (endless.stderr, len(endless.shown)) == ("", 1)
    failed = scientific.run("plt.plot([1, 2]); 1 / 0")
    assert failed.status == "error" and [each.main for each in failed.shown] == [False]
    assert scientific.run("plt.get_fignums()").text == "[]"


def test_output_keeps_its_order_with_that_of_children(kernel: KernelProcess) -> None:
    mixed = "import os, subprocess, sys\nprint('A', end=''); os.system('echo B'); print('C')"
    assert kernel.run(mixed).stdout == "AB\nC\n"
    written = "sys.stdout.write('x'); subprocess.run(['echo', 'y']); None"
    assert kernel.run(written).stdout == "xy\n"
    child = "if os.fork() == 0: sys.stdout.flush(); os._exit(0)"
    forked = f"sys.stdout.write('once')\n{child}\nos.wait(); None"
    assert kernel.run(forked).stdout == "once"
