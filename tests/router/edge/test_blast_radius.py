"""L1, T8.11: an exception anywhere in one client's service hits that one alone."""

from collections.abc import Awaitable, Callable

import pytest
import trio

from router.edge.site import Patience
from router.ports import Taken
from tests.kit.deep import size
from tests.kit.edge import RawClient, RunningEdge, chat, request, running, until
from tests.kit.stub_router import StubRouter

TIMES = size(1_000, least=60)
PATIENT = Patience(linger_s=0.05)
HEALTH = request("GET", "/healthz")


def broken(*_: object) -> None:
    raise ValueError("a bug")


async def in_the_route_table(
    here: RunningEdge, router: StubRouter, client: RawClient
) -> None:
    find = here.edge.routes.find
    here.edge.routes.find = broken  # type: ignore[method-assign,assignment]
    await client.send(chat())
    assert (await client.reply()).status == 500
    here.edge.routes.find = find  # type: ignore[method-assign]


async def before_the_head(
    here: RunningEdge, router: StubRouter, client: RawClient
) -> None:
    router.bug = ValueError("a bug")
    await client.send(chat(stream=False))
    assert (await client.reply()).status == 500
    router.bug = None


async def after_the_head(
    here: RunningEdge, router: StubRouter, client: RawClient
) -> None:
    await client.send(chat())
    served = await router.next()
    served.text("a")
    served.crash(ValueError("a bug"))
    rest = await client.rest()
    assert b'"error"' in rest
    assert not rest.endswith(b"0\r\n\r\n")


async def in_a_group(here: RunningEdge, router: StubRouter, client: RawClient) -> None:
    await client.send(chat())
    served = await router.next()
    served.crash(ExceptionGroup("", [ValueError(), ExceptionGroup("", [OSError()])]))
    assert (await client.reply()).status == 500


async def when_told_that_the_client_left(
    here: RunningEdge, router: StubRouter, client: RawClient
) -> None:
    await client.send(chat())
    served = await router.next()
    served.receiver.attach(broken, broken)
    client.fin()
    with trio.fail_after(1):
        await served.over.wait()
    assert served.steps == ["cancelled"]


async def when_told_that_there_is_room(
    here: RunningEdge, router: StubRouter, client: RawClient
) -> None:
    await client.send(chat())
    served = await router.next()
    served.receiver.attach(broken, served.gone.set)
    while served.text("x" * 30_000) is Taken.MORE:
        pass
    while not served.over.is_set():
        await client.read()
    assert served.steps == ["cancelled"]


Break = Callable[[RunningEdge, StubRouter, RawClient], Awaitable[None]]
PLACES: list[Break] = [
    in_the_route_table,
    before_the_head,
    after_the_head,
    in_a_group,
    when_told_that_the_client_left,
    when_told_that_there_is_room,
]


@pytest.mark.deep
async def test_l1_a_bug_anywhere_hits_one_client_and_is_counted_once() -> None:
    router = StubRouter()
    async with running(router, patience=PATIENT) as here:
        other = await here.connect()
        await other.send(chat())
        untouched = await router.next()
        for number in range(TIMES):
            client = await RawClient.connect(here.listener, rcvbuf=200_000)
            await PLACES[number % len(PLACES)](here, router, client)
            client.close()
            untouched.text(str(number))
            await other.until(b'"%d"' % number)
        untouched.finish()
        await other.until(b"0\r\n\r\n")
        await other.send(HEALTH)
        assert (await other.reply()).status == 200
        await until(lambda: here.edge.connections == 1)

    assert router.tally.bugs.total() == TIMES
