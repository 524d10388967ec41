"""An agent in another language, written from docs/wire.md alone, behind our daemon.

``js/agent.mjs`` shares no line with ours: what both understand is what the document
says. Its answer is the prompt, word by word, so each answer is known. P1-P3, P5, P6.
"""

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import httpx
import pytest

from tests.kit.processes import Daemon, Spoken, daemon, running

pytestmark = [pytest.mark.real, pytest.mark.slow]

JS: Final = Path(__file__).parent / "js"
VECTORS: Final = Path(__file__).parents[2] / "docs/wire-vectors.json"
TOKEN: Final = "a token of sixteen letters"
SLOTS: Final = 2
PATIENCE_S: Final = 30.0
#: What has an end when it is told to end, and not before the test has.
ENDLESS: Final = " ".join(f"w{n}" for n in range(100_000))


@attrs.frozen
class Agent:
    """One agent, and what it says of itself."""

    port: int
    process: subprocess.Popen[bytes]
    log: Spoken


@contextmanager
def agent(*, port: int = 0, token: str = TOKEN) -> Iterator[Agent]:
    """Run the agent from its listening on."""
    argv = ["node", "agent.mjs", "--port", str(port), "--slots", str(SLOTS)]
    pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    env = {**os.environ, "AGENT_TOKEN": token}
    with running(argv, cwd=JS, env=env, **pipes) as (process, last):
        assert process.stdout is not None
        assert process.stderr is not None
        log = Spoken(process.stderr)
        last.callback(process.stderr.close)
        last.callback(log.join)
        line = Spoken(process.stdout).await_line("listening")
        yield Agent(int(line.rpartition(":")[2]), process, log)


@contextmanager
def router(
    folder: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Daemon]:
    """Run our daemon in front of the agent at *port*."""
    monkeypatch.setenv("FENCEPOST_TEST_TOKEN", TOKEN)
    config = f"""
[agents]
token_env = "FENCEPOST_TEST_TOKEN"
[waits]
offer_timeout_ms = 5000
[[worker]]
name = "js"
agent = "127.0.0.1:{port}"
"""
    with daemon(folder, config) as started:
        yield started


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Agent]]:
    """A daemon and an agent for all that leaves them as they were."""
    with pytest.MonkeyPatch.context() as patch, agent() as foreign:
        folder = tmp_path_factory.mktemp("foreign")
        with router(folder, foreign.port, patch) as here:
            here.await_ready()
            yield here, foreign


def asked(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "echo", "messages": [{"role": "user", "content": text}], **more}


def client(here: Daemon) -> httpx.Client:
    return httpx.Client(base_url=here.url, timeout=PATIENCE_S, trust_env=False)


def ask(here: Daemon, text: str) -> Any:
    """Get one whole answer."""
    with client(here) as http:
        reply = http.post("/v1/chat/completions", json=asked(text))
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(reply: httpx.Response) -> Iterator[Any]:
    """Read the events of a stream up to its end, whatever that is."""
    for line in reply.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


@contextmanager
def stream(here: Daemon, text: str) -> Iterator[Iterator[Any]]:
    """Read the events of a streamed answer; leaving the block leaves the answer."""
    body = asked(text, stream=True, stream_options={"include_usage": True})
    with (
        client(here) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as reply,
    ):
        assert reply.status_code == 200, reply.read()
        yield events(reply)


def texts(found: list[Any]) -> list[str]:
    """Give the text of each chunk that has one."""
    choices = [choice for event in found for choice in event.get("choices", ())]
    return [c["delta"]["content"] for c in choices if c["delta"].get("content")]


def await_text(coming: Iterator[Any]) -> str:
    """Read on until some text has come, and give it."""
    return next(text for event in coming for text in texts([event]))


def load(status: Any) -> Any:
    """Give how many slots work, as the agent says; None while it is not here."""
    return status["workers"][0]["agent"].get("load")


def is_called(state: str) -> Callable[[Any], bool]:
    return lambda status: status["workers"][0]["state"] == state


def test_p2_a_foreign_codec_agrees_with_every_vector() -> None:
    done = subprocess.run(
        ["node", "vectors.mjs", str(VECTORS)],
        cwd=JS,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = re.fullmatch(r"(\d+) checks\n", done.stdout)
    assert found is not None
    vectors = json.loads(VECTORS.read_text(encoding="utf-8"))
    entries = sum(len(vectors[part]) for part in ("frames", "costs", "refused"))
    assert int(found[1]) >= entries > 0


def test_p1_a_foreign_agent_is_taken_in_and_its_model_listed(
    pair: tuple[Daemon, Agent],
) -> None:
    here, foreign = pair
    with client(here) as http:
        models = http.get("/v1/models").json()["data"]

    assert [model["id"] for model in models] == ["echo"]
    foreign.log.await_line("is here")


def test_p2_answers_of_a_foreign_agent_are_right_and_come_once(
    pair: tuple[Daemon, Agent],
) -> None:
    here, _ = pair
    prompt = "one two  three\nvier fünf 六 𝄞"

    whole = ask(here, prompt)
    with stream(here, prompt) as coming:
        streamed = list(coming)

    assert whole["choices"][0]["message"]["content"] == prompt
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert "".join(texts(streamed)) == prompt
    for usage in (whole["usage"], streamed[-1]["usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 7)
    assert here.status()["verdicts"] == {}


def test_p3_a_client_that_leaves_frees_its_slot_at_a_foreign_agent(
    pair: tuple[Daemon, Agent],
) -> None:
    here, foreign = pair
    with stream(here, ENDLESS) as coming:
        await_text(coming)
        here.await_status(lambda status: load(status) == 1)

    foreign.log.await_line("cancel")
    status = here.await_status(lambda status: load(status) == 0)
    assert status["workers"][0]["in_flight"] == 0


def test_p3_three_clients_on_two_slots_of_a_foreign_agent_are_all_answered(
    pair: tuple[Daemon, Agent],
) -> None:
    here, _ = pair
    prompts = [" ".join(f"{name}{n}" for n in range(40)) for name in "abc"]
    together = threading.Barrier(len(prompts))

    def one(prompt: str) -> Any:
        together.wait(PATIENCE_S)
        return ask(here, prompt)

    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(one, prompts))

    assert [a["choices"][0]["message"]["content"] for a in answers] == prompts
    assert load(here.await_status(lambda status: load(status) == 0)) == 0


def test_p6_a_long_delta_of_a_foreign_agent_comes_whole_in_pieces(
    pair: tuple[Daemon, Agent],
) -> None:
    """It is longer than a delta may be, and than the credit."""
    here, _ = pair
    prompt = f"before {'x日𝄞y' * 150_000} behind"

    with stream(here, prompt) as coming:
        streamed = texts(list(coming))

    assert ask(here, prompt)["choices"][0]["message"]["content"] == prompt
    assert "".join(streamed) == prompt


def test_p6_a_foreign_agent_waits_for_a_client_that_does_not_read(
    pair: tuple[Daemon, Agent],
) -> None:
    """Its answer is longer than what all sockets on the way may hold."""
    here, foreign = pair
    prompt = " ".join(["x" * 100_000] * 160)

    with stream(here, prompt) as coming:
        streamed = await_text(coming)
        foreign.log.await_line("waits for credit")
        assert ask(here, "me too")["choices"][0]["message"]["content"] == "me too"
        streamed += "".join(texts(list(coming)))

    assert streamed == prompt


def test_p5_a_foreign_agent_that_is_killed_is_a_failure_and_is_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agent() as first, router(tmp_path, first.port, monkeypatch) as here:
        here.await_ready()
        with stream(here, ENDLESS) as coming:
            begun = await_text(coming)
            first.process.kill()
            rest: list[Any] = []
            # Behind its error the stream has no proper end, so that nobody takes it
            # for whole.
            with pytest.raises(httpx.RemoteProtocolError):
                rest += coming

        assert ENDLESS.startswith(begun + "".join(texts(rest)))
        assert rest[-1]["error"]["message"]
        first.process.wait(PATIENCE_S)
        here.await_status(lambda status: load(status) is None)
        with agent(port=first.port):
            here.await_ready()
            answer = ask(here, "here again")
            assert answer["choices"][0]["message"]["content"] == "here again"


def test_l5_a_foreign_agent_that_drains_ends_what_it_has_and_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = " ".join(f"w{n}" for n in range(400))
    with agent() as foreign, router(tmp_path, foreign.port, monkeypatch) as here:
        here.await_ready()
        with stream(here, prompt) as coming:
            begun = await_text(coming)
            foreign.process.send_signal(signal.SIGTERM)
            here.await_status(is_called("draining"))
            rest = list(coming)

        assert begun + "".join(texts(rest)) == prompt
        assert rest[-1]["usage"]["completion_tokens"] == 400
        assert foreign.process.wait(PATIENCE_S) == 0


def test_p1_a_wrong_token_is_told_at_both_ends_of_a_foreign_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        agent(token="another token altogether") as foreign,
        router(tmp_path, foreign.port, monkeypatch) as here,
    ):
        foreign.log.await_line("unauthorized")
        status = here.await_status(
            lambda status: status["workers"][0]["reason"] == "unauthorized"
        )

        assert load(status) is None
