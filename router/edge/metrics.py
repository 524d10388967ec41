"""What Prometheus reads (X1): a view of the tally and of the status.

Nothing is counted here. A scrape takes a snapshot; label values come from
bounded sets, and what clients can name is bounded again where it is shown.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from router.edge.core import Core
from router.lifecycle import State
from router.tally import Histogram
from router.waiting import WaitState

#: What ``generate_latest`` writes.
CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

#: Names of dropped request fields that get a series; the others share one.
IGNORED_FIELDS_MAX: Final = 50

#: attribute of the tally: (name, help, label)
_COUNTERS: Final[Mapping[str, tuple[str, str, str]]] = {
    "failovers": ("failovers", "Attempts that ended so that the job moved.", "cause"),
    "attempts": ("attempts", "Attempts begun.", "worker"),
    "verdicts": ("fence_verdicts", "Deltas that the fence kept back.", "verdict"),
    "disconnects": (
        "client_disconnects",
        "Requests whose client left, by the phase they were in.",
        "phase",
    ),
    "signals": ("signals", "Control signals of requests that ended.", "code"),
    "ghosts": ("ghosts", "Slots still at work after their settle time.", "worker"),
    "restarts": ("worker_restarts", "Restarts noticed.", "worker"),
    "bugs": ("bugs", "Exceptions kept to one request.", "place"),
    "declines": (
        "offers_declined",
        "Offers of routers that this agent did not take.",
        "reason",
    ),
    "waits": ("waits", "Silent waits looked at, by state.", "state"),
    "refused": ("http_refused", "HTTP requests that reached no route.", "status"),
}

#: attribute of the tally: (name, help)
_HISTOGRAMS: Final[Mapping[str, tuple[str, str]]] = {
    "first_delta": ("first_delta_seconds", "From request to first delta."),
    "between_deltas": ("between_deltas_seconds", "Between batches of deltas."),
    "queue_wait": ("queue_wait_seconds", "From request to permit."),
    "duration": ("request_duration_seconds", "From request to its end."),
    "cancel_latency": ("cancel_seconds", "From a client's leaving to the close."),
    "settle": ("settle_seconds", "From letting go of a slot to its being free."),
    "loop_lag": ("loop_lag_seconds", "How late a sleeping task woke."),
}

#: key of a worker's status: (name, help)
_WORKER_GAUGES: Final[Mapping[str, tuple[str, str]]] = {
    "slots": ("slots", "Slots of the worker."),
    "limit": ("slots_usable", "Slots that may be used now, while ramping up too."),
    "in_flight": ("slots_in_flight", "Permits out for running requests."),
    "settling": ("slots_settling", "Permits kept until a slot is free again."),
    "ghosts": ("slots_ghost", "Permits kept for slots that do not come free."),
}


class Metrics(Collector):
    """The metrics of one router, in a registry of their own (E3)."""

    def __init__(self, core: Core) -> None:
        """Read *core*, at each scrape."""
        self._core = core
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """Write all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Say nothing ahead: registering must not ask a router that starts."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Give a snapshot."""
        tally = self._core.tally
        yield _counter(
            "requests",
            "Requests by model and outcome.",
            ("model", "outcome"),
            tally.requests.items(),
        )
        for attribute, (name, text, label) in _COUNTERS.items():
            counted = getattr(tally, attribute)
            pairs = [((str(key),), count) for key, count in counted.items()]
            yield _counter(name, text, (label,), pairs)
        yield _counter(
            "wire_ends",
            "Connections between routers and agents that ended, by whose word.",
            ("by", "reason"),
            tally.wire.items(),
        )
        yield _counter(
            "ignored_fields",
            "Request fields that were dropped, by name.",
            ("field",),
            _bounded(tally.ignored_fields, IGNORED_FIELDS_MAX),
        )
        for attribute, (name, text) in _HISTOGRAMS.items():
            yield _histogram(name, text, getattr(tally, attribute))
        yield GaugeMetricFamily(
            "fencepost_client_buffer_high_water_bytes",
            "Most bytes ever held for one client.",
            value=tally.buffer_high_water,
        )
        yield from self._now()

    def _now(self) -> Iterator[Metric]:
        """Give what the status says of this moment."""
        status = self._core.status()
        ready = GaugeMetricFamily("fencepost_ready", "1: new work is served.")
        ready.add_metric((), float(bool(status["ready"])))
        yield ready
        active = GaugeMetricFamily("fencepost_requests_active", "Requests under way.")
        active.add_metric((), len(status["requests"]))
        yield active
        yield _waiting(status["requests"])
        queues: Mapping[str, int] = status["queues"]
        depth = GaugeMetricFamily(
            "fencepost_queue_depth", "Requests that wait for a slot.", labels=("model",)
        )
        for model, waiting in queues.items():
            depth.add_metric((model,), waiting)
        yield depth
        workers: list[Mapping[str, Any]] = status["workers"]
        for key, (name, text) in _WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(f"fencepost_{name}", text, labels=("worker",))
            for worker in workers:
                if worker[key] is not None:
                    gauge.add_metric((worker["name"],), worker[key])
            yield gauge
        connected = GaugeMetricFamily(
            "fencepost_agent_connected",
            "1: the worker's agent is connected.",
            labels=("worker",),
        )
        for worker in workers:
            if worker.get("agent") is not None:
                connected.add_metric(
                    (worker["name"],), float(worker["agent"]["connected"])
                )
        yield connected
        guests = GaugeMetricFamily(
            "fencepost_agent_routers", "Routers that are connected to this agent."
        )
        guests.add_metric((), len((status.get("agent") or {}).get("routers", ())))
        yield guests
        states = GaugeMetricFamily(
            "fencepost_worker_state",
            "1 for the state that the worker is in.",
            labels=("worker", "state"),
        )
        for worker in workers:
            for state in State:
                states.add_metric(
                    (worker["name"], state.value), float(worker["state"] == state.value)
                )
        yield states


def _waiting(requests: Iterable[Mapping[str, Any]]) -> Metric:
    """Count who waits for a head, by what the silence is (W5)."""
    states = Counter(str(one["waiting"]) for one in requests if "waiting" in one)
    family = GaugeMetricFamily(
        "fencepost_requests_waiting",
        "Requests whose worker is silent before its answer, by what that is.",
        labels=("state",),
    )
    for state in WaitState:
        family.add_metric((state.value,), states[state.value])
    return family


def _counter(
    name: str,
    text: str,
    labels: tuple[str, ...],
    pairs: Iterable[tuple[tuple[str, ...], int]],
) -> Metric:
    family = CounterMetricFamily(f"fencepost_{name}", text, labels=labels)
    for values, count in pairs:
        family.add_metric(values, count)
    return family


def _bounded(
    counted: Mapping[str, int], most: int
) -> list[tuple[tuple[str, ...], int]]:
    """Give the *most* frequent names their own series, the others one."""
    ranked = sorted(counted.items(), key=lambda pair: (-pair[1], pair[0]))
    pairs: list[tuple[tuple[str, ...], int]] = [
        ((name,), count) for name, count in ranked[:most]
    ]
    rest = sum(count for _, count in ranked[most:])
    if rest:
        pairs.append((("other",), rest))
    return pairs


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    """Give a histogram as Prometheus has it: each bucket counts those below too."""
    buckets = []
    so_far = 0
    bounds = [str(bound) for bound in histogram.bounds]
    for bound, count in zip([*bounds, "+Inf"], histogram.counts, strict=True):
        so_far += count
        buckets.append((bound, float(so_far)))
    return HistogramMetricFamily(
        f"fencepost_{name}", text, buckets=buckets, sum_value=histogram.total
    )
