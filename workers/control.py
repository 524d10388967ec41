"""The control plane of one worker: a few small questions over httpx.

The one module that imports httpx. A question takes its own connection, so
that an answer always proves a listening server and nothing stays open; how
long it may take is the caller's business.
"""

import ssl
from collections.abc import Iterator, Mapping
from typing import Any, Final

import attrs
import httpx
import msgspec

from router.errors import EXHAUSTED, RouterError
from workers.site import Site

#: Bytes of an answer; more is no answer to any of our questions.
ANSWER_MAX: Final = 4 * 1024 * 1024


class NoAnswer(RouterError):
    """Nothing came, or nothing of use.

    ``refused``: hard evidence that no server is there (L3). ``unasked``: it is we
    who had no descriptor left to ask with.
    """

    def __init__(
        self, message: str, *, refused: bool = False, unasked: bool = False
    ) -> None:
        """*message* is for people; it holds no address and no key."""
        super().__init__(message)
        self.refused = refused
        self.unasked = unasked


@attrs.frozen
class Answer:
    """One answer, whole."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def ok(self) -> bool:
        """Whether the status is a 2xx."""
        return 200 <= self.status < 300

    def json(self) -> Any:
        """Decode the body; None for what is not JSON, and for null."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.MsgspecError, RecursionError):
            return None

    def fields(self) -> Mapping[str, Any]:
        """Give the body's JSON object; empty where it is none."""
        found = self.json()
        return found if isinstance(found, dict) else {}

    def text(self) -> str:
        """Decode the body; bytes that are no UTF-8 are replaced."""
        return self.body.decode("utf-8", "replace")


class Control:
    """Asks one worker's control endpoints."""

    def __init__(
        self, site: Site, api_key: str | None, tls: ssl.SSLContext | None
    ) -> None:
        """*tls*: None where *site* is not https."""
        self._site = site
        self._own = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._client = httpx.AsyncClient(
            verify=tls if tls is not None else False,
            # An environment's proxy would take the worker's place.
            trust_env=False,
            follow_redirects=False,
            timeout=None,  # noqa: S113  the caller bounds it
            # Its pool wedges under cancellation when it is bounded (B91).
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def get(self, path: str) -> Answer:
        """Ask for *path*: one of this worker's, or a whole URL. A checkpoint.

        The worker's key goes to the worker only. Cancelled: the connection is
        closed.

        Raises:
            NoAnswer: see there.
        """
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: bytes) -> Answer:
        """Send JSON to one of this worker's paths. A checkpoint.

        Raises:
            NoAnswer: see there.
        """
        return await self._ask("POST", path, body)

    async def _ask(self, method: str, path: str, body: bytes | None) -> Answer:
        root = self._site.root
        url = root + path if path.startswith("/") else path
        headers = dict(self._own) if url.startswith(f"{root}/") else {}
        # Nothing is unpacked, so what the limit counts is what there is.
        headers["accept-encoding"] = "identity"
        if body is not None:
            headers["content-type"] = "application/json"
        pieces: list[bytes] = []
        size = 0
        try:
            async with self._client.stream(
                method, url, headers=headers, content=body
            ) as response:
                async for piece in response.aiter_raw():
                    pieces.append(piece)
                    size += len(piece)
                    if size > ANSWER_MAX:
                        # To leave the loop would leave httpx's generators to
                        # the garbage collector; so the next read shall fail.
                        await response.extensions["network_stream"].aclose()
                fields = {k.lower(): v for k, v in response.headers.items()}
                return Answer(response.status_code, fields, b"".join(pieces))
        except _FAILURES as error:
            if size > ANSWER_MAX:
                raise NoAnswer(f"an answer of more than {ANSWER_MAX} bytes") from error
            if any(isinstance(cause, _REFUSALS) for cause in _causes(error)):
                raise NoAnswer("the connection was refused", refused=True) from error
            if any(getattr(c, "errno", None) in EXHAUSTED for c in _causes(error)):
                raise NoAnswer("no descriptor is left here", unasked=True) from error
            raise NoAnswer(_what(error)) from error


#: UnicodeError: a health URL with a host that is no name.
_FAILURES: Final = (
    httpx.HTTPError,
    httpx.InvalidURL,
    httpx.StreamError,
    UnicodeError,
)
_REFUSALS: Final = (ConnectionRefusedError, ConnectionResetError, BrokenPipeError)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Give *error* and all that led to it."""
    left = [error]
    seen: set[int] = set()
    while left:
        cause = left.pop()
        if id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        left += [c for c in (cause.__cause__, cause.__context__) if c is not None]
        if isinstance(cause, BaseExceptionGroup):
            left += cause.exceptions


def _what(error: Exception) -> str:
    """Say in a few words what went wrong; errors of httpx may hold the URL."""
    if any(isinstance(cause, ssl.SSLError) for cause in _causes(error)):
        return "the TLS handshake failed"
    if isinstance(error, httpx.ConnectError):
        return "no connection"
    if isinstance(error, httpx.RemoteProtocolError):
        return "an answer that is not HTTP"
    return "no answer"
