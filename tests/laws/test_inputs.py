"""Laws of inputs: however a call is put, it is the calls of its sequences."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import jaxtyping
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import regard
from regard import masks

BACKENDS = st.sampled_from(["reference", "tiled"])


def numbers(*shape: int, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(*shape, generator=source, dtype=torch.float64)


FUNCTIONS: list[Any] = [
    lambda b, h, q, k: q >= k,
    lambda b, h, q, k: (q - k).abs() <= 2,
    lambda b, h, q, k: (q // 3 == k // 3) | (k == 0),
    lambda b, h, q, k: (q * k + b + h) % 3 > 0,
    lambda b, h, q, k: ~((q >= k) & (k > b)),
    lambda b, h, q, k: torch.where(q % 2 == h, k <= q, k > 3),
]
WHERE = [masks.where(function) for function in FUNCTIONS]


@given(
    lead=st.lists(st.integers(1, 3), min_size=2, max_size=3),
    Q=st.integers(1, 6),
    K=st.integers(1, 6),
    tabled=st.booleans(),
    backend=BACKENDS,
    seed=st.integers(0, 9),
)
def test_axes_before_the_heads_are_many_calls(
    lead: list[int], Q: int, K: int, tabled: bool, backend: str, seed: int
) -> None:
    q, k, v = (
        numbers(*lead, h, n, 3, seed=seed + i) for i, (h, n) in enumerate([(2, Q), (1, K), (1, K)])
    )
    table = numbers(*lead, 2, Q, K, seed=seed) > -1
    t = regard.trace(q, k, v, mask=masks.keep(table) if tabled else masks.causal(), backend=backend)
    flat = [x.flatten(0, len(lead) - 1) for x in (q, k, v)]
    for i in range(math.prod(lead)):
        mask = masks.keep(table.flatten(0, len(lead) - 1)[i : i + 1]) if tabled else masks.causal()
        want = regard.trace(*(x[i : i + 1] for x in flat), mask=mask, backend="reference")
        for name in ("out", "lse", "entropy"):
            assert_close(getattr(t, name).flatten(0, len(lead) - 1)[i], getattr(want, name)[0])
        assert_close(t.weights().flatten(0, len(lead) - 1)[i], want.weights()[0])


KINDS: list[masks.Mask | None] = [
    None,
    masks.causal(),
    masks.window(1, 2),
    masks.causal() & masks.window(2),
    masks.causal() | masks.prefix(2),
    ~masks.dilated(2),
]


@given(
    lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=4),
    mask=st.sampled_from(KINDS),
    backend=BACKENDS,
    seed=st.integers(0, 9),
)
def test_jagged_sequences_are_many_calls(
    lengths: list[tuple[int, int]], mask: masks.Mask | None, backend: str, seed: int
) -> None:
    q = [numbers(n, 2, 3, seed=seed + i) for i, (n, _) in enumerate(lengths)]
    k = [numbers(n, 2, 3, seed=seed + i + 50) for i, (_, n) in enumerate(lengths)]
    nested = [
        torch.nested.as_nested_tensor(x, layout=torch.jagged).transpose(1, 2) for x in (q, k, k)
    ]
    # Sequences have no length in common that a signature could name.
    with patch.object(jaxtyping.config, "jaxtyping_disable", True):
        t = regard.trace(*nested, mask=mask, backend=backend)
        for i, (one_q, one_k) in enumerate(zip(q, k, strict=True)):
            alone = [x.transpose(0, 1)[None] for x in (one_q, one_k, one_k)]
            want = regard.trace(*alone, mask=mask, backend="reference")
            for name in ("out", "lse", "entropy"):
                assert_close(getattr(t, name)[i], getattr(want, name)[0])
            assert_close(t.received()[i], want.received()[0])
            assert_close(t[i].weights(), want.weights())


@given(
    ends=st.tuples(*[st.lists(st.integers(0, 24), max_size=5)] * 2),
    mask=st.sampled_from(KINDS),
    softcap=st.sampled_from([None, 1.5]),
    backend=BACKENDS,
    seed=st.integers(0, 9),
)
def test_tokens_are_many_calls_however_they_are_cut(
    ends: tuple[list[int], list[int]],
    mask: masks.Mask | None,
    softcap: float | None,
    backend: str,
    seed: int,
) -> None:
    """Also where queries and keys are cut at different places, or some sequences are empty."""
    n = min(map(len, ends))
    cuts = [torch.tensor([0, *sorted(some[:n]), 24], dtype=torch.int32) for some in ends]
    q, k, v, sink = (
        numbers(*shape, seed=seed + i).requires_grad_()
        for i, shape in enumerate([(24, 4, 3), (24, 2, 3), (24, 2, 5), (4,)])
    )
    options: dict[str, Any] = {"mask": mask, "softcap": softcap, "sink": sink}
    got = regard.attention(q, k, v, cu_seqlens=(cuts[0], cuts[1]), **options, backend=backend)
    of_queries, of_keys = (cut.diff().tolist() for cut in cuts)
    each = zip(q.split(of_queries), k.split(of_keys), v.split(of_keys), strict=True)
    alone = [
        regard.attention(*(x.transpose(0, 1)[None] for x in one), **options, backend="reference")
        for one in each
    ]
    want = torch.cat(alone, 2)[0].transpose(0, 1)
    assert_close(got, want)
    pull, learned = numbers(24, 4, 5, seed=seed), [q, k, v, sink]
    gradients = (torch.autograd.grad(out, learned, pull) for out in (got, want))
    for mine, theirs in zip(*gradients, strict=True):
        assert_close(mine, theirs)


@given(
    which=st.integers(0, len(WHERE) - 1),
    B=st.integers(1, 2),
    Q=st.integers(1, 9),
    K=st.integers(1, 9),
    backend=BACKENDS,
    seed=st.integers(0, 9),
)
def test_a_function_is_the_table_of_its_pairs(
    which: int, B: int, Q: int, K: int, backend: str, seed: int
) -> None:
    q, k = numbers(B, 2, Q, 3, seed=seed), numbers(B, 2, K, 3, seed=seed + 1)
    b, h, i, j = torch.meshgrid(*map(torch.arange, (B, 2, Q, K)), indexing="ij")
    table = masks.keep(FUNCTIONS[which](b, h, i, j))
    got = regard.trace(q, k, k, mask=WHERE[which], backend=backend)
    want = regard.trace(q, k, k, mask=table, backend="reference")
    for name in ("out", "lse", "entropy", "max_logit"):
        assert_close(getattr(got, name), getattr(want, name))
    assert_close(got.weights(), want.weights())
    assert_close(got.received(), want.received())
