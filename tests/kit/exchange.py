"""One chat request as the fake engine sees it, and the pen for its answer.

A script writes with it, byte for byte what it says; nothing is repaired.
Every writing call is a checkpoint and raises `RouterGone` once the router's
socket is closed.
"""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final, Protocol

import trio

from router.errors import RouterError

_LINGER_ZERO: Final = struct.pack("ii", 1, 0)

#: Head fields of a streamed answer, as llama-server sends them.
STREAM_HEADERS: Final[Mapping[str, str]] = {
    "Server": "fake",
    "Content-Type": "text/event-stream",
}


class RouterGone(RouterError):
    """The router closed its socket; the script has nobody to write to."""


class Pipe(Protocol):
    """What an exchange needs of its connection."""

    number: int
    stream: trio.abc.Stream
    sock: trio.socket.SocketType
    gone: trio.Event


class Exchange:
    """One request and its answer.

    ``closed`` is set when the router's socket of this exchange is closed (FIN
    or RST, or our own ``reset``), whether or not the answer was whole.
    """

    def __init__(
        self,
        pipe: Pipe,
        nth: int,
        request_head: bytes,
        headers: Mapping[str, str],
        method: str,
        path: str,
    ) -> None:
        """*nth* counts the requests of one connection from 1."""
        self._pipe = pipe
        self.connection = pipe.number
        self.nth = nth
        self.request_head = request_head
        self.headers = dict(headers)
        self.method = method
        self.path = path
        self.content = b""
        self.body: Any = None
        self.started_at = trio.current_time()
        self.closed = trio.Event()
        self.closed_at: float | None = None
        #: The answer was written to its end.
        self.ended = trio.Event()
        self.keep_alive = True
        self._chunked = False
        self._head_out = False

    # ---- the answer, framed ----

    async def head(
        self,
        status: int = 200,
        headers: Mapping[str, str] = STREAM_HEADERS,
        *,
        chunked: bool = True,
    ) -> None:
        """Write an answer's head, chunked unless told otherwise."""
        self._chunked = chunked
        self._head_out = True
        lines = [f"HTTP/1.1 {status} Said"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if chunked:
            lines.append("Transfer-Encoding: chunked")
        await self.raw("\r\n".join([*lines, "", ""]).encode())

    async def role(self) -> None:
        """Write the role chunk; the head too, where it is not out."""
        await self._choice({"role": "assistant", "content": None})

    async def text(self, *pieces: str) -> None:
        """Write one text delta a piece."""
        for piece in pieces:
            await self._choice({"content": piece})

    async def reasoning(self, *pieces: str) -> None:
        """Write one reasoning delta a piece."""
        for piece in pieces:
            await self._choice({"reasoning_content": piece})

    async def tool(
        self,
        index: int,
        arguments: str = "",
        *,
        call_id: str | None = None,
        name: str | None = None,
    ) -> None:
        """Write one fragment of a tool call."""
        call: dict[str, Any] = {"index": index, "function": {"arguments": arguments}}
        if call_id is not None:
            call |= {"id": call_id, "type": "function"}
        if name is not None:
            call["function"] = {"name": name, "arguments": arguments}
        await self._choice({"tool_calls": [call]})

    async def finish(self, reason: str = "stop") -> None:
        """Write the finish chunk."""
        await self._choice({}, reason)

    async def usage(self, prompt: int, completion: int) -> None:
        """Write the usage chunk."""
        counts = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        await self.chunk({**self._frame(), "choices": [], "usage": counts})

    async def chunk(self, frame: Mapping[str, Any]) -> None:
        """Write *frame* as one event, head first where it is not out."""
        await self.data(b"data: " + json.dumps(frame).encode() + b"\n\n")

    async def done(self) -> None:
        """Write ``[DONE]``."""
        await self.data(b"data: [DONE]\n\n")

    async def data(self, piece: bytes) -> None:
        """Write *piece* as one HTTP chunk, or as it is in a plain body."""
        if not self._head_out:
            await self.head()
        if self._chunked:
            piece = b"%x\r\n%b\r\n" % (len(piece), piece)
        await self.raw(piece)

    async def end(self) -> None:
        """Write the zero chunk: the answer is whole."""
        if not self._head_out:
            await self.head()
        if self._chunked:
            await self.raw(b"0\r\n\r\n")
        self.ended.set()

    async def json(
        self, status: int, reply: object, headers: Mapping[str, str] | None = None
    ) -> None:
        """Write a whole JSON answer with its length."""
        body = json.dumps(reply).encode()
        fields = {
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **(headers or {}),
        }
        await self.head(status, fields, chunked=False)
        await self.raw(body)
        self.ended.set()

    # ---- the connection, bare ----

    async def raw(self, octets: bytes) -> None:
        """Write *octets* as they are. Waits while the router does not read."""
        if self._pipe.gone.is_set():
            raise RouterGone("the router is gone")
        try:
            await self._pipe.stream.send_all(octets)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise RouterGone("the router is gone") from error

    async def reset(self) -> None:
        """Cut the connection with a RST."""
        self._pipe.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)
        self._pipe.sock.close()
        await trio.lowlevel.checkpoint()

    async def fin(self) -> None:
        """Send a FIN, after what was written and nothing else.

        The router's own close is still seen.
        """
        try:
            self._pipe.sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            raise RouterGone("the router is gone") from error
        await trio.lowlevel.checkpoint()

    async def wait_closed(self) -> None:
        """Wait until the router's socket is closed. A checkpoint."""
        await self.closed.wait()

    # ---- pieces ----

    async def _choice(
        self, delta: Mapping[str, Any], finish: str | None = None
    ) -> None:
        choice = {"index": 0, "delta": dict(delta), "finish_reason": finish}
        await self.chunk({**self._frame(), "choices": [choice]})

    def _frame(self) -> dict[str, Any]:
        model = self.body.get("model") if isinstance(self.body, dict) else None
        return {
            "id": "chatcmpl-fake",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": model,
        }
