"""The router as a library: stream one answer, take another whole.

    python docs/examples/embed.py http://127.0.0.1:8081 http://127.0.0.1:8082

The workers are whatever speaks OpenAI's HTTP there.
"""

import sys

import trio

from router.engine import open_router
from router.errors import RequestFailed
from router.messages import Job


async def main(urls: list[str]) -> None:
    """Ask the workers at *urls* twice."""
    async with open_router(workers=urls) as router:
        await router.wait_ready()
        model = router.model_cards()[0].id
        question = {"role": "user", "content": "Name a river."}
        job = Job(model=model, messages=(question,))

        # Leaving the block early is the disconnect: the worker's slot is freed.
        async with router.stream(job) as deltas:
            async for delta in deltas:
                print(delta.text, end="", flush=True)
        assert deltas.finished is not None
        print(f"\n({deltas.finished.reason.value})")

        # So is a deadline, or any other way to cancel the caller.
        with trio.move_on_after(30):
            try:
                answer = await router.complete(job)
            except RequestFailed as failure:
                print("no whole answer:", failure.reason)
            else:
                print(answer.text, answer.usage)


if __name__ == "__main__":
    if not sys.argv[1:]:
        sys.exit("usage: embed.py URL [URL …]")
    trio.run(main, sys.argv[1:])
