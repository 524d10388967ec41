"""HTTP/1.1, both ends: strict about framing, and blind to all else.

Bytes in, values out; no sockets. httptools (llhttp) parses every message, but
only after the gate has passed it: the gate finds where each message ends, so
no byte behind that reaches a parser which would take it for something else.
A message is let through only if both agree (H2).
"""

from router.http1.head import Head
from router.http1.request import END, BadRequest, End, RequestEvent, RequestParser
from router.http1.response import ProtocolError, ResponseHead, ResponseParser

__all__ = [
    "END",
    "BadRequest",
    "End",
    "Head",
    "ProtocolError",
    "RequestEvent",
    "RequestParser",
    "ResponseHead",
    "ResponseParser",
]
