from typing import Any

from router.edge.metrics import IGNORED_FIELDS_MAX, Metrics
from tests.kit.stub_router import StubRouter


def rendered(router: StubRouter) -> list[str]:
    return Metrics(router).render().decode().splitlines()


async def test_x1_counters_carry_their_labels() -> None:
    router = StubRouter()
    tally = router.tally
    tally.failovers["connect"] += 1
    tally.verdicts["stale"] += 2
    tally.disconnects["streaming"] += 3
    tally.refused["404"] += 4
    tally.bugs["edge.connection"] += 5

    lines = rendered(router)

    assert 'fencepost_failovers_total{cause="connect"} 1.0' in lines
    assert 'fencepost_fence_verdicts_total{verdict="stale"} 2.0' in lines
    assert 'fencepost_client_disconnects_total{phase="streaming"} 3.0' in lines
    assert 'fencepost_http_refused_total{status="404"} 4.0' in lines
    assert 'fencepost_bugs_total{place="edge.connection"} 5.0' in lines


async def test_x1_histograms_count_upwards_and_end_in_all() -> None:
    router = StubRouter()
    router.tally.first_delta.observe(0.003)
    router.tally.first_delta.observe(0.02)
    router.tally.first_delta.observe(1000.0)

    lines = rendered(router)

    name = "fencepost_first_delta_seconds"
    assert f'{name}_bucket{{le="0.0025"}} 0.0' in lines
    assert f'{name}_bucket{{le="0.005"}} 1.0' in lines
    assert f'{name}_bucket{{le="300.0"}} 2.0' in lines
    assert f'{name}_bucket{{le="+Inf"}} 3.0' in lines
    assert f"{name}_count 3.0" in lines
    assert f"{name}_sum 1000.023" in lines


async def test_x1_gauges_show_workers_and_queues_now() -> None:
    router = StubRouter()
    router.tally.buffer_high_water = 70_000

    lines = rendered(router)

    assert "fencepost_ready 1.0" in lines
    assert 'fencepost_queue_depth{model="m"} 3.0' in lines
    assert 'fencepost_slots_in_flight{worker="w1"} 1.0' in lines
    assert 'fencepost_worker_state{state="ready",worker="w1"} 1.0' in lines
    assert 'fencepost_worker_state{state="lost",worker="w1"} 0.0' in lines
    assert 'fencepost_worker_state{state="lost",worker="w2"} 1.0' in lines
    assert "fencepost_client_buffer_high_water_bytes 70000.0" in lines
    # What a worker does not say is not shown as a number.
    assert not any(line.startswith('fencepost_slots{worker="w2"}') for line in lines)


async def test_x1_names_that_clients_make_up_are_bounded() -> None:
    router = StubRouter()
    for number in range(1000):
        router.tally.ignored_fields[f"field{number}"] += 1
    router.tally.ignored_fields["common"] += 10

    lines = [x for x in rendered(router) if x.startswith("fencepost_ignored_fields_t")]

    assert len(lines) == IGNORED_FIELDS_MAX + 1
    assert lines[0] == 'fencepost_ignored_fields_total{field="common"} 10.0'
    rest = 1000 - (IGNORED_FIELDS_MAX - 1)
    assert lines[-1] == f'fencepost_ignored_fields_total{{field="other"}} {rest}.0'


async def test_e3_two_routers_have_registries_of_their_own() -> None:
    one, two = StubRouter(), StubRouter()
    one.tally.failovers["connect"] += 1

    assert any("failovers_total{" in line for line in rendered(one))
    assert not any("failovers_total{" in line for line in rendered(two))


async def test_w5_silent_waits_are_counted_by_what_they_are() -> None:
    class Waiting(StubRouter):
        def status(self) -> dict[str, Any]:
            requests = [{"waiting": "busy"}, {"waiting": "idle"}, {"waiting": "busy"}]
            return {**super().status(), "requests": [*requests, {}]}

    lines = rendered(Waiting())

    name = "fencepost_requests_waiting"
    assert f'{name}{{state="busy"}} 2.0' in lines
    assert f'{name}{{state="idle"}} 1.0' in lines
    assert f'{name}{{state="unavailable"}} 0.0' in lines


class AgentsRouter(StubRouter):
    """A router whose first worker is an agent, and which is one itself."""

    def status(self) -> dict[str, Any]:
        status = super().status()
        first, *others = status["workers"]
        first["agent"] = {"connected": True}
        return {
            **status,
            "workers": [first, *others],
            "agent": {"routers": [{}, {}]},
        }


async def test_x1_agents_and_the_ends_of_their_connections_are_counted() -> None:
    router = AgentsRouter()
    router.tally.wire["said", "expired"] += 2
    router.tally.declines["no_slot"] += 3

    lines = rendered(router)

    assert 'fencepost_wire_ends_total{by="said",reason="expired"} 2.0' in lines
    assert 'fencepost_offers_declined_total{reason="no_slot"} 3.0' in lines
    assert 'fencepost_agent_connected{worker="w1"} 1.0' in lines
    assert "fencepost_agent_routers 2.0" in lines
