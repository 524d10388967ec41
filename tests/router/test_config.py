import os
import tomllib
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import ConfigInvalid, load, parse, render
from router.config.addresses import TcpAddress, UnixAddress, parse_address
from router.config.reading import SECTIONS
from router.config.values import ENGINES, checks
from router.settings import (
    AdminSettings,
    AgentsSettings,
    ModelSettings,
    RouterSettings,
    ServerSettings,
    Settings,
    WaitSettings,
    WorkerSettings,
)

WORKER = '[[worker]]\nname = "w0"\nurl = "http://127.0.0.1:9000"\n'
HERE = Path("/etc/fencepost")


def read(source: str, **environ: str) -> Settings:
    return parse(source, environ=environ, directory=HERE)


BIOS = """Tools:
{tools}
Call one with {"tool_calls": [{"name": "x", "arguments": {}}]} alone.
"""


def faults(source: str, **environ: str) -> list[str]:
    with pytest.raises(ConfigInvalid) as caught:
        read(source, **environ)
    return list(caught.value.faults)


def fault(source: str, **environ: str) -> str:
    found = faults(source, **environ)
    assert len(found) == 1, found
    return found[0]


# ---- what is right ----


def test_d2_one_worker_and_nothing_else_gives_the_defaults() -> None:
    assert read(WORKER) == Settings(
        workers=(WorkerSettings(name="w0", url="http://127.0.0.1:9000"),)
    )


def test_d2_every_key_is_read(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("0" * 64)
    source = """
        [server]
        listen = ["127.0.0.1:8080", "unix:/run/f.sock", "[::1]:0"]
        prefixes = ["", "/llm", "/a/b"]
        body_max_bytes = 2048
        bodies_max_bytes = 4096
        connections_max = 10
        client_stall_ms = 1000
        drain_ms = 0
        lame_duck_ms = 5
        api_keys_file = "keys"
        state_dir = "state"

        [admin]
        listen = "127.0.0.1:9090"

        [router]
        attempts = 2
        queue_limit = 0
        queue_ms = 7
        commit_after_ms = 8
        keepalive_ms = 900
        suspect_after = 4
        signals_max = 5
        tool_calls_max = 6
        result_ttl_ms = 7
        thinking_signature = "opaque"

        [waits]
        connect_ms = 1
        poll_ms = 20
        busy_wait_ms = 30
        load_wait_ms = 40
        idle_grace_ms = 50
        liveness_ms = 60
        first_delta_ms = 70
        usage_wait_ms = 80
        ghost_ms = 90
        offer_timeout_ms = 100

        [agents]
        listen = ["0.0.0.0:7701"]
        token_env = "GPU_KEY"
        tls_cert = "keys"
        tls_key = "keys"
        tls_ca = "keys"

        [[worker]]
        name = "far"
        agent = "[fd00::7]:7700"
        slots = 3
        models = ["m"]
        api_key_env = "GPU_KEY"

        [[worker]]
        name = "gpu-0"
        url = "https://gpu0.example:8443/v1"
        slots = 8
        engine = "vllm"
        models = ["m", "n"]
        health_url = "http://gpu0.example:9/health"
        settle_ms = 0
        api_key_env = "GPU_KEY"

        [[worker]]
        name = "gpu-1"
        command = ["sh", "serve", "{port}", "{slots}", "{model}"]
        port = 9001
        model = "m.gguf"
        env = { CUDA_VISIBLE_DEVICES = "1" }
        cwd = "/"
        slots = 2
        models = ["o"]
        pin_slots = true
        stop_grace_ms = 1
        max_restarts = 2
        restart_window_ms = 3000

        [models.m]
        aliases = ["gpt-4o", "*"]
        fallback = "n"
        thinking_max_tokens = 0
        bios = '''
Tools:
{tools}
Call one with {"tool_calls": [{"name": "x", "arguments": {}}]} alone.
'''
        tool_parse_error = "signal"
        exit_tools = ["POLICY_RISK", "LOW_CONFIDENCE"]
        loop_repeats_max = 20
    """

    settings = parse(
        source,
        environ={"GPU_KEY": "sk-1234567890123456", "PATH": os.defpath},
        directory=tmp_path,
    )

    assert settings == Settings(
        server=ServerSettings(
            listen=("127.0.0.1:8080", "unix:/run/f.sock", "[::1]:0"),
            prefixes=("", "/llm", "/a/b"),
            body_max_bytes=2048,
            bodies_max_bytes=4096,
            connections_max=10,
            client_stall_ms=1000,
            drain_ms=0,
            lame_duck_ms=5,
            api_keys_file=str(tmp_path / "keys"),
            state_dir=str(tmp_path / "state"),
        ),
        admin=AdminSettings(listen="127.0.0.1:9090"),
        router=RouterSettings(
            attempts=2,
            queue_limit=0,
            queue_ms=7,
            commit_after_ms=8,
            keepalive_ms=900,
            suspect_after=4,
            signals_max=5,
            tool_calls_max=6,
            result_ttl_ms=7,
            thinking_signature="opaque",
        ),
        waits=WaitSettings(
            connect_ms=1,
            poll_ms=20,
            busy_wait_ms=30,
            load_wait_ms=40,
            idle_grace_ms=50,
            liveness_ms=60,
            first_delta_ms=70,
            usage_wait_ms=80,
            ghost_ms=90,
            offer_timeout_ms=100,
        ),
        agents=AgentsSettings(
            listen=("0.0.0.0:7701",),
            token_env="GPU_KEY",
            tls_cert=str(tmp_path / "keys"),
            tls_key=str(tmp_path / "keys"),
            tls_ca=str(tmp_path / "keys"),
        ),
        workers=(
            WorkerSettings(
                name="far",
                agent="[fd00::7]:7700",
                slots=3,
                models=("m",),
                api_key_env="GPU_KEY",
            ),
            WorkerSettings(
                name="gpu-0",
                url="https://gpu0.example:8443/v1",
                slots=8,
                engine="vllm",
                models=("m", "n"),
                health_url="http://gpu0.example:9/health",
                settle_ms=0,
                api_key_env="GPU_KEY",
            ),
            WorkerSettings(
                name="gpu-1",
                command=("sh", "serve", "{port}", "{slots}", "{model}"),
                port=9001,
                model="m.gguf",
                env={"CUDA_VISIBLE_DEVICES": "1"},
                cwd="/",
                slots=2,
                models=("o",),
                pin_slots=True,
                stop_grace_ms=1,
                max_restarts=2,
                restart_window_ms=3000,
            ),
        ),
        models={
            "m": ModelSettings(
                aliases=("gpt-4o", "*"),
                fallback="n",
                thinking_max_tokens=0,
                bios=BIOS,
                tool_parse_error="signal",
                exit_tools=("POLICY_RISK", "LOW_CONFIDENCE"),
                loop_repeats_max=20,
            )
        },
    )


def test_d2_every_setting_has_its_check() -> None:
    rules = checks({}, HERE)

    assert {name: set(section) for name, section in rules.items()} == {
        name: {field.name for field in attrs.fields(cls)}
        for name, cls in SECTIONS.items()
    }


def test_d2_one_listen_address_may_be_written_without_a_list() -> None:
    settings = read('[server]\nlisten = "unix:/run/f.sock"\n' + WORKER)

    assert settings.server.listen == ("unix:/run/f.sock",)


def test_d2_a_path_starts_from_the_folder_of_the_file() -> None:
    settings = read('[server]\nstate_dir = "state"\n' + WORKER)

    assert settings.server.state_dir == "/etc/fencepost/state"


# ---- what is wrong, each with its path ----


def test_d2_all_faults_are_told_at_once() -> None:
    found = faults(
        """
        [server]
        drain_ms = "8"
        listen = ["nowhere", "unix:relative"]
        [rooter]
        [router]
        attempts = 0
        [[worker]]
        name = "a"
        slot = 8
        [[worker]]
        name = "a"
        url = "http://127.0.0.1:1"
        engine = "vlm"
        """
    )

    assert sorted(entry.partition(": ")[0] for entry in found) == [
        "rooter",
        "router.attempts",
        "server.drain_ms",
        "server.listen[0]",
        "server.listen[1]",
        "worker[0].slot",
        "worker[0].url",
        "worker[1].engine",
        "worker[1].name",
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("slot = 8", "worker[0].slot: unknown key, did you mean slots?"),
        ("Slots = 8", "worker[0].Slots: unknown key, did you mean slots?"),
        ("drain_ms = 8", "worker[0].drain_ms: unknown key, it belongs to [server]"),
        (
            "zzz = 8",
            "worker[0].zzz: unknown key: name, url, agent, command, port, model, env",
        ),
        ('"a b" = 8', 'worker[0]."a b": unknown key'),
    ],
)
def test_d2_an_unknown_key_names_the_one_that_was_meant(line: str, says: str) -> None:
    assert fault(WORKER + line).startswith(says)


def test_d2_an_unknown_section_names_the_one_that_was_meant() -> None:
    assert fault(WORKER + "[wait]") == "wait: unknown section, did you mean waits?"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            '[agents]\nlisten = "0.0.0.0:7701"',
            (
                "agents.listen: 0.0.0.0:7701 is reached from elsewhere: set "
                "token_env, or all of tls_cert, tls_key and tls_ca"
            ),
        ),
        (
            '[agents]\nlisten = "unix:/run/a.sock"',
            "agents.listen: needs host:port or [v6]:port",
        ),
        (
            '[agents]\ntls_cert = "keys"',
            "agents.tls_key: is missing: it goes with tls_cert",
        ),
        (
            '[agents]\nlisten = "127.0.0.1:1"\ntls_ca = "keys"',
            "agents.tls_cert: is missing: who listens with tls_ca needs it",
        ),
        (
            '[agent]\nlisten = "127.0.0.1:1"\ntls_ca = "keys"',
            "agent.tls_cert: is missing: who listens with tls_ca needs it",
        ),
        (
            '[agents]\ntls_ca = "nowhere"',
            "agents.tls_ca: there is no file {folder}/nowhere",
        ),
        (
            '[agents]\ntoken_env = "SHORT"',
            "agents.token_env: the token in SHORT has less than 16 characters",
        ),
        (
            '[agent]\nname = "gpus"',
            "agent.listen: is missing: where routers connect, or set routers",
        ),
        (
            '[agent]\nlisten = "10.0.0.1:7700"',
            (
                "agent.listen: 10.0.0.1:7700 is reached from elsewhere: set "
                "token_env, or all of tls_cert, tls_key and tls_ca"
            ),
        ),
        (
            '[[worker]]\nname = "far"\nagent = "h:7700"\nengine = "vllm"',
            "worker[1].engine: is set where its agent runs, in that host's file",
        ),
        (
            '[[worker]]\nname = "far"\nagent = "h:7700"\nurl = "http://h"',
            "worker[1].agent: there is a url too: one worker is one of both",
        ),
        (
            '[[worker]]\nname = "far"\nagent = "h"',
            "worker[1].agent: needs host:port or [v6]:port",
        ),
        (
            '[[worker]]\nname = "far"\nagent = "h:0"',
            "worker[1].agent: nobody listens on port 0",
        ),
        (
            '[agent]\nrouters = ["unix:/run/a.sock"]',
            "agent.routers[0]: needs host:port or [v6]:port",
        ),
        (
            '[[worker]]\nname = "far"\nagent = "a..b:7700"',
            "worker[1].agent: the host has an empty or a too long part",
        ),
        (
            f'[agent]\nrouters = ["{"a" * 64}.test:7700"]',
            "agent.routers[0]: the host has an empty or a too long part",
        ),
    ],
)
def test_d2_what_is_said_of_agents_is_checked(
    source: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "keys").touch()

    with pytest.raises(ConfigInvalid) as raised:
        parse(f"{WORKER}\n{source}", environ={"SHORT": "sk-1"}, directory=tmp_path)

    assert list(raised.value.faults) == [says.format(folder=tmp_path)]


def test_d2_a_model_may_be_that_of_an_agent_which_comes_by_itself() -> None:
    source = """
        [agents]
        listen = "127.0.0.1:0"
        [[worker]]
        name = "here"
        url = "http://h"
        models = ["small"]
        [models.big]
        fallback = "medium"
    """
    assert "big" in parse(source, environ={}, directory=HERE).models
    with pytest.raises(ConfigInvalid) as raised:
        parse(source.replace("listen", "# listen"), environ={}, directory=HERE)

    assert list(raised.value.faults) == [
        "models.big: no worker lists this model",
        'models.big.fallback: no worker lists the model "medium"',
    ]


def test_d2_who_only_connects_needs_no_certificate_for_tls(tmp_path: Path) -> None:
    (tmp_path / "ca").touch()
    settings = parse(
        f'{WORKER}\n[agents]\ntls_ca = "ca"', environ={}, directory=tmp_path
    )

    assert settings.agents.tls_ca == str(tmp_path / "ca")


def test_d2_an_agent_has_engines_of_its_own() -> None:
    source = """
        [agent]
        listen = "127.0.0.1:7700"
        [agents]
        listen = "127.0.0.1:7701"
        [[worker]]
        name = "far"
        agent = "h:7700"
    """
    with pytest.raises(ConfigInvalid) as raised:
        parse(source, environ={}, directory=HERE)

    assert list(raised.value.faults) == [
        "worker[0].agent: an agent has engines of its own: give url, or command",
        "agents: an agent meets no agents: that is for a router's file",
    ]


def test_d2_a_router_of_agents_that_announce_themselves_needs_no_worker() -> None:
    settings = parse('[agents]\nlisten = "127.0.0.1:0"', environ={}, directory=HERE)

    assert settings.workers == ()
    assert settings.agents.listen == ("127.0.0.1:0",)


RUN = """
[[worker]]
name = "w0"
command = ["sh", "-c", "serve --port {port}"]
port = 9001
"""


def test_d2_a_worker_may_be_a_command_with_a_port() -> None:
    assert read(RUN, PATH=os.defpath).workers == (
        WorkerSettings(
            name="w0", command=("sh", "-c", "serve --port {port}"), port=9001
        ),
    )


def test_l6_braces_that_hold_no_word_stay_and_arguments_may_repeat() -> None:
    json = r"'{\"enable_thinking\": false, \"a\": {}}'"
    source = RUN.replace("{port}", "{port} {{word}} a{3} " + json).replace(
        '"-c"', '"-c", "-c", ""'
    )

    (worker,) = read(source, PATH=os.defpath).workers

    assert worker.command is not None
    assert worker.command[1:4] == ("-c", "-c", "")
    assert worker.command[4].endswith('\'{"enable_thinking": false, "a": {}}\'')


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            ('name = "w0"', 'name = "w0"\nurl = "http://h"'),
            (
                "worker[0].command: there is a url too: "
                "give url, or command and port, or agent"
            ),
        ),
        (
            ("port = 9001", ""),
            "worker[0].port: is missing: the port that the command listens on",
        ),
        (
            ("{port}", "{prot}"),
            (
                "worker[0].command[2]: {prot} stands for nothing: "
                "there are {port}, {slots}, {model}"
            ),
        ),
        (
            ("{port}", "{slots}"),
            "worker[0].command[2]: {slots} stands for worker[0].slots: set it",
        ),
        (
            ("{port}", "{model}"),
            "worker[0].command[2]: {model} stands for worker[0].model: set it",
        ),
        (
            ('"sh"', '"no-such-program"'),
            (
                "worker[0].command[0]: no program no-such-program in PATH: "
                "install it, or give its whole path"
            ),
        ),
        (
            ('"sh"', '"./no-such-program"'),
            (
                "worker[0].command[0]: there is no program ./no-such-program: "
                "correct the path"
            ),
        ),
        (
            ('"sh"', '"/etc/passwd"'),
            (
                "worker[0].command[0]: /etc/passwd is not executable: "
                "chmod +x it, or name another"
            ),
        ),
        (('"sh"', '" "'), "worker[0].command[0]: needs a program"),
        (
            ('["sh", "-c", "serve --port {port}"]', '"sh -c serve"'),
            'worker[0].command: takes no shell: write a list, ["program", "argument"]',
        ),
        (
            ("port = 9001", "port = 9001\nslots = 0"),
            "worker[0].slots: needs at least 1, got 0",
        ),
        (
            ("port = 9001", "port = 70000"),
            "worker[0].port: takes at most 65535, got 70000",
        ),
        (
            ("port = 9001", 'port = 9001\nengine = "vlm"'),
            "worker[0].engine: 'vlm' is no engine, did you mean vllm?",
        ),
        (
            ("port = 9001", 'port = 9001\ncwd = "/no/such/folder"'),
            "worker[0].cwd: there is no folder /no/such/folder",
        ),
        (
            ("port = 9001", "port = 9001\nenv = { A = 1 }"),
            "worker[0].env: A needs a string, got a whole number",
        ),
        (
            ("port = 9001", 'port = 9001\nenv = { "A=B" = "1" }'),
            "worker[0].env: 'A=B' is no name of a variable",
        ),
        (
            ("port = 9001", 'port = 9001\nengine = "vllm"\npin_slots = true'),
            "worker[0].pin_slots: vllm has no slots that can be named",
        ),
        (
            ("port = 9001", "port = 9001\npin_slots = 1"),
            "worker[0].pin_slots: needs true or false, got a whole number",
        ),
    ],
)
def test_d2_what_is_wrong_with_a_command_is_told_with_its_mending(
    change: tuple[str, str], says: str
) -> None:
    assert fault(RUN.replace(*change), PATH=os.defpath) == says


def test_d2_a_program_is_looked_for_as_it_will_be_started(tmp_path: Path) -> None:
    program = tmp_path / "serve"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    in_folder = RUN.replace('"sh"', '"./serve"') + f'cwd = "{tmp_path}"'
    in_path = RUN.replace('"sh"', '"serve"') + f'env = {{ PATH = "{tmp_path}" }}'

    for source in (in_folder, in_path):
        (worker,) = read(source, PATH="/nowhere").workers
        assert worker.port == 9001


def test_d2_who_serves_nothing_looks_for_no_program() -> None:
    source = RUN.replace('"sh"', '"no-such-program"')

    assert len(parse(source, environ=None, directory=HERE).workers) == 1


def test_d2_two_servers_on_one_port_are_told() -> None:
    twin = RUN.replace("w0", "w1")

    assert fault(RUN + twin, PATH=os.defpath) == (
        "worker[1].port: the same as worker[0]: each server needs a port of its own"
    )


@pytest.mark.parametrize(
    "line", ["port = 1", 'model = "m"', 'cwd = "/"', 'env = { A = "b" }']
)
def test_d2_what_is_for_a_command_says_so_beside_a_url(line: str) -> None:
    key = line.partition(" ")[0]

    assert fault(WORKER + line) == (
        f"worker[0].{key}: is for a worker with command; this one has url"
    )


def test_d2_a_worker_without_url_and_command_is_told_both_ways() -> None:
    assert fault('[[worker]]\nname = "a"') == (
        "worker[0].url: is missing: give url, or command and port, or agent"
    )


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ('"8"', "a string"),
        ("true", "a boolean"),
        ("8.0", "a fraction"),
        ("[8]", "a list"),
        ("{}", "a table"),
        ("2020-01-01", "a date or time"),
    ],
)
def test_d2_a_number_is_a_number_and_nothing_is_converted(value: str, got: str) -> None:
    assert fault(f"[router]\nattempts = {value}\n{WORKER}") == (
        f"router.attempts: needs a whole number, got {got}"
    )


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("server = 3", "server"),
        ("[models]\nm = 3", "models.m"),
        ("[server]\nlisten = 8080", "server.listen"),
        ("[server]\nlisten = []", "server.listen"),
        ('[server]\nprefixes = ""', "server.prefixes"),
        ("[server]\nprefixes = [1]", "server.prefixes[0]"),
        ("[admin]\nlisten = [1]", "admin.listen"),
        ("[server]\nstate_dir = 1", "server.state_dir"),
        ('[server]\nstate_dir = " "', "server.state_dir"),
    ],
)
def test_d2_wrong_types_are_told_with_their_path(source: str, path: str) -> None:
    assert fault(f"{source}\n{WORKER}").startswith(f"{path}: needs ")


def test_d2_models_are_tables_by_name() -> None:
    assert fault(f"models = 3\n{WORKER}") == (
        "models: each model is a table with a name: write [models.NAME]"
    )


def test_d2_a_lone_worker_table_is_told_how_to_be_a_list() -> None:
    assert fault('[worker]\nname = "a"') == (
        "worker: each worker is a table of a list: write [[worker]]"
    )


@pytest.mark.parametrize(
    ("section", "key", "value", "bound"),
    [
        ("server", "body_max_bytes", 1023, "at least 1024 bytes"),
        ("server", "connections_max", 0, "at least 1"),
        ("server", "client_stall_ms", 99, "at least 100 ms"),
        ("server", "drain_ms", -1, "at least 0 ms"),
        ("router", "attempts", 0, "at least 1"),
        ("router", "attempts", 101, "at most 100"),
        ("router", "queue_limit", -1, "at least 0"),
        ("router", "keepalive_ms", -1, "at least 0 ms"),
        ("router", "suspect_after", 0, "at least 1"),
        ("waits", "poll_ms", 9, "at least 10 ms"),
        ("waits", "connect_ms", 0, "at least 1 ms"),
        ("waits", "ghost_ms", 2**32, "at most 2678400000 ms"),
    ],
)
def test_d2_numbers_have_their_range(
    section: str, key: str, value: int, bound: str
) -> None:
    says = fault(f"[{section}]\n{key} = {value}\n{WORKER}")

    assert says.startswith(f"{section}.{key}: ")
    assert bound in says
    assert says.endswith(f"got {value}")


def test_d2_a_signature_is_one_of_two() -> None:
    says = fault(f'[router]\nthinking_signature = "yes"\n{WORKER}')

    assert says == "router.thinking_signature: 'yes' is no signature: off, opaque"


@pytest.mark.parametrize("slots", [0, -1, 65_537])
def test_d2_a_worker_has_at_least_one_slot(slots: int) -> None:
    assert fault(f"{WORKER}slots = {slots}").startswith("worker[0].slots: ")


@pytest.mark.parametrize(
    "listen",
    [
        "127.0.0.1",
        "8080",
        ":8080",
        "127.0.0.1:http",
        "127.0.0.1:65536",
        "127.0.0.1:-1",
        "::1:8080",
        "http://127.0.0.1:8080",
        "a b:1",
        "unix:",
        "unix:relative.sock",
        f"unix:/{'x' * 107}",
        "",
    ],
)
def test_d2_a_bad_listen_address_is_told(listen: str) -> None:
    assert fault(f'[server]\nlisten = "{listen}"\n{WORKER}').startswith(
        "server.listen: "
    )


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8080", TcpAddress("127.0.0.1", 8080)),
        ("[::1]:0", TcpAddress("::1", 0)),
        ("localhost:1", TcpAddress("localhost", 1)),
        ("unix:/run/f.sock", UnixAddress("/run/f.sock")),
    ],
)
def test_listen_addresses_read_and_show_the_same(
    text: str, address: TcpAddress | UnixAddress
) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("ftp://h", "needs http:// or https://"),
        ("127.0.0.1:9000", "needs http:// or https://"),
        ("http://", "is not a URL"),
        ("http://h:99999", "is not a URL"),
        ("http://[::1", "is not a URL"),
        ("http://a b/", "is not a URL"),
        ("http://gpu..local:8000", "is not a URL"),
        ("http://h/v1/chat/completions", "ends at the engine's root or at /v1"),
        ("http://h/v1/v1", "ends at the engine's root or at /v1"),
        ("http://h/a%20b", "ends at the engine's root or at /v1"),
        ("http://h?a=1", "takes no query"),
        ("http://h#a", "takes no query"),
        ("http://user:hunter2@h", "takes no user or password"),
    ],
)
def test_d2_a_worker_url_is_a_root_and_nothing_more(url: str, says: str) -> None:
    found = fault(f'[[worker]]\nname = "a"\nurl = "{url}"')

    assert found.startswith(f"worker[0].url: {says}")
    assert "hunter2" not in found


@pytest.mark.parametrize(
    "url",
    [
        "http://h",
        "http://h/",
        "https://h:1/v1",
        "http://[::1]:9/v1/",
        "http://h/gpu0/v1",
    ],
)
def test_d2_a_worker_url_may_end_in_v1(url: str) -> None:
    settings = read(f'[[worker]]\nname = "a"\nurl = "{url}"')

    assert settings.workers[0].url == url


@pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", "ä", "x" * 65, "a\\n"])
def test_d2_a_worker_name_fits_a_header_and_a_command(name: str) -> None:
    assert fault(f'[[worker]]\nname = "{name}"\nurl = "http://h"').startswith(
        "worker[0].name: needs "
    )


def test_d2_an_unknown_engine_names_the_one_that_was_meant() -> None:
    assert fault(WORKER + 'engine = "vlm"') == (
        "worker[0].engine: 'vlm' is no engine, did you mean vllm?"
    )
    assert fault(WORKER + 'engine = "mlx"').endswith(f": {', '.join(ENGINES)}")


def test_d2_a_key_variable_that_is_not_set_is_told() -> None:
    source = WORKER + 'api_key_env = "GPU_KEY"'

    assert fault(source) == (
        "worker[0].api_key_env: the environment variable GPU_KEY is not set"
    )
    assert fault(source, GPU_KEY=" ").endswith("is not set")
    assert read(source, GPU_KEY="sk-1").workers[0].api_key_env == "GPU_KEY"


def test_d2_a_keys_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    path = tmp_path / "keys"

    assert fault(f'[server]\napi_keys_file = "{path}"\n{WORKER}') == (
        f"server.api_keys_file: {path}: No such file or directory"
    )


def test_d2_a_keys_file_with_a_key_in_the_clear_is_told_without_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys"
    path.write_text("sk-secret\n")

    assert fault(f'[server]\napi_keys_file = "{path}"\n{WORKER}') == (
        f"server.api_keys_file: {path}:1: not a SHA-256 in hex"
    )


# ---- contradictions ----


def test_d2_a_router_without_workers_is_told_what_to_add() -> None:
    assert fault("") == "worker: there is none: add a [[worker]] with name and url"


def test_d2_two_workers_of_one_name_are_told() -> None:
    assert fault(WORKER + '[[worker]]\nname = "w0"\nurl = "http://h:2"') == (
        "worker[1].name: the same as worker[0]: each worker needs a name of its own"
    )


def test_d2_two_workers_at_one_url_would_share_slots() -> None:
    source = WORKER + '[[worker]]\nname = "w1"\nurl = "http://127.0.0.1:9000/v1/"'

    assert fault(source).startswith("worker[1].url: the same as worker[0]")


MODELS = WORKER + 'models = ["m", "n"]\n'


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('[models.m]\naliases = ["n"]', 'models.m.aliases: "n" is the name of a model'),
        ('[models.m]\naliases = ["m"]', 'models.m.aliases: "m" is the name of a model'),
        (
            '[models.m]\naliases = ["x"]\n[models.n]\naliases = ["x"]',
            'models.n.aliases: "x" is an alias of "m" already',
        ),
        (
            '[models.m]\naliases = ["*"]\n[models.n]\naliases = ["*"]',
            'models.n.aliases: "*" is an alias of "m" already',
        ),
        ('[models.m]\naliases = ["x", "x"]', "models.m.aliases[1]: the same as [0]"),
        ('[models.m]\nfallback = "m"', "models.m.fallback: a model is no fallback"),
        ('[models.m]\nfallback = "z"', "models.m.fallback: no worker lists the model"),
        (
            '[models.m]\nfallback = "x"\n[models.n]\naliases = ["x"]',
            'models.m.fallback: "x" is an alias: name "n" itself',
        ),
        ('[models."a.b"]', 'models."a.b": no worker lists this model'),
    ],
)
def test_d2_names_of_models_must_not_collide(source: str, says: str) -> None:
    assert fault(MODELS + source).startswith(says)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('bios = "Use {tools}."', "models.m.bios: must show the model the key"),
        ('bios = "Use the tools."', "models.m.bios: needs {tools} once"),
        ('bios = "{tools} {today}"', "models.m.bios: {today} is no place"),
        ('bios = ""', "models.m.bios: needs a text that is not empty"),
        ("bios = 3", "models.m.bios: needs a string, got a whole number"),
        ("thinking_max_tokens = -1", "models.m.thinking_max_tokens: needs at least 0"),
        (
            'exit_tools = ["POLICY_RISK", "LOOP_DETECTED"]',
            "models.m.exit_tools[1]: 'LOOP_DETECTED' is not one of LOW_CONFIDENCE, ",
        ),
        (
            'tool_parse_error = "ignore"',
            "models.m.tool_parse_error: 'ignore' is not one of fail, signal",
        ),
        (
            'tool_parse_error = "signal"',
            "models.m.tool_parse_error: without a bios no call is parsed",
        ),
    ],
)
def test_j4_what_a_model_is_told_is_checked_with_its_path(line: str, says: str) -> None:
    assert fault(f"{WORKER}[models.m]\n{line}").startswith(says)


def test_d2_a_worker_that_tells_its_models_later_may_have_any() -> None:
    settings = read(WORKER + '[models.m]\nfallback = "z"')

    assert settings.models["m"].fallback == "z"


def test_d2_clients_must_not_reach_the_admin_listener() -> None:
    source = '[admin]\nlisten = "127.0.0.1:8080"\n' + WORKER

    assert fault(source).startswith("admin.listen: the same as server.listen")


def test_d2_one_body_is_not_larger_than_all_together() -> None:
    source = "[server]\nbodies_max_bytes = 2048\n" + WORKER

    assert fault(source).startswith("server.body_max_bytes: 33554432 is more than ")


@pytest.mark.parametrize("key", ["busy_wait_ms", "load_wait_ms", "idle_grace_ms"])
def test_d2_a_budget_is_not_below_the_step_it_is_counted_in(key: str) -> None:
    assert fault(f"[waits]\n{key} = 499\n{WORKER}").startswith(
        f"waits.{key}: 499 is less than poll_ms (500)"
    )


# ---- the file ----


def test_d2_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        load(tmp_path / "f.toml", environ={})

    assert caught.value.faults == ("no such file or directory",)


def test_d2_bytes_that_are_no_text_are_told(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_bytes(b'a = "\xff"')

    with pytest.raises(ConfigInvalid, match="byte 5 is not UTF-8"):
        load(path, environ={})


def test_d2_text_that_is_no_toml_is_told_with_its_line() -> None:
    assert fault("[server]\nlisten = \n") == (
        "not TOML: Invalid value (at line 2, column 10)"
    )
    assert fault("a = " + "[" * 100_000).startswith("not TOML: ")


# ---- rendering ----

short_text = st.text(
    st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1, max_size=8
)


@given(
    st.dictionaries(
        short_text.filter(lambda name: name not in {"w", "*"}),
        st.sets(short_text),
        max_size=3,
    )
)
def test_d1_what_check_shows_reads_as_the_same_settings(
    names: dict[str, set[str]],
) -> None:
    taken: set[str] = set(names)
    models = {}
    for name, aliases in names.items():
        models[name] = ModelSettings(aliases=tuple(sorted(aliases - taken)))
        taken |= aliases
    settings = Settings(
        server=ServerSettings(state_dir="/run/f", listen=("unix:/x", "h:1")),
        workers=(
            WorkerSettings(name="w0", url="http://h", slots=3),
            WorkerSettings(
                name="w1",
                # A brace may begin a placeholder, which has rules of its own.
                command=("sh", "-c", '{"a": {}}', *(n for n in names if "{" not in n)),
                port=1,
                model="m",
                env={"A": "b", **{f"_{n}".replace("=", "-"): n for n in names}},
                cwd="/",
                pin_slots=True,
                stop_grace_ms=0,
                max_restarts=0,
            ),
        ),
        models=models,
    )

    assert read(render(settings), PATH=os.defpath) == settings


def test_d1_what_check_shows_has_every_key() -> None:
    shown = render(read(WORKER + "[models.m]"))
    host = render(read(WORKER + '[agent]\nlisten = "127.0.0.1:7700"'))

    for name, cls in SECTIONS.items():
        for field in attrs.fields(cls):
            text = host if name == "agent" else shown
            assert f"{field.name} " in text, f"{name}.{field.name}"
    assert tomllib.loads(shown)["worker"][0]["name"] == "w0"


# ---- whatever a file says ----

LONG = "x" * 5_000


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            RUN + "env = { PATH = 1 }",
            "worker[0].env: PATH needs a string, got a whole number",
        ),
        (
            RUN.replace('"sh"', f'"/{LONG}"'),
            "worker[0].command[0]: cannot be looked at: File name too long",
        ),
        (
            RUN + f'cwd = "{LONG}"',
            "worker[0].cwd: cannot be looked at: File name too long",
        ),
        (
            f'[agents]\ntls_ca = "{LONG}"\n' + RUN,
            "agents.tls_ca: cannot be looked at: File name too long",
        ),
        ("x = " + "9" * 5_000, "a number in it has thousands of digits"),
        (
            f"[server]\nbody_max_bytes = 0x{'f' * 5_000}\n" + RUN,
            "server.body_max_bytes: takes at most 1099511627776 bytes, got far beyond",
        ),
        (
            f"[waits]\npoll_ms = 0x{'f' * 5_000}\n" + RUN,
            "waits.poll_ms: takes at most 2678400000 ms, got far beyond",
        ),
        (
            f'[server]\nlisten = "127.0.0.1:{"9" * 5_000}"\n' + RUN,
            "server.listen: the port is at most 65535",
        ),
        ("a = " + "[" * 100_000, "not TOML: it is nested too deeply"),
    ],
)
def test_d2_what_is_far_out_is_a_fault_in_our_words(source: str, says: str) -> None:
    assert fault(source, PATH=os.defpath) == says


def test_d2_all_faults_of_an_environment_are_told_at_once() -> None:
    source = RUN + 'env = { A = 1, "B=C" = "x", D = "\\u0000", E = "e" }'

    assert faults(source, PATH=os.defpath) == [
        "worker[0].env: A needs a string, got a whole number",
        "worker[0].env: 'B=C' is no name of a variable",
        "worker[0].env: D takes no zero byte",
    ]


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('[models.""]', 'models."": needs a printable string'),
        ('[models."a\\u0000"]', 'models."a\\u0000": needs a printable string'),
        ('[models."a\\nb"]', 'models."a\\nb": needs a printable string'),
        ('[models."*"]', 'models."*": * is no model'),
        ('models = ["*"]', "worker[0].models[0]: * is no model"),
        ('[models.m]\nfallback = "*"', "models.m.fallback: * is no model"),
    ],
)
def test_d2_a_model_has_a_name_that_it_can_be_called_by(source: str, says: str) -> None:
    assert fault(WORKER + source).startswith(says)


def test_d2_two_models_may_stand_in_for_each_other() -> None:
    # A fallback is one step: where none of both is ready, the first one waits.
    settings = read(MODELS + '[models.m]\nfallback = "n"\n[models.n]\nfallback = "m"')

    assert settings.models["m"].fallback == "n"
    assert settings.models["n"].fallback == "m"


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("url", "http://h:1", "http://H:1"),
        ("url", "http://h", "http://h:80/v1"),
        ("url", "https://h/a", "HTTPS://h:443/a/v1/"),
        ("url", "http://[::1]:1", "http://[0:0::1]:1"),
        ("agent", "h:1", "H:1"),
        ("agent", "[::1]:1", "[0:0::1]:1"),
    ],
)
def test_d2_one_place_is_one_place_however_it_is_written(
    key: str, one: str, other: str
) -> None:
    twins = [
        f'[[worker]]\nname = "{name}"\n{key} = "{where}"\n'
        for name, where in (("a", one), ("b", other))
    ]

    assert fault("".join(twins)).startswith(f"worker[1].{key}: the same as worker[0]: ")


@pytest.mark.parametrize(
    "other", ["http://h:2", "https://h:1", "http://h:1/a", "http://g:1"]
)
def test_d2_another_place_is_another_worker(other: str) -> None:
    source = (
        '[[worker]]\nname = "a"\nurl = "http://h:1"\n'
        f'[[worker]]\nname = "b"\nurl = "{other}"\n'
    )

    assert len(read(source).workers) == 2


@pytest.mark.parametrize(
    ("listen", "admin"),
    [
        ("127.0.0.1:1", "127.0.0.1:1"),
        ("127.0.0.1:1", "0.0.0.0:1"),
        ("0.0.0.0:1", "10.0.0.1:1"),
        ("localhost:1", "127.0.0.1:1"),
        ("localhost:1", "0.0.0.0:1"),
        ("[::]:1", "[::1]:1"),
        ("h:1", "H:1"),
        ("unix:/run/a", "unix:/run/a"),
    ],
)
def test_d2_two_listeners_of_one_port_are_told(listen: str, admin: str) -> None:
    source = f'[server]\nlisten = "{listen}"\n[admin]\nlisten = "{admin}"\n'

    says = fault(source + WORKER)

    assert says.startswith("admin.listen: ")
    assert says.endswith(f" server.listen ({listen}): each needs an address of its own")


@pytest.mark.parametrize(
    ("listen", "admin"),
    [
        ("127.0.0.1:0", "127.0.0.1:0"),
        ("0.0.0.0:0", "127.0.0.1:0"),
        ("0.0.0.0:1", "127.0.0.1:2"),
        ("127.0.0.1:1", "127.0.0.2:1"),
        ("0.0.0.0:1", "[::1]:1"),
        ("h:1", "g:1"),
        ("unix:/run/a", "unix:/run/b"),
        ("unix:/run/a", "127.0.0.1:1"),
    ],
)
def test_d2_listeners_that_can_be_had_together_are_no_fault(
    listen: str, admin: str
) -> None:
    source = f'[server]\nlisten = "{listen}"\n[admin]\nlisten = "{admin}"\n'

    assert read(source + WORKER).admin.listen == admin


def test_d2_agents_and_clients_come_to_listeners_of_their_own() -> None:
    source = (
        '[server]\nlisten = ["127.0.0.1:1", "0.0.0.0:2"]\n'
        '[agents]\nlisten = ["127.0.0.1:2"]\n'
    )

    assert fault(source + WORKER) == (
        "agents.listen[0]: can't be had beside server.listen[1] (0.0.0.0:2): "
        "each needs an address of its own"
    )


def test_d2_an_agent_has_no_listener_for_clients() -> None:
    source = '[agent]\nlisten = "127.0.0.1:1"\n[admin]\nlisten = "127.0.0.1:{port}"\n'

    # Where a router would have its clients.
    assert read(source.format(port=8080) + WORKER).admin.listen == "127.0.0.1:8080"
    assert fault(source.format(port=1) + WORKER).startswith(
        "admin.listen: the same as agent.listen (127.0.0.1:1): "
    )


@pytest.mark.parametrize(
    ("listen", "meets"),
    [("127.0.0.1:9001", True), ("0.0.0.0:9001", True), ("10.0.0.1:9001", False)],
)
def test_d2_a_server_that_is_run_has_a_port_that_we_do_not_listen_on(
    listen: str, meets: bool
) -> None:
    source = f'[server]\nlisten = "{listen}"\n' + RUN

    if meets:
        assert fault(source, PATH=os.defpath) == (
            f"worker[0].port: the same as server.listen ({listen}): "
            "each server needs a port of its own"
        )
    else:
        assert read(source, PATH=os.defpath).workers[0].port == 9001
