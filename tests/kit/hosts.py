"""A second host: a network namespace behind a link that can be pulled.

Needs root and iproute2. Where a namespace can't be made, ``other_host`` says
why by having tried (``NoNamespace``); a test then asserts that reason.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import attrs


class NoNamespace(Exception):
    """The machine lets us make none; the text is its own word."""


#: What a machine says that lets us make no namespaces.
REFUSALS = ("not permitted", "Permission denied", "Read-only file system")


@attrs.frozen
class OtherHost:
    """A namespace, and the link to it."""

    name: str
    link: str
    """Our end of the link."""
    here: str
    """Our address on it."""
    there: str
    """Its address."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """What runs a command over there."""
        return ("ip", "netns", "exec", self.name)

    def pull(self) -> None:
        """Take the link down: nothing passes, and nobody is told."""
        _ip("link", "set", self.link, "down")

    def plug(self) -> None:
        """Put it up again."""
        _ip("link", "set", self.link, "up")

    def mute(self) -> None:
        """Let nothing that the other host says reach us; it hears us all the same."""
        _ip("-n", self.name, "route", "add", "blackhole", f"{self.here}/32")

    def unmute(self) -> None:
        """Let it be heard again."""
        _ip("-n", self.name, "route", "del", "blackhole", f"{self.here}/32")


def _ip(*arguments: str) -> None:
    done = subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise NoNamespace(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def other_host() -> Iterator[OtherHost]:
    """Make one for the length of the block.

    Raises:
        NoNamespace: with why.
    """
    number = os.getpid() % 60_000
    name, link = f"fp{number}", f"fpv{number}"
    block = f"10.{200 + number % 50}.{number // 250 % 250}"
    host = OtherHost(name, link, f"{block}.1", f"{block}.2")
    _ip("netns", "add", name)
    try:
        _ip("link", "add", link, "type", "veth", "peer", "name", f"{link}p")
        _ip("link", "set", f"{link}p", "netns", name)
        _ip("addr", "add", f"{host.here}/30", "dev", link)
        _ip("link", "set", link, "up")
        _ip("-n", name, "addr", "add", f"{host.there}/30", "dev", f"{link}p")
        _ip("-n", name, "link", "set", f"{link}p", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        yield host
    finally:
        # The link goes with it.
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", link], capture_output=True, check=False)
