"""What a model says out of band, and what ends an answer that runs away.

    python docs/examples/signals.py

Workers that follow a script stand in for models.
"""

import trio

from router.engine import JobResult, open_router
from router.messages import Job, Kind, SignalCode, ToolPart
from router.settings import ModelSettings, Settings
from workers.scripted import Finish, Head, Say, ScriptedWorker, Wait

#: Calls the exit tool of a signal in the middle of its answer.
ASKS = (
    Head(),
    Say(("There are two ways to do it.",)),
    Say(
        ('{"message": "May I delete the old files?"}',),
        Kind.TOOL_CALL,
        tool=ToolPart(0, "call_0", "needs_manager_decision"),
    ),
    Wait(3_600),
    Finish(),
)
#: Says the same until somebody ends it.
LOOPS = (Head(), *[Say(("and on ",))] * 10_000, Finish())
#: Thinks for ever.
THINKS = (Head(), *[Say((f"{n}… ",), Kind.REASONING) for n in range(500)], Wait(3_600))

SETTINGS = Settings(
    models={
        "asks": ModelSettings(exit_tools=(SignalCode.NEEDS_MANAGER_DECISION.value,)),
        "loops": ModelSettings(loop_repeats_max=20),
        "thinks": ModelSettings(thinking_max_tokens=100),
    }
)


def show(result: JobResult) -> None:
    """Print how a job ended, and what was said beside its answer."""
    reason = result.finish_reason.value if result.finish_reason else result.reason
    print(f"{result.state.value} ({reason}), {len(result.text)} characters of text")
    for signal in result.signals:
        print(f"  {signal.index} {signal.code.value}: {signal.message}")


async def main() -> None:
    """Give each of them one job."""
    scripts = {"asks": ASKS, "loops": LOOPS, "thinks": THINKS}
    workers = [
        ScriptedWorker(name, lambda *_, steps=steps: steps, models=(name,))
        for name, steps in scripts.items()
    ]
    async with open_router(SETTINGS, workers=workers) as router:
        await router.wait_ready()
        for name in scripts:
            question = {"role": "user", "content": "Tidy up."}
            show(await router.get_result(router.submit(Job(name, (question,)))))


if __name__ == "__main__":
    trio.run(main)
