"""An agent that shows room and has none, again and again (P3, A3)."""

from itertools import pairwise

import trio

from tests.kit.delivery import JOB
from tests.kit.edge import until
from tests.kit.peer import doorway
from tests.workers.test_remote import routed
from workers.wire import frames
from workers.wire.frames import Accepted, Declined, Offer


async def test_p3_an_agent_that_shows_room_and_has_none_is_asked_in_steps() -> None:
    async with doorway() as door, routed(door) as router:
        peer = await door.open()
        await until(lambda: router.ready)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(router.complete, JOB)
            came: list[float] = []
            for sequence in range(2, 9):
                offer = await peer.expect(Offer)
                came.append(trio.current_time())
                await peer.observe(sequence)
                await peer.send(Declined(offer.stream, "no_slot"))
            gaps = [later - one for one, later in pairwise(came)]
            # The third refusal in a row is the first that it rests for.
            assert gaps[2] > 0.03
            assert gaps[3] > 0.06
            assert min(gaps[4:]) > 0.12
            # And it is served as soon as there is a slot again.
            last = await peer.expect(Offer)
            assert trio.current_time() - came[-1] < 1
            await peer.send(
                Accepted(last.stream), frames.Finished(last.stream, 0, "stop")
            )
