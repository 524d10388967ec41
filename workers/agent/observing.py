"""What an agent says of itself: its slots, its models and what hosts them."""

from router.engine.router import Router
from router.lifecycle import COMING
from router.messages import GenerationParams, Job
from router.openai.upstream import VARYING
from router.ports import KnowsParams
from workers.wire.frames import Host

#: States of a model in an observation.
OUT, COMES, SERVES = 0, 1, 2
#: Models of one engine that are shown.
MODELS_MAX = 64

#: A job that asks for all that engines may lack.
_GREEDY = Job(
    "",
    (),
    params=GenerationParams(
        presence_penalty=1.0,
        frequency_penalty=1.0,
        top_k=1,
        min_p=0.1,
        typical_p=0.1,
        repeat_penalty=1.1,
        repeat_last_n=1,
        min_tokens=1,
        ignore_eos=True,
        thinking_max_tokens=1,
    ),
)


def state_of(router: Router, model: str) -> int:
    """Say whether an engine of *model* serves, or is coming up."""
    members = router.fleet.models.get(model, ())
    if any(m.serving for m in members):
        return SERVES
    return COMES if any(m.life.state in COMING for m in members) else OUT


def slots_of(router: Router) -> tuple[int, int]:
    """Count the slots of engines that serve, and how many of these work."""
    serving = [m for m in router.fleet.members.values() if m.serving]
    return sum(m.slots for m in serving), sum(min(m.busy, m.slots) for m in serving)


def context_of(router: Router) -> int | None:
    """Give the largest context of an engine that serves, where known."""
    return max(
        (
            m.context
            for m in router.fleet.members.values()
            if m.serving and m.context is not None
        ),
        default=None,
    )


def lacks_of(router: Router) -> list[str]:
    """Name the sampling parameters that some engine does not know (J3)."""
    lacks: dict[str, None] = {}
    for worker in router.workers.values():
        if isinstance(worker, KnowsParams):
            lacks |= dict.fromkeys(worker.unsupported(_GREEDY))
    return [name for name in VARYING if name in lacks]


def hosts_of(router: Router) -> list[Host]:
    """Show each engine."""
    return [
        Host(
            row["name"],
            row["state"],
            row["reason"],
            row["engine"],
            row["version"],
            row["slots"],
            row["in_flight"] + row["settling"] + row["ghosts"],
            row["models"][:MODELS_MAX],
        )
        for row in router.workers_status()
    ]
