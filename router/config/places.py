"""Faults of addresses that mean one place, whatever they are written like.

Like ``contradictions``, on the raw document; what has the wrong type or form is
passed over here. No name is looked up: only what is certain is a fault.
"""

import ipaddress
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from router.config.addresses import Address, TcpAddress, parse_address
from router.config.keys import join
from router.settings import ServerSettings

_Number: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
_LOOPBACK: Final = "127.0.0.1"
_PORTS: Final = {"http": 80, "https": 443}


def plain_url(url: str) -> str:
    """Write an engine's URL as all are that mean the same place."""
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        return url
    host = _plain_host(parts.hostname or "")
    return f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/').removesuffix('/v1')}"


def plain_address(text: str) -> str:
    """Write ``host:port`` as all are that mean the same place."""
    try:
        address = parse_address(text)
    except ValueError:
        return text
    if isinstance(address, TcpAddress):
        address = TcpAddress(str(_plain_host(address.host)), address.port)
    return str(address)


def place_faults(
    document: Mapping[str, Any], workers: list[dict[str, Any]]
) -> Iterator[str]:
    """Tell which listeners of this host can't be had beside each other."""
    listeners = list(_listeners(document))
    for (one, first), (other, second) in combinations(listeners, 2):
        # Twice the same in one list: the check of the list tells it.
        listed = one.partition("[")[0] == other.partition("[")[0] and first == second
        if not listed and _meet(first, second):
            how = "the same as" if first == second else "can't be had beside"
            yield f"{other}: {how} {one} ({first}): each needs an address of its own"
    for index, worker in enumerate(workers):
        port = worker.get("port")
        if worker.get("command") is None or type(port) is not int:
            continue
        # Where the server of a command listens. A port out of range meets nothing.
        own = TcpAddress(_LOOPBACK, port)
        for path, address in listeners:
            if _meet(own, address):
                yield (
                    f"worker[{index}].port: the same as {path} ({address}): "
                    "each server needs a port of its own"
                )


def _listeners(document: Mapping[str, Any]) -> Iterator[tuple[str, Address]]:
    """Give (path, address) of all that this process is to listen on."""
    # An agent has no clients, and meets no agents.
    is_agent = document.get("agent") is not None
    for section in ("agent", "admin") if is_agent else ("server", "agents", "admin"):
        table = document.get(section)
        found = table.get("listen") if isinstance(table, dict) else None
        path = f"{section}.listen"
        entries = [(path, found)]
        if isinstance(found, list):
            entries = [(join(path, place), entry) for place, entry in enumerate(found)]
        elif found is None and section == "server":
            entries = [(path, entry) for entry in ServerSettings().listen]
        for where, entry in entries:
            try:
                if isinstance(entry, str):
                    yield where, parse_address(entry)
            except ValueError:
                continue


def _meet(one: Address, other: Address) -> bool:
    """Tell whether only one of two listeners can be had."""
    if not isinstance(one, TcpAddress) or not isinstance(other, TcpAddress):
        return one == other
    if one.port != other.port or one.port == 0:
        return False
    first, second = _listened(one.host), _listened(other.host)
    if isinstance(first, str) or isinstance(second, str):
        return first == second
    # IPv6 listeners take no IPv4 here.
    return first.version == second.version and (
        first == second or first.is_unspecified or second.is_unspecified
    )


def _listened(host: str) -> _Number | str:
    return _plain_host(_LOOPBACK if host.lower() == "localhost" else host)


def _plain_host(host: str) -> _Number | str:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return host.lower()
