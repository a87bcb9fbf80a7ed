"""PyTorch's arguments in regard's words give what PyTorch gives."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import regard
from regard import RegardError
from regard.calls.sdpa_arguments import four_axes, mask_and_bias

torch.manual_seed(0)
VISIBLE = torch.rand(4, 5) > 0.4
VISIBLE[:, 0] = True
LEAD: dict[str, tuple[int, ...]] = {"none": (), "one": (3,), "two": (2, 3), "three": (2, 1, 3)}


@pytest.mark.parametrize("lead", LEAD.values(), ids=LEAD)
@pytest.mark.parametrize("whose", ["all", "each"])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_it_is_the_same_attention(lead: tuple[int, ...], whose: str, kind: str) -> None:
    q, k, v = torch.randn(*lead, 4, 8), torch.randn(*lead, 5, 8), torch.randn(*lead, 5, 6)
    shown = VISIBLE if whose == "all" else VISIBLE.expand(*lead, 4, 5)
    given = {"bool": shown, "float": torch.where(shown, 0.5, -2.0)}.get(kind)
    want = F.scaled_dot_product_attention(q, k, v, given, is_causal=kind == "causal")
    mask, bias = mask_and_bias(given, kind == "causal")
    found = regard.attention(*map(four_axes, (q, k, v)), mask=mask, bias=bias)
    torch.testing.assert_close(found.reshape(want.shape), want)


def test_a_mask_and_causal_both_count() -> None:
    mask, bias = mask_and_bias(VISIBLE, is_causal=True)
    x = torch.randn(1, 1, 4, 8)
    y = torch.randn(1, 1, 5, 8)
    weights = regard.trace(x, y, y, mask=mask, bias=bias).weights()[0, 0]
    assert torch.equal(weights > 0, VISIBLE & torch.ones(4, 5).tril().bool())


@pytest.mark.parametrize("mask", [torch.ones(5).bool(), torch.zeros(5)], ids=["bool", "float"])
def test_a_mask_of_one_axis_is_refused(mask: torch.Tensor) -> None:
    with pytest.raises(RegardError):
        mask_and_bias(mask, is_causal=False)
