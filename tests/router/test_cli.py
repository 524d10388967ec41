import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from router.cli import main, print_tables
from router.config import parse
from router.config.addresses import UnixAddress
from router.control import Control

COMMANDS = ("serve", "check", "status", "drain", "undrain", "cancel", "demo")
GOOD = '[[worker]]\nname = "w0"\nurl = "http://127.0.0.1:9000"\n'


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_d5_version_is_told() -> None:
    done = run("--version")

    assert done.exit_code == 0
    assert done.output.startswith("fencepost, version 0.")


def test_d5_help_lists_the_commands_with_examples() -> None:
    done = run("--help")

    assert done.exit_code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in done.output
    assert "Examples:\n    fencepost demo\n" in done.output


@pytest.mark.parametrize("command", COMMANDS)
def test_d5_every_command_has_its_help(command: str) -> None:
    done = run(command, "-h")

    assert done.exit_code == 0
    assert done.output.startswith(f"Usage: fencepost {command} ")


def test_d5_serve_has_examples_in_its_help() -> None:
    assert "Examples:\n    fencepost serve --worker" in run("serve", "--help").output


def test_d1_check_shows_the_resolved_configuration(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text(GOOD)

    done = run("check", str(path))

    assert done.exit_code == 0
    assert parse(done.output, environ={}, directory=tmp_path) == parse(
        GOOD, environ={}, directory=tmp_path
    )


def test_d2_check_ends_with_2_and_one_line_for_each_fault(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text(GOOD + "slot = 8\n[wait]")

    done = run("check", str(path))

    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        f"fencepost: {path}: worker[0].slot: unknown key, did you mean slots?",
        f"fencepost: {path}: wait: unknown section, did you mean waits?",
    ]


def test_j4_check_refuses_a_malformed_bios_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    worker = '[[worker]]\nname = "a"\nurl = "http://127.0.0.1:1"\n'
    path.write_text(f'{worker}[models."a.b"]\nbios = "Use the tools."\n')

    done = run("check", str(path))

    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f'fencepost: {path}: models."a.b".bios: needs {{tools}}')


def test_d2_check_of_no_file_ends_with_2(tmp_path: Path) -> None:
    done = run("check", str(tmp_path / "f.toml"))

    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line == f"fencepost: {tmp_path}/f.toml: no such file or directory"


@pytest.mark.parametrize(
    "arguments", [(), ("--config", "f.toml", "--worker", "http://h")]
)
def test_d1_serve_takes_a_file_or_urls(arguments: tuple[str, ...]) -> None:
    done = run("serve", *arguments)

    assert done.exit_code == 2
    assert "either --config FILE or --worker URL" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-w", "ftp://h"), "worker[0].url: needs http:// or https://"),
        (("-w", "http://h", "-l", "8080"), "server.listen[0]: needs host:port"),
        (("-w", "http://h", "--admin", "x"), "admin.listen: needs host:port"),
        (("-w", "http://h", "-w", "http://h"), "worker[1].url: the same as"),
    ],
)
def test_d2_what_is_wrong_in_the_options_of_serve_is_told(
    arguments: tuple[str, ...], says: str
) -> None:
    done = run("serve", *arguments)

    assert done.exit_code == 2
    assert says in done.stderr


def test_d5_an_address_of_another_machine_is_told() -> None:
    done = run(
        "serve", "-w", "http://h", "-l", "192.0.2.1:80", "--admin", "127.0.0.1:0"
    )

    assert done.exit_code == 1
    assert done.stderr == (
        "fencepost: 192.0.2.1:80 is not an address of this machine: "
        "correct --listen or server.listen\n"
    )


@pytest.mark.parametrize(
    "command", [("status",), ("status", "--json"), ("drain", "w0"), ("cancel", "r")]
)
def test_d1_commands_without_a_router_end_with_1(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    done = run(*command, "--admin", f"unix:{tmp_path}/admin.sock")

    assert done.exit_code == 1
    assert done.stderr.startswith(f"fencepost: no router answers at unix:{tmp_path}")


def test_d1_a_bad_admin_address_ends_with_2() -> None:
    done = run("status", "--admin", "nowhere")

    assert done.exit_code == 2
    assert "needs host:port" in done.stderr


def test_d1_commands_need_no_key_variable_of_the_daemon(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text(
        f'[server]\nstate_dir = "{tmp_path}"\n{GOOD}api_key_env = "NOT_SET_HERE"'
    )

    done = run("status", "--config", str(path))

    assert done.exit_code == 1
    assert f"unix:{tmp_path}/admin.sock" in done.stderr


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "soon"])
def test_d1_a_drain_ends_within_a_number_of_seconds(seconds: str) -> None:
    done = run("drain", "w0", "--within", seconds, "--admin", "unix:/nowhere/a.sock")

    assert done.exit_code == 2
    assert "Invalid value for '--within'" in done.stderr


def test_d2_what_a_fault_repeats_is_one_line_and_steers_no_terminal(
    tmp_path: Path,
) -> None:
    path = tmp_path / "f.toml"
    path.write_text(
        '[[worker]]\nname = "a"\nport = 1\ncommand = ["no\\n\\u001b[2Jsuch"]'
    )

    done = run("check", str(path))

    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert "no program no??[2Jsuch in PATH" in line


@pytest.mark.parametrize("command", [("check", "{file}"), ("--help",)])
def test_d5_output_that_can_t_be_written_is_one_line(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "f.toml"
    path.write_text(GOOD)

    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "router", *(c.format(file=path) for c in command)],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )

    assert done.returncode == 1
    assert done.stderr == (b"fencepost: the output is lost: no space left on device\n")


STATUS: dict[str, Any] = {
    "ready": True,
    "stopping": False,
    "queues": {"modèle": 1},
    "requests": [],
    "workers": [],
}


class Asked(Control):
    """A router that is asked for its status, and is not there."""

    def status(self) -> dict[str, Any]:
        return STATUS


def test_d5_a_status_is_drawn_in_the_letters_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    octets = io.BytesIO()
    stream = io.TextIOWrapper(octets, encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)

    with Asked(UnixAddress("/nowhere")) as control:
        print_tables(control, watch=False)

    lines = octets.getvalue().decode().splitlines()
    assert lines[0].startswith("ready ? 0 of 0 workers serve")
    assert lines[-1].split() == ["mod?le", "1"]


def test_d5_a_configuration_is_shown_in_the_letters_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "f.toml"
    path.write_text(GOOD + 'models = ["模型"]', encoding="utf-8")
    octets = io.BytesIO()
    stream = io.TextIOWrapper(octets, encoding="latin-1", write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)

    main(["check", str(path)], standalone_mode=False)

    assert b'models = ["\\u6a21\\u578b"]' in octets.getvalue()
