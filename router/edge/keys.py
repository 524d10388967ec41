"""Client keys, optional (H8): only their SHA-256 is ever on disk or in memory.

A file holds one key a line: 64 hex digits, then anything (a name, say), as
``printf %s "$KEY" | sha256sum`` writes it. ``#`` begins a comment.
"""

import hashlib
import hmac
from pathlib import Path
from typing import Final

from router.errors import RouterError
from router.http1 import Head

_DIGEST_HEX: Final = 64
_BEARER: Final = b"bearer "


class KeysInvalid(RouterError):
    """The keys file is not readable as one; the message holds no line of it."""


class Keys:
    """The keys that clients may use."""

    def __init__(self, digests: tuple[bytes, ...]) -> None:
        """*digests*: the SHA-256 of each key."""
        self._digests = digests

    @classmethod
    def load(cls, path: str) -> "Keys":
        """Read the file at *path*. Blocks; for start and reload.

        Raises:
            KeysInvalid: unreadable, malformed (with the line's number), or empty.
        """
        try:
            lines = Path(path).read_bytes().splitlines()
        except OSError as error:
            raise KeysInvalid(f"{path}: {error.strerror}") from error
        digests = []
        for number, line in enumerate(lines, 1):
            words = line.partition(b"#")[0].split(maxsplit=1)
            if not words:
                continue
            try:
                digest = bytes.fromhex(words[0].decode("ascii"))
            except ValueError:
                digest = b""
            if len(words[0]) != _DIGEST_HEX or len(digest) != _DIGEST_HEX // 2:
                # Not a word of the line: it may be a key in the clear.
                raise KeysInvalid(f"{path}:{number}: not a SHA-256 in hex")
            digests.append(digest)
        if not digests:
            raise KeysInvalid(f"{path}: no keys in it")
        return cls(tuple(digests))

    def admit(self, head: Head) -> bool:
        """Tell whether the request carries one of the keys, in either header.

        Every digest is compared, each in constant time, so that the time
        taken tells nothing of which key came close.
        """
        bearer = head.get(b"authorization")
        if bearer is None or bearer[: len(_BEARER)].lower() != _BEARER:
            bearer = b""
        found = False
        # Some agents send a token of their own beside the key (M1).
        for key in (bearer[len(_BEARER) :].strip(), head.get(b"x-api-key")):
            if not key:
                continue
            given = hashlib.sha256(key).digest()
            for digest in self._digests:
                found |= hmac.compare_digest(digest, given)
        return found
