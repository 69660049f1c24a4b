"""`GET /metrics`, in Prometheus' text format.

Numbers are read off the service when somebody asks; what grows is counted where it happens. A new
one is a line in `_families`. prometheus-client takes a tenth of a second to import, so that happens
with the first scrape, and rendering in a thread: neither holds up a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from starlette.responses import Response

from capsule.model import State
from capsule.service import PoolStatus, Service, ShelfStatus, Stats

if TYPE_CHECKING:
    from prometheus_client import Metric

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATH = "/metrics"

_SHELF = ("provider", "template", "runtime")

Sample = tuple[tuple[str, ...], float]


class Seen(NamedTuple):
    """The service at one moment."""

    stats: Stats
    pool: PoolStatus


class Family(NamedTuple):
    kind: str  # "gauge" or "counter", whose samples end in _total
    name: str
    help: str
    labels: tuple[str, ...]
    samples: Iterable[Sample]


async def scrape(service: Service) -> Response:
    seen = Seen(service.stats(), service.pool())
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


def _metric(family: Family) -> Metric:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
    metric: GaugeMetricFamily | CounterMetricFamily
    metric = kinds[family.kind](family.name, family.help, labels=family.labels)
    for labels, value in family.samples:
        metric.add_metric(labels, value)
    return metric


def _families(seen: Seen) -> Iterator[Family]:
    stats, pool = seen
    states = {state: stats.sandboxes.get(state, 0) for state in State if state is not State.GONE}
    yield Family(
        "gauge", "capsule_sandboxes", "Sandboxes by state.", ("state",), _by_name(states.items())
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
    yield _one("capsule_draining", "1 while the server stops.", stats.draining)
    yield _one("capsule_launch_queue", "Creates that wait for their turn.", pool.waiting)
    yield _one("capsule_launches", "Boxes being launched.", pool.launching)
    yield _one("capsule_launches_max", "Of one provider, at most.", pool.max_launches)
    yield _one("capsule_pool_memory_bytes", "What ready boxes cost.", pool.memory_bytes)
    yield _one("capsule_pool_memory_max_bytes", "What they may cost.", pool.max_memory_bytes)
    yield from _shelves(pool.shelves)


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
