"""Hand jobs in, look at them, take what became of them.

    python docs/examples/jobs.py [http://127.0.0.1:8081 …]

Without a URL, a worker that follows a script stands in for an engine.
"""

import sys

import trio

from router.engine import Router, open_router
from router.errors import RequestFailed
from router.messages import GenerationParams, Job
from workers.scripted import ScriptedWorker, answers

RIVERS = ("Elbe", "Loire", "Po")


def about(river: str, model: str) -> Job:
    """Make one job."""
    question = {"role": "user", "content": f"Where does the {river} begin?"}
    return Job(model, (question,), params=GenerationParams(max_tokens=64, top_k=20))


async def hand_in(router: Router) -> None:
    """Three jobs at once, and one that nobody wants any more."""
    model = router.model_cards()[0].id
    jobs = {router.submit(about(river, model)): river for river in RIVERS}
    for job in jobs:
        print(router.get_status(job).state.value)

    unwanted = router.submit(about("Styx", model))
    router.release(unwanted)  # cancelled, and forgotten

    for job, river in jobs.items():
        result = await router.get_result(job)  # waits, and takes it
        if result.ok:
            print(f"{river}: {result.text}")
        else:
            print(f"{river}: {result.reason}, after {result.text!r}")

    # What nobody can take is refused when it is handed in.
    try:
        router.submit(about("Elbe", "no-such-model"))
    except RequestFailed as failed:
        print("refused:", failed.reason)


async def main(urls: list[str]) -> None:
    """Run it all; leaving the block would end what is still under way."""
    scripted = ScriptedWorker("scripted", answers("In the ", "mountains."), slots=2)
    async with open_router(workers=urls or [scripted]) as router:
        await router.wait_ready()
        await hand_in(router)


if __name__ == "__main__":
    trio.run(main, sys.argv[1:])
