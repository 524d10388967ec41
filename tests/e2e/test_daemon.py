"""A real process, real sockets, real signals; the engine is a fake one."""

import hashlib
import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from router.edge.server import clients_that_fit
from tests.kit.daemon import (
    COMMAND,
    PATIENCE_S,
    ROOT,
    Daemon,
    open_daemon,
    run_command,
    until,
    write_config,
)
from tests.kit.edge import chat
from tests.kit.engine import open_engine
from tests.kit.exchange import Exchange

pytestmark = pytest.mark.slow

CHAT = {"model": "m", "messages": [{"role": "user", "content": "tell me"}]}
STREAM = {**CHAT, "stream": True}


class Held:
    """A script: one delta at once, the rest when it is let go."""

    def __init__(self) -> None:
        self.let_go = trio.Event()

    async def __call__(self, x: Exchange) -> None:
        await x.role()
        await x.text("one")
        await self.let_go.wait()
        await x.text(" two")
        await x.finish()
        await x.done()
        await x.end()


class Client:
    """One streamed request; ``begun`` is set by its first bytes."""

    def __init__(self) -> None:
        self.begun = trio.Event()
        self.status: int | None = None
        self.text = ""
        self.whole = False

    async def run(self, daemon: Daemon) -> None:
        async with (
            daemon.client() as client,
            client.stream("POST", "/v1/chat/completions", json=STREAM) as reply,
        ):
            self.status = reply.status_code
            try:
                async for piece in reply.aiter_text():
                    self.text += piece
                    self.begun.set()
            except httpx.RemoteProtocolError:
                return
            self.whole = True

    @property
    def frames(self) -> list[Any]:
        """What its events said, ``[DONE]`` as it is."""
        said = [
            event.removeprefix("data: ")
            for event in self.text.split("\n\n")
            if event.startswith("data: ")
        ]
        return [entry if entry == "[DONE]" else json.loads(entry) for entry in said]


@asynccontextmanager
async def live_streams(daemon: Daemon, count: int) -> AsyncIterator[list[Client]]:
    """Run some streams that have begun; the block's end waits for theirs."""
    clients = [Client() for _ in range(count)]
    async with trio.open_nursery() as nursery:
        for client in clients:
            nursery.start_soon(client.run, daemon)
        for client in clients:
            await client.begun.wait()
        yield clients


# ---- start ----


async def test_d1_serve_needs_no_file() -> None:
    async with (
        open_engine() as engine,
        open_daemon(
            [
                "--worker",
                engine.url,
                "--listen",
                "127.0.0.1:0",
                "--admin",
                "127.0.0.1:0",
            ]
        ) as daemon,
    ):
        await daemon.ready()
        async with daemon.client() as client:
            reply = await client.post("/v1/chat/completions", json=CHAT)

    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"] == "Hello world"
    assert reply.headers["x-fencepost-worker"] == "w0"
    assert daemon.noise == []


async def test_d1_a_worker_that_comes_later_is_taken_in(tmp_path: Path) -> None:
    async with open_engine() as engine:
        engine.refuse = True
        config = write_config(tmp_path, [engine.url])
        async with (
            open_daemon(["--config", str(config)]) as daemon,
            daemon.client() as client,
        ):
            assert (await client.get("/healthz")).status_code == 200
            assert (await client.get("/readyz")).status_code == 503
            early = await client.post("/v1/chat/completions", json=CHAT)
            assert early.status_code == 503
            assert "retry-after" in early.headers

            engine.refuse = False
            await daemon.ready()

            late = await client.post("/v1/chat/completions", json=CHAT)
            assert late.status_code == 200


async def test_d5_a_taken_port_is_one_line_with_what_to_do(tmp_path: Path) -> None:
    config = write_config(tmp_path, ["http://127.0.0.1:9"])
    async with open_daemon(["--config", str(config)]) as daemon:
        taken = daemon.url.removeprefix("http://")

        second = await run_command(
            *("serve", "-w", "http://127.0.0.1:9", "-l", taken),
            *("--admin", "127.0.0.1:0"),
        )

    assert second.returncode == 1
    assert second.stderr.decode() == (
        f"fencepost: {taken} is taken: stop what listens there, or set "
        "--listen or server.listen to another address\n"
    )


async def test_d5_a_second_daemon_on_one_state_folder_is_refused(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path, ["http://127.0.0.1:9"])
    async with open_daemon(["--config", str(config)]):
        second = await run_command("serve", "--config", str(config))

    assert second.returncode == 1
    assert b"a running router answers at" in second.stderr
    assert second.stderr.count(b"\n") == 1


async def test_d5_the_socket_of_a_killed_daemon_is_taken_over(tmp_path: Path) -> None:
    config = write_config(tmp_path, ["http://127.0.0.1:9"])
    async with open_daemon(["--config", str(config)]) as daemon:
        daemon.process.kill()
        await daemon.process.wait()
    assert (tmp_path / "admin.sock").exists()

    async with open_daemon(["--config", str(config)]):
        answer = await run_command("status", "--config", str(config))

    assert answer.returncode == 0


async def test_d2_a_bad_file_ends_with_2_and_every_fault(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text('[[worker]]\nname = "a"\nslot = 8\n[server]\ndrain_ms = "1"')

    done = await run_command("serve", "--config", str(path))

    assert done.returncode == 2
    assert sorted(done.stderr.decode().splitlines()) == [
        f"fencepost: {path}: server.drain_ms: needs a whole number of ms, got a string",
        f"fencepost: {path}: worker[0].slot: unknown key, did you mean slots?",
        (
            f"fencepost: {path}: worker[0].url: is missing:"
            " give url, or command and port, or agent"
        ),
    ]


async def test_h6_the_soft_descriptor_limit_is_raised_at_start(tmp_path: Path) -> None:
    config = write_config(tmp_path, ["http://127.0.0.1:9"])
    async with open_daemon(["--config", str(config)]) as daemon:
        limits = await trio.Path(f"/proc/{daemon.process.pid}/limits").read_text()

    (line,) = (line for line in limits.splitlines() if "open files" in line)
    soft, hard = line.split()[3:5]
    assert soft == hard


async def test_h6_more_clients_than_descriptors_are_refused_and_harm_nobody(
    tmp_path: Path,
) -> None:
    held = Held()
    statuses: Counter[bytes] = Counter()
    answered = trio.Event()

    async def ask(address: tuple[str, int]) -> None:
        stream = await trio.open_tcp_stream(*address)
        async with stream:
            await stream.send_all(chat(stream=True))
            got = await stream.receive_some(4096)
            statuses[got[9:12]] += 1
            if statuses.total() == 200:
                answered.set()
            while more := await stream.receive_some(65_536):
                got += more
                if got.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                    statuses[b"whole"] += 1
                    break

    async with open_engine(held, slots=200) as first:
        config = write_config(tmp_path, [first.url], worker="slots = 200")
        async with open_daemon(
            ["--config", str(config)], prefix=["prlimit", "--nofile=256:256"]
        ) as daemon:
            await daemon.ready()
            (line,) = daemon.events("listening")
            assert line["connections_max"] == clients_that_fit(256, 1)
            host, _, port = daemon.url.removeprefix("http://").rpartition(":")
            async with trio.open_nursery() as nursery:
                for _ in range(200):
                    nursery.start_soon(ask, (host, int(port)))
                with trio.fail_after(PATIENCE_S):
                    await answered.wait()
                shown = await status(config)
                held.let_go.set()

    assert statuses[b"200"] == statuses[b"whole"] == line["connections_max"]
    assert statuses[b"503"] == 200 - line["connections_max"]
    assert [worker["state"] for worker in shown["workers"]] == ["ready"]
    assert not daemon.events("accept_exhausted")


async def test_d4_the_admin_socket_is_for_its_owner_and_goes_with_the_daemon(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path, ["http://127.0.0.1:9"])
    async with open_daemon(["--config", str(config)]) as daemon:
        path = tmp_path / "admin.sock"
        assert daemon.admin == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600

        daemon.signal(signal.SIGTERM)
        assert await daemon.exit_code() == 0

    assert not path.exists()


# ---- stop ----


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_d3_a_signal_lets_live_streams_finish(
    tmp_path: Path, number: signal.Signals
) -> None:
    held = Held()
    async with open_engine(held, slots=4) as engine:
        config = write_config(tmp_path, [engine.url])
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            async with live_streams(daemon, 3) as clients:
                daemon.signal(number)
                await daemon.event("stopping")
                held.let_go.set()
            code = await daemon.exit_code()

    assert code == 0
    assert [client.frames[-1] for client in clients] == ["[DONE]"] * 3
    assert all(client.whole for client in clients)
    assert daemon.noise == []


async def test_d3_readiness_goes_first_and_is_still_answered(tmp_path: Path) -> None:
    async with open_engine() as engine:
        config = write_config(tmp_path, [engine.url], server="lame_duck_ms = 1500")
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            daemon.signal(signal.SIGTERM)
            await daemon.event("stopping")
            async with daemon.client() as client:
                assert (await client.get("/readyz")).status_code == 503
                assert (await client.get("/healthz")).status_code == 200
                served = await client.post("/v1/chat/completions", json=CHAT)
            assert served.status_code == 200
            assert await daemon.exit_code() == 0

            async with daemon.client() as client:
                with pytest.raises(httpx.ConnectError):
                    await client.get("/readyz")


async def test_d3_waiting_requests_are_refused(tmp_path: Path) -> None:
    held = Held()
    async with open_engine(held, slots=1) as engine:
        config = write_config(tmp_path, [engine.url])
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            waiting = Client()
            async with (
                live_streams(daemon, 1) as clients,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(waiting.run, daemon)
                await queued(config)

                daemon.signal(signal.SIGTERM)
                await waiting.begun.wait()

                assert waiting.status == 503
                assert "stopping" in waiting.text
                held.let_go.set()
            assert await daemon.exit_code() == 0

    assert clients[0].frames[-1] == "[DONE]"


async def test_d3_what_outlives_the_drain_ends_in_an_error_frame(
    tmp_path: Path,
) -> None:
    async with open_engine(Held(), slots=4) as engine:
        config = write_config(tmp_path, [engine.url], server="drain_ms = 300")
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            async with live_streams(daemon, 2) as clients:
                begun = trio.current_time()
                daemon.signal(signal.SIGTERM)
                code = await daemon.exit_code()
                took = trio.current_time() - begun
            (line,) = daemon.events("drain is over")

    assert code == 0
    assert 0.3 <= took < 2
    assert line["cut"] == 2
    for client in clients:
        assert "[DONE]" not in client.frames
        assert "error" in client.frames[-1]
        assert not client.whole


async def test_d3_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    async with open_engine(Held()) as engine:
        config = write_config(tmp_path, [engine.url])
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            async with live_streams(daemon, 1) as clients:
                daemon.signal(signal.SIGTERM)
                await daemon.event("stopping")
                begun = trio.current_time()
                daemon.signal(signal.SIGTERM)
                code = await daemon.exit_code()
                took = trio.current_time() - begun

    assert code == 0
    assert took < 1
    assert "[DONE]" not in clients[0].frames


async def test_x3_what_a_second_signal_cuts_the_router_has_closed(
    tmp_path: Path,
) -> None:
    async with open_engine(Held()) as engine:
        config = write_config(tmp_path, [engine.url])
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            async with live_streams(daemon, 1):
                daemon.signal(signal.SIGTERM)
                await daemon.event("stopping")
                daemon.signal(signal.SIGTERM)
                await daemon.exit_code()
            (record,) = daemon.events("request")

    assert (record["outcome"], record["phase"]) == ("failed", "failed")
    assert (record["closed_by"], record["fault"]) == ("router", "shutting_down")


async def test_d3_an_idle_connection_does_not_hold_the_end_up(tmp_path: Path) -> None:
    async with open_engine() as engine:
        config = write_config(tmp_path, [engine.url])
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            async with daemon.client() as client:
                await client.post("/v1/chat/completions", json=CHAT)
                begun = trio.current_time()
                daemon.signal(signal.SIGTERM)
                assert await daemon.exit_code() == 0
                assert trio.current_time() - begun < 2


# ---- commands ----


async def status(config: Path) -> dict[str, Any]:
    done = await run_command("status", "--json", "--config", str(config))
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


async def queued(config: Path) -> None:
    """Wait until a request waits for a slot."""

    async def one_waits() -> bool:
        return any((await status(config))["queues"].values())

    await until(one_waits)


async def test_d1_status_shows_workers_and_requests(tmp_path: Path) -> None:
    held = Held()
    async with open_engine(held) as engine:
        config = write_config(tmp_path, [engine.url])
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            async with live_streams(daemon, 1):
                answer = await status(config)
                table = await run_command("status", "--config", str(config))
                held.let_go.set()

    (worker,) = answer["workers"]
    assert (worker["name"], worker["state"], worker["in_flight"]) == ("w0", "ready", 1)
    assert [request["model"] for request in answer["requests"]] == ["m"]
    shown = table.stdout.decode()
    assert "ready · 1 of 1 workers serve · 1 requests" in shown
    assert answer["requests"][0]["request"] in shown


@pytest.mark.parametrize("form", [["--json"], []])
async def test_d1_status_watches_until_interrupted(
    tmp_path: Path, form: list[str]
) -> None:
    config = write_config(tmp_path, ["http://127.0.0.1:9"])
    async with open_daemon(["--config", str(config)]) as daemon:
        watch = await trio.lowlevel.open_process(
            [*COMMAND, "status", "--watch", *form, "--admin", daemon.admin],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert watch.stdout is not None
        assert watch.stderr is not None
        async with watch.stdout as shown, watch.stderr as said:
            text = b""
            with trio.fail_after(10):
                while text.count(b"w0") < 2:
                    text += await shown.receive_some(65_536)
            watch.send_signal(signal.SIGINT)
            with trio.fail_after(10):
                assert await said.receive_some(4096) == b""
                assert await watch.wait() == 0


async def test_d1_drain_and_undrain_steer_a_worker(tmp_path: Path) -> None:
    async with open_engine() as first, open_engine() as second:
        config = write_config(tmp_path, [first.url, second.url])
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()

            done = await run_command("drain", "w0", "--config", str(config))

            assert done.returncode == 0, done.stderr
            async with daemon.client() as client:
                for _ in range(4):
                    reply = await client.post("/v1/chat/completions", json=CHAT)
                    assert reply.headers["x-fencepost-worker"] == "w1"
            assert first.seen == []

            done = await run_command("undrain", "w0", "--config", str(config))

            assert done.returncode == 0, done.stderr

            async def is_back() -> bool:
                state: str = (await status(config))["workers"][0]["state"]
                return state == "ready"

            await until(is_back)


async def test_d1_cancel_ends_a_request(tmp_path: Path) -> None:
    async with open_engine(Held()) as engine:
        config = write_config(tmp_path, [engine.url])
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            async with live_streams(daemon, 1) as clients:
                (request,) = (await status(config))["requests"]
                done = await run_command(
                    "cancel", request["request"], "--config", str(config)
                )

                assert done.returncode == 0, done.stderr
                await engine.seen[0].wait_closed()

    assert "error" in clients[0].frames[-1]


async def test_d1_an_unknown_name_is_told(tmp_path: Path) -> None:
    config = write_config(tmp_path, ["http://127.0.0.1:9"])
    async with open_daemon(["--config", str(config)]):
        for command, says in (
            (("drain", "gpu7"), "no worker gpu7"),
            (("undrain", "gpu7"), "no worker gpu7"),
            (("cancel", "req_7"), "no live request req_7"),
        ):
            done = await run_command(*command, "--config", str(config))

            assert done.returncode == 1
            assert done.stderr.decode() == f"fencepost: {says}\n"


# ---- logs and keys ----


async def test_x2_a_request_is_one_line_without_content_and_keys(
    tmp_path: Path,
) -> None:
    prompt, answer, key = "xyzzyprompt", "xyzzyanswer", "xyzzykey"
    asked = {**CHAT, "messages": [{"role": "user", "content": prompt}]}

    async def script(x: Exchange) -> None:
        assert x.headers["authorization"] == f"Bearer {key}"
        await x.text(answer)
        await x.finish()
        await x.done()
        await x.end()

    async with open_engine(script) as engine:
        config = write_config(
            tmp_path, [engine.url], worker='api_key_env = "FENCEPOST_TEST_KEY"'
        )
        async with open_daemon(
            ["--config", str(config)], environ={"FENCEPOST_TEST_KEY": key}
        ) as daemon:
            await daemon.ready()
            async with daemon.client() as client:
                headers = {"authorization": f"Bearer {key}", "x-request-id": "mine"}
                reply = await client.post(
                    "/v1/chat/completions", json=asked, headers=headers
                )
                await client.post(
                    "/v1/chat/completions", content=b"{" + prompt.encode()
                )
            assert answer in reply.text
            daemon.signal(signal.SIGTERM)
            await daemon.exit_code()
            await daemon.event("stopped")

    (line,) = daemon.events("request")
    assert line["client_request"] == "mine"
    assert line["outcome"] == "completed"
    assert [attempt["worker"] for attempt in line["attempts"]] == ["w0"]
    assert "xyzzy" not in json.dumps(daemon.lines)
    assert daemon.noise == []


async def test_h8_a_keys_file_is_asked_for_every_request(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(hashlib.sha256(b"sk-1").hexdigest() + " me\n")
    async with open_engine() as engine:
        config = write_config(tmp_path, [engine.url], server='api_keys_file = "keys"')
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            async with daemon.client() as client:
                bare = await client.post("/v1/chat/completions", json=CHAT)
                keyed = await client.post(
                    "/v1/chat/completions",
                    json=CHAT,
                    headers={"authorization": "Bearer sk-1"},
                )

    assert (bare.status_code, keyed.status_code) == (401, 200)


async def test_d5_a_daemon_whose_stderr_is_closed_runs(tmp_path: Path) -> None:
    config = write_config(tmp_path, ["http://127.0.0.1:9"])
    process = await trio.lowlevel.open_process(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *COMMAND, "serve", "-c", str(config)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    try:

        async def answers() -> bool:
            done = await run_command("status", "--config", str(config))
            return done.returncode == 0

        await until(answers)
        process.send_signal(signal.SIGTERM)
        with trio.fail_after(PATIENCE_S):
            assert await process.wait() == 0
    finally:
        process.kill()
        await process.wait()


async def test_d1_a_drain_within_a_time_cuts_what_still_runs(tmp_path: Path) -> None:
    async with open_engine(Held()) as engine:
        config = write_config(tmp_path, [engine.url])
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            with trio.fail_after(PATIENCE_S):
                async with live_streams(daemon, 1) as clients:
                    done = await run_command(
                        *("drain", "w0", "--within", "0.1", "--config", str(config))
                    )
                    assert done.returncode == 0, done.stderr

    assert "error" in clients[0].frames[-1]


async def test_d1_commands_find_their_router_by_the_environment(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path, ["http://127.0.0.1:9"])
    async with open_daemon(["--config", str(config)]) as daemon:
        done = await run_command(
            "status", "--json", environ={"FENCEPOST_ADMIN": daemon.admin}
        )

    assert done.returncode == 0, done.stderr
    assert [worker["name"] for worker in json.loads(done.stdout)["workers"]] == ["w0"]


async def test_d3_a_waiting_request_is_told_when_to_come_again(
    tmp_path: Path,
) -> None:
    held = Held()
    replies: list[httpx.Response] = []

    async def wait(daemon: Daemon) -> None:
        async with daemon.client() as client:
            replies.append(await client.post("/v1/chat/completions", json=CHAT))
        held.let_go.set()

    async with open_engine(held, slots=1) as engine:
        config = write_config(tmp_path, [engine.url])
        async with open_daemon(["--config", str(config)]) as daemon:
            await daemon.ready()
            async with live_streams(daemon, 1), trio.open_nursery() as nursery:
                nursery.start_soon(wait, daemon)
                await queued(config)
                daemon.signal(signal.SIGTERM)
            assert await daemon.exit_code() == 0

    (reply,) = replies
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"


async def test_d5_a_state_folder_that_others_write_is_one_line(tmp_path: Path) -> None:
    config = write_config(tmp_path, ["http://127.0.0.1:9"])
    tmp_path.chmod(0o777)

    done = await run_command("serve", "--config", str(config))

    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith(f"fencepost: {tmp_path} is not a folder that only this user")


def test_the_tests_leave_no_daemon_behind() -> None:
    ours = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if b"serve" in words and parent == str(os.getpid()):
                ours.append(entry.name)

    assert ours == []
