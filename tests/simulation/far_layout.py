"""Which hosts a simulation has, and who connects to whom."""

import random
from collections import defaultdict
from typing import Final, Protocol

from tests.simulation.far_net import Net
from tests.simulation.far_parts import AgentPart, RouterPart
from tests.simulation.far_wires import Path, Weather

ROUTERS: Final = 2
#: Slots of each engine of each agent; the agents of an odd number announce
#: themselves, to those of an even one the routers connect.
AGENTS: Final = ((2, 3), (1, 3), (2,))
#: Seconds from host to host when all is well.
LATENCIES: Final = (0.0, 0.0, 0.003)


class World(Protocol):
    """What is laid out."""

    net: Net
    rng: random.Random
    paths: list[Path]
    routers: list[RouterPart]
    agents: list[AgentPart]

    def new_epoch(self) -> int:
        """Give one that is greater than all before."""


def lay_out(world: World) -> None:
    """Put all hosts of *world* there, and the paths between them."""
    listens: dict[str, list[str]] = defaultdict(list)
    dials: dict[str, dict[str, str]] = defaultdict(dict)
    for a in range(len(AGENTS)):
        for r in range(ROUTERS):
            usual = world.rng.choice(LATENCIES)
            path = Path(
                f"r{r}",
                f"a{a}",
                router_dials=a % 2 == 0,
                there=Weather(usual),
                back=Weather(usual),
            )
            address = f"10.{r}.{a}.1"
            world.paths.append(path)
            world.net.paths[address] = path
            near, far = path.router, path.agent
            if not path.router_dials:
                near, far = far, near
            listens[far].append(address)
            dials[near][far] = address
    for a, slots in enumerate(AGENTS):
        name = f"a{a}"
        world.agents.append(
            AgentPart(
                world,
                name,
                listens_at=listens[name],
                slots=slots,
                routers=list(dials[name].values()),
                books=world,
            )
        )
    for r in range(ROUTERS):
        name = f"r{r}"
        world.routers.append(
            RouterPart(
                world,
                name,
                listens_at=listens[name],
                agents=dials[name],
            )
        )
