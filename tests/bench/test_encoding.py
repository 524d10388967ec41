"""The measure of encoders still runs."""

import pytest

from bench import encoding


def test_every_encoder_has_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "CALLS", 10)
    monkeypatch.setattr(encoding, "ROUNDS", 3)

    head, *rows = encoding.table().splitlines()

    assert head.startswith("ns per delta")
    assert len(rows) == len(encoding.ROWS)
    assert all(int(row.split()[-1]) > 0 for row in rows)
