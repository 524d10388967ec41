"""A certificate authority for one test: contexts for both ends of https."""

import ssl
from typing import NamedTuple

import trustme


class Contexts(NamedTuple):
    """What each end needs."""

    server: ssl.SSLContext
    client: ssl.SSLContext


def make_contexts(*names: str) -> Contexts:
    """Make contexts for a server called *names* (default: localhost)."""
    authority = trustme.CA()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(*(names or ("localhost", "127.0.0.1"))).configure_cert(server)
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return Contexts(server, client)
