"""A worker's URL taken apart, and its name resolved where waiting is allowed."""

import socket
from typing import Any

import pytest
import trio
import trio.testing

from workers.site import Resolver, Site, parse_site


@pytest.mark.parametrize(
    ("url", "site"),
    [
        ("http://a", Site(False, "a", 80, "")),
        ("http://a/", Site(False, "a", 80, "")),
        ("http://a/v1", Site(False, "a", 80, "")),
        ("http://a/v1/", Site(False, "a", 80, "")),
        ("https://a:8443/x/v1", Site(True, "a", 8443, "/x")),
        ("https://A.Example", Site(True, "a.example", 443, "")),
        ("http://[::1]:8080", Site(False, "::1", 8080, "")),
    ],
)
def test_a_url_is_taken_apart(url: str, site: Site) -> None:
    assert parse_site(url) == site


@pytest.mark.parametrize(
    ("url", "host", "root"),
    [
        ("http://a/v1", "a", "http://a"),
        ("http://a:8080", "a:8080", "http://a:8080"),
        ("https://a:443/b/v1", "a", "https://a/b"),
        ("http://[::1]:8080", "[::1]:8080", "http://[::1]:8080"),
    ],
)
def test_the_host_field_and_the_root_are_canonical(
    url: str, host: str, root: str
) -> None:
    site = parse_site(url)

    assert (site.host_field, site.root) == (host, root)


@pytest.mark.parametrize(
    "url",
    [
        *("", "a:8080", "ftp://a", "http://", "http://a b", "http://u:p@a"),
        *("http://a:x", "http://a..b", f"http://{'a' * 64}.test", "http://.:80"),
    ],
)
def test_a_url_that_is_none_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        parse_site(url)

    assert "u:p" not in str(raised.value)


@pytest.mark.parametrize(
    ("host", "family"), [("127.0.0.1", socket.AF_INET), ("[::1]", socket.AF_INET6)]
)
def test_a_numeric_host_needs_no_lookup(host: str, family: int) -> None:
    resolver = Resolver(parse_site(f"http://{host}:80"))

    assert resolver.addresses == [(family, (host.strip("[]"), 80))]


class Names(trio.abc.HostnameResolver):
    """Answers from a list, one entry a question."""

    def __init__(self, *turns: list[str] | OSError) -> None:
        self.turns = list(turns)

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> Any:
        del kwargs
        await trio.lowlevel.checkpoint()
        turn = self.turns.pop(0)
        if isinstance(turn, OSError):
            raise turn
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, args[1]))
            for address in turn
        ]

    async def getnameinfo(self, *_args: Any) -> Any:
        raise NotImplementedError


def hosts(resolver: Resolver) -> list[object]:
    return [where[0] for _, where in resolver.addresses]


async def test_a_name_is_asked_for_again_when_its_answer_is_old(
    autojump_clock: trio.testing.MockClock,
) -> None:
    trio.socket.set_custom_hostname_resolver(Names(["10.0.0.1"], ["10.0.0.2"]))
    resolver = Resolver(parse_site("http://gpu.test"))
    assert hosts(resolver) == []

    await resolver.refresh()
    await resolver.refresh()
    assert hosts(resolver) == ["10.0.0.1"]
    await trio.sleep(5)
    await resolver.refresh()

    assert hosts(resolver) == ["10.0.0.2"]


async def test_a_failed_lookup_keeps_what_was_known(
    autojump_clock: trio.testing.MockClock,
) -> None:
    failure = socket.gaierror(-2, "unknown")
    trio.socket.set_custom_hostname_resolver(Names(["10.0.0.1"], failure))
    resolver = Resolver(parse_site("http://gpu.test"))
    await resolver.refresh()
    await trio.sleep(5)

    with pytest.raises(OSError, match="unknown"):
        await resolver.refresh()
    assert hosts(resolver) == ["10.0.0.1"]


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.test"])
async def test_a_name_that_no_resolver_takes_is_one_that_does_not_resolve(
    host: str,
) -> None:
    with pytest.raises(OSError, match="no name"):
        await Resolver(Site(False, host, 80, "")).refresh()


async def test_a_doubted_address_stays_last_over_lookups(
    autojump_clock: trio.testing.MockClock,
) -> None:
    both = ["10.0.0.1", "10.0.0.2"]
    trio.socket.set_custom_hostname_resolver(Names(both, both))
    resolver = Resolver(parse_site("http://gpu.test"))
    await resolver.refresh()
    resolver.doubt(resolver.addresses[0])
    assert hosts(resolver) == ["10.0.0.2", "10.0.0.1"]
    await trio.sleep(5)
    await resolver.refresh()

    assert hosts(resolver) == ["10.0.0.2", "10.0.0.1"]
