"""A compiled loop whose packed products are written in Python, for any machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from regard.backends.tiled import plan
from regard.backends.tiled.loop import inner_loop
from regard.backends.tiled.loop.compiled import Loop
from tests.backends.tiled.packed_product import DTYPES, Product, Released


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    loop, why_not = inner_loop.found()
    if loop is None or loop.multiply is None:
        pytest.skip(f"there is no compiled loop here: {why_not}")
    monkeypatch.setattr(plan, "PACKED_ROWS", 1)
    monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: True)
    # A thread that Python does not know cannot call it in order.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield loop
    torch.set_num_threads(before)


@pytest.fixture
def released(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Released:
    made = Released()
    monkeypatch.setattr(loop, "release", made.address)
    return made


@pytest.fixture(params=DTYPES, ids=["bfloat16", "float16"])
def product(
    request: pytest.FixtureRequest,
    loop: Loop,
    released: Released,
    monkeypatch: pytest.MonkeyPatch,
) -> Product:
    made = Product(request.param)
    monkeypatch.setattr(loop, "multiply_packed", {made.dtype: made.address})
    monkeypatch.setattr(loop, "multiply_halves", {})
    return made
