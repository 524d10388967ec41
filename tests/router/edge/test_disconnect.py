"""H4: a client that leaves ends its request within 100 ms, whatever the state.

Real sockets, TCP and unix; the stub router says when it was told.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from tests.kit.edge import STEP_S, SWEPT, RawClient, chat, request, running
from tests.kit.stub_router import StubRequest, StubRouter

NOTICED_S = 0.1


async def fin(client: RawClient) -> None:
    client.close()


async def rst(client: RawClient) -> None:
    client.reset()


async def half_close(client: RawClient) -> None:
    client.fin()


async def fin_behind_a_pipelined_request(client: RawClient) -> None:
    await client.send(request("GET", "/v1/models"))
    client.close()


async def fin_behind_a_stray_crlf(client: RawClient) -> None:
    await client.send(b"\r\n")
    client.close()


async def fin_after_stray_bytes_were_there_for_a_while(client: RawClient) -> None:
    await client.send(b"\r\n")
    await trio.testing.wait_all_tasks_blocked(0.01)
    client.close()


WAYS = [
    fin,
    rst,
    half_close,
    fin_behind_a_pipelined_request,
    fin_behind_a_stray_crlf,
    fin_after_stray_bytes_were_there_for_a_while,
]


def silent(served: StubRequest) -> None:
    """Queued, connecting, waiting for the head: to the edge they are one."""


def routed(served: StubRequest) -> None:
    served.route()


def streaming(served: StubRequest) -> None:
    served.route()
    served.text("a")


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("stream", "before"),
    [(True, silent), (True, routed), (True, streaming), (False, streaming)],
    ids=["queued", "before-the-head", "mid-stream", "non-stream"],
)
async def test_h4_a_client_that_leaves_is_noticed_at_once(
    way: Callable[[RawClient], object],
    stream: bool,
    before: Callable[[StubRequest], None],
    unix: bool,
    tmp_path: Path,
) -> None:
    if unix and way is rst:
        return  # unix sockets know no RST
    router = StubRouter()
    async with running(router, unix=tmp_path / "s" if unix else None) as here:
        client = await here.connect()
        await client.send(chat(stream=stream))
        served = await router.next()
        before(served)
        await trio.testing.wait_all_tasks_blocked()

        left_at = trio.current_time()
        await way(client)  # type: ignore[misc]
        with trio.fail_after(1):
            await served.gone.wait()
            await served.over.wait()
        await here.empty()

    assert served.gone_at is not None
    assert served.gone_at - left_at < NOTICED_S
    assert served.steps[0] == "gone"


@pytest.mark.parametrize("way", [fin, half_close])
@pytest.mark.parametrize("before", [silent, streaming])
@pytest.mark.parametrize("size", [300_000, 16 * 1024 * 1024])
async def test_h4_a_fin_behind_more_than_the_receive_window_is_noticed(
    size: int,
    before: Callable[[StubRequest], None],
    way: Callable[[RawClient], object],
) -> None:
    """It does not arrive while nobody reads, so it has no 100 ms."""
    router = StubRouter()
    async with running(router, patience=SWEPT) as here:
        client = await here.connect()
        await client.send(chat())
        served = await router.next()
        before(served)

        await client.send(bytes(size))
        await way(client)  # type: ignore[misc]
        with trio.fail_after(STEP_S):
            await served.gone.wait()
            await served.over.wait()
        await here.empty()

    assert served.steps[0] == "gone"
