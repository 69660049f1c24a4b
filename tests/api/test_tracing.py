"""Traces of a real server, as a collector gets them."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.servers import real_server

pytestmark = pytest.mark.real

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(HTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[Span] = []


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        sent = ExportTraceServiceRequest.FromString(body)
        for resource in sent.resource_spans:
            for scope in resource.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def collector() -> Iterator[Collector]:
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()


def test_a_request_is_followed_through_the_provider_to_the_agent() -> None:
    with collector() as there:
        endpoint = f"http://127.0.0.1:{there.server_port}"
        with real_server(OTEL_ENDPOINT=endpoint) as server:
            headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            with httpx.Client(base_url=server.url, headers=headers, timeout=30) as http:
                box = http.post("/v1/sandboxes", json={"template": "bash"}).json()["id"]
                params = {"id": box, "cmd": ["true"]}
                call = {"jsonrpc": "2.0", "id": 1, "method": "sandbox.v1.exec", "params": params}
                assert "result" in http.post("/rpc", json=call).json()
                http.delete(f"/v1/sandboxes/{box}")
        # The server has stopped, and sent what it had left.
        mine = [span for span in there.spans if span.trace_id.hex() == TRACE]
        names = {span.name for span in mine}
        assert names >= {
            *("POST /v1/sandboxes", "launch", "POST /rpc", "sandbox.v1.exec", "agent exec"),
            "DELETE /v1/sandboxes/{id}",
        }
        by_id = {span.span_id: span.name for span in mine}
        parents = {span.name: by_id.get(span.parent_span_id) for span in mine}
        assert parents["launch"] == "POST /v1/sandboxes"
        assert parents["agent exec"] == "sandbox.v1.exec"
        assert parents["sandbox.v1.exec"] == "POST /rpc"
        (deleted,) = (span for span in mine if span.name.startswith("DELETE"))
        about = {each.key: each.value.string_value for each in deleted.attributes}
        assert (about["capsule.sandbox"], about["capsule.tenant"]) == (box, "default")


def test_a_collector_that_is_down_does_no_harm() -> None:
    with real_server(OTEL_ENDPOINT="http://127.0.0.1:9") as server:
        assert httpx.get(f"{server.url}/v1/sandboxes").status_code == 200
