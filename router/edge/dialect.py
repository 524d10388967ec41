"""In which words a client is told of failures: OpenAI's or Anthropic's (O5, M6)."""

from collections.abc import Callable
from typing import Final

import attrs

from router.anthropic import errors as anthropic
from router.checks import RequestInvalid
from router.errors import ErrorReply, Fault
from router.openai import errors as openai


@attrs.frozen
class Dialect:
    """One dialect's failures. *request* is always our own id of the request."""

    reply_of: Callable[[Fault, str], ErrorReply]
    reply_of_invalid: Callable[[RequestInvalid, str], ErrorReply]
    refusal: Callable[[int, str, str], tuple[int, bytes]] | None = None
    """Says a refusal of the edge itself; None: as the edge has made it."""
    id_header: bytes | None = None
    """A header of its own for our id of the request."""


OPENAI: Final = Dialect(
    lambda fault, _: openai.reply_of(fault),
    lambda invalid, _: openai.reply_of_invalid(invalid),
)
#: What paths of the Anthropic dialect have in them, those too that are not ours.
_MESSAGES: Final = "/v1/messages"

ANTHROPIC: Final = Dialect(
    anthropic.reply_of, anthropic.reply_of_invalid, anthropic.refusal, b"request-id"
)


def dialect_of(path: str, version: bytes | None = None) -> Dialect:
    """Give the dialect of a request that has no route, or one of both dialects.

    *version*: its ``anthropic-version``, which clients of that dialect send always.
    """
    return OPENAI if version is None and _MESSAGES not in path else ANTHROPIC
