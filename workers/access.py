"""Who is let in, and over what: tokens, certificates and names of the wire (P1).

A token comes from the environment and goes nowhere but into a `Passport`,
whose text does not show it (H8).
"""

import os
import platform
import secrets
import ssl
import time
from collections.abc import Mapping

import attrs

from router.settings import AgentSettings, AgentsSettings
from workers.site import Site
from workers.wire.opening import Passport, Role
from workers.wire.routing import COUNTS, ENDS_REASONING


@attrs.frozen
class Access:
    """How one end meets the other."""

    passport: Passport
    outward: ssl.SSLContext | None = None
    """For connections that we make; None: plain TCP."""
    inward: ssl.SSLContext | None = None
    """For connections that are made to us; None: plain TCP."""


def router_access(
    settings: AgentsSettings, environ: Mapping[str, str] = os.environ
) -> Access:
    """Make a router's, with an identity that no other router has.

    Raises:
        ValueError: a certificate is of no use; the message says which.
    """
    host = platform.node() or "router"
    passport = Passport(
        Role.ROUTER,
        f"{host}-{os.getpid()}-{secrets.token_hex(4)}",
        new_epoch(),
        (COUNTS, ENDS_REASONING),
        token_of(settings.token_env, environ),
    )
    return Access(passport, *_contexts(settings))


def agent_access(
    settings: AgentSettings, environ: Mapping[str, str] = os.environ
) -> Access:
    """Make an agent's. Raises as ``router_access``."""
    passport = Passport(
        Role.AGENT,
        settings.name or platform.node() or "agent",
        new_epoch(),
        (COUNTS, ENDS_REASONING),
        token_of(settings.token_env, environ),
    )
    return Access(passport, *_contexts(settings))


def with_token(
    access: Access, variable: str | None, environ: Mapping[str, str]
) -> Access:
    """Give *access* with the token in *variable*, if one is named."""
    if variable is None:
        return access
    token = token_of(variable, environ)
    return attrs.evolve(access, passport=attrs.evolve(access.passport, token=token))


def token_of(variable: str | None, environ: Mapping[str, str]) -> bytes | None:
    """Read a token; None: none is used."""
    if variable is None:
        return None
    return environ.get(variable, "").strip().encode() or None


def new_epoch() -> int:
    """Make an epoch: milliseconds of the wall clock, so greater at each start."""
    return time.time_ns() // 1_000_000


def site_of(address: str, *, secure: bool) -> Site:
    """Take ``host:port`` or ``[v6]:port`` apart, as the configuration has it."""
    host, _, port = address.rpartition(":")
    return Site(secure=secure, host=host.strip("[]"), port=int(port), base="")


def _contexts(
    settings: AgentSettings | AgentsSettings,
) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Make the two contexts; None, where none of the files is set."""
    cert, key, authority = settings.tls_cert, settings.tls_key, settings.tls_ca
    if cert is None and authority is None:
        return None, None
    try:
        outward = ssl.create_default_context(cafile=authority)
        inward = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        inward.minimum_version = ssl.TLSVersion.TLSv1_2
        # A write never waits for a read: what it waits for is the socket's room.
        for context in (outward, inward):
            context.options |= ssl.OP_NO_RENEGOTIATION
        if authority is not None:
            inward.load_verify_locations(authority)
            inward.verify_mode = ssl.CERT_REQUIRED
        if cert is not None:
            outward.load_cert_chain(cert, key)
            inward.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(
            f"the TLS files are of no use: {error.strerror or error}"
        ) from None
    return outward, inward if cert is not None else None
