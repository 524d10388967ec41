"""TLS, and agents that come by themselves (P1)."""

import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trustme

from router.engine import Router, open_router
from router.engine.announced import Greeter
from router.ids import WorkerId
from router.settings import AgentSettings, AgentsSettings, Settings, WaitSettings
from tests.kit.agents import (
    ENVIRON,
    QUICK,
    TOKEN,
    listen,
    open_agent,
    open_far_router,
    port_of,
)
from tests.kit.delivery import JOB
from tests.kit.edge import until
from tests.kit.peer import calling, doorway, router_passport
from workers import access, site
from workers.agent import agent as agent_module
from workers.wire import frames


@attrs.frozen
class Files:
    """Certificates of one authority, as files."""

    cert: str
    key: str
    ca: str

    @property
    def keys(self) -> dict[str, Any]:
        return {"tls_cert": self.cert, "tls_key": self.key, "tls_ca": self.ca}


def certify(folder: Path, authority: trustme.CA, name: str) -> Files:
    issued = authority.issue_cert("127.0.0.1", "localhost")
    cert, key, ca = (folder / f"{name}.{part}" for part in ("cert", "key", "ca"))
    issued.private_key_pem.write_to_path(key)
    for number, pem in enumerate(issued.cert_chain_pems):
        pem.write_to_path(cert, append=number > 0)
    authority.cert_pem.write_to_path(ca)
    return Files(str(cert), str(key), str(ca))


async def test_p1_mutual_tls_lets_in_who_has_a_certificate(tmp_path: Path) -> None:
    authority = trustme.CA()
    host, ours = (certify(tmp_path, authority, name) for name in ("host", "ours"))
    settings = AgentSettings(**host.keys)
    async with (
        open_agent(None, settings=settings) as agent,
        open_far_router(agent, settings=AgentsSettings(**ours.keys)) as router,
    ):
        assert (await router.complete(JOB)).text == "Hello world"


async def test_p1_mutual_tls_keeps_others_out_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = certify(tmp_path, trustme.CA(), "host")
    stranger = certify(tmp_path, trustme.CA(), "stranger")
    half = AgentsSettings(tls_ca=host.ca)
    wrong = attrs.evolve(half, tls_cert=stranger.cert, tls_key=stranger.key)
    cases = {
        "tlsv13 alert certificate required": half,
        "tlsv1 alert unknown ca": wrong,
        "a certificate fails: ": AgentsSettings(**stranger.keys),
    }
    async with open_agent(None, settings=AgentSettings(**host.keys)) as agent:
        for words, settings in cases.items():
            async with open_far_router(agent, settings=settings, ready=False) as router:
                await until(partial(tells_of_tls, router, words))
                assert not router.ready
        assert agent.agent.visits == {}
    assert "is not let in (tls): " in caplog.text


def tells_of_tls(router: Router, words: str) -> bool:
    (member,) = router.fleet.members.values()
    return member.life.reason == "tls_failed" and words in member.life.detail


async def test_p1_tls_at_one_end_alone_is_told_at_both(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = AgentsSettings(**certify(tmp_path, trustme.CA(), "a").keys)
    host = AgentSettings(**certify(tmp_path, trustme.CA(), "b").keys)
    async with open_agent(None, settings=host) as agent:
        async with open_far_router(agent, ready=False) as router:
            await until(partial(was_refused, router))
            worker = router.workers[WorkerId("a0")]
            assert "one end uses TLS alone" in (await worker.probe()).detail
        assert "is not let in (tls): TLS failed: wrong version number" in caplog.text
    async with (
        open_agent(None) as agent,
        open_far_router(agent, settings=keys, ready=False) as router,
    ):
        await until(partial(tells_of_tls, router, "TLS failed: wrong version number"))


async def test_a_connection_that_ends_in_the_handshake_is_lost_and_no_fault_of_tls(
    tmp_path: Path,
) -> None:
    keys = AgentsSettings(**certify(tmp_path, trustme.CA(), "a").keys)
    async with (
        doorway() as hall,
        open_far_router(hall.port, settings=keys, ready=False) as router,
    ):
        stream = await hall.listener.accept()
        await stream.receive_some(65536)
        await stream.aclose()
        await until(partial(was_refused, router))

        assert router.tally.wire["said", "lost"] >= 1
        assert router.tally.wire["said", "tls"] == 0


def was_refused(router: Router) -> bool:
    return router.tally.wire.total() > 0


async def test_a_plain_router_is_no_guest_of_a_tls_agent(tmp_path: Path) -> None:
    host = certify(tmp_path, trustme.CA(), "host")
    async with open_agent(None, settings=AgentSettings(**host.keys)) as agent:
        async with calling(agent.port, router_passport()) as peer:
            with pytest.raises((trio.EndOfChannel, frames.WireError)):
                await peer.open()
        await until(lambda: agent.router.tally.wire["said", "tls"] == 1)


def test_files_that_are_no_certificates_are_told(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(ValueError, match="the TLS files are of no use"):
        access.agent_access(AgentSettings(tls_ca=str(tmp_path / "x")), {})
    good = certify(tmp_path, trustme.CA(), "good")
    made = access.agent_access(AgentSettings(**good.keys), ENVIRON)
    assert made.inward is not None
    assert made.inward.verify_mode is ssl.CERT_REQUIRED


@asynccontextmanager
async def greeting(
    settings: AgentsSettings | None = None, waits: WaitSettings = QUICK
) -> AsyncIterator[tuple[Any, int]]:
    """A router that lets agents come, and the port where they do."""
    sock = listen()
    whole = Settings(waits=waits, agents=settings or AgentsSettings())
    async with open_router(whole) as router, trio.open_nursery() as nursery:
        await nursery.start(Greeter(router).serve, [sock])
        yield router, port_of(sock)
        nursery.cancel_scope.cancel()


async def test_p1_an_agent_that_announces_itself_is_a_worker() -> None:
    async with greeting() as (router, port):
        async with open_agent(None, name="gpu-7", routers=[port]):
            await until(lambda: router.ready)
            assert list(router.workers) == ["gpu-7"]
            assert (await router.complete(JOB)).text == "Hello world"
        await until(lambda: not router.ready)
        assert list(router.workers) == ["gpu-7"]
        assert list(router.fleet.models) == ["m"]
        async with open_agent(None, name="gpu-7", routers=[port]):
            await until(lambda: router.ready)
            assert (await router.complete(JOB)).text == "Hello world"


async def test_p1_an_agent_says_once_why_its_router_does_not_take_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_module, "BACKOFF_S", (0.001, 1.0))
    async with greeting() as (router, port):
        wrong = AgentSettings(token_env="TOKEN")
        async with open_agent(None, settings=wrong, routers=[port]) as agent:
            await until(lambda: router.tally.wire.total() > 3)
            (away,) = agent.agent.status()["agent"]["away"]
            assert away["address"] == f"127.0.0.1:{port}"
            assert away["reason"] == "unauthorized"
            (line,) = [r.message for r in caplog.records if "it is tried" in r.message]
            assert line.startswith(f"router 127.0.0.1:{port} ")
            assert " (unauthorized): " in line
            at_router = [r.message for r in caplog.records if "agent at" in r.message]
            assert len([line for line in at_router if "(unauthorized)" in line]) == 1
            assert TOKEN not in caplog.text
        caplog.clear()
        async with open_agent(None, name="gpu-7", routers=[port]) as agent:
            await until(lambda: router.ready)
            assert agent.agent.status()["agent"]["away"] == []


async def test_p1_two_agents_of_one_name_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agent_module, "BACKOFF_S", (0.001, 0.001))
    epochs = iter((1, 5, 9))
    monkeypatch.setattr(access, "new_epoch", lambda: next(epochs))
    async with greeting() as (router, port):
        async with open_agent(None, routers=[port]):
            await until(lambda: router.ready)
            async with open_agent(None, routers=[port]):
                await until(lambda: "lets us in no more (superseded)" in caplog.text)
                await until(lambda: "is not let in (superseded)" in caplog.text)
                await until(lambda: router.ready)


async def test_an_agent_tries_what_it_knew_where_a_name_resolves_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with greeting() as (router, port), open_agent(None) as agent:
        found = site.Resolver(site.Site(secure=False, host="h", port=port, base=""))
        found.addresses = [(socket.AF_INET, ("127.0.0.1", port))]

        async def fails() -> None:
            await trio.lowlevel.checkpoint()
            raise OSError

        monkeypatch.setattr(found, "refresh", fails)
        monkeypatch.setattr(agent_module, "Resolver", lambda _: found)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(agent.agent._call_on, site.Site(False, "h", port, ""))
            await until(lambda: router.ready)
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("name", ["no name!", "x" * 65, "-x"])
async def test_p1_an_agent_without_a_proper_name_is_not_taken_in(name: str) -> None:
    async with greeting() as (router, port):
        async with open_agent(None, name=name, routers=[port]):
            await until(lambda: router.tally.wire["said", "name"] > 0)
        assert router.workers == {}


async def test_p1_an_agent_takes_no_other_workers_name() -> None:
    sock = listen()
    async with (
        open_agent(None) as host,
        open_far_router(host) as router,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(Greeter(router).serve, [sock])
        async with open_agent(None, name="a0", routers=[port_of(sock)]):
            await until(lambda: router.tally.wire["said", "name"] > 0)
        assert (await router.complete(JOB)).text == "Hello world"
        nursery.cancel_scope.cancel()


async def test_an_agent_that_stays_away_is_forgotten() -> None:
    sock = listen()
    async with (
        open_router(Settings(waits=QUICK)) as router,
        trio.open_nursery() as nursery,
    ):
        greeter = Greeter(router, forget_s=0.05)
        await nursery.start(greeter.serve, [sock])
        async with open_agent(None, name="h", routers=[port_of(sock)]):
            await until(lambda: router.ready)
        await until(lambda: router.workers == {})
        assert router.fleet.models == {}
        nursery.cancel_scope.cancel()


async def test_p1_two_agents_and_two_routers_meet_from_either_side() -> None:
    async with (
        greeting() as (r0, p0),
        greeting() as (r1, p1),
        open_agent(None, name="h0", routers=[p0, p1]) as a0,
        open_agent(None, name="h1", routers=[p0, p1]) as a1,
    ):
        await until(lambda: len(r0.workers) == len(r1.workers) == 2)
        members = [m for r in (r0, r1) for m in r.fleet.members.values()]
        await until(lambda: all(m.serving for m in members))
        async with trio.open_nursery() as nursery:
            for n in range(12):
                nursery.start_soon((r0, r1)[n % 2].complete, JOB)
        assert len(a0.engines[0].seen) + len(a1.engines[0].seen) == 12
