"""Two routers and two agents, each a process of its own (P, S1, F1, F8)."""

import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import pytest
import trio

from tests.kit.daemon import run_command, until
from tests.kit.deep import size
from tests.kit.swarm import ENVIRON, TOKEN, Asked, Part, Swarm, ask, open_swarm

ENGINE: Final = '[[worker]]\nname="e"\nurl="http://h"'
REQUESTS: Final = size(500, least=60)

pytestmark = pytest.mark.slow


async def ask_many(
    swarm: Swarm, count: int, asked: list[Asked], *, at_once: int = 24
) -> None:
    """Ask both routers in turn, so many at once at most."""
    places = trio.CapacityLimiter(at_once)

    async def one(number: int) -> None:
        async with places:
            asked.append(await ask(f"http://{urls[number % len(urls)]}"))

    urls = [part.running.events("listening")[0]["clients"][0] for part in swarm.routers]
    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, number)


@pytest.mark.deep
async def test_s1_two_routers_share_two_agents_and_no_slot_is_given_twice(
    tmp_path: Path,
) -> None:
    asked: list[Asked] = []
    async with open_swarm(tmp_path) as swarm:
        await ask_many(swarm, REQUESTS, asked)
        await swarm.rest()

        for one in asked:
            one.check()
        assert Counter(one.whole for one in asked) == {True: REQUESTS}
        assert dict(swarm.generations.most) == {0: 4, 1: 4}
        # Each was generated once: nothing was begun twice, whoever asked.
        assert swarm.generations.begun == REQUESTS


@pytest.mark.deep
@pytest.mark.parametrize("victim", ["agent", "router", "engine"])
async def test_f1_whoever_is_killed_no_client_gets_a_piece_twice_or_too_few(
    victim: str, tmp_path: Path
) -> None:
    asked: list[Asked] = []
    async with open_swarm(tmp_path) as swarm:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_many, swarm, REQUESTS, asked)
            kills = max(1, REQUESTS // 60)
            for round_number in range(kills):
                await until(progressed(asked, (round_number + 1) * 20))
                await kill(swarm, victim)
        await swarm.ready()
        await swarm.rest()

        for one in asked:
            one.check()
        assert all(most <= 4 for most in swarm.generations.most.values())
        # Every request has an end, and most a whole one.
        assert len(asked) == REQUESTS
        assert all(one.whole or one.error or one.text for one in asked)
        assert sum(one.whole for one in asked) >= REQUESTS // 2
        late: list[Asked] = []
        await ask_many(swarm, 8, late)
        assert [one.whole for one in late] == [True] * 8


def progressed(asked: list[Asked], count: int) -> Callable[[], Awaitable[bool]]:
    async def is_there() -> bool:
        await trio.lowlevel.checkpoint()
        return len(asked) >= count

    return is_there


async def kill(swarm: Swarm, victim: str) -> None:
    """Kill one, and bring it back."""
    if victim == "engine":
        engine = swarm.engines[0]
        engine.refuse = True
        await engine.cut()
        await trio.sleep(0.3)
        engine.refuse = False
        return
    part: Part = (swarm.agents if victim == "agent" else swarm.routers)[0]
    await part.kill()
    await trio.sleep(0.1)
    await part.start()


async def test_p5_a_killed_router_leaves_no_slot_at_work(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, agents=1, routers=2, slots=8) as swarm:
        first, second = swarm.routers
        async with trio.open_nursery() as nursery:
            url = first.running.url
            for _ in range(8):
                nursery.start_soon(ask, url)
            await until(busy(swarm, 8))
            await first.kill()
            began = trio.current_time()
            await until(busy(swarm, 0))
            took = trio.current_time() - began
        assert took < 1.0
        whole = await ask(second.running.url)
        assert whole.whole


def busy(swarm: Swarm, count: int) -> Callable[[], Awaitable[bool]]:
    async def is_so() -> bool:
        await trio.lowlevel.checkpoint()
        return sum(engine.live for engine in swarm.engines) == count

    return is_so


async def test_l5_an_agent_that_is_told_to_stop_finishes_what_it_has(
    tmp_path: Path,
) -> None:
    asked: list[Asked] = []
    async with open_swarm(tmp_path) as swarm:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_many, swarm, 40, asked)
            await until(progressed(asked, 5))
            first = swarm.agents[0]
            daemon = first.running
            daemon.signal(signal.SIGTERM)
            assert await daemon.exit_code() == 0
        for one in asked:
            one.check()
        assert [one.whole for one in asked] == [True] * 40
        assert daemon.events("stopped") != []
        await first.start()
        await swarm.ready()


async def test_d1_operators_see_agents_and_what_they_host(tmp_path: Path) -> None:
    async with open_swarm(tmp_path) as swarm:
        router, agent = swarm.routers[0], swarm.agents[0]
        status = await router.status()
        hosted = status["workers"][0]["agent"]
        assert (hosted["agent"], hosted["connected"]) == ("h0", True)
        assert [h["name"] for h in hosted["hosts"]] == ["e"]
        own = await agent.status()
        assert len(own["agent"]["routers"]) == 2
        assert own["workers"][0]["name"] == "e"

        shown = await run_command("status", "--config", str(agent.config))
        assert b"e " in shown.stdout
        assert b"h0" in shown.stdout
        shown = await run_command(
            "status", "--config", str(router.config), environ=ENVIRON
        )
        (line,) = [line for line in shown.stdout.splitlines() if b" h0 " in line]
        assert line.split()[:4] == [b"a0", b"h0", b"e", b"ready"]
        drained = await run_command("drain", "--config", str(agent.config), "e")
        assert drained.returncode == 0

        async def is_out() -> bool:
            found = (await router.status())["workers"][0]
            return bool(found["agent"]["hosts"][0]["state"] == "draining")

        await until(is_out)
        for _ in range(4):
            assert (await ask(router.running.url)).whole
        assert swarm.generations.most[0] == 0


async def test_h8_the_token_is_in_no_log_and_no_status(tmp_path: Path) -> None:
    async with open_swarm(tmp_path, agents=1, routers=1) as swarm:
        await ask(swarm.routers[0].running.url)
        for part in (*swarm.agents, *swarm.routers):
            assert TOKEN not in str(await part.status())
            assert TOKEN not in str(part.running.lines)
            assert part.running.noise == []


@pytest.mark.parametrize(
    ("command", "text", "code", "says"),
    [
        ("agent", ENGINE, 2, b"agent: is missing"),
        (
            "serve",
            '[agent]\nlisten="127.0.0.1:0"\n' + ENGINE,
            2,
            b"run it with `fencepost agent`",
        ),
        (
            "agent",
            '[agent]\nlisten="0.0.0.0:1"\n' + ENGINE,
            2,
            b"is reached from elsewhere",
        ),
        (
            "agent",
            '[agent]\nrouters=["127.0.0.1:1"]\ntls_ca="agent.toml"\n' + ENGINE,
            1,
            b"correct tls_cert, tls_key and tls_ca",
        ),
    ],
)
async def test_d2_a_file_of_the_wrong_kind_is_told(
    command: str, text: str, code: int, says: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "agent.toml"
    path.write_text(f'[server]\nstate_dir = "{tmp_path}"\n{text}')
    done = await run_command(command, "--config", str(path))

    assert done.returncode == code
    assert says in done.stderr
