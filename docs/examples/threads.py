"""The router in a plain script, and from several threads at once.

    python docs/examples/threads.py [http://127.0.0.1:8081 …]

Without a URL, a worker that follows a script stands in for an engine.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

from router.engine import JobResult, SyncRouter
from router.errors import RequestFailed
from router.messages import Job
from workers.scripted import ScriptedWorker, answers


def ask(content: str, model: str) -> Job:
    """Make one job."""
    return Job(model, ({"role": "user", "content": content},))


def main(urls: list[str]) -> None:
    """Stream one answer, complete another, and have twenty done by four threads."""
    scripted = ScriptedWorker("scripted", answers("The ", "Elbe."))
    with SyncRouter(workers=urls or [scripted]) as router:
        router.wait_ready(within_s=30)
        model = router.model_cards()[0].id

        # Leaving the block early, by Ctrl-C too, is the disconnect.
        with router.stream(ask("Name a river.", model)) as deltas:
            for delta in deltas:
                print(delta.text, end="", flush=True)
        print()

        try:
            print(router.complete(ask("Name another.", model), within_s=60).text)
        except RequestFailed as failed:
            print("no whole answer:", failed.reason)

        def one(number: int) -> JobResult:
            job = router.submit(ask(f"Name river number {number}.", model))
            return router.get_result(job)

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(one, range(20)))
        print(sum(result.ok for result in results), "of 20 were answered")


if __name__ == "__main__":
    main(sys.argv[1:])
