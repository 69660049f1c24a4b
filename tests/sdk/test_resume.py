"""Streams through bad networks and restarts of the server: every byte once."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from capsule_sdk import Capsule, CapsuleClient, Exit, Output, UnavailableError
from tests.support import wait_for
from tests.support.servers import RealServer, forked, real_server


@contextlib.contextmanager
def cutting_proxy(port: int, *, after: int) -> Iterator[tuple[str, list[int]]]:
    """Passes connections on to `port`, and cuts each after so many bytes of its answer."""
    cuts: list[int] = []
    stop = threading.Event()
    threads: list[threading.Thread] = []

    def carry(client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            left = after
            while left > 0 and not stop.is_set():
                ready, _, _ = select.select([client, server], [], [], 0.1)
                for end in ready:
                    data = end.recv(min(65536, left) if end is server else 65536)
                    if not data:
                        return
                    (client if end is server else server).sendall(data)
                    left -= len(data) if end is server else 0
            cuts.append(after)

    def accept(listener: socket.socket) -> None:
        while not stop.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = listener.accept()
                threads.append(threading.Thread(target=carry, args=(client,)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        threads.append(threading.Thread(target=accept, args=(listener,)))
        threads[0].start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", cuts
        finally:
            stop.set()
            for thread in threads:
                thread.join(5)


PROGRAM = """
import random, sys
random.seed(7)
for n in range(5000):
    sys.stdout.write("é✓" * random.randrange(1, 500) + str(n) + "\\n")
    if n % 400 == 0:
        sys.stderr.write(f"at {n}\\n")
"""


def test_a_stream_that_is_cut_again_and_again_loses_and_repeats_nothing(
    server: RealServer, capsule: Capsule
) -> None:
    expected = capsule.run(PROGRAM)
    with cutting_proxy(server.port, after=1_700_000) as (url, cuts):
        with CapsuleClient(url) as far:
            events = list(far.get(capsule.id).stream(code=PROGRAM))
        assert len(cuts) >= 3
    for name in ("stdout", "stderr"):
        pieces = [e for e in events if isinstance(e, Output) and e.stream == name]
        assert "".join(piece.text for piece in pieces) == getattr(expected, name)
        offset = 0
        for piece in pieces:
            assert piece.offset == offset
            offset += len(piece.data)
    assert isinstance(events[-1], Exit) and events[-1].ok


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_stream_goes_on_after_the_server_was_killed_and_started_again() -> None:
    with real_server(DRAIN="keep") as server, CapsuleClient(server.url) as client:
        capsule = client.create("python")
        script = "echo begun; read line; echo then $line"
        stream = capsule.start(script, stdin_open=True, timeout=50)
        events = iter(stream)
        assert next(events) == Output("stdout", 0, b"begun\n")
        server.process.kill()
        server.process.wait()
        again = forked(server.env, server.base)
        try:
            wait_for(lambda: answers(client), what="the server answers again", within=30)
            stream.send_input("there\n")
            rest = list(events)
            assert "".join(e.text for e in rest if isinstance(e, Output)) == "then there\n"
            assert stream.exit is not None and stream.exit.ok
            capsule.delete()
        finally:
            again.send_signal(signal.SIGTERM)
            again.wait(30)


def answers(client: CapsuleClient) -> bool:
    with contextlib.suppress(UnavailableError):
        return client.list() is not None
    return False
