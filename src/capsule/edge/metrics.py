"""`GET /metrics`, in Prometheus' text format.

Numbers are read off the service when somebody asks; what grows is counted where it happens. A new
one is a line in `_families`. prometheus-client takes a tenth of a second to import, so that happens
with the first scrape, and rendering in a thread: neither holds up a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from starlette.responses import Response

from capsule.edge.observed import Observed
from capsule.model import Reason, State, Usage
from capsule.service import (
    Kind,
    PoolStatus,
    SandboxUsage,
    Service,
    ShelfStatus,
    Spread,
    Stats,
    Tally,
)

if TYPE_CHECKING:
    from prometheus_client import Metric

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATH = "/metrics"

TENANTS = 100
_ENDS = (Kind.DELETED, Kind.EXPIRED, Kind.FAILED)
_SHELF = ("provider", "template", "runtime")

Sample = tuple[tuple[str, ...], float]


class Seen(NamedTuple):
    """The server at one moment."""

    stats: Stats
    pool: PoolStatus
    tally: Tally
    observed: Observed
    usages: Sequence[SandboxUsage]
    tenants: Mapping[tuple[str, State], int]


class Family(NamedTuple):
    kind: str  # "gauge", or "counter", whose samples end in _total
    name: str
    help: str
    labels: tuple[str, ...]
    samples: Iterable[Sample]


class Spreads(NamedTuple):
    """Histograms of one name."""

    name: str
    help: str
    labels: tuple[str, ...]
    samples: Iterable[tuple[tuple[str, ...], Spread]]


async def scrape(service: Service, observed: Observed) -> Response:
    used = await service.usages()
    tenants = service.by_tenant(TENANTS)
    seen = Seen(service.stats(), service.pool(), service.tally, observed, used, tenants)
    return Response(await asyncio.to_thread(render, seen), media_type=MEDIA_TYPE)


def render(seen: Seen) -> bytes:
    """Blocks."""
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
    from prometheus_client.registry import Collector

    class Reader(Collector):
        def collect(self) -> Iterator[Metric]:
            return (_metric(family) for family in _families(seen))

    registry = CollectorRegistry()
    ProcessCollector(namespace="capsule", registry=registry)
    registry.register(Reader())
    return generate_latest(registry)


def _metric(family: Family | Spreads) -> Metric:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    if isinstance(family, Spreads):
        spreads = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for labels, spread in list(family.samples):
            spreads.add_metric(labels, list(spread.up_to()), sum_value=spread.seconds)
        return spreads
    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    metric: GaugeMetricFamily | CounterMetricFamily
    metric = kinds[family.kind](family.name, family.help, labels=family.labels)
    for labels, value in family.samples:
        metric.add_metric(labels, value)
    return metric


def _families(seen: Seen) -> Iterator[Family | Spreads]:
    stats, pool, tally, observed = seen[:4]
    states = {state: stats.sandboxes.get(state, 0) for state in State if state is not State.GONE}
    yield Family(
        "gauge", "capsule_sandboxes", "Sandboxes by state.", ("state",), _by_name(states.items())
    )
    yield Family(
        "gauge",
        "capsule_tenant_sandboxes",
        f"Sandboxes by tenant and state, of the {TENANTS} tenants with the most; others as one.",
        ("tenant", "state"),
        [((tenant, state), float(count)) for (tenant, state), count in seen.tenants.items()],
    )
    yield _one("capsule_sandboxes_max", "Sandboxes at the same time, at most.", stats.max_sandboxes)
    yield Family(
        "counter",
        "capsule_sandboxes_started",
        "Boxes given to sandboxes, from the pool (warm) or launched for them (cold).",
        ("started",),
        _by_name(stats.started.items()),
    )
    yield _one("capsule_execs", "Execs that run.", stats.execs)
    yield _one("capsule_execs_max", "Execs at the same time, at most.", stats.max_execs)
    yield Family(
        "counter", "capsule_execs_begun", "Execs so far.", (), [((), float(stats.execs_begun))]
    )
    yield Family(
        "counter",
        "capsule_sandboxes_ended",
        "Sandboxes that were deleted, expired or failed.",
        ("how",),
        _by_name((kind.partition(".")[2], tally.sandboxes[kind]) for kind in _ENDS),
    )
    yield Family(
        "counter",
        "capsule_execs_ended",
        "Execs whose end was seen, by why they ended.",
        ("reason",),
        _by_name((reason, tally.execs[reason]) for reason in Reason),
    )
    yield Spreads("capsule_exec_seconds", "How long execs ran.", (), [((), tally.exec_seconds)])
    yield from _requests(observed)
    yield from _usages(seen.usages)
    yield _one("capsule_draining", "1 while the server stops.", stats.draining)
    yield _one("capsule_launch_queue", "Creates that wait for their turn.", pool.waiting)
    yield _one("capsule_launches", "Boxes being launched.", pool.launching)
    yield _one("capsule_launches_max", "Of one provider, at most.", pool.max_launches)
    yield _one("capsule_pool_memory_bytes", "What ready boxes cost.", pool.memory_bytes)
    yield _one("capsule_pool_memory_max_bytes", "What they may cost.", pool.max_memory_bytes)
    yield from _shelves(pool.shelves)


def _requests(observed: Observed) -> Iterator[Family | Spreads]:
    yield Family(
        "counter",
        "capsule_http_requests",
        "Requests and WebSockets by how they were answered.",
        ("method", "route", "status"),
        [
            ((r.method, r.route, str(r.status)), float(n))
            for r, n in observed.requests.copy().items()
        ],
    )
    yield Spreads(
        "capsule_http_request_seconds",
        "From a request to the beginning of its answer.",
        ("method", "route"),
        list(observed.seconds.copy().items()),
    )
    yield Family(
        "counter",
        "capsule_rpc_calls",
        "Calls of JSON-RPC by method and how they went: ok, or the code of the error.",
        ("method", "code"),
        [(labels, float(count)) for labels, count in observed.calls.copy().items()],
    )
    yield Spreads(
        "capsule_rpc_call_seconds",
        "How long calls of JSON-RPC took.",
        ("method",),
        [((method,), spread) for method, spread in observed.call_seconds.copy().items()],
    )
    yield _one("capsule_http_open", "Requests and WebSockets that are not over.", observed.open)


def _usages(usages: Sequence[SandboxUsage]) -> Iterator[Family]:
    def each(read: Callable[[Usage], float | None]) -> list[Sample]:
        found = ((used, read(used.usage)) for used in usages)
        return [((u.sandbox, u.template), float(value)) for u, value in found if value is not None]

    for kind, name, help, read in (
        ("counter", "cpu_seconds", "CPU time.", _cpu_seconds),
        ("gauge", "memory_bytes", "Memory in use.", lambda u: u.memory_bytes),
        ("gauge", "processes", "Processes and threads that run.", lambda u: u.processes),
        ("gauge", "disk_bytes", "Disk in use.", lambda u: u.disk_bytes),
        ("counter", "read_bytes", "Read from the machine's disks.", lambda u: u.io_read_bytes),
        ("counter", "written_bytes", "Written to them.", lambda u: u.io_write_bytes),
        ("counter", "oom_kills", "Processes killed for lack of memory.", lambda u: u.oom_kills),
    ):
        text = f"{help} Of the oldest sandboxes, as many as metrics_sandboxes says."
        yield Family(kind, f"capsule_sandbox_{name}", text, ("sandbox", "template"), each(read))


def _cpu_seconds(usage: Usage) -> float | None:
    return None if usage.cpu_ms is None else usage.cpu_ms / 1000


def _shelves(shelves: Iterable[ShelfStatus]) -> Iterator[Family]:
    def each(read: Callable[[ShelfStatus], int]) -> list[Sample]:
        return [((s.provider, s.template, s.runtime), float(read(s))) for s in shelves]

    for kind, name, help, read in (
        ("gauge", "ready", "Boxes that are ready.", lambda s: s.ready),
        ("gauge", "launching", "Boxes being launched for the pool.", lambda s: s.launching),
        ("gauge", "target", "Boxes that should be ready now.", lambda s: s.target),
        ("gauge", "min", "The least that should be.", lambda s: s.min),
        ("gauge", "max", "The most that may be.", lambda s: s.max),
        ("gauge", "waiting", "Creates that wait for such a box.", lambda s: s.waiting),
        ("counter", "hits", "Creates and resets that found a box ready.", lambda s: s.hits),
        ("counter", "misses", "Creates and resets that found none.", lambda s: s.misses),
        ("counter", "discarded", "Boxes that were dead, or not needed.", lambda s: s.discarded),
    ):
        yield Family(kind, f"capsule_pool_{name}", help, _SHELF, each(read))


def _one(name: str, help: str, value: float) -> Family:
    return Family("gauge", name, help, (), [((), float(value))])


def _by_name(counts: Iterable[tuple[str, int]]) -> list[Sample]:
    return [((str(name),), float(count)) for name, count in counts]
