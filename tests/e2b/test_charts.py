"""Figures of matplotlib and images of Pillow, through the SDK of E2B's code interpreter."""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b_code_interpreter import Sandbox
from e2b_code_interpreter.charts import (
    BarChart,
    BoxAndWhiskerChart,
    Chart,
    ChartType,
    LineChart,
    PieChart,
    ScatterChart,
    SuperChart,
)

from tests.e2b.conftest import parameters
from tests.support.servers import RealServer

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(60)]

PACKAGES = "/home/user/packages"


def packed(folder: Path) -> bytes:
    """Without what is not needed to draw, which is most of it."""
    left_out = {"tests", "__pycache__", "include", "pandas", "pandas.libs"}
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        tar.add(folder, ".", filter=lambda each: None if _last(each) in left_out else each)
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


def draw(sandbox: Sandbox, code: str) -> Any:
    """The chart of a run's only result, which is a picture as well."""
    ran = sandbox.run_code(code)
    assert ran.error is None, ran.error
    (result,) = ran.results
    assert base64.b64decode(str(result.png)).startswith(b"\x89PNG")
    return result.chart


def test_bars(drawing: Sandbox) -> None:
    chart = draw(drawing, "plt.bar(['x', 'y'], [3, 5]); plt.ylabel('height (m)'); plt.show()")
    assert isinstance(chart, BarChart) and chart.type == ChartType.BAR
    assert (chart.title, chart.x_label, chart.y_label, chart.y_unit) == (
        None,
        None,
        "height (m)",
        "m",
    )
    assert [(bar.label, bar.value, bar.group) for bar in chart.elements] == [
        ("x", 3, "Group 0"),
        ("y", 5, "Group 0"),
    ]
    lying = draw(drawing, "plt.barh(['x'], [3], label='g'); plt.xlabel('width'); plt.show()")
    assert (lying.x_label, lying.y_label) == (None, "width")
    assert [(bar.label, bar.value, bar.group) for bar in lying.elements] == [("x", 3, "g")]


def test_lines(drawing: Sandbox) -> None:
    code = "plt.plot([1, 2], [10, 100], label='up'); plt.plot([1, 2], [5, 5.5])\n"
    chart = draw(drawing, code + "plt.title('T'); plt.xlabel('t [s]'); plt.yscale('log')")
    assert isinstance(chart, LineChart)
    assert (chart.title, chart.x_unit, chart.x_scale, chart.y_scale) == ("T", "s", "linear", "log")
    assert [line.label for line in chart.elements] == ["up", "Line 1"]
    assert chart.elements[0].points == [(1, 10), (2, 100)]
    numbers = [*chart.x_ticks, *chart.y_ticks, *chart.elements[0].points[0]]
    assert all(isinstance(each, float) for each in numbers)


def test_dates_and_names_on_an_axis(drawing: Sandbox) -> None:
    code = "import datetime as d\nplt.plot([d.date(2024, 1, 1), d.date(2024, 1, 3)], ['p', 'q'])"
    chart = draw(drawing, code + "\nplt.show()")
    assert (chart.x_scale, chart.y_scale) == ("datetime", "categorical")
    assert chart.elements[0].points[1] == ("2024-01-03T00:00:00+00:00", "q")
    assert str(chart.x_ticks[0]).startswith("20") and chart.y_tick_labels == ["p", "q"]


def test_dots(drawing: Sandbox) -> None:
    code = "plt.scatter(np.arange(4), np.arange(4) / 2, label='four'); plt.show()"
    chart = draw(drawing, code)
    assert isinstance(chart, ScatterChart)
    assert [(each.label, each.points[3]) for each in chart.elements] == [("four", (3.0, 1.5))]


def test_a_pie(drawing: Sandbox) -> None:
    chart = draw(drawing, "plt.pie([9, 1], labels=['most', 'rest'], startangle=90); plt.show()")
    assert isinstance(chart, PieChart)
    told = [(each.label, round(each.angle, 4), each.radius) for each in chart.elements]
    assert told == [("most", 324, 1), ("rest", 36, 1)]


def test_boxes_that_are_drawn_twice_are_told_once(drawing: Sandbox) -> None:
    code = "data = [[1, 2, 3, 4, 50], [2, 4]]\nfig, axes = plt.subplots()\n"
    twice = "axes.boxplot(data)\naxes.boxplot(data, patch_artist=True)\nplt.show()"
    chart = draw(drawing, code + twice)
    assert isinstance(chart, BoxAndWhiskerChart)
    first, second = chart.elements
    assert (first.min, first.median, first.max, first.outliers) == (1.0, 3.0, 4.0, [50.0])
    assert isinstance(first.min, float) and (second.first_quartile, second.max) == (2.5, 4.0)


def test_several_in_one_figure(drawing: Sandbox) -> None:
    code = "fig, (one, two) = plt.subplots(1, 2)\nfig.suptitle('Both')\none.set_title('One')\n"
    chart = draw(drawing, code + "one.plot([1, 2])\ntwo.scatter([1], [2])\nplt.show()")
    assert isinstance(chart, SuperChart) and chart.title == "Both"
    first, second = chart.elements
    assert isinstance(first, LineChart) and first.title == "One"
    assert isinstance(second, ScatterChart) and second.x_label is None


def test_a_figure_of_another_kind(drawing: Sandbox) -> None:
    code = "fig, axes = plt.subplots()\naxes.add_patch(plt.Circle((0, 0), 1))\n"
    chart = draw(drawing, code + "plt.title('Round')\nplt.show()")
    assert isinstance(chart, Chart)
    assert (chart.type, chart.title, chart.elements) == (ChartType.UNKNOWN, "Round", [])


def test_an_image_that_is_shown_or_saved(drawing: Sandbox) -> None:
    drawing.run_code("from PIL import Image\nimage = Image.new('RGB', (8, 8))")
    for how in ("image", "image.show()", "image.save('made.png')", "display(image)"):
        ran = drawing.run_code(how)
        assert [bool(result.png) for result in ran.results] == [True], how
    # A library that saves one asks nobody to look at it.
    drawing.run_code("plt.plot([1])\nplt.savefig('figure.png')\nplt.close()")
    ran = drawing.run_code("fig = plt.figure(); fig.savefig('empty.png'); plt.close()")
    assert ran.results == []
