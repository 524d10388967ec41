"""One upstream byte stream, plain or TLS, behind one non-blocking interface.

Nothing here waits. A call moves what the socket takes or gives at once and
says so; when to call again is told by readiness (``workers.poll``). All
failures of the network or of TLS are `OSError`.
"""

import socket
import ssl
from contextlib import suppress
from typing import Final, Protocol, Self, TypeAlias

from workers.poll import READ, WRITE

#: What ``socket.connect`` takes: resolved, never a name.
Address: TypeAlias = tuple[
    socket.AddressFamily, tuple[str, int] | tuple[str, int, int, int]
]

#: Bytes per read of a socket: one full TCP segment train of a fast engine.
READ_SIZE: Final = 65536
#: Ciphertext held for a socket that takes no more; plaintext waits behind it.
_UNSENT_MAX: Final = 65536


class Transport(Protocol):
    """A connected, or connecting, byte stream that never blocks."""

    @property
    def unsent(self) -> bool:
        """True while bytes it has taken wait for a writable socket."""

    @property
    def connect_mask(self) -> int:
        """What the connect waits for: `READ`, `WRITE` or both."""

    def fileno(self) -> int:
        """Give the socket's number, for registering it only."""

    def advance(self) -> bool:
        """Go on with the connect; True once the stream can carry bytes.

        To be called when the socket is readable or writable.

        Raises:
            OSError: there is no connection, and will be none.
        """

    def send(self, octets: memoryview) -> int:
        """Take a beginning of *octets*, maybe none; give its length.

        Raises:
            OSError: the stream is broken.
        """

    def recv(self, size: int = READ_SIZE) -> bytes | None:
        """Give all that one read brings: None for nothing yet, b"" for the end.

        *size*: bytes to read from the socket at most.

        Raises:
            OSError: the stream is broken.
        """

    def close(self) -> None:
        """Close the socket at once. Idempotent; never raises."""


def _dial(address: Address) -> socket.socket:
    """Begin to connect."""
    family, where = address
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(BlockingIOError):
            sock.connect(where)
    except BaseException:
        sock.close()
        raise
    return sock


def _check_connected(sock: socket.socket) -> bool:
    """Tell whether the TCP handshake is over.

    Raises:
        OSError: it failed.
    """
    if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(error, "connect failed")
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


class PlainTransport:
    """TCP as it is."""

    __slots__ = ("_sock",)

    unsent: Final = False
    connect_mask: Final = WRITE

    def __init__(self, address: Address) -> None:
        """Begin to connect.

        Raises:
            OSError: no connection can be made.
        """
        self._sock = _dial(address)

    @classmethod
    def accepted(cls, sock: socket.socket) -> Self:
        """Own a connection that somebody made to us; *sock* is non-blocking."""
        self = cls.__new__(cls)
        self._sock = sock
        return self

    def fileno(self) -> int:
        """Give the socket's number."""
        return self._sock.fileno()

    def advance(self) -> bool:
        """Go on with the connect."""
        return _check_connected(self._sock)

    def send(self, octets: memoryview) -> int:
        """Take a beginning of *octets*."""
        try:
            return self._sock.send(octets)
        except BlockingIOError:
            return 0

    def recv(self, size: int = READ_SIZE) -> bytes | None:
        """Give what one read brings."""
        try:
            return self._sock.recv(size)
        except BlockingIOError:
            return None

    def close(self) -> None:
        """Close the socket."""
        with suppress(OSError):
            self._sock.close()


class TlsTransport:
    """TLS over TCP, by memory buffers, so that the socket stays ours.

    A read takes off the TLS layer all that it holds: readiness of the socket
    says nothing about bytes that were left inside. An end without
    close_notify is an end like any other: HTTP's own framing tells whether
    the message was whole.
    """

    __slots__ = ("_connected", "_in", "_out", "_ready", "_rest", "_sock", "_tls")

    def __init__(self, address: Address, tls: ssl.SSLContext, name: str) -> None:
        """Begin to connect to the server that must prove to be *name*.

        Raises:
            OSError: no connection can be made.
        """
        try:
            self._wrap(tls, name)
        except ValueError:
            # An empty part, or one that is too long: nobody can prove to be that.
            raise OSError("the host is no name that a certificate has") from None
        self._sock = _dial(address)

    @classmethod
    def accepted(cls, sock: socket.socket, tls: ssl.SSLContext) -> Self:
        """Own a connection that somebody made to us; *sock* is non-blocking."""
        self = cls.__new__(cls)
        self._wrap(tls, None)
        self._sock = sock
        return self

    def _wrap(self, tls: ssl.SSLContext, name: str | None) -> None:
        """Make the TLS layer: a client's of the server *name*, or a server's."""
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._tls = tls.wrap_bio(
            self._in, self._out, server_side=name is None, server_hostname=name
        )
        self._rest = b""
        self._connected = False
        self._ready = False

    @property
    def unsent(self) -> bool:
        """True while ciphertext waits for a writable socket."""
        return bool(self._rest) or self._out.pending > 0

    @property
    def connect_mask(self) -> int:
        """What the connect waits for."""
        if not self._connected:
            return WRITE
        return READ | WRITE if self.unsent else READ

    def fileno(self) -> int:
        """Give the socket's number."""
        return self._sock.fileno()

    def advance(self) -> bool:
        """Go on with the connect and the TLS handshake."""
        if not self._connected:
            self._connected = _check_connected(self._sock)
            if not self._connected:
                return False
        if not self._ready:
            self._fill()
            try:
                self._tls.do_handshake()
                self._ready = True
            except ssl.SSLWantReadError:
                pass
            finally:
                # An alert that says why we refuse is worth sending too.
                self._flush()
        return self._ready

    def send(self, octets: memoryview) -> int:
        """Take a beginning of *octets*, while little ciphertext waits."""
        self._flush()
        taken = 0
        while taken < len(octets) and not self.unsent:
            try:
                taken += self._tls.write(octets[taken : taken + _UNSENT_MAX])
            except ssl.SSLWantReadError:
                break
            self._flush()
        return taken

    def recv(self, size: int = READ_SIZE) -> bytes | None:
        """Give all plaintext that one read of the socket brings."""
        filled = self._fill(size)
        pieces = []
        ended = False
        try:
            while piece := self._tls.read(READ_SIZE):
                pieces.append(piece)
            ended = True
        except ssl.SSLWantReadError:
            ended = filled == 0
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            ended = True
        self._flush()
        if pieces:
            # The end, if this was it, is there again at the next read.
            return b"".join(pieces)
        return b"" if ended else None

    def close(self) -> None:
        """Close the socket, without close_notify: an abort is one."""
        with suppress(OSError):
            self._sock.close()

    def _fill(self, size: int = READ_SIZE) -> int | None:
        """Move one read into the TLS layer: its length, None for nothing yet."""
        try:
            octets = self._sock.recv(size)
        except BlockingIOError:
            return None
        if octets:
            self._in.write(octets)
        else:
            self._in.write_eof()
        return len(octets)

    def _flush(self) -> None:
        """Move ciphertext to the socket, as much as it takes."""
        rest = self._rest or self._out.read()
        while rest:
            try:
                sent = self._sock.send(rest)
            except BlockingIOError:
                break
            rest = rest[sent:] or self._out.read()
        self._rest = rest
