"""Capsule's Python kernel: runs pieces of code, one after the other, in one namespace.

Started as `python3 -u -c SOURCE`; any Python from 3.8 on, standard library only. It speaks what
spec/kernel.md says: requests come as lines of JSON on the standard input that it was born with,
answers go as marked chunks between the program's own output. User code sees an empty stdin.
"""

import ast
import binascii
import builtins
import json
import linecache
import os
import select
import signal
import sys
import threading
import traceback
import types

PIECE = 4096 - 22  # of a message; with its header, what a pipe takes whole or not at all
LONGEST_TEXT = 1 << 20
LARGEST_FORM = 4 << 20
LARGEST_RESULT = 6 << 20
LARGEST_JSON = 1 << 20
MOST_ROWS, MOST_COLUMNS, MOST_POINTS = 1000, 100, 10000
MOST_TICKS = 200
MOST_SOURCES = 500  # runs whose lines tracebacks can show
DEEPEST = 32

FORMS = ("html", "markdown", "svg", "png", "jpeg", "latex", "json", "pdf", "javascript")
MIME = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "text/latex": "latex",
    "application/json": "json",
    "application/pdf": "pdf",
    "application/javascript": "javascript",
}


class Last:
    """Goes with its exception: where that was swallowed, the next one is due."""

    def __init__(self, wire):
        self.wire = wire

    def __del__(self):
        if self.wire.running and self.wire.insisting and self.wire._is_main():
            self.wire.arm(sys._getframe(1))


class Wire:
    """The way out. A message that has begun is finished: an interrupt waits for its end."""

    def __init__(self):
        self.requests = os.fdopen(os.dup(0), "rb")
        self.out, self.err = os.dup(1), os.dup(2)  # not inherited by child processes
        self.marker = b"\0"
        self.running = self.pending = self.insisting = False
        self.run = 0
        self.shields = 0
        self.struck = self.alarm = None
        self._main = threading.get_ident()
        self._lock = threading.RLock()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)

    def __enter__(self):
        self.shields += self._is_main()

    def __exit__(self, *exc):
        self.shields -= self._is_main()
        if not self._is_main():
            return
        if not self.shields and self.pending:
            self.pending = False
            if self.running:
                self.strike()

    def _is_main(self):
        """Signals come to the main thread: no other can hold one off, or be hit by it."""
        return threading.get_ident() == self._main

    def interrupt(self, signum, frame):
        if self.shields:
            self.pending = True
        elif self.running:
            self.strike()

    def strike(self):
        """Told, so that nobody sends it again: a second one would hit what cleans up."""
        if self.insisting:
            raise self.unswallowed()
        self._put(self.out, {"k": "hit", "run": self.run})
        self.struck = KeyboardInterrupt()
        raise self.struck

    def insist(self, signum, frame):
        """Code may have swallowed its interrupt, or not wanted to hear of it. From now on another
        one follows each that is swallowed, so that it leaves its handlers and loops as well."""
        if not self.running:
            return
        if not self.insisting:
            self.insisting = True
            signal.signal(signal.SIGINT, self.interrupt)
            self.alarm = signal.signal(signal.SIGALRM, self.insist)
        signal.setitimer(signal.ITIMER_REAL, 0.001)  # for what keeps the exception
        if self.arm(frame):  # else it is on its way out
            self.interrupt(signum, None)

    def arm(self, frame):
        """Its next line raises. Whether there is code of its own at all."""
        theirs = False
        sys.settrace(self.trace)
        while frame is not None:
            if frame.f_globals is not globals():
                frame.f_trace, theirs = self.trace, True
            frame = frame.f_back
        return theirs

    def trace(self, frame, event, arg):
        if not self.running or frame.f_globals is globals():
            return None
        if event == "exception":
            return self.trace
        raise self.unswallowed()  # which ends the tracing

    def unswallowed(self):
        interrupt = KeyboardInterrupt()
        interrupt.last = Last(self)
        return interrupt

    def rest(self):
        """The run is over."""
        self.running = False
        if self.insisting:
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self.alarm or signal.SIG_DFL)
            self.insisting = False

    def dropped(self, what):
        """Python ignores what is raised in a `__del__`, or when a weak reference goes: then we try
        again, a moment later and elsewhere."""
        if self.struck is None or what.exc_value is not self.struck:
            return sys.__unraisablehook__(what)
        again = threading.Timer(0.01, self.strike_again, (self.run,))
        again.daemon = True
        again.start()

    def strike_again(self, run):
        if self.running and self.run == run:
            os.kill(os.getpid(), signal.SIGINT)

    def send(self, message, fd=None):
        with self, self._lock:
            flush()  # what was printed before comes before
            self._put(self.out if fd is None else fd, message)

    def _put(self, fd, message):
        data = json.dumps(message, separators=(",", ":")).encode("ascii")
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            first, last = start == 0, start + PIECE >= len(data)
            flag = b"MEBS"[2 * first + last : 2 * first + last + 1]
            self._write(fd, b"%s%s%04x" % (self.marker, flag, len(piece)) + piece)

    def _write(self, fd, data):
        while True:
            try:
                os.write(fd, data)
                return
            except BlockingIOError:  # a child made the pipe non-blocking; so small a write is whole
                select.select([], [fd], [])


flush_c = None  # C's fflush, where it can be had


def flush():
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:  # the user's own object, or one that is closed
            pass
    if flush_c is not None:
        flush_c(None)


# Before these happen, what was printed so far is told: others write to the same streams, or it
# would wait as long as the code does. Of the last there is word from Python 3.11 on.
TOLD_BEFORE = frozenset(
    "os.exec os.posix_spawn os.spawn os.system pty.spawn subprocess.Popen time.sleep".split()
)


def flush_in_time():
    """Lines come one by one; one that is not finished comes as soon as it makes a difference."""
    import builtins
    import functools

    original = builtins.print

    @functools.wraps(original)
    def print(*values, **options):
        end, file = options.get("end"), options.get("file") or sys.stdout
        unfinished = isinstance(end, str) and not end.endswith("\n")
        if unfinished and (file is sys.__stdout__ or file is sys.__stderr__):
            options["flush"] = True
        original(*values, **options)

    builtins.print = print
    os.register_at_fork(before=flush)  # or both would tell it
    if hasattr(sys, "addaudithook"):
        sys.addaudithook(lambda event, args: event in TOLD_BEFORE and flush())


def flush_c_streams():
    """C's own streams, which know nothing of Python's: line by line from now on."""
    try:
        import ctypes

        libc = ctypes.CDLL(None)
        out = ctypes.c_void_p.in_dll(libc, "stdout")
        libc.setvbuf(out, None, 1, 0)  # _IOLBF
        return libc.fflush
    except (ImportError, OSError, ValueError, AttributeError):
        return None


def clean(value, depth=0):
    """Something JSON has a word for: what is missing is null, what is unknown is its text."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else str(value)
    if isinstance(value, float):
        value = float(value)  # numpy's own would warn of what is infinite
        return value if value - value == 0 else None
    if depth < DEEPEST:
        if isinstance(value, dict):
            return {text_of(str(k)): clean(v, depth + 1) for k, v in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [clean(each, depth + 1) for each in value]
    item = getattr(type(value), "item", None)  # numpy's numbers
    if item is not None and getattr(value, "ndim", 1) == 0:
        return clean(item(value), DEEPEST)
    if type(value).__name__ in ("NAType", "NaTType"):  # of pandas
        return None
    return text_of(str(value))


def text_of(text):
    """Without lone surrogates, which are no characters, and not too long."""
    text = str.encode(text, "utf-8", "replace").decode()
    if len(text) > LONGEST_TEXT:
        more = len(text) - LONGEST_TEXT
        text = text[:LONGEST_TEXT] + f"… ({more} more characters)"
    return text


def brief(error):
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be had)"
    return text_of(f"{type(error).__name__}: {text}")[:1000]


class Result:
    """A value in every form it offers. What goes wrong with a form is told in `errors`."""

    def __init__(self, value, run, main):
        self.body = {"k": "result", "run": run, "main": main}
        self.errors = {}
        if not isinstance(value, Bundle):
            self._add("text", lambda: text_of(repr(value)))
        if not isinstance(value, type):
            self._bundle(value)
            for form in FORMS:
                method = getattr(type(value), f"_repr_{form}_", None)
                if form not in self.body and callable(method):
                    self._add(form, lambda form=form, method=method: encoded(form, method(value)))
            self._add("png", lambda: figure_png(value) if is_figure(value) else None)
            self._add("chart", lambda: figure_chart(value) if is_figure(value) else None)
            self._add("data", lambda: table(value))
        self._fit()

    def _add(self, form, make):
        if form in self.body:
            return
        try:
            made = make()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.errors[form] = brief(error)
            return
        if made is not None:
            self.body[form] = made

    def _bundle(self, value):
        method = getattr(type(value), "_repr_mimebundle_", None)
        if not callable(method):
            return
        try:
            bundle = method(value, include=None, exclude=None)
            bundle = bundle[0] if isinstance(bundle, tuple) else bundle
            found = [(MIME.get(key), content) for key, content in dict(bundle or {}).items()]
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.errors["bundle"] = brief(error)
            return
        for form, content in found:
            if form is not None:
                self.body.pop(form, None)
                self._add(form, lambda form=form, content=content: encoded(form, content))

    def _fit(self):
        left = LARGEST_RESULT
        for form in [key for key in self.body if key not in ("k", "run", "main")]:
            size = len(json.dumps(self.body[form], separators=(",", ":")))
            most = LARGEST_JSON if form in ("json", "data", "chart") else LARGEST_FORM
            if size > min(most, left):
                del self.body[form]
                self.errors[form] = f"too large: {size} bytes, limit {most}"
            else:
                left -= size
        if self.errors:
            self.body["errors"] = self.errors


def encoded(form, content):
    if isinstance(content, tuple):  # the content, and what is to be known about it
        content = content[0]
    if content is None:
        return None
    if form == "json":
        return clean(json.loads(content) if isinstance(content, str) else content)
    if isinstance(content, (bytes, bytearray)):
        if form in ("png", "jpeg", "pdf"):
            return binascii.b2a_base64(content, newline=False).decode("ascii")
        content = bytes(content).decode("utf-8", "replace")
    if not isinstance(content, str):
        raise TypeError(f"{form} as {type(content).__name__}, not as text or bytes")
    if len(content) > LARGEST_FORM:
        raise ValueError(f"too large: {len(content)} characters, limit {LARGEST_FORM}")
    return str.encode(content, "utf-8", "replace").decode()


def is_a(value, module, name):
    """Without importing anything: by the names of its classes."""
    return any(
        cls.__name__ == name and (cls.__module__ or "").split(".")[0] == module
        for cls in type(value).__mro__
    )


def table(value):
    if is_a(value, "pandas", "Series"):
        value = value.to_frame()
    elif not is_a(value, "pandas", "DataFrame"):
        return None
    rows, columns = value.shape
    part = value.iloc[:MOST_ROWS, :MOST_COLUMNS]
    return {
        "columns": [text_of(str(name)) for name in part.columns],
        "index": [clean(each, DEEPEST) for each in part.index],
        "rows": [[clean(c, DEEPEST) for c in row] for row in part.itertuples(False, None)],
        "total_rows": int(rows),
        "total_columns": int(columns),
        "truncated": rows > MOST_ROWS or columns > MOST_COLUMNS,
    }


def is_figure(value):
    return is_a(value, "matplotlib", "Figure") and hasattr(value, "savefig")


def figure_png(figure):
    import io

    picture = io.BytesIO()
    figure.savefig(picture, format="png", bbox_inches="tight")
    return encoded("png", picture.getvalue())


def figure_chart(figure):
    title = getattr(figure, "_suptitle", None)
    drawn = [axes for axes in figure.axes[:50] if axes.has_data()]
    every = [chart for axes in drawn for chart in axes_charts(axes)]
    charts = [chart for chart in every if chart["type"] != "unknown"] or every[:1]
    if not charts:
        return None
    if len(charts) == 1:
        return charts[0]
    return {
        "type": "several",
        "title": text_of(title.get_text()) if title else "",
        "charts": charts,
    }


def axes_charts(axes):
    """One of each kind that is drawn there: dots and a line through them are two."""
    about = {
        "title": text_of(axes.get_title()),
        "x": axis_of(axes.xaxis, axes.get_xlabel()),
        "y": axis_of(axes.yaxis, axes.get_ylabel()),
    }
    return [{"type": kind, **about, "series": series} for kind, series in axes_series(axes)]


def axis_of(axis, label):
    places = list(axis.get_ticklocs())[:MOST_TICKS]
    scale = scale_of(axis)
    if scale == "datetime":
        places = as_given(axis, places)
    names = [text_of(tick.get_text()) for tick in axis.get_ticklabels()[:MOST_TICKS]]
    return {
        "label": text_of(label),
        "scale": scale,
        "ticks": [clean(place, DEEPEST) for place in places],
        "tick_labels": names,
    }


def scale_of(axis):
    """Dates and names are numbers to matplotlib; what they were, its converter knows."""
    converter = axis.get_converter() if hasattr(axis, "get_converter") else axis.converter
    kind = type(converter).__name__
    if "Date" in kind:
        return "datetime"
    return "categorical" if kind == "StrCategoryConverter" else axis.get_scale()


def as_given(axis, numbers):
    scale = scale_of(axis)
    if scale == "datetime":
        dates = sys.modules["matplotlib.dates"]
        return [dates.num2date(each).isoformat() for each in numbers]
    if scale == "categorical":
        names = {place: name for name, place in axis.units._mapping.items()}
        return [names.get(each, each) for each in numbers]
    return numbers


def axes_series(axes):
    if getattr(axes, "name", "") == "3d":
        return [("unknown", [])]  # what it has are points on the paper
    boxes = getattr(axes, "_capsule_boxes", None)
    if boxes:
        return [("box", boxes)]
    wedges = [patch for patch in axes.patches if is_a(patch, "matplotlib", "Wedge")]
    if wedges:
        parts = [
            {"label": label_of(each), "value": (each.theta2 - each.theta1) / 360} for each in wedges
        ]
        return [("pie", parts)]
    bars = [each for each in axes.containers if is_a(each, "matplotlib", "BarContainer")]
    dots = [each for each in axes.collections if is_a(each, "matplotlib", "PathCollection")]
    found = [
        ("bar", [bar_series(axes, each) for each in bars[:100]]),
        ("line", line_series(axes)),
        ("scatter", [dot_series(axes, each) for each in dots[:100]]),
    ]
    return [(kind, series) for kind, series in found if series] or [("unknown", [])]


def line_series(axes):
    """Caps of error bars and the ground of stems are none; the label is their container's."""
    labels, parts = {}, set()
    for each in axes.containers:
        if is_a(each, "matplotlib", "ErrorbarContainer"):
            data, caps = each.lines[:2]
            labels[data] = label_of(each)
            parts.update(caps)
        elif is_a(each, "matplotlib", "StemContainer"):
            labels[each.markerline] = label_of(each)
            parts.add(each.baseline)
    lines = [line for line in axes.lines if line not in parts and len(line.get_xdata())]
    return [
        {"label": labels.get(line) or label_of(line), **line_points(axes, line)}
        for line in lines[:100]
    ]


def dot_series(axes, dots):
    at = dots.get_offsets()
    return {"label": label_of(dots), **points(axes, [p[0] for p in at], [p[1] for p in at])}


def bar_series(axes, container):
    """Horizontal bars are told by the axis that their lengths are measured on. Those that do not
    begin at zero have a base, stacked ones for instance."""
    across = getattr(container, "orientation", None) == "horizontal"
    bars = container.patches[:MOST_POINTS]
    if across:
        middles = [float(bar.get_y() + bar.get_height() / 2) for bar in bars]
    else:
        middles = [float(bar.get_x() + bar.get_width() / 2) for bar in bars]
    series = {
        "label": label_of(container),
        "x": bar_names(axes.yaxis if across else axes.xaxis, middles),
        "y": [clean(float(bar.get_width() if across else bar.get_height())) for bar in bars],
    }
    if across:
        series["horizontal"] = True
    begin = [float(bar.get_x() if across else bar.get_y()) for bar in bars]
    if any(begin):
        given = as_given(axes.xaxis if across else axes.yaxis, begin)
        series["base"] = [clean(each, DEEPEST) for each in given]
    return series


def bar_names(axis, middles):
    """What stands below each: a name, where the axis has names; else the number or date."""
    formatter = axis.get_major_formatter()
    numbers = [is_a(formatter, "matplotlib", kind) for kind in ("ScalarFormatter", "LogFormatter")]
    if scale_of(axis) == "datetime" or any(numbers):
        return [clean(each) for each in as_given(axis, middles)]
    side = 1 if axis.axis_name == "y" else 0
    ticks = axis.get_ticklabels()
    names = {round(float(tick.get_position()[side]), 6): tick.get_text() for tick in ticks}
    return [names.get(round(middle, 6)) or clean(middle) for middle in middles]


def line_points(axes, line):
    where = line.get_transform()
    if not all(where.contains_branch_seperately(axes.transData)):
        # From edge to edge, such as axhline's: told as what it covers.
        axes.get_xlim()  # which also makes them fit, if nobody has yet
        covered = axes.transData.inverted().transform(where.transform(line.get_xydata()))
        return points(axes, [p[0] for p in covered], [p[1] for p in covered])
    plain = scale_of(axes.xaxis) != "datetime" and scale_of(axes.yaxis) != "datetime"
    return points(axes, line.get_xdata(orig=plain), line.get_ydata(orig=plain))


def points(axes, xs, ys):
    most = MOST_POINTS
    xs, ys = as_given(axes.xaxis, list(xs)[:most]), as_given(axes.yaxis, list(ys)[:most])
    return {"x": [clean(x, DEEPEST) for x in xs], "y": [clean(y, DEEPEST) for y in ys]}


def label_of(artist):
    label = text_of(str(artist.get_label() or ""))
    return "" if label.startswith("_") else label


class ImportHook:
    """Calls `loaded` with a module when it is imported for the first time."""

    def __init__(self, module, loaded):
        self._module = module
        self._loaded = loaded

    def find_spec(self, name, path=None, target=None):
        if name != self._module:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                self._loaded(module)

            spec.loader.exec_module = exec_module
        return spec


def hook_pyplot(pyplot, show):
    """`show` sends the figures, and box plots remember their numbers."""
    pyplot.show = lambda *args, **kwargs: show()
    axes = sys.modules["matplotlib.axes"].Axes
    draw = axes.bxp

    def bxp(self, bxpstats, *args, **kwargs):
        names = {"whislo": "low", "q1": "q1", "med": "median", "q3": "q3", "whishi": "high"}
        known = getattr(self, "_capsule_boxes", [])
        for stats in bxpstats[:1000]:
            box = {new: clean(stats.get(old), DEEPEST) for old, new in names.items()}
            box["label"] = text_of(str(stats.get("label", "") or ""))
            box["outliers"] = [clean(y, DEEPEST) for y in list(stats.get("fliers", ()))[:1000]]
            if box not in known:  # one that is drawn over itself, in another color
                known.append(box)
        self._capsule_boxes = known
        return draw(self, bxpstats, *args, **kwargs)

    axes.bxp = bxp


def hook_pillow(pillow, display):
    """There is no screen: an image that is shown, or saved as a file, is a result."""
    save = pillow.Image.save

    def shown_save(self, fp, *args, **kwargs):
        save(self, fp, *args, **kwargs)
        asked = sys._getframe(1).f_globals.get("__name__") == "__main__"  # and no library
        if asked and isinstance(fp, (str, bytes, os.PathLike)):
            display(self)

    pillow.Image.save = shown_save
    pillow.Image.show = lambda self, *args, **kwargs: display(self)


class Bundle:
    """Forms by their MIME types, and no other."""

    def __init__(self, forms):
        self._forms = forms

    def _repr_mimebundle_(self, include=None, exclude=None):
        return self._forms


MARKUP = {
    "HTML": "text/html",
    "Markdown": "text/markdown",
    "Latex": "text/latex",
    "SVG": "image/svg+xml",
    "Javascript": "application/javascript",
    "JSON": "application/json",
    "Pretty": "text/plain",
}


class Notebook:
    """Finds `IPython` and `IPython.display` where there is none: code that was written for
    notebooks shows its results with them.
    """

    def __init__(self, display):
        self._display = display

    def find_spec(self, name, path=None, target=None):
        if name not in ("IPython", "IPython.display"):
            return None
        import importlib.machinery

        return importlib.machinery.ModuleSpec(name, self, is_package=name == "IPython")

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.display = self._display
        if module.__name__ == "IPython":
            module.get_ipython = lambda: None
            module.version_info, module.__version__ = (9, 0, 0, ""), "9.0.0"  # libraries look
            return
        for name, mime in MARKUP.items():
            setattr(module, name, self._form(name, mime))
        module.Image = self._image
        module.clear_output = lambda *args, **kwargs: None
        for name in ("html", "markdown", "svg", "png", "jpeg", "latex", "json", "javascript"):
            setattr(module, f"display_{name}", self._display)

    def _form(self, name, mime):
        def init(self, data=None, url=None, filename=None, **how):
            if filename is not None:
                with open(filename, encoding="utf-8") as file:
                    data = file.read()
            self.data = data

        def bundle(self, include=None, exclude=None):
            return {mime: self.data}

        body = {"__init__": init, "_repr_mimebundle_": bundle, "__module__": "IPython.display"}
        return type(name, (), body)

    @staticmethod
    def _image(data=None, url=None, filename=None, **how):
        path = filename if filename is not None else data
        if isinstance(path, str):
            with open(path, "rb") as file:
                data = file.read()
        kind = "image/jpeg" if data[:2] == b"\xff\xd8" else "image/png"
        return Bundle({kind: data})


class Kernel:
    def __init__(self, wire):
        self.wire = wire
        self.pid = os.getpid()
        self.run = 0
        self.future = future_flags()
        self.flags = 0  # of `from __future__`, which hold on
        self.loop = None
        self.sources = []
        self.main = types.ModuleType("__main__")
        self.names = self.main.__dict__
        self.own = sys.modules["__main__"]  # ours, or its names would go with it
        sys.modules["__main__"] = self.main
        builtins.display = self.display
        builtins.input = no_input

    def serve(self):
        signal.signal(signal.SIGINT, self.wire.interrupt)
        signal.signal(signal.SIGQUIT, self.wire.insist)
        sys.unraisablehook = self.wire.dropped
        self.hello(json.loads(self.wire.requests.readline()))
        for line in self.wire.requests:
            try:
                request = json.loads(line)
                op, self.run = request["op"], request["run"]
                code, env = request.get("code", ""), request.get("env", {})
            except (ValueError, KeyError, TypeError):
                continue  # half a line, from a server that died while it wrote
            end = {"k": "sync", "run": self.run} if op == "sync" else self.within(env, code)
            if os.getpid() != self.pid:  # user code forked, and this is the child
                flush()
                os._exit(0)
            self.wire.send({"k": end["k"], "run": self.run}, self.wire.err)
            self.wire.send(end)

    def hello(self, request):
        import importlib

        self.wire.marker = b"\0" + request["nonce"].encode("ascii")
        failed = {}
        for name in request.get("imports", ()):
            try:
                importlib.import_module(name)
            except BaseException as error:
                failed[name] = brief(error)
        version = ".".join(map(str, sys.version_info[:3]))
        self.wire.send({"k": "ready", "version": version, "failed": failed})

    def within(self, env, code):
        """With these variables; afterwards they are as they were before."""
        if not env:
            return self.guarded(code)
        before = {name: os.environ.get(name) for name in env}
        os.environ.update(env)
        try:
            return self.guarded(code)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def guarded(self, code):
        try:
            return self.execute(code)
        except KeyboardInterrupt as error:  # it came between two lines of ours
            self.wire.rest()
            self.report(error)
            return {"k": "end", "run": self.run, "status": "interrupted"}

    def execute(self, code):
        signal.signal(signal.SIGINT, self.wire.interrupt)
        self.wire.run, self.wire.pending = self.run, False
        status = "ok"
        for part in (lambda: self.conclude(code), self.show_figures):
            self.wire.running = True
            try:
                part()
            except BaseException as error:
                self.wire.rest()
                if status == "ok" and os.getpid() == self.pid:
                    self.report(error)
                status = "interrupted" if isinstance(error, KeyboardInterrupt) else "error"
            self.wire.rest()
            if status == "interrupted" or os.getpid() != self.pid:
                break
        return {"k": "end", "run": self.run, "status": status}

    def conclude(self, code):
        value = self.evaluate(code)
        if value is not None and os.getpid() == self.pid:
            self.names["_"] = value
            self.tell(value, main=True)

    def evaluate(self, code):
        name = f"<run {self.run}>"
        self.remember(name, code)
        flags = self.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree = compile(code, name, "exec", flags | ast.PyCF_ONLY_AST, True)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not code.rstrip().endswith(";"):
            last = ast.Expression(tree.body.pop().value)
        parts = [compile(tree, name, "exec", flags, True)]
        self.flags |= parts[0].co_flags & self.future
        if last is not None:
            parts.append(compile(last, name, "eval", flags | self.flags, True))
        if any(awaits(part) for part in parts):
            return self.wait_for(self.one_by_one(parts))
        return [eval(part, self.names) for part in parts][-1]

    async def one_by_one(self, parts):
        """Those that await nothing as well: what they start is to run in the loop of the others."""
        for part in parts:
            value = eval(part, self.names)
            if awaits(part):
                value = await value
        return value

    def wait_for(self, coroutine):
        import asyncio

        if self.loop is None or self.loop.is_closed():
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(coroutine)
        try:
            return self.loop.run_until_complete(task)
        except BaseException:
            if not task.done():  # interrupted: it must not go on when the loop does
                task.cancel()
                self.loop.run_until_complete(asyncio.wait({task}, timeout=1))
            elif not task.cancelled():
                task.exception()  # or it would be logged as one that nobody saw
            raise

    def remember(self, name, code):
        linecache.cache[name] = (len(code), None, [s + "\n" for s in code.split("\n")], name)
        self.sources.append(name)
        if len(self.sources) > MOST_SOURCES:
            linecache.cache.pop(self.sources.pop(0), None)

    def display(self, *values, raw=False, **how):
        """Show values as results, in every form they offer; `raw` ones are these forms."""
        for value in values:
            self.tell(Bundle(value) if raw else value, main=False)

    def tell(self, value, main):
        self.wire.send(Result(value, self.run, main).body)
        if is_figure(value) and "matplotlib.pyplot" in sys.modules:
            sys.modules["matplotlib.pyplot"].close(value)

    def show_figures(self):
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None or not hasattr(pyplot, "get_fignums"):
            return
        for number in pyplot.get_fignums():
            self.tell(pyplot.figure(number), main=False)

    def report(self, error):
        try:
            lines = traceback.format_exception(type(error), error, own_frames(error.__traceback__))
            value = str(error)
        except Exception:  # whatever its text raises
            lines, value = [brief(error) + "\n"], "(its text cannot be had)"
        body = {"k": "error", "run": self.run, "name": text_of(type(error).__name__)}
        body["value"], body["traceback"] = text_of(value)[:65536], text_of("".join(lines))[-262144:]
        self.wire.send(body)


def awaits(code):
    """Whether it has a top-level await."""
    return bool(code.co_flags & 0x80)  # CO_COROUTINE


def own_frames(tb):
    """From the run's own code on, and without our functions that it called."""
    while tb is not None and not tb.tb_frame.f_code.co_filename.startswith("<run "):
        tb = tb.tb_next
    kept = []
    while tb is not None:
        if tb.tb_frame.f_globals is not globals():
            kept.append(tb)
        tb = tb.tb_next
    for each in reversed(kept):
        tb = types.TracebackType(tb, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return tb


def no_input(prompt=""):
    raise EOFError("code in a context has no input; give it its values as variables")


def future_flags():
    import __future__

    names = __future__.all_feature_names
    mask = 0
    for name in names:
        mask |= getattr(__future__, name).compiler_flag
    return mask & ~0x30  # two of the oldest share their bits with flags of code objects


def main():
    global flush_c
    flush_c = flush_c_streams()
    for stream in (sys.stdout, sys.stderr):  # a line at a time, as on a terminal, not word by word
        stream.reconfigure(line_buffering=True, write_through=False)
    flush_in_time()
    os.environ.setdefault("MPLBACKEND", "Agg")
    kernel = Kernel(Wire())
    shown, display = kernel.show_figures, kernel.display
    sys.meta_path.insert(0, ImportHook("matplotlib.pyplot", lambda it: hook_pyplot(it, shown)))
    sys.meta_path.insert(0, ImportHook("PIL.Image", lambda it: hook_pillow(it, display)))
    sys.meta_path.append(Notebook(display))
    kernel.serve()


if __name__ == "__main__":
    main()
