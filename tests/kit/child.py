"""A tiny supervised server, for tests: `python -I -S child.py PORT [WORD …]`.

Standard library alone. It answers as a generic engine does; what a chat request says
tells it what to do. Words: ``stubborn`` ignores SIGTERM, ``family`` starts a
grandchild in a session of its own that ignores it too, ``slow`` listens late, ``mute``
never listens, ``PATH`` with a slash is a file for its and its grandchild's numbers.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GRANDCHILD = (
    "import os,signal,time; os.setsid();"
    " signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
)
LAST_WORDS = "CUDA error: out of memory"


class Answers(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing: the last line of stderr is a test's."""

    def do_GET(self) -> None:
        """Answer as a generic engine."""
        known = self.path == "/v1/models"
        self._json(200 if known else 404, {"data": [{"id": "m", "object": "model"}]})

    def do_POST(self) -> None:
        """Do what the last message says."""
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        said, _, number = body["messages"][-1]["content"].partition(" ")
        if said in {"hang", "spin"}:
            end = time.monotonic() + float(number or 600)  # noqa: TID251
            while time.monotonic() < end:  # noqa: TID251
                if said == "hang":
                    time.sleep(0.05)
        if said == "vanish":
            self._die()
        if said == "share" and os.fork() == 0:
            # Somebody else has the socket now too.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        if said == "share":
            os.kill(os.getpid(), signal.SIGKILL)
        self._head()
        for place in range(int(number or 3)):
            if said == "die" and place == int(number) - 1:
                self._die()
            if said == "drip":
                time.sleep(0.05)
            if said == "cut" and place == int(number) - 1:
                self.close_connection = True
                return
            self._event({"delta": {"content": f"{place} "}, "finish_reason": None})
        self._event({"delta": {}, "finish_reason": "stop"})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _die(self) -> None:
        sys.stderr.write(f"{LAST_WORDS}\n")
        sys.stderr.flush()
        os._exit(3)

    def _head(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def _event(self, choice: dict[str, Any]) -> None:
        chunk = {"object": "chat.completion.chunk", "choices": [{"index": 0, **choice}]}
        self._chunk(f"data: {json.dumps(chunk)}\n\n".encode())

    def _chunk(self, octets: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(octets), octets))
        self.wfile.flush()

    def _json(self, status: int, body: object) -> None:
        octets = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(octets)))
        self.end_headers()
        self.wfile.write(octets)


def main(port: int, *words: str) -> None:
    """Serve until killed."""
    if "stubborn" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    numbers = [os.getpid()]
    if "family" in words:
        command = [sys.executable, "-I", "-S", "-c", GRANDCHILD]
        numbers.append(subprocess.Popen(command).pid)
    for path in words:
        if "/" in path:
            with open(f"{path}.new", "w", encoding="ascii") as file:  # noqa: PTH123
                file.write(" ".join(map(str, numbers)))
            os.replace(f"{path}.new", path)  # noqa: PTH105
    if "mute" in words:
        time.sleep(600)
    if "slow" in words:
        time.sleep(1)
    ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
