"""A mock engine for benchmarks: OpenAI chat on one epoll loop, as cheap as can be.

``python -m bench.engine --rate 50`` writes ``listening PORT`` to stdout, then
answers until stdin closes. A request's ``max_tokens`` says how many deltas its
answer has, and the rate says how they come:

* a streamed answer of more than `AT_ONCE` deltas: RATE deltas a second, each in a
  write of its own; with rate 0 as fast as the reader takes them (the flood);
* anything shorter, streamed or not: all at once, which is what a *small request*
  costs a router, whether it asks its worker for a stream or not.

Each fifth of the streams moves at its own fifth of the period, so that a router
meets neither one delta at a time nor all of them in one pass.
"""

import json
import select
import socket
import time
from collections import Counter
from typing import Any, Final

import click

#: Answers of at most so many deltas are not paced.
AT_ONCE: Final = 4
#: Groups of streams within one period.
GROUPS: Final = 5
#: Different deltas, so that nothing downstream can cache one.
_VARIETY: Final = 97
_BLOCK: Final = 64 * 1024

_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nServer: mock\r\nContent-Type: text/event-stream\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def _frame(choices: list[dict[str, Any]], **more: Any) -> bytes:
    """One event in an HTTP chunk of its own, as long as llama.cpp's are."""
    event = {
        "choices": choices,
        "created": 1795952512,
        "id": "chatcmpl-ejKq8YpzYuL0J9Pn5vjBlBryQIfQ0u30",
        "model": "mock",
        "system_fingerprint": "b0-unknown",
        "object": "chat.completion.chunk",
        **more,
    }
    body = b"data: " + json.dumps(event).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(body), body)


def _choice(delta: dict[str, Any], finish: str | None = None) -> list[dict[str, Any]]:
    return [{"finish_reason": finish, "index": 0, "delta": delta}]


_USAGE: Final = {"prompt_tokens": 9, "completion_tokens": 2, "total_tokens": 11}
_ROLE: Final = _frame(_choice({"role": "assistant", "content": None}))
_TOKENS: Final = tuple(
    _frame(_choice({"content": f" tok{n}"})) for n in range(_VARIETY)
)
_END: Final = (
    _frame(_choice({}, "length"))
    + _frame([], usage=_USAGE)
    + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
)
_MODELS: Final = {
    "object": "list",
    "data": [{"id": "mock", "object": "model", "created": 1, "owned_by": "bench"}],
}
#: Control paths that a plain OpenAI-compatible server does not know.
_UNKNOWN: Final = (b"/props", b"/slots", b"/metrics", b"/version")


def _reply(body: Any, status: bytes = b"200 OK") -> bytes:
    text = json.dumps(body).encode()
    return (
        b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (status, len(text), text)
    )


class _Line:
    """One connection, and the answer that it is in the middle of."""

    __slots__ = ("held", "left", "peer", "read")

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.read = b""
        #: Bytes that the socket did not take yet.
        self.held = b""
        #: Deltas still to come; -1: no streamed answer is under way.
        self.left = -1


class _Engine:
    """All connections, on one epoll."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.counts: Counter[str] = Counter()
        self.lines: dict[int, _Line] = {}
        self.groups: list[dict[int, _Line]] = [{} for _ in range(GROUPS)]
        self.flood: dict[int, _Line] = {}
        self.poll = select.epoll()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        self.listener.setblocking(False)
        self.poll.register(self.listener, select.EPOLLIN)
        self.port: int = self.listener.getsockname()[1]

    def run(self) -> None:
        """Serve until stdin is at its end."""
        self.poll.register(0, select.EPOLLIN)
        step = 1 / self.rate / GROUPS if self.rate else 1.0
        due = time.perf_counter() + step
        turn = 0
        while True:
            wait = max(0.0, due - time.perf_counter())
            for number, event in self.poll.poll(wait, 1024):
                if number == 0:
                    return
                if number == self.listener.fileno():
                    self._accept()
                else:
                    self._event(self.lines[number], event)
            if time.perf_counter() >= due:
                due += step
                turn = (turn + 1) % GROUPS
                for line in list(self.groups[turn].values()):
                    self._next(line)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
            except BlockingIOError:
                return
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.lines[peer.fileno()] = _Line(peer)
            self.poll.register(peer, select.EPOLLIN)

    def _event(self, line: _Line, event: int) -> None:
        if event & select.EPOLLOUT:
            self._flush(line)
        if event & ~select.EPOLLOUT:
            try:
                chunk = line.peer.recv(65536)
            except OSError:
                chunk = b""
            if not chunk:
                self._drop(line)
                return
            line.read += chunk
            if line.read.startswith(b"PRI "):
                # sglang-router asks for gRPC first, in HTTP/2.
                self._drop(line)
                return
            while self._request(line):
                pass

    def _drop(self, line: _Line) -> None:
        number = line.peer.fileno()
        if line.left >= 0:
            self.counts["lost"] += 1
        self._settle(line)
        del self.lines[number]
        self.poll.unregister(number)
        line.peer.close()

    def _settle(self, line: _Line) -> None:
        number = line.peer.fileno()
        line.left = -1
        self.flood.pop(number, None)
        self.groups[number % GROUPS].pop(number, None)

    def _request(self, line: _Line) -> bool:
        """Take one whole request off what was read; False: there is none."""
        end = line.read.find(b"\r\n\r\n") + 4
        if end < 4:
            return False
        head = line.read[:end].lower()
        if b"\r\ncontent-length:" in head:
            length = head.split(b"\r\ncontent-length:", 1)[1].split(b"\r\n", 1)[0]
            stop = end + int(length)
        elif b"\r\ntransfer-encoding: chunked" in head:
            stop = line.read.find(b"0\r\n\r\n", end) + 5
            if stop < 5:
                return False
        else:
            stop = end
        if len(line.read) < stop:
            return False
        body, line.read = line.read[end:stop], line.read[stop:]
        self._answer(line, head.split(b" ", 2)[1], body)
        return True

    def _answer(self, line: _Line, path: bytes, body: bytes) -> None:
        if path == b"/v1/chat/completions":
            # A chunked body has its braces all the same.
            asked = json.loads(body[body.index(b"{") : body.rindex(b"}") + 1])
            # sglang-router forwards the newer of the two names.
            limit = asked.get("max_tokens") or asked.get("max_completion_tokens") or 2
            self._chat(line, limit, bool(asked.get("stream")))
        elif path == b"/v1/models":
            self._write(line, _reply(_MODELS))
        elif path == b"/stats":
            live = sum(1 for one in self.lines.values() if one.left >= 0)
            self._write(line, _reply({**self.counts, "live": live}))
        elif path in _UNKNOWN:
            self._write(line, _reply({"error": "unknown"}, b"404 Not Found"))
        else:
            self._write(line, _reply({"status": "ok", "model_path": "mock"}))

    def _chat(self, line: _Line, deltas: int, stream: bool) -> None:
        self.counts["requests"] += 1
        if not stream:
            text = "".join(f" tok{n % _VARIETY}" for n in range(deltas))
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "finish_reason": "length"}
            self._write(
                line,
                _reply(
                    {
                        "id": "chatcmpl-1",
                        "object": "chat.completion",
                        "created": 1,
                        "model": "mock",
                        "choices": [choice],
                        "usage": _USAGE,
                    }
                ),
            )
        elif deltas <= AT_ONCE:
            self._write(line, _HEAD + _ROLE + b"".join(_TOKENS[:deltas]) + _END)
        else:
            line.left = deltas
            number = line.peer.fileno()
            self._write(line, _HEAD + _ROLE)
            if self.rate:
                self.groups[number % GROUPS][number] = line
            else:
                self.flood[number] = line
                self.poll.modify(number, select.EPOLLIN | select.EPOLLOUT)

    def _next(self, line: _Line) -> None:
        """Write one paced delta, or the end; nothing while the reader is behind."""
        if line.held:
            return
        if line.left:
            line.left -= 1
            self._write(line, _TOKENS[line.left % _VARIETY])
        else:
            self._settle(line)
            self.counts["done"] += 1
            self._write(line, _END)

    def _flush(self, line: _Line) -> None:
        number = line.peer.fileno()
        if not line.held and number in self.flood:
            if line.left:
                block = b"".join(_TOKENS[: min(line.left, _VARIETY)])
                block *= min(_BLOCK // len(block), line.left // _VARIETY) or 1
                line.left -= block.count(b" tok")
                line.held = block
            else:
                self._settle(line)
                self.counts["done"] += 1
                line.held = _END
        held, line.held = line.held, b""
        self._write(line, held)

    def _write(self, line: _Line, data: bytes) -> None:
        if line.held:
            line.held += data
            return
        try:
            sent = line.peer.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            # The read side tells of the loss, and drops the line.
            return
        self.counts["written"] += sent
        line.held = data[sent:]
        more = line.held or line.peer.fileno() in self.flood
        events = select.EPOLLIN | (select.EPOLLOUT if more else 0)
        self.poll.modify(line.peer, events)


@click.command()
@click.option("--rate", default=50.0, help="Deltas a second of a stream; 0: flood.")
def main(rate: float) -> None:
    """Serve on a free port of 127.0.0.1 until stdin closes."""
    engine = _Engine(rate)
    click.echo(f"listening {engine.port}")
    engine.run()


if __name__ == "__main__":
    main()
