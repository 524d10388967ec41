"""Listen addresses: ``host:port``, ``[v6]:port`` or ``unix:/path``."""

from pathlib import PurePosixPath
from typing import Final, TypeAlias

import attrs

#: Longest path that fits a ``sockaddr_un``, its closing zero apart.
UNIX_PATH_MAX: Final = 107
_TCP_FORMS: Final = "needs host:port or [v6]:port"


@attrs.frozen
class TcpAddress:
    """A host, by name or number, and a port; 0 lets the system choose one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@attrs.frozen
class UnixAddress:
    """An absolute path in the file system."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


Address: TypeAlias = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """Read one listen address.

    Raises:
        ValueError: not an address; the message says what one looks like.
    """
    if text.startswith("unix:"):
        return _unix(text.removeprefix("unix:"))
    return _tcp(text, "needs host:port, [v6]:port or unix:/path")


def parse_tcp(text: str) -> TcpAddress:
    """Read one address where a socket of a path is none. Raises as above."""
    if text.startswith("unix:"):
        raise ValueError(_TCP_FORMS)
    return _tcp(text, _TCP_FORMS)


def _tcp(text: str, forms: str) -> TcpAddress:
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()):
        raise ValueError(forms)
    # By length first: Python reads no number of thousands of digits.
    if len(port) > len("65535") or int(port) > 65_535:
        raise ValueError("the port is at most 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 host needs brackets: [::1]:8080")
    if not host:
        raise ValueError("the host is missing: 127.0.0.1, or 0.0.0.0 for all")
    if not host.isascii() or any(c.isspace() or c in "/@" for c in host):
        raise ValueError("the host is not a name or a number")
    try:
        # As the resolver does, whose error is no OSError.
        host.encode("idna")
    except UnicodeError:
        raise ValueError("the host has an empty or a too long part") from None
    return TcpAddress(host, int(port))


def _unix(path: str) -> UnixAddress:
    if not PurePosixPath(path).is_absolute() or "\0" in path:
        raise ValueError("a unix socket needs an absolute path: unix:/run/x.sock")
    if len(path.encode()) > UNIX_PATH_MAX:
        raise ValueError(f"a unix socket's path is at most {UNIX_PATH_MAX} bytes")
    return UnixAddress(path)
