"""A web page of another site uses the server as E2B's SDK would, in a real browser: what a browser
is not told that it may, it does not do."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any
from urllib.parse import urlencode

import pytest

from tests.support import free_port
from tests.support.servers import RealServer, real_server

pytestmark = pytest.mark.real

KEY = "e2b_0123456789abcdef0123456789abcdef01234567"
SCRIPT = (Path(__file__).parent / "pages" / "page.js").read_bytes()
PAGE = b"<!doctype html><body><script src=/page.js></script>"
NOT_TOLD = "TypeError: Failed to fetch"  # all that a page learns of an answer that is not for it


class Site:
    """Serves the page, and hears from it what came of its requests."""

    def __init__(self) -> None:
        told = Queue[tuple[str, dict[str, Any]]]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/page.js":
                    self.answer(SCRIPT, "text/javascript")
                else:
                    self.answer(PAGE, "text/html")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                told.put((self.path.removeprefix("/told/"), json.loads(body)))
                self.answer(b"", "text/plain")

            def answer(self, body: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self.told = told
        self.port = free_port()
        self.origin = f"http://127.0.0.1:{self.port}"
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)

    @contextmanager
    def serving(self) -> Iterator[None]:
        thread = Thread(target=self._server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


@pytest.fixture
def chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip("no chromium: apt install chromium to see how a browser takes it")


@contextmanager
def browsing(chromium: str, url: str, home: Path) -> Iterator[None]:
    """As root it takes --no-sandbox; its pages are ours."""
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--no-proxy-server",
        "--enable-logging=stderr",
    )
    command = [chromium, *options, f"--user-data-dir={home}", "--remote-debugging-port=0", url]
    with (home / "log").open("w") as log:
        browser = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        browser.terminate()
        browser.wait(10)


@pytest.mark.timeout(60)
def test_pages_of_other_sites(chromium: str, agent_binary: Path, tmp_path: Path) -> None:
    site = Site()
    with site.serving(), real_server(API_KEYS=KEY, ALLOWED_ORIGINS=site.origin) as server:
        stories = told_in(chromium, site, server, tmp_path)
    stream = {"said": ["0\n", "1\n", "2\n"]}
    owner, stranger = stories["owner"], stories["stranger"]
    assert owner.pop("stream").items() >= stream.items()
    assert owner == {
        "list": 200,
        "create": 201,
        "upload": 200,
        "download": "from a page",
        "command": True,
        "servers": ["serving\n"],
        "open program": "from a program",
        "closed program": NOT_TOLD,
    }
    assert stranger.pop("stream")["said"] == ["as there\n"]
    assert stranger == {
        "list": NOT_TOLD,
        "delete": NOT_TOLD,
        "no token": 401,
        "contexts": 200,
        "contexts, no token": 403,
    }


def told_in(chromium: str, site: Site, server: RealServer, home: Path) -> dict[str, dict[str, Any]]:
    asked = urlencode({"api": server.url, "key": KEY, "domain": f"localhost:{server.port}"})
    with browsing(chromium, f"{site.origin}/?{asked}", home):
        return dict(site.told.get(timeout=25) for _ in range(2))
