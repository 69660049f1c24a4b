"""Plain HTTP over one kept connection, by the standard library's client: a larger one, as httpx,
adds as much again as the server takes, and is no part of what is measured."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit


class Plain:
    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        self._conn = http.client.HTTPConnection(place.hostname or "", place.port, timeout=30)

    def get(self, path: str) -> bytes:
        return self._ask("GET", path)

    def rpc(self, verb: str, **params: Any) -> Any:
        body = {"jsonrpc": "2.0", "id": 1, "method": f"sandbox.v1.{verb}", "params": params}
        told = json.loads(self._ask("POST", "/rpc", json.dumps(body).encode()))
        if "error" in told:
            raise SystemExit(f"bench: {verb} failed: {told['error']}")
        return told["result"]

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        self._conn.request(method, path, body, headers)
        return self._conn.getresponse().read()

    def close(self) -> None:
        self._conn.close()
