"""OpenTelemetry, where it is set up: from a request through the provider to the agent. Elsewhere a
span is nothing, and costs next to nothing. The extra `otel` brings what this needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from capsule.errors import InvalidError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

Opened = AbstractContextManager["Span | None"]

_tracer: Tracer | None = None
_NOTHING: Opened = nullcontext()


def start(endpoint: str, version: str) -> Callable[[], None]:
    """Send spans to a collector that speaks OTLP over HTTP. Returns what ends it and sends the last
    ones. Raises InvalidError where the extra is missing."""
    global _tracer
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise InvalidError(
            f"setting otel_endpoint: needs what is not installed ({error.name})",
            hint="`make setup` in a clone, or install Capsule's wheel with its extra `otel`",
            field="otel_endpoint",
        ) from error
    about = {"service.name": "capsule", "service.version": version}
    provider = TracerProvider(resource=Resource.create(about))
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=5)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = provider.get_tracer("capsule", version)

    def stop() -> None:
        global _tracer
        _tracer = None
        provider.shutdown()

    return stop


def span(name: str, **about: str | float) -> Opened:
    if _tracer is None:
        return _NOTHING
    return _tracer.start_as_current_span(name, attributes=_dotted(about))


def request_span(name: str, headers: Iterable[tuple[bytes, bytes]]) -> Opened:
    """The span that a request begins with; part of the client's trace, if it sent one."""
    if _tracer is None:
        return _NOTHING
    from opentelemetry.propagate import extract
    from opentelemetry.trace import SpanKind

    carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers}
    return _tracer.start_as_current_span(name, context=extract(carrier), kind=SpanKind.SERVER)


def _dotted(about: Mapping[str, str | float]) -> dict[str, str | float]:
    return {f"capsule.{name}": value for name, value in about.items()}
