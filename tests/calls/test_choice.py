"""How a backend is chosen: each is asked once."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.calls import choice


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each backend was asked whether it can run a call on a GPU. Only `triton` and `sdpa`
    can."""
    found: Counter[str] = Counter()
    for backend in choice.BACKENDS.values():
        name = backend.name

        def refuses(inputs: Any, *, statistics: bool, name: str = name) -> list[str]:
            found[name] += 1
            return [] if name in ("triton", "sdpa") else ["it cannot"]

        monkeypatch.setattr(backend, "refuses", refuses)
        monkeypatch.setattr(backend, "reserved", lambda inputs: "")
    return found


@pytest.mark.parametrize("chosen", ["triton", "sdpa"])
def test_each_backend_is_asked_once(
    chosen: str, asked: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    call: Any = SimpleNamespace(q=SimpleNamespace(device=torch.device("cuda")))
    monkeypatch.setattr(choice, "hides", lambda inputs: chosen == "triton")
    monkeypatch.setattr(choice, "outruns_cudnn", lambda inputs: False)
    found = choice.choose(call, None, statistics=False)
    assert found.name == chosen
    assert set(asked.values()) == {1}
    asked.clear()
    reasons = choice.refusals(call, found, None, statistics=False)
    assert reasons["flex"] == ["it cannot"]
    assert bool(reasons.get("sdpa")) == (chosen == "triton")
    assert set(asked.values()) == {1}
