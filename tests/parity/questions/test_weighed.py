"""Columns of numbers that the forward pass mixes beside the values, and forms of the values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.backends.reference import Reference, ReferencePass
from regard.inputs import AttentionInputs
from regard.interpret.head_scores.copied_tokens.copying_score import _value_forms
from tests.parity.cases import Case, Sizes
from tests.parity.test_triton import _is_hopper

LONGER = Sizes(B=2, H=4, G=2, Q=433, K=601, D=64, E=64)
ROUNDING = 2.0**-8
"""Of weights in bfloat16, as a share of themselves."""

ON_HOPPER = [
    *(
        Case(mask, sizes=replace(LONGER, D=D, E=E))
        for mask in ("none", "causal", "causal_window", "causal_padding", "prefix", "nothing")
        for D, E in ((64, 64), (128, 128), (96, 96), (256, 256), (192, 128))
        if D in (64, 128) or mask in ("causal", "prefix")
    ),
    Case("causal", bias="alibi", sizes=LONGER),
    Case("causal", extra="softcap", sizes=LONGER),
]


def weights_of(x: AttentionInputs) -> Tensor:
    wide = replace(x, q=x.q.double(), k=x.k.double(), v=x.v.double())
    lse = Reference().observe(wide).lse
    q, k = (torch.arange(n, device=lse.device) for n in wide.shape[2:])
    return ReferencePass().weights(wide, lse, q, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ON_HOPPER, ids=lambda c: f"{c}-{c.sizes.D}-{c.sizes.E}")
def test_columns_beside_the_values(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.backends.triton import forward
    from regard.backends.triton.questions.second_pass import TritonPass
    from regard.backends.triton.settings.tuning import Forward

    if not _is_hopper():
        pytest.skip("only the kernel for Hopper mixes columns")
    wide = case.sizes.D > 128
    how = Forward(128, 64 if wide else 128, stages=2 if wide else 3, hopper=True)
    monkeypatch.setattr(forward, "forward_settings", lambda x, **_: how)
    x, _ = replace(case, dtype=dtype).build()
    x = x.map_tensors(Tensor.detach)
    B, H, Q, K = x.shape
    torch.manual_seed(0)
    columns = torch.randn(B, H, K, 6, device=x.q.device)
    place = torch.arange(K, device=x.q.device)
    columns[..., 0], columns[..., 1] = place, place == 3
    found = TritonPass().weighed(x, columns)
    assert found is not None
    weights = weights_of(x)
    want = torch.einsum("bhqk,bhkc->bhc", weights, columns.double())
    size = torch.einsum("bhqk,bhkc->bhc", weights, columns.double().abs())
    # Weights of a row are shares of 1: places are told as exactly as what lies between them.
    row = torch.arange(Q, device=x.q.device)[:, None]
    size[..., 0] = (weights * (row + (K - Q) - place).abs()).sum((2, 3))
    assert bool(((found.columns - want).abs() <= ROUNDING * size + 1e-5 * Q).all())
    plain, _ = forward.run(x, how, statistics=True)
    for mine, usual in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, usual, rtol=2e-2, atol=2e-2, equal_nan=True)


def test_too_many_columns_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.backends.triton.questions.second_pass import TritonPass

    if not _is_hopper():
        pytest.skip("only the kernel for Hopper mixes columns")
    sizes = Sizes(B=1, H=2, G=2, Q=4096, K=4096, D=64, E=64)
    x, _ = Case("causal", sizes=sizes, dtype=torch.bfloat16).build()
    x = x.map_tensors(Tensor.detach)
    assert TritonPass().weighed(x, torch.ones(1, 2, 4096, 7, device=x.q.device)) is not None
    assert TritonPass().weighed(x, torch.ones(1, 2, 4096, 8, device=x.q.device)) is None
    x.q.requires_grad_()
    assert TritonPass().weighed(x, torch.ones(1, 2, 4096, 7, device=x.q.device)) is None


@pytest.mark.interpreted
@pytest.mark.parametrize("width", [8, 24, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forms_of_values(width: int, dtype: torch.dtype) -> None:
    from regard.backends.triton.questions.second_pass import TritonPass

    sizes = Sizes(B=2, H=4, G=2, Q=5, K=77, D=16, E=width)
    x, _ = Case(sizes=sizes, dtype=dtype).build()
    torch.manual_seed(0)
    forms = torch.randn(4, width, width).to(x.v.device, dtype)
    vectors = torch.randn(2, 77, 4 * width).to(x.v.device, dtype)
    found = TritonPass().value_forms(x, forms, vectors)
    assert found is not None
    wide = replace(x, v=x.v.double())
    for got, want in zip(found, _value_forms(wide, forms.double(), vectors.double()), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)
    value = x.v[1, 1, 5].double()
    torch.testing.assert_close(
        found[0][1, 3, 5].double(), value @ forms[3].double() @ value, rtol=1e-3, atol=1e-3
    )
    own = vectors[1, 5].view(4, width)[3].double()
    torch.testing.assert_close(found[1][1, 3, 5].double(), own @ value, rtol=1e-3, atol=1e-3)
    assert TritonPass().value_forms(x, forms.double(), vectors) is None


def test_other_backends_leave_it() -> None:
    x, _ = Case().build()
    assert ReferencePass().weighed(x, torch.ones(*x.shape[:2], x.shape.K, 1)) is None
