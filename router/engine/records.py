"""What an operator may see of requests and workers, as plain values.

Never content, never keys (X2, H8).
"""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from router.crew import Member
from router.engine.flight import Flight
from router.messages import Signal
from router.ports import BehindAgent, Process
from router.supervise import Keeper
from router.waiting import WaitState


class Receipts:
    """The last requests that ended, by id, oldest forgotten first (X3)."""

    def __init__(self, most: int) -> None:
        """Keep at most *most*."""
        self._most = most
        self._records: OrderedDict[str, Mapping[str, object]] = OrderedDict()

    def add(self, request: str, record: Mapping[str, object]) -> None:
        """Keep *record*."""
        self._records[request] = record
        if len(self._records) > self._most:
            self._records.popitem(last=False)

    def get(self, request: str) -> Mapping[str, object] | None:
        """Find the record of *request*, if it is still kept."""
        return self._records.get(request)


def flight_record(flight: Flight, now: float) -> dict[str, object]:
    """Describe one request at *now*; times are seconds since it was received."""
    born = flight.received_at
    end = flight.ended_at
    record: dict[str, object] = {
        "request": flight.request,
        "client_request": flight.client_ref,
        "model": flight.job.target,
        "phase": flight.phase_name(),
        "outcome": flight.outcome,
        "attempts": [
            {
                "worker": attempt.worker,
                "candidates": attempt.candidates,
                "at_s": round(attempt.granted_at - born, 6),
                "fault": None if attempt.fault is None else attempt.fault.kind.value,
            }
            for attempt in flight.attempts.trail
        ],
        "queued_s": _since(born, flight.granted_at),
        "first_delta_s": _since(born, flight.first_delta_at),
        "total_s": round((now if end is None else end) - born, 6),
        "deltas": flight.delta_count,
    }
    if flight.job.trace is not None:
        record["trace_id"] = flight.job.trace.id
    if flight.verdicts:
        record["verdicts"] = flight.verdicts
    if flight.wait_state is not None:
        record["waiting"] = flight.wait_state.value
        record["waiting_s"] = flight.waited
        record["slot_busy"] = flight.wait_state is WaitState.BUSY
    if flight.outcome is not None:
        record["closed_by"] = flight.closed_by
        record["phase_at_end"] = flight.phase_at_end
    if flight.fault is not None:
        record["reason"] = flight.fault.row.reason
        record["fault"] = flight.fault.kind.value
    signals = flight.signals
    if signals:
        record["signals"] = [signal.code.value for signal in signals]
    return record


def with_signals(record: Mapping[str, object], flight: Flight) -> Mapping[str, object]:
    """Say the signals of *flight* whole, for who asked for this one request (J5).

    A record holds their codes alone: it goes to the log (X2).
    """
    if "signals" not in record:
        return record
    return {**record, "signals": [signal_record(s) for s in flight.signals]}


def signal_record(signal: Signal) -> dict[str, object]:
    """Write one signal, fit for JSON (J5)."""
    return {
        "code": signal.code.value,
        "message": signal.message,
        "index": signal.index,
    }


def _since(born: float, at: float | None) -> float | None:
    return None if at is None else round(at - born, 6)


def member_status(
    member: Member, keeper: Keeper | None, process: Process | None, now: float
) -> dict[str, Any]:
    """Describe one worker at *now*, and its *process* where that is ours."""
    life = member.life
    probe = keeper.last_probe if keeper is not None else None
    found = probe.discovery if probe is not None else None
    worker: object = keeper.worker if keeper is not None else None
    return {
        "name": member.id,
        "state": life.state.value,
        "reason": life.reason,
        "detail": life.detail or (probe.detail if probe is not None else ""),
        "since_s": round(now - life.since, 3),
        "engine": found.engine if found is not None else None,
        "version": found.version if found is not None else None,
        "models": list(member.models),
        "context": member.context,
        "slots": member.slots,
        "limit": member.limit,
        "in_flight": len(member.held),
        "settling": len(member.settling) - len(member.ghosts),
        "ghosts": len(member.ghosts),
        "faults_in_a_row": member.faults,
        "rests_s": max(0.0, round(member.rest_until - now, 3)),
        "process": None if process is None else dict(process.status()),
        "agent": worker.agent_status() if isinstance(worker, BehindAgent) else None,
    }
