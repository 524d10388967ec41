"""Where a worker is: its URL taken apart, its name resolved off the hot path."""

import ipaddress
import socket
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

import attrs
import trio

from workers.transport import Address

#: Seconds for which resolved addresses are taken as they are.
_FRESH_S: Final = 5.0


@attrs.frozen
class Site:
    """A worker's URL, taken apart."""

    secure: bool
    host: str
    port: int
    base: str
    """Path before ``/v1`` and before the control endpoints; "" or ``/a/b``."""

    @property
    def host_field(self) -> str:
        """Value of the Host header: no port where it is the scheme's own."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        usual = 443 if self.secure else 80
        return name if self.port == usual else f"{name}:{self.port}"

    @property
    def root(self) -> str:
        """The URL again, with its base and without ``/v1``."""
        scheme = "https" if self.secure else "http"
        return f"{scheme}://{self.host_field}{self.base}"


def parse_site(url: str) -> Site:
    """Take *url* apart: http or https, with or without ``/v1``.

    Raises:
        ValueError: it is not such a URL; the message says what is wrong and
            holds no part of it.
    """
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError("a worker's URL is plain ASCII without spaces")
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("a worker's URL is http:// or https:// and a host")
    if parts.username is not None or parts.query or parts.fragment:
        raise ValueError("a worker's URL has no user, query or fragment")
    try:
        # As the resolver does, whose error is no OSError.
        parts.hostname.encode("idna")
    except UnicodeError:
        raise ValueError("a worker's host has an empty or a too long part") from None
    secure = parts.scheme == "https"
    port = parts.port
    return Site(
        secure=secure,
        host=parts.hostname,
        port=port if port is not None else 443 if secure else 80,
        base=parts.path.rstrip("/").removesuffix("/v1").rstrip("/"),
    )


class Resolver:
    """The addresses of one site, kept for the path that may not wait."""

    def __init__(self, site: Site) -> None:
        """A numeric host is known at once."""
        self._site = site
        self._asked_at = -_FRESH_S
        #: In order of preference, without repeats; empty: not known yet.
        self.addresses: Sequence[Address] = []
        try:
            numeric = ipaddress.ip_address(site.host)
        except ValueError:
            self._is_name = True
        else:
            self._is_name = False
            v6 = numeric.version == 6
            family = socket.AF_INET6 if v6 else socket.AF_INET
            self.addresses = [(family, (site.host, site.port))]

    async def refresh(self) -> None:
        """Resolve the name, if the last answer is not fresh. A checkpoint.

        Raises:
            OSError: it does not resolve; what was known before stays.
        """
        await trio.lowlevel.checkpoint()
        now = trio.current_time()
        if not self._is_name or now - self._asked_at < _FRESH_S:
            return
        try:
            found = await trio.socket.getaddrinfo(
                self._site.host, self._site.port, type=socket.SOCK_STREAM
            )
        except UnicodeError:
            # An empty part, or one that is too long: never looked up at all.
            raise OSError("the host is no name that can be looked up") from None
        self._asked_at = now
        known = {address: place for place, address in enumerate(self.addresses)}
        addresses: dict[Address, None] = {}
        for family, _, _, _, where in found:
            if len(where) == 4:
                addresses[family, where] = None
            else:
                addresses[family, (str(where[0]), int(where[1]))] = None
        self.addresses = sorted(addresses, key=lambda a: known.get(a, -1))

    def doubt(self, address: Address) -> None:
        """Put *address* last: it did not connect. Not a checkpoint."""
        if address in self.addresses:
            others = [other for other in self.addresses if other != address]
            self.addresses = [*others, address]
