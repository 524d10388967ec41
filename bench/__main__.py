"""``python -m bench``: see bench/README.md for how to read what it prints."""

import json
from pathlib import Path

import attrs
import click

from bench.compare import SHAPES, compare, present, table
from bench.contenders import CONTENDERS, mock_agent
from bench.profile import profile
from bench.stalled import stalled
from bench.stalled import table as stalled_table

_ROUTER = click.Choice([one.name for one in CONTENDERS])


@click.group(invoke_without_command=True)
@click.pass_context
def main(click_context: click.Context) -> None:
    """Measure the router beside others; without a command: compare."""
    if click_context.invoked_subcommand is None:
        click_context.invoke(compare_command)


@main.command("compare")
@click.option("--router", multiple=True, type=_ROUTER, help="Only these.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--seconds", default=4.0, show_default=True, help="For one load.")
@click.option(
    "--shape",
    multiple=True,
    type=click.Choice([one.name for one in SHAPES]),
    help="Only these loads.",
)
@click.option("--json", "target", type=click.Path(path_type=Path))
def compare_command(
    router: tuple[str, ...] = (),
    rounds: int = 3,
    seconds: float = 4.0,
    shape: tuple[str, ...] = (),
    target: Path | None = None,
) -> None:
    """CPU per delta and per request of all routers, taking turns in one run."""
    shapes = [one for one in SHAPES if not shape or one.name in shape]
    rows = compare(present(router), rounds, seconds, shapes)
    click.echo(table(rows))
    if target is not None:
        text = json.dumps([attrs.asdict(row) for row in rows], indent=1)
        target.write_text(text + "\n", encoding="utf-8")


@main.command("stalled")
@click.option("--router", multiple=True, type=_ROUTER, help="Only these.")
@click.option("--clients", default=1, show_default=True)
@click.option("--megabytes", default=240, show_default=True, help="Of each stream.")
@click.option("--seconds", default=10.0, show_default=True, help="Without a read.")
def stalled_command(
    router: tuple[str, ...], clients: int, megabytes: int, seconds: float
) -> None:
    """Memory of each router while clients do not read their streams."""
    # What the mock agent has to say is small, and is its own.
    asked = [one for one in present(router) if one.between is not mock_agent]
    click.echo(stalled_table(stalled(asked, clients, megabytes, seconds)))


@main.command("profile")
@click.option(
    "--shape",
    type=click.Choice([one.name for one in SHAPES]),
    default=SHAPES[0].name,
    show_default=True,
)
@click.option("--seconds", default=5.0, show_default=True)
@click.option("--lines", default=40, show_default=True)
@click.option(
    "--out",
    "target",
    type=click.Path(path_type=Path),
    default=Path("build/fencepost.prof"),
    show_default=True,
    help="For snakeviz and the like.",
)
def profile_command(shape: str, seconds: float, lines: int, target: Path) -> None:
    """Where our own router's time goes under one load, by cProfile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    chosen = next(one for one in SHAPES if one.name == shape)
    click.echo(profile(chosen, seconds, target.absolute(), lines))


if __name__ == "__main__":
    main()
