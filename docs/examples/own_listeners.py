"""The router's HTTP edge on listeners of your own, beside tasks of your own.

    python docs/examples/own_listeners.py 8080 http://127.0.0.1:8081

Port 0 takes any. You choose and close the sockets, and you decide when it ends:
cancelling ``serve`` closes every client's connection and leaves the listeners be.
"""

import socket
import sys
from functools import partial

import trio

from router.edge.server import serve
from router.engine import Router, open_router


async def watch(router: Router) -> None:
    """Tell every 5 s how many requests are under way."""
    while True:
        await trio.sleep(5)
        print(router.active, "requests under way")


async def main(port: int, urls: list[str]) -> None:
    """Serve on *port* what the workers at *urls* can answer, until Ctrl-C."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        async with open_router(workers=urls) as router, trio.open_nursery() as nursery:
            nursery.start_soon(watch, router)
            await nursery.start(partial(serve, router, [listener]))
            print(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", flush=True)


if __name__ == "__main__":
    if not sys.argv[2:] or not sys.argv[1].isdecimal():
        sys.exit("usage: own_listeners.py PORT URL [URL …]")
    trio.run(main, int(sys.argv[1]), sys.argv[2:])
