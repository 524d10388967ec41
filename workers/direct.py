"""A worker that is an OpenAI-compatible HTTP server, spoken to directly.

One task reads all of its connections through one nested poll; requests start
without waiting, from whatever task holds them (sections 1 and 4 of the
design). The control plane goes over httpx, apart from all this.
"""

import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NoReturn

import trio

from router.cork import Cork
from router.crew import DEFAULT_SLOTS
from router.errors import Fault, FaultKind, LocalError, WorkerFailed
from router.ids import AssignmentId, WorkerId
from router.messages import Endpoint, Job, Probe, ProbeResult, SlotView, Trace
from router.openai.upstream import BUDGET, build_body, build_count_body, unsupported
from router.ports import Delivery
from router.settings import WaitSettings, WorkerSettings
from workers.control import Control, NoAnswer
from workers.engines.engine import Engine
from workers.engines.recognise import make_engine, recognise
from workers.poll import Poll, open_poll
from workers.reasoning import ReasoningControl, ReasoningEnd
from workers.site import Resolver, parse_site
from workers.source import DirectSource
from workers.transport import Address, PlainTransport, TlsTransport
from workers.upstream import Upstream

#: Seconds that an idle connection is kept: the engines close theirs after 5.
IDLE_MAX_S: Final = 4.0
#: Seconds between two looks at what is idle or lingers.
SWEEP_S: Final = 0.25
#: Seconds that the end of a finished answer is waited for; with the time
#: between two looks, within one.
LINGER_MAX_S: Final = 0.75
#: Bytes of a body that are worth copying to save a system call.
_JOIN_MAX: Final = 65536


class DirectWorker:
    """Implements ``ports.Worker`` over HTTP/1.1."""

    def __init__(
        self,
        settings: WorkerSettings,
        waits: WaitSettings,
        *,
        environ: Mapping[str, str] = os.environ,
        report_bug: Callable[[str, Exception], None],
        cork: Cork | None = None,
        tls: ssl.SSLContext | None = None,
        explain: Callable[[DirectSource, Fault], bool] | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            settings: this worker's.
            waits: not kept; the engine looks at the clocks (W).
            environ: where the worker's key is found.
            report_bug: told of each exception that was kept to one request,
                with its place in the code (L1).
            cork: the router's, for what its clients are sent; None: they are
                sent each delta by itself.
            tls: for https; None: the system's certificate authorities.
            explain: told of each failure before the engine is; True: it will
                have the source report, at the latest when it knows more.

        Raises:
            ValueError: a setting is of no use; the message holds no secret.
        """
        del waits
        self.id = WorkerId(settings.name)
        self._settings = settings
        if settings.url is None:
            raise ValueError("a direct worker needs a url")
        self._site = site = parse_site(settings.url)
        self._tls = None
        if site.secure:
            self._tls = tls or ssl.create_default_context()
        key = _key(settings.api_key_env, environ)
        self._heads = _heads(site.base, site.host_field, key)
        self._control = Control(site, key, self._tls)
        self._reasoning = ReasoningControl(self._control)
        self._resolver = Resolver(site)
        self._engine = make_engine(settings.engine, settings.models)
        self._recognised = settings.engine != "auto"
        self._slots = settings.slots or DEFAULT_SLOTS
        self._explain = explain
        self._poll: Poll | None = None
        self._all: set[Upstream] = set()
        # Newest last: the first to be used again.
        self._idle: list[Upstream] = []
        self._lingering: set[Upstream] = set()
        self._loose = trio.Event()
        self.report_bug = report_bug
        self._cork = cork or Cork(report_bug)
        self.works: bool | None = None
        self.settle_s = 0.0
        self.settles_by_probe = False
        self._take_on(self._engine)

    # ---- ports.Worker ----

    def open(
        self,
        assignment: AssignmentId,
        job: Job,
        delivery: Delivery,
        *,
        slot: int | None = None,
    ) -> DirectSource:
        """Start one attempt. Not a checkpoint; *delivery* is not called.

        Raises:
            WorkerFailed: it could not even start.
        """
        if self._poll is None:
            raise WorkerFailed(Fault(FaultKind.CONNECT, "The worker is not served."))
        now = trio.current_time()
        source = DirectSource(
            self,
            assignment,
            delivery,
            self._request(assignment, job, slot),
            now,
            early_head=self._engine.early_head,
            endpoint=job.endpoint,
            reasoning=self._reasoning_end() if BUDGET in job.extras else None,
        )
        pooled = self._take_idle(now)
        if pooled is not None and source.board(pooled, now):
            return source
        fault = source.launch(now)
        if fault is not None:
            raise WorkerFailed(fault)
        return source

    async def run(self) -> NoReturn:
        """Read all of this worker's sources.

        Returns only when cancelled, and has then closed every socket; sources
        that were still open are closed without a report.
        """
        self._poll = poll = await open_poll(self._cork)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._sweep)
                nursery.start_soon(self._resolve)
                nursery.start_soon(self._reasoning.run)
                await poll.run()
        finally:
            for upstream in list(self._all):
                upstream.abandon()
            self._poll = None
            poll.close()

    async def probe(self) -> Probe:
        """Ask whether the worker is ready, and what it is (L2, L9).

        A checkpoint. Never raises for what the worker does.
        """
        try:
            await self._resolver.refresh()
        except OSError:
            if not self._resolver.addresses:
                return Probe(ProbeResult.SILENT, "its name does not resolve")
        try:
            if not self._recognised:
                found = await recognise(self._control, self._settings.models)
                if isinstance(found, Probe):
                    return found
                self._engine = found
                self._recognised = True
            probe = await self._engine.probe(self._control, self._settings.health_url)
        except NoAnswer as failure:
            if failure.refused and self._settings.engine == "auto":
                # Another engine may come up in its place.
                self._recognised = False
            return Probe(_shown(failure), str(failure))
        if probe.discovery is not None:
            self._take_on(self._engine)
            self._slots = self._settings.slots or probe.discovery.slots or DEFAULT_SLOTS
        return probe

    async def slot_view(self) -> SlotView | None:
        """Ask the engine about its slots; None: it did not say. A checkpoint."""
        try:
            return await self._engine.slot_view(self._control)
        except NoAnswer:
            return None

    async def alive(self) -> bool:
        """Ask the cheapest question that proves a process answers. A checkpoint."""
        try:
            return await self._engine.alive(self._control)
        except NoAnswer:
            return False

    async def count_tokens(self, job: Job) -> int | None:
        """Count a prompt with the engine's tokenizer; None: it did not say.

        A checkpoint. Never raises for what the worker does.
        """
        try:
            return await self._engine.count_tokens(self._control, build_count_body(job))
        except NoAnswer:
            return None

    def unsupported(self, job: Job) -> tuple[str, ...]:
        """Name the sampling parameters of *job* that its engine lacks (J3)."""
        return unsupported(job, self._engine.sampling_fields)

    # ---- source.Dialler ----

    def address(self, tried: Sequence[Address]) -> Address | None:
        """Give the best address that is not in *tried*; None: none is left."""
        for address in self._resolver.addresses:
            if address not in tried:
                return address
        return None

    def dial(self, address: Address) -> Upstream:
        """Begin a fresh connection.

        Raises:
            OSError: there is none, and will be none.
        """
        if self._poll is None:
            raise LocalError("a worker that is not served dials nobody")
        transport = (
            PlainTransport(address)
            if self._tls is None
            else TlsTransport(address, self._tls, self._site.host)
        )
        secure = self._tls is not None
        upstream = Upstream(transport, self._poll, self, secure=secure)
        self._all.add(upstream)
        return upstream

    def doubt(self, address: Address) -> None:
        """Try *address* last from now on: it did not connect."""
        self._resolver.doubt(address)

    def failed(self, source: DirectSource, fault: Fault) -> None:
        """Have *source* report its end."""
        if self._explain is None or not self._explain(source, fault):
            source.report(fault)

    def lose(self, fault: Fault) -> None:
        """End every attempt with *fault* and close every connection: the server
        is no more, whoever still holds its sockets. Not a checkpoint."""
        for upstream in list(self._all):
            if isinstance(upstream.taker, DirectSource):
                upstream.taker.lose(fault)
            upstream.close()

    # ---- upstream.Home ----

    def parked(self, upstream: Upstream, now: float) -> None:
        """Keep a free connection, the newest of at most one a slot."""
        del now
        self._lingering.discard(upstream)
        self._idle.append(upstream)
        if len(self._idle) > self._slots:
            self._idle[0].close()
        self._loose.set()

    def lingers(self, upstream: Upstream, now: float) -> None:
        """Wait for the end of a finished answer, but not long."""
        del now
        self._lingering.add(upstream)
        self._loose.set()

    def gone(self, upstream: Upstream) -> None:
        """Forget a closed connection."""
        self._all.discard(upstream)
        self._lingering.discard(upstream)
        if upstream in self._idle:
            self._idle.remove(upstream)

    # ---- pieces ----

    def _request(
        self, assignment: AssignmentId, job: Job, slot: int | None
    ) -> tuple[bytes, ...]:
        """Write one attempt's request anew from its job (A3)."""
        engine = self._engine
        body = build_body(
            job,
            engine.max_tokens_field,
            budget_field=engine.budget_field,
            reasoning_control=engine.ends_reasoning,
            images=engine.sees_images,
            sampling_fields=engine.sampling_fields,
            slot=slot if engine.pins_slots else None,
        )
        name = str(assignment)
        if not _is_field_value(name):
            raise LocalError("a request id that no header can carry")
        lines = b"x-request-id: %b\r\n" % name.encode()
        if job.trace is not None:
            lines += _trace_lines(job.trace)
        fixed = self._heads[job.endpoint]
        head = b"%b%bcontent-length: %d\r\n\r\n" % (fixed, lines, len(body))
        return (head + body,) if len(body) <= _JOIN_MAX else (head, body)

    def _reasoning_end(self) -> ReasoningEnd | None:
        """Say how a reasoning beyond its limit is ended there (J6)."""
        engine = self._engine
        if not engine.keeps_budget:
            return None
        return ReasoningEnd(self._reasoning.end if engine.ends_reasoning else None)

    def _take_idle(self, now: float) -> Upstream | None:
        while self._idle:
            upstream = self._idle.pop()
            if now - upstream.idle_since < IDLE_MAX_S:
                return upstream
            upstream.close()
        return None

    def _take_on(self, engine: Engine) -> None:
        """Show the engine's traits where the port has them."""
        settle_ms = self._settings.settle_ms
        self.settle_s = engine.settle_s if settle_ms is None else settle_ms / 1000
        self.settles_by_probe = engine.settles_by_probe

    async def _resolve(self) -> None:
        """Look the name up once, so that the first request need not fail."""
        try:
            await self._resolver.refresh()
        except OSError:
            return  # the probe tries again, and tells

    async def _sweep(self) -> NoReturn:
        """Close what has been idle or has lingered for too long."""
        while True:
            await self._loose.wait()
            await trio.sleep(SWEEP_S)
            now = trio.current_time()
            for upstream in [*self._idle]:
                if now - upstream.idle_since >= IDLE_MAX_S:
                    upstream.close()
            for upstream in [*self._lingering]:
                if now - upstream.idle_since >= LINGER_MAX_S:
                    upstream.close()
            if not (self._idle or self._lingering):
                self._loose = trio.Event()


def _key(variable: str | None, environ: Mapping[str, str]) -> str | None:
    """Find the worker's key; None: it has none."""
    if variable is None:
        return None
    key = environ.get(variable, "").strip()
    if not key:
        return None
    if not _is_field_value(key) or " " in key:
        raise ValueError(f"the key in {variable} can't stand in a header")
    return key


#: Path and kind of answer of each endpoint.
_ENDPOINTS: Final = {
    Endpoint.CHAT: ("/v1/chat/completions", "text/event-stream"),
    Endpoint.COMPLETIONS: ("/v1/completions", "text/event-stream"),
    Endpoint.EMBEDDINGS: ("/v1/embeddings", "application/json"),
}


def _heads(base: str, host: str, key: str | None) -> dict[Endpoint, bytes]:
    """Write the part of a request's head that is always the same (H3)."""
    secret = [] if key is None else [f"authorization: Bearer {key}"]
    return {
        endpoint: "\r\n".join(
            [
                f"POST {base}{path} HTTP/1.1",
                f"host: {host}",
                "content-type: application/json",
                f"accept: {kind}",
                *secret,
                "",
            ]
        ).encode()
        for endpoint, (path, kind) in _ENDPOINTS.items()
    }


def _trace_lines(trace: Trace) -> bytes:
    """Write a trace context's fields (X4), whoever it came from."""
    if not trace.parent or not _is_field_value(trace.parent):
        return b""
    line = b"traceparent: %b\r\n" % trace.parent.encode()
    if trace.state and _is_field_value(trace.state):
        line += b"tracestate: %b\r\n" % trace.state.encode()
    return line


def _is_field_value(value: str) -> bool:
    return value.isascii() and value.isprintable() and value == value.strip()


def _shown(failure: NoAnswer) -> ProbeResult:
    """Say what an answer that did not come shows of the worker (L3)."""
    if failure.unasked:
        return ProbeResult.UNASKED
    return ProbeResult.REFUSED if failure.refused else ProbeResult.SILENT
