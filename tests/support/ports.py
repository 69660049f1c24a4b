"""A sandbox with a web server in it, and how it is reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.support import wait_for

APP = (Path(__file__).parent / "port_app.py").read_text()
PORT = 3000


@contextmanager
def sandbox(url: str, key: str = "", **options: Any) -> Iterator[str]:
    """Its id."""
    headers = {"x-api-key": key} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        asked = {"template": "python", "ttl_ms": 600_000, **options}
        made = http.post("/v1/sandboxes", json=asked)
        assert made.status_code == 201, made.text
        id = made.json()["id"]
        try:
            yield id
        finally:
            with suppress(httpx.ConnectError):  # a server that was stopped has removed it
                http.delete(f"/v1/sandboxes/{id}")


def start_app(url: str, id: str, port: int = PORT, *host: str, key: str = "") -> None:
    """Returns when it listens."""
    command = ["python3", "-c", APP, str(port), *host]
    headers = {"x-api-key": key} if key else {}
    with httpx.Client(base_url=url, headers=headers, timeout=15) as http:
        params = {"id": id, "cmd": command, "timeout_ms": 3_600_000}
        call = {"jsonrpc": "2.0", "id": 1, "method": "sandbox.v1.start", "params": params}
        started = http.post("/rpc", json=call).json()
        assert "result" in started, started

        def listens() -> bool:
            return http.get("/left", headers=by_header(id, port)).status_code == 200

        wait_for(listens, what=f"a server at port {port}")


def by_header(id: str, port: int = PORT) -> dict[str, str]:
    return {"e2b-sandbox-id": id, "e2b-sandbox-port": str(port)}


def by_name(id: str, port: int = PORT, domain: str = "localhost") -> dict[str, str]:
    """As a browser at http://PORT-ID.localhost/."""
    return {"host": f"{port}-{id}.{domain}"}
