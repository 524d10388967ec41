"""All that an operator can set, with the defaults of D2.

Plain values: ``router.config`` reads them from TOML and checks them. Every
key carries its unit; the machines get seconds by dividing once, when built.
"""

from collections.abc import Mapping

import attrs


@attrs.frozen
class ServerSettings:
    """``[server]``: the client edge."""

    listen: tuple[str, ...] = ("127.0.0.1:8080",)
    """``host:port``, ``[v6]:port`` or ``unix:/path``."""
    prefixes: tuple[str, ...] = ("", "/llm")
    body_max_bytes: int = 32 * 1024 * 1024
    bodies_max_bytes: int = 1024 * 1024 * 1024
    connections_max: int = 4096
    client_stall_ms: int = 120_000
    drain_ms: int = 30_000
    lame_duck_ms: int = 0
    api_keys_file: str | None = None
    state_dir: str | None = None


@attrs.frozen
class AdminSettings:
    """``[admin]``: metrics, status and commands."""

    listen: str | None = None
    """None: a unix socket in ``state_dir``."""


@attrs.frozen
class RouterSettings:
    """``[router]``: admission and failover."""

    attempts: int = 3
    queue_limit: int = 256
    queue_ms: int = 0
    """0: no limit."""
    commit_after_ms: int = 15_000
    keepalive_ms: int = 10_000
    suspect_after: int = 3
    signals_max: int = 8
    """Control signals of one request, at most (J5)."""
    tool_calls_max: int = 0
    """Tool calls of one answer; 0: no limit (J5)."""
    result_ttl_ms: int = 0
    """How long the result of a submitted job is kept; 0: until it is taken or
    released (J1)."""
    thinking_signature: str = "off"
    """off, or opaque: thinking blocks end with a signature of ours (M7)."""


@attrs.frozen
class WaitSettings:
    """``[waits]``: how long silence may last, by its kind (W)."""

    connect_ms: int = 3_000
    offer_timeout_ms: int = 100
    poll_ms: int = 500
    busy_wait_ms: int = 600_000
    load_wait_ms: int = 300_000
    idle_grace_ms: int = 10_000
    liveness_ms: int = 60_000
    first_delta_ms: int = 0
    """0: off."""
    usage_wait_ms: int = 1_000
    ghost_ms: int = 60_000


@attrs.frozen
class WorkerSettings:
    """``[[worker]]``: one engine, reached by URL or run by the router, or the
    agent of another host."""

    name: str
    url: str | None = None
    """``http://`` or ``https://``, with or without ``/v1``; None: ``command``."""
    agent: str | None = None
    """``host:port`` of an agent, which has engines of its own; None: ``url``."""
    command: tuple[str, ...] | None = None
    """Program and arguments, without a shell; ``{port}``, ``{slots}`` and
    ``{model}`` stand for those settings (L6). None: ``url``."""
    port: int | None = None
    """Of 127.0.0.1, where the command's server listens."""
    model: str | None = None
    """What ``{model}`` stands for."""
    env: Mapping[str, str] = attrs.field(factory=dict)
    """Set for the command, over what the router was started with."""
    cwd: str | None = None
    """Folder of the command; None: the router's own."""
    slots: int | None = None
    """None: what the engine says, else 4 (S5)."""
    engine: str = "auto"
    """auto, llama-server, vllm, sglang or generic."""
    models: tuple[str, ...] = ()
    """Names this worker serves; empty: what it says itself."""
    health_url: str | None = None
    settle_ms: int | None = None
    """None: the engine's own (S3)."""
    pin_slots: bool = False
    """Name the slot of each request: for llama-server (W2)."""
    stop_grace_ms: int = 5_000
    """Between SIGTERM and SIGKILL (L7)."""
    max_restarts: int = 5
    """In any ``restart_window_ms``; one more is a crash loop (L8)."""
    restart_window_ms: int = 600_000
    api_key_env: str | None = None
    """Environment variable that holds this worker's key."""


@attrs.frozen
class AgentSettings:
    """``[agent]``: this host's engines for routers elsewhere (``fencepost agent``)."""

    name: str | None = None
    """Who it is to routers that it announces itself to; None: the host's name."""
    listen: tuple[str, ...] = ()
    """``host:port`` or ``[v6]:port``, for routers that connect."""
    routers: tuple[str, ...] = ()
    """``host:port`` of routers to announce itself to; see their ``[agents]``."""
    token_env: str | None = None
    """Environment variable that holds the token which routers know too."""
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    """Certificate authority of the other end: it must show a certificate."""


@attrs.frozen
class AgentsSettings:
    """``[agents]``: how this router meets agents, whoever connects."""

    listen: tuple[str, ...] = ()
    """``host:port`` or ``[v6]:port``, for agents that announce themselves."""
    token_env: str | None = None
    """Environment variable that holds the token which agents know too; a
    worker's ``api_key_env`` goes before it."""
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    """Certificate authority of the other end; None: the system's, where TLS is
    used at all."""


@attrs.frozen
class ModelSettings:
    """``[models.NAME]``: what else a model is called."""

    aliases: tuple[str, ...] = ()
    """``*`` catches any name that is in no table (O6)."""
    fallback: str | None = None
    """Model to use while no worker of this one is ready."""
    thinking_max_tokens: int | None = None
    """Tokens of reasoning; None: no limit but the request's own (J6)."""
    bios: str | None = None
    """System text that tells a model without native tool calls how to call, the
    request's tools in the place of ``{tools}``; None: calls are native (J4)."""
    tool_parse_error: str = "fail"
    """What a call by ``bios`` that can't be read is: "fail", or "signal" (J4)."""
    exit_tools: tuple[str, ...] = ()
    """Codes of the signals that the model may give (J5)."""
    loop_repeats_max: int = 0
    """How often the same words may follow on themselves; 0: no limit (J5)."""


@attrs.frozen
class Settings:
    """One whole, checked configuration."""

    server: ServerSettings = ServerSettings()
    admin: AdminSettings = AdminSettings()
    router: RouterSettings = RouterSettings()
    waits: WaitSettings = WaitSettings()
    workers: tuple[WorkerSettings, ...] = ()
    """TOML: ``[[worker]]``."""
    models: Mapping[str, ModelSettings] = attrs.field(factory=dict)
    agents: AgentsSettings = AgentsSettings()
    agent: AgentSettings | None = None
