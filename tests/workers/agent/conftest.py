"""What all tests of agents have in common."""

import pytest

from workers import link


@pytest.fixture(autouse=True)
def _short_farewells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PARTING_S", 0.05)
