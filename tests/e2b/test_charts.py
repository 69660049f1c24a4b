"""Figures of matplotlib and images of Pillow, through the SDK of E2B's code interpreter.

What becomes of each kind of chart is in tests/unit: test_kernel_python.py and test_e2b_charts.py.
"""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b_code_interpreter import Sandbox
from e2b_code_interpreter.charts import BarChart, LineChart, SuperChart

from tests.e2b.conftest import parameters
from tests.support.servers import RealServer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(60)]

PACKAGES = "/home/user/packages"
NOT_NEEDED = {"tests", "__pycache__", "include", "pandas", "pandas.libs"}  # most of the bytes


def packed(folder: Path) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.add(folder, ".", filter=lambda file: None if _last(file) in NOT_NEEDED else file)
    return content.getvalue()


def _last(member: tarfile.TarInfo) -> str:
    return member.name.rpartition("/")[2]


@pytest.fixture(scope="module")
def drawing(server: RealServer, notebook: Path) -> Iterator[Sandbox]:
    tar = packed(notebook)
    variables = {"PYTHONPATH": PACKAGES, "MPLCONFIGDIR": "/tmp"}
    made = Sandbox.create(timeout=600, envs=variables, **parameters(server))
    try:
        made.files.write("/tmp/packages.tar", tar)
        made.commands.run(f"mkdir {PACKAGES} && tar xf /tmp/packages.tar -C {PACKAGES}")
        made.run_code("import matplotlib.pyplot as plt, numpy as np", timeout=60)
        yield made
    finally:
        made.kill()


def test_a_figure_is_a_picture_and_a_chart(drawing: Sandbox) -> None:
    code = """
fig, (one, two) = plt.subplots(1, 2)
fig.suptitle('Both')
one.plot([1, 2], [10, 100], label='up'); one.set_title('One'); one.set_xlabel('t [s]')
two.bar(['x', 'y'], [3, 5])
plt.show()
"""
    ran = drawing.run_code(code)
    assert ran.error is None, ran.error
    (result,) = ran.results
    assert base64.b64decode(str(result.png)).startswith(b"\x89PNG")
    chart = result.chart
    assert isinstance(chart, SuperChart) and chart.title == "Both"
    lines, bars = chart.elements
    assert isinstance(lines, LineChart) and isinstance(bars, BarChart)
    assert (lines.title, lines.x_unit, lines.elements[0].label) == ("One", "s", "up")
    assert lines.elements[0].points == [(1, 10), (2, 100)]
    assert [(bar.label, bar.value) for bar in bars.elements] == [("x", 3), ("y", 5)]


def test_an_image_that_is_shown_or_saved(drawing: Sandbox) -> None:
    drawing.run_code("from PIL import Image\nimage = Image.new('RGB', (8, 8))")
    for how in ("image", "image.show()", "image.save('made.png')", "display(image)"):
        ran = drawing.run_code(how)
        assert [bool(result.png) for result in ran.results] == [True], how
    # A figure that a library saves is not meant to be shown.
    drawing.run_code("plt.plot([1])\nplt.savefig('figure.png')\nplt.close()")
    ran = drawing.run_code("fig = plt.figure(); fig.savefig('empty.png'); plt.close()")
    assert ran.results == []
