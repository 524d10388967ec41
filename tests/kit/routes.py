"""Control endpoints of the fake engine, by kind (PROTOCOLS B.1 to B.3)."""

from typing import Any, Final, Protocol

from tests.kit.exchange import Exchange


class EngineFacts(Protocol):
    """What the endpoints tell of."""

    kind: str
    slots: int
    models: tuple[str, ...]
    context: int
    version: str
    health_status: int
    models_status: int
    slots_status: int
    props_status: int
    metrics_status: int
    models_body: bytes | None
    started_at: int
    sleeping: bool
    hang_probes: bool
    counts: int | None
    sees: bool

    def controlled(self, body: Any) -> None:
        """Note what the control endpoint was sent."""

    @property
    def processing(self) -> int:
        """Slots at work."""


#: By kind: where prompts are counted, and how the number is called.
_COUNTS: Final = {
    "llama-server": {"/v1/chat/completions/input_tokens": "input_tokens"},
    "vllm": {"/tokenize": "count"},
    "sglang": {"/v1/tokenize": "count"},
}


async def answer_probe(engine: EngineFacts, x: Exchange) -> None:
    """Answer one control request, or none while ``hang_probes`` is set."""
    if engine.hang_probes:
        await x.wait_closed()
        return
    path = x.path.partition("?")[0]
    if path == "/v1/models":
        await _models(engine, x)
    elif path in _COUNTS.get(engine.kind, {}) and engine.counts is not None:
        await x.json(200, {_COUNTS[engine.kind][path]: engine.counts})
    elif path == "/v1/chat/completions/control" and engine.kind == "llama-server":
        engine.controlled(x.body)
        await x.json(200, {"success": True})
    elif engine.kind == "llama-server":
        await _llama(engine, x, path)
    elif engine.kind == "vllm":
        await _vllm(engine, x, path)
    elif engine.kind == "sglang":
        await _sglang(engine, x, path)
    else:
        await _not_found(x)


async def _models(engine: EngineFacts, x: Exchange) -> None:
    if engine.models_status != 200:
        await x.json(engine.models_status, _error(engine.models_status))
        return
    if engine.models_body is not None:
        fields = {"Content-Length": str(len(engine.models_body))}
        await x.head(200, fields, chunked=False)
        await x.raw(engine.models_body)
        x.ended.set()
        return
    await x.json(
        200, {"object": "list", "data": [_model(engine, m) for m in engine.models]}
    )


def _model(engine: EngineFacts, name: str) -> dict[str, Any]:
    card: dict[str, Any] = {"id": name, "object": "model", "created": 1}
    if engine.kind == "llama-server":
        card |= {"owned_by": "llamacpp", "meta": {"n_ctx": engine.context}}
    elif engine.kind in {"vllm", "sglang"}:
        card |= {"owned_by": engine.kind, "max_model_len": engine.context}
    return card


async def _llama(engine: EngineFacts, x: Exchange, path: str) -> None:
    if path == "/health":
        await _plain(x, engine.health_status, {"status": "ok"})
    elif path == "/props":
        props = {
            "total_slots": engine.slots,
            "model_alias": engine.models[0],
            "build_info": engine.version,
            "is_sleeping": engine.sleeping,
            "modalities": {"vision": engine.sees},
            "endpoint_slots": engine.slots_status != 501,
            "endpoint_metrics": engine.metrics_status != 501,
            "default_generation_settings": {"n_ctx": engine.context},
        }
        await _plain(x, engine.props_status, props)
    elif path == "/slots":
        slots = [
            {"id": i, "n_ctx": engine.context, "is_processing": i < engine.processing}
            for i in range(engine.slots)
        ]
        await _plain(x, engine.slots_status, slots)
    elif path == "/metrics":
        await _text(
            engine,
            x,
            f"llamacpp:requests_processing {engine.processing}\n"
            "llamacpp:requests_deferred 0\n",
        )
    else:
        await _not_found(x)


async def _vllm(engine: EngineFacts, x: Exchange, path: str) -> None:
    if path == "/health":
        await x.json(engine.health_status, "")
    elif path == "/version":
        await x.json(200, {"version": engine.version})
    elif path == "/metrics":
        waiting = max(0, engine.processing - engine.slots)
        await _text(
            engine,
            x,
            f'vllm:num_requests_running{{engine="0"}} {engine.processing}.0\n'
            f'vllm:num_requests_waiting{{engine="0"}} {waiting}.0\n'
            f"process_start_time_seconds {float(engine.started_at)}\n",
        )
    else:
        await x.json(404, {"detail": "Not Found"})


async def _sglang(engine: EngineFacts, x: Exchange, path: str) -> None:
    if path in {"/health", "/ready"}:
        await x.json(engine.health_status, "")
    elif path == "/model_info":
        await x.json(200, {"model_path": engine.models[0], "is_generation": True})
    elif path == "/server_info":
        info = {"version": engine.version, "max_running_requests": engine.slots}
        await x.json(200, info)
    elif path == "/v1/loads":
        load = {
            "dp_rank": 0,
            "num_running_reqs": engine.processing,
            "num_waiting_reqs": 0,
            "max_running_requests": engine.slots,
        }
        await _plain(x, engine.slots_status, {"loads": [load]})
    else:
        await x.json(404, {"detail": "Not Found"})


async def _plain(x: Exchange, status: int, reply: object) -> None:
    await x.json(status, reply if status == 200 else _error(status))


async def _text(engine: EngineFacts, x: Exchange, text: str) -> None:
    if engine.metrics_status != 200:
        await x.json(engine.metrics_status, _error(engine.metrics_status))
        return
    fields = {
        "Content-Type": "text/plain; version=0.0.4",
        "Content-Length": str(len(text)),
        "Process-Start-Time-Unix": str(engine.started_at),
    }
    await x.head(200, fields, chunked=False)
    await x.raw(text.encode())
    x.ended.set()


async def _not_found(x: Exchange) -> None:
    await x.json(404, _error(404))


def _error(status: int) -> dict[str, Any]:
    message, kind = {
        503: ("Loading model", "unavailable_error"),
        404: ("File Not Found", "not_found_error"),
        401: ("Invalid API Key", "authentication_error"),
        501: ("This server does not support it", "not_supported_error"),
    }.get(status, ("said so", "server_error"))
    return {"error": {"message": message, "type": kind, "code": status}}
