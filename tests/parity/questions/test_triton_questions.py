"""What only kernels of the second pass can get wrong: sums of keys, columns of logits, cells."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.backends.contract import Pool
from regard.inputs import AttentionInputs, check
from regard.masks import Mask
from tests.parity import cases

pytestmark = pytest.mark.interpreted

N = 75
MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(9),
    "causal window": masks.causal() & masks.window(40),
    "padding": masks.causal() & masks.padding(torch.tensor([61])),
    "documents": masks.causal() & masks.documents(torch.arange(N) // 34),
    "dilated": masks.dilated(16),
}
"""None of them, a band, limits, runs, and a list of tiles whose queries see one column each."""


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that queries see several, full and partial."""
    from regard.backends.triton.questions import second_pass
    from regard.backends.triton.settings.tuning import Looking

    how = Looking(16, 16, warps=4, stages=1)
    monkeypatch.setattr(second_pass, "looking_settings", lambda x: how)


def drawn(n: int = N, heads: int = 2, groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(n)
    shapes = [(1, heads, n, 16), (1, groups, n, 16), (1, groups, n, 16)]
    q, k, v = (torch.randn(*shape, generator=source).to(cases.DEVICE) for shape in shapes)
    return q, k, v


def traced(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None) -> regard.Trace:
    return regard.trace(q, k, v, mask=mask, backend="triton")


def logits_of(q: Tensor, k: Tensor, mask: Mask | None) -> Tensor:
    """All logits; minus infinity where a pair is hidden."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q @ k.mT / q.shape[-1] ** 0.5
    if mask is None:
        return s
    clean = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(k)
    seen = regard.trace(*clean, mask=mask, backend="reference").weights() > 0
    return s.masked_fill(~seen, -math.inf)


def mean_of(s: Tensor) -> Tensor:
    hidden = s == -math.inf
    many = (~hidden).sum(-1)
    found = s.masked_fill(hidden, 0.0).sum(-1) / many.clamp_min(1)
    return found.masked_fill(many == 0, -math.inf)


def strongest_of(s: Tensor, n: int) -> Tensor:
    """The indices of the strongest keys, the earlier ones first where logits are equal."""
    found, order = torch.sort(s, dim=-1, descending=True, stable=True)
    return order.masked_fill(found == -math.inf, -1)[..., :n]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", MASKS)
def test_means_by_sums_of_keys(mask: str) -> None:
    q, k, v = drawn()
    got = traced(q, k, v, MASKS[mask]).mean_logit
    torch.testing.assert_close(got, mean_of(logits_of(q, k, MASKS[mask])), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("mask", "bad"),
    [
        ("none", math.nan), ("causal", -math.inf), ("causal window", 3e38),
        ("documents", math.nan), ("causal", 3e38), ("none", -math.inf),
    ],
)  # fmt: skip
def test_means_of_who_sees_a_broken_key(mask: str, bad: float) -> None:
    """As if each logit had been looked at: one of minus infinity is none."""
    q, k, v = drawn()
    k[0, 0, 20, 3] = k[0, 0, 21, 3] = bad
    got = traced(q, k, v, MASKS[mask]).mean_logit
    want = mean_of(logits_of(q, k, MASKS[mask]))
    told = want.isfinite()
    torch.testing.assert_close(got[told], want[told], rtol=1e-4, atol=1e-5)
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", MASKS)
def test_the_strongest_keys(mask: str) -> None:
    n = 33 if list(MASKS).index(mask) % 2 else 3
    q, k, v = drawn()
    got = traced(q, k, v, MASKS[mask]).top(n)
    s = logits_of(q, k, MASKS[mask])
    assert torch.equal(got.indices, strongest_of(s, n))
    weights = s.softmax(-1).nan_to_num_(0.0).gather(-1, got.indices.clamp_min(0))
    weights = weights.masked_fill(got.indices < 0, 0.0)
    torch.testing.assert_close(got.values, weights, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", ["none", "causal", "window", "documents"])
def test_strong_keys_that_share_a_column_of_tiles(mask: str) -> None:
    q, k, v = drawn()
    q, k = q.abs(), k / 10
    k[:, :, 5::16] = k[:, :, 5::16].abs() * 10
    got = traced(q, k, v, MASKS[mask]).top(4).indices
    assert torch.equal(got, strongest_of(logits_of(q, k, MASKS[mask]), 4))
    assert mask not in ("none", "causal") or (got[0, 0, -1] % 16 == 5).sum() >= 3


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("mask", "n"), [("none", 1), ("causal", 20), ("documents", 1)])
def test_of_equal_logits_the_earlier_key_is_the_stronger(mask: str, n: int) -> None:
    q, k, v = drawn()
    q, k = q.sign().round(), k.round().clamp(-1, 1)
    got = traced(q, k, v, MASKS[mask]).top(n).indices
    assert torch.equal(got, strongest_of(logits_of(q, k, MASKS[mask]), n))
    none = traced(torch.zeros_like(q), k, v, MASKS[mask]).top(n).indices
    assert torch.equal(none, strongest_of(logits_of(torch.zeros_like(q), k, MASKS[mask]), n))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.usefixtures("small_tiles")
def test_a_key_that_is_nan_is_not_among_the_strongest() -> None:
    q, k, v = drawn()
    k[0, 0, 20] = math.nan
    got = traced(q, k, v, masks.causal()).top(30)
    assert not (got.indices == 20).any()
    assert got.values[:, :, :20].isfinite().all()
    assert got.values[0, 0, 40].isnan().all()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("mask", "pool", "cells", "queries", "keys"),
    [
        ("none", "max", (20, 20), (0, 40), (0, 40)),
        ("causal", "mean", (20, 20), (0, 40), (0, 40)),
        ("causal", "mean", (9, 9), (0, 72), (0, 72)),
        ("causal window", "sum", (9, 9), (0, 72), (0, 72)),
        ("causal window", "sum", (4, 4), (3, 67), (5, 69)),
        ("padding", "max", (2, 16), (10, 74), (10, 74)),
        ("causal", "mean", (2, 16), (10, 74), (10, 74)),
        ("padding", "max", (1, 75), (0, 48), (0, 75)),
        ("causal window", "sum", (75, 3), (0, 75), (20, 68)),
        ("none", "max", (24, 7), (1, 73), (0, 70)),
        ("causal", "mean", (24, 7), (1, 73), (0, 70)),
    ],
    ids=str,
)
def test_cells_that_divide_tiles(
    mask: str,
    pool: Pool,
    cells: tuple[int, int],
    queries: tuple[int, int],
    keys: tuple[int, int],
) -> None:
    """Of 2, 8 and 16 places, of 32 queries and 4 keys, of one key, of one query; and others."""
    q, k, v = drawn()
    t = traced(q, k, v, MASKS[mask])
    x, lse = t.inputs, t.rows.lse
    got = t.second_pass.pooled(x, lse, cells, queries, keys, pool)
    p = logits_of(q, k, MASKS[mask]).softmax(-1).nan_to_num_(0.0)
    p = p[..., queries[0] : queries[1], keys[0] : keys[1]]
    p = p.unflatten(-1, (cells[1], -1)).unflatten(-3, (cells[0], -1))
    reduce: dict[Pool, Any] = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}
    want = reduce[pool](p, dim=(-3, -1))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_which_cells_divide_tiles() -> None:
    from regard.backends.triton.questions.maps import _Fine
    from regard.backends.triton.settings.tuning import Looking

    def fine(n: int, cells: int) -> tuple[int, int, int] | None:
        found = _Fine.of(Looking(128, 64), n, n, (cells, cells))
        return None if found is None else (found.tall, found.broad, found.together)

    assert fine(16384, 1024) == (16, 16, 16)
    assert fine(16384, 256) == (64, 64, 16)
    assert fine(16384, 16384) == (1, 1, 1)
    assert fine(16384, 64) is None
    assert fine(16000, 1024) is None
    assert fine(96, 2) is None


def _of_lengths(q: Tensor, k: Tensor) -> AttentionInputs:
    return check(
        q, k, k, mask=masks.causal(), score=None, bias=None, softcap=None, sink=None, scale=-0.5,
        dropout=0.0, training=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [8, 24, 200])
def test_the_longest_vectors(width: int, dtype: torch.dtype) -> None:
    """Of both, in whatever order they lie, though the last tile is not full."""
    from regard.backends.triton.questions.longest import squared_lengths, told_by

    n = 16384 // 128 + 3
    source = torch.Generator().manual_seed(width)
    q = torch.randn(2, n, 4, width, generator=source).to(dtype).to(cases.DEVICE).transpose(1, 2)
    k = torch.randn(2, 2, n, width, generator=source).to(dtype).to(cases.DEVICE)
    q[1, 3, n - 1] *= 9
    k[0, 1, 5] *= 7
    x = _of_lengths(q, k)
    told = told_by(x, squared_lengths(x))
    assert told is not None
    assert math.isclose(told, x.largest_sum, rel_tol=1e-3)
    assert math.isclose(
        told, 0.5 * float(q[1, 3, -1].norm()) * float(k[0, 1, 5].norm()), rel_tol=0.02
    )


@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("part", ["q", "k"])
def test_lengths_that_float32_does_not_tell(part: str, what: float) -> None:
    from regard.backends.triton.questions.longest import squared_lengths, told_by

    tensors = {n: torch.randn(1, 1, 40, 16, device=cases.DEVICE) for n in "qk"}
    tensors[part][0, 0, 17, 3] = what
    x = _of_lengths(tensors["q"], tensors["k"])
    assert told_by(x, squared_lengths(x)) is None


@pytest.mark.skipif("cases.DEVICE == 'cpu'", reason="launches are made again on a GPU")
@pytest.mark.parametrize("size", [1.0, 1e3])
def test_long_texts_are_measured_by_a_kernel(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.backends.triton.questions import second_pass

    told = []

    def noted(x: AttentionInputs, found: Tensor) -> float | None:
        told.append(told_by(x, found))
        return told[-1]

    told_by = second_pass.told_by
    monkeypatch.setattr(second_pass, "told_by", noted)
    questions = second_pass.TritonPass()
    for seed in range(3):
        source = torch.Generator(cases.DEVICE).manual_seed(seed)
        q, k = size * torch.randn(
            2, 1, 8, 8192, 64, device=cases.DEVICE, dtype=torch.bfloat16, generator=source
        )
        x, again = _of_lengths(q, k), _of_lengths(q, k)
        lse = regard.trace(q, k, k, mask=masks.causal(), scale=-0.5).lse
        received = questions.received(x, lse)
        assert len(told) == seed + 1
        assert math.isclose(x.largest_sum, again.largest_sum, rel_tol=1e-3)
        # Logits so large are asked in float64.
        assert received.dtype == torch.float32
        torch.testing.assert_close(received.sum(-1), torch.full((1, 8), 8192.0, device=q.device))
