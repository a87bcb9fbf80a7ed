"""What falls on each offset and on keys of a query's own kind: by kernels, and from weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard
from regard.backends.questions.matching_keys import matching_keys
from regard.backends.reference import ReferencePass
from regard.backends.triton.refusals import why_not
from regard.interpret.head_scores.pairs.asked_totals import asked_totals
from regard.interpret.head_scores.pairs.pair_sums import call_sums
from regard.interpret.head_scores.pairs.row_totals import row_totals
from regard.interpret.head_scores.pairs.weight_blocks import blocks
from regard.interpret.head_scores.texts.sides import Side, Sides
from regard.masks.algebra import pairs
from tests.parity import cases
from tests.parity.cases import Case, Sizes

pytestmark = pytest.mark.interpreted

MASKS = ["none", "causal", "causal_window", "causal_padding", "prefix", "nothing"]
SIZES = {
    "square": Sizes(B=2, H=2, G=1, Q=45, K=45, D=8, E=8),
    "more_keys": Sizes(B=1, H=2, G=1, Q=21, K=83, D=8, E=8),
    "more_queries": Sizes(B=1, H=1, G=1, Q=70, K=33, D=8, E=8),
}
MET = [(mask, "square") for mask in MASKS] + [
    ("none", "more_keys"),
    ("causal", "more_keys"),
    ("causal_window", "more_queries"),
    ("prefix", "more_queries"),
]


def weights_of(inputs: regard.inputs.AttentionInputs) -> tuple[Tensor, Tensor]:
    """lse and weights, by the reference."""
    from regard.backends.reference import Reference

    lse = Reference().observe(inputs).lse
    queries, keys = (torch.arange(n, device=lse.device) for n in inputs.shape[2:])
    return lse, ReferencePass().weights(inputs, lse, queries, keys)


@pytest.mark.parametrize(("mask", "sizes"), MET)
def test_each_offset(mask: str, sizes: str) -> None:
    from regard.backends.triton.questions.second_pass import TritonPass

    bias = "alibi" if mask == "prefix" else "none"
    case = Case(mask, "scaled_dot", bias, "plain", torch.float32, SIZES[sizes])
    inputs, _ = case.build()
    lse, weights = weights_of(inputs)
    found = TritonPass().offset_sums(inputs, lse, 64)
    assert found is not None
    Q, K = inputs.shape[2:]
    for offset in range(-64, 65):
        # The diagonal of keys that lie so far before a query, which is among the last keys.
        want = weights.diagonal(K - Q - offset, -2, -1).sum(-1)
        torch.testing.assert_close(
            found[..., 64 + offset], want.double(), rtol=1e-4, atol=1e-5, msg=f"offset {offset}"
        )


@pytest.mark.parametrize(("mask", "sizes"), MET)
def test_own_kind(mask: str, sizes: str) -> None:
    from regard.backends.triton.questions.second_pass import TritonPass

    earlier = sizes != "more_keys"
    inputs, _ = Case(mask, dtype=torch.float32, sizes=SIZES[sizes]).build()
    lse, weights = weights_of(inputs)
    B, _, Q, K = inputs.shape
    # Kind 5 is asked for and held by nobody, -1 held and asked for by nobody.
    asks = torch.randint(6, (B, Q)).to(lse.device)
    holds = torch.randint(-1, 5, (B, K)).to(lse.device)
    answer = TritonPass().matching_mass(inputs, lse, matching_keys(asks, holds, earlier=earlier))
    assert answer is not None
    query, key = (torch.arange(n, device=lse.device) for n in (Q, K))
    alike = asks[:, :, None] == holds[:, None]
    if earlier:
        alike &= key < query[:, None] + K - Q
    want = (weights * alike[:, None]).sum(-1)
    torch.testing.assert_close(answer[0], want.float(), rtol=1e-4, atol=1e-5)
    seen = alike[:, None]
    if inputs.mask is not None:
        seen = seen & pairs(inputs.mask, query, key)[:, :1]
    assert torch.equal(answer[1], seen[:, 0].any(-1))


@pytest.mark.parametrize(
    ("mask", "padded"),
    [("causal", False), ("causal_window", True), ("causal_padding", True),
     ("causal_documents", False)],
)  # fmt: skip
def test_scores_are_those_of_a_sweep(mask: str, padded: bool) -> None:
    from regard.backends.triton.questions.second_pass import TritonPass

    n = 75
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 16, device=cases.DEVICE) for _ in range(3))
    given = {
        "causal": regard.masks.causal(),
        "causal_window": regard.masks.causal() & regard.masks.window(20),
        "causal_padding": regard.masks.causal() & regard.masks.padding([n, 49]),
        "causal_documents": regard.masks.causal()
        & regard.masks.documents(torch.arange(n, device=cases.DEVICE) // 30),
    }[mask]
    trace = regard.trace(q, k, v, mask=given)
    real = torch.ones(2, n, dtype=torch.bool, device=cases.DEVICE)
    if padded:
        real[1, 49:] = False
    side = Side(real, torch.randint(20, (2, n), device=cases.DEVICE))
    sides = Sides(side, side, True)
    want = call_sums(replace(trace, second_pass=ReferencePass()), sides)
    asked = replace(trace, second_pass=TritonPass())
    assert asked_totals(asked, sides, row_totals(asked, side)) is not None
    found = call_sums(asked, sides)
    for name, (total, many) in want.scores.items():
        mine = found.scores[name]
        torch.testing.assert_close(mine[0], total, rtol=1e-4, atol=1e-3, check_dtype=False)
        torch.testing.assert_close(mine[1], many, check_dtype=False)
    assert found.offsets is not None
    assert want.offsets is not None
    for mine, its in zip(found.offsets, want.offsets, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4, check_dtype=False)
    torch.testing.assert_close(found.received, want.received, rtol=1e-4, atol=1e-5)


def test_who_looks_ahead_is_swept() -> None:
    """How far weight falls is not told by where it falls, if that may be either way."""
    from regard.backends.triton.questions.second_pass import TritonPass

    q, k, v = (torch.randn(1, 2, 20, 8, device=cases.DEVICE) for _ in range(3))
    side = Side.of_places(1, 20, q.device)
    for given in (None, regard.masks.window(3, 3)):
        trace = replace(regard.trace(q, k, v, mask=given), second_pass=TritonPass())
        assert not why_not(trace.inputs)
        rows = row_totals(trace, side)
        assert asked_totals(trace, Sides(side, side, True), rows) is None
        assert asked_totals(trace, Sides(side, side, False), rows) is not None
        assert list(blocks(trace))
