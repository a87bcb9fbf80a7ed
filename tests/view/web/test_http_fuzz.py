"""A small part of the requests that `make fuzz` sends to the app."""

from __future__ import annotations

import pytest

from regard.view.web import server
from tests.fuzz import http_requests


def test_strange_requests_are_answered_or_refused() -> None:
    outcomes = http_requests.run(100, seed=1)
    assert sum(outcomes.values()) == 100
    assert outcomes["200"] > 10
    assert sum(outcomes.get(str(status), 0) for status in http_requests.REFUSALS) > 10


def test_what_must_not_happen_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.Handler, "_has_key", lambda self: 1 / 0)
    with pytest.raises(http_requests.Failure, match="500: b'ZeroDivisionError"):
        http_requests.run(20, seed=1)
