"""Streams over restarts of the server: every byte once. test_follow.py has bad networks."""

from __future__ import annotations

import contextlib
import signal

import pytest

from capsule_sdk import CapsuleClient, Output, UnavailableError
from tests.support import wait_for
from tests.support.servers import forked, real_server


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
