"""Real llama.cpp servers and a real daemon, shared by a whole run."""

from collections.abc import Iterator

import pytest

from tests.kit.processes import Daemon, Llama, daemon, llama_servers, worker_table

#: Slots of each shared server.
SLOTS = 4


@pytest.fixture(scope="session")
def llamas() -> Iterator[list[Llama]]:
    """Two servers with `SLOTS` slots each."""
    with llama_servers(2, SLOTS) as servers:
        yield servers


@pytest.fixture(scope="session")
def router(
    llamas: list[Llama], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Daemon]:
    """The daemon in front of both servers."""
    tables = [worker_table(f"w{n}", llama.url) for n, llama in enumerate(llamas)]
    with daemon(tmp_path_factory.mktemp("router"), "\n".join(tables)) as started:
        started.await_ready(len(llamas))
        yield started
