"""A router of the test's own that visits an agent, frame by frame."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec.structs

from router.messages import Job
from tests.kit.agents import (
    RunningAgent,
)
from tests.kit.delivery import JOB
from tests.kit.exchange import Exchange
from tests.kit.peer import Peer, calling, router_passport
from workers.wire.frames import (
    Message,
    Observation,
    Offer,
    Part,
)
from workers.wire.jobs import encode_job


@asynccontextmanager
async def visiting(
    agent: RunningAgent, name: str = "router", **passport: Any
) -> AsyncIterator[Peer]:
    """Be a router of *agent*, which has observed."""
    async with calling(agent.port, router_passport(name, **passport)) as peer:
        await peer.open()
        await peer.expect(Observation)
        yield peer


def offer_of(
    peer: Peer, number: int = 1, *, job: Job = JOB, **fields: Any
) -> list[Message]:
    octets = encode_job(job)
    assert peer.opening.peer is not None
    offer = Offer(
        number,
        f"{peer.passport.id}.{number}",
        1,
        peer.opening.peer.epoch,
        job.target,
        len(octets),
        65536,
    )
    return [msgspec.structs.replace(offer, **fields), Part(number, 0, octets)]


async def slow(x: Exchange) -> None:
    """Say one word, and then nothing until the router leaves."""
    await x.role()
    await x.text("a")
    await x.wait_closed()
