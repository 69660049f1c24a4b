"""`sandbox.pty` of E2B's SDK: terminals."""

from __future__ import annotations

import pytest
from e2b import (
    CommandExitException,
    CommandHandle,
    PtySize,
    Sandbox,
)

pytestmark = pytest.mark.real


def test_a_terminal_is_typed_into_resized_and_ends(shared: Sandbox) -> None:
    handle = shared.pty.create(PtySize(rows=30, cols=100), envs={"WHO": "me"}, cwd="/tmp")
    # bash gets and sets the size before each prompt, and so may undo a resize that comes between.
    shared.pty.send_stdin(handle.pid, b"exec sh\ntty; stty size; echo $WHO; pwd; echo $TERM\n")
    text = until(handle, "\nxterm-256color")
    for part in ("/dev/pts/", "30 100", "me", "/tmp"):
        assert part in text
    shared.pty.resize(handle.pid, PtySize(rows=40, cols=120))
    shared.pty.send_stdin(handle.pid, b"stty size; exit 7\n")
    assert "40 120" in until(handle, "40 120")
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert ended.value.exit_code == 7


def until(handle: CommandHandle[str], text: str) -> str:
    """What it shows, up to `text`."""
    shown = b""
    for _, _, data in handle:
        shown += data or b""
        if text in shown.decode(errors="replace").replace("\r", ""):
            break
    return shown.decode(errors="replace").replace("\r", "")


def test_a_terminal_goes_on_without_its_viewer(shared: Sandbox) -> None:
    handle = shared.pty.create(PtySize(rows=24, cols=80), timeout=0)
    assert handle.pid in [each.pid for each in shared.commands.list()]
    handle.disconnect()
    again = shared.pty.connect(handle.pid)
    shared.pty.stream_input(handle.pid, [b"echo still ", b"$((20 + 22))\n", b"exit\n"])
    shown: list[bytes] = []
    again.wait(on_pty=shown.append)
    assert b"still 42" in b"".join(shown)
    assert shared.pty.kill(handle.pid) is False
