"""Faults of a worker that is to be run by the router: between its keys, and in its
command line (L6). Like ``contradictions``, on the raw document; what has the wrong
type is passed over here.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

from router.settings import WorkerSettings
from workers.command import WORDS, find_program, words_in

#: Keys that mean something for a command only.
_OWN: Final = (
    "port",
    "model",
    "env",
    "cwd",
    "stop_grace_ms",
    "max_restarts",
    "restart_window_ms",
)
#: Engines that can be told which slot is to serve a request.
_PINNING: Final = ("auto", "llama-server")
_GIVE: Final = "give url, or command and port, or agent"


def command_faults(
    workers: list[dict[str, Any]],
    environ: Mapping[str, str] | None,
    directory: Path,
) -> Iterator[str]:
    """Give all of them, each ``path: sentence``.

    Args:
        workers: the tables of ``[[worker]]``.
        environ: the environment that commands start in; None: don't look for
            their programs, which is for those who serve nothing.
        directory: where relative paths start.
    """
    ports: dict[int, int] = {}
    for index, worker in enumerate(workers):
        path = f"worker[{index}]"
        if worker.get("agent") is not None:
            continue
        if worker.get("command") is None:
            yield from _by_url(path, worker)
        else:
            yield from _by_command(path, worker, environ, directory)
            port = worker.get("port")
            if type(port) is int:
                first = ports.setdefault(port, index)
                if first != index:
                    yield (
                        f"{path}.port: the same as worker[{first}]: "
                        "each server needs a port of its own"
                    )
        if worker.get("pin_slots") is True:
            engine = worker.get("engine", "auto")
            if isinstance(engine, str) and engine not in _PINNING:
                yield f"{path}.pin_slots: {engine} has no slots that can be named"


def _by_url(path: str, worker: Mapping[str, Any]) -> Iterator[str]:
    if "url" not in worker:
        yield f"{path}.url: is missing: {_GIVE}"
    defaults = {field.name: field.default for field in attrs.fields(WorkerSettings)}
    for key in _OWN:
        unset = {} if key == "env" else defaults[key]
        if key in worker and worker[key] != unset:
            yield f"{path}.{key}: is for a worker with command; this one has url"


def _by_command(
    path: str,
    worker: Mapping[str, Any],
    environ: Mapping[str, str] | None,
    directory: Path,
) -> Iterator[str]:
    if "url" in worker:
        yield f"{path}.command: there is a url too: {_GIVE}"
    if "port" not in worker:
        yield f"{path}.port: is missing: the port that the command listens on"
    command = worker["command"]
    if not isinstance(command, list):
        return
    for place, argument in enumerate(command):
        for word in words_in(argument) if isinstance(argument, str) else ():
            where = f"{path}.command[{place}]"
            if word not in WORDS:
                known = ", ".join(f"{{{name}}}" for name in WORDS)
                yield f"{where}: {{{word}}} stands for nothing: there are {known}"
            elif word != "port" and word not in worker:
                yield f"{where}: {{{word}}} stands for {path}.{word}: set it"
    program = command[0] if command else None
    if environ is not None and isinstance(program, str) and program.strip():
        env = worker.get("env")
        own = env.items() if isinstance(env, dict) else ()
        cwd = worker.get("cwd")
        why = find_program(
            program,
            environ={**environ, **{k: v for k, v in own if isinstance(v, str)}},
            cwd=str(directory / cwd) if isinstance(cwd, str) else None,
        )
        if why is not None:
            yield f"{path}.command[0]: {why}"
