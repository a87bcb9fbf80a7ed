"""The table of docs/masks.md: each row is what the other library computes."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import biases, masks

PAGE = Path(__file__).parents[2] / "docs" / "masks.md"
B, H, Q, K, D = 2, 4, 5, 7, 8


def normal(*axes: int, seed: int) -> Tensor:
    return torch.randn(axes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def coins(*axes: int, seed: int) -> Tensor:
    """True and False by chance, with the first key always True."""
    table = torch.rand(axes, generator=torch.Generator().manual_seed(seed)) < 0.5
    table[..., 0] = True
    return table


q = normal(B, H, Q, D, seed=0)
k, v = normal(B, H, K, D, seed=1), normal(B, H, K, D, seed=2)
"""As many key heads as query heads, but for rows that say otherwise."""
NAMES: dict[str, Any] = {
    "torch": torch, "masks": masks, "biases": biases,
    "seen": coins(Q, K, seed=3),
    "hidden": ~coins(Q, K, seed=4),
    "of_heads": ~coins(B * H, Q, K, seed=5),
    "padded": ~coins(B, K, seed=6),
    "ones": coins(B, K, seed=7).long(),
    "added": normal(H, Q, K, seed=8),
    "slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]).double(),
    "heads": H,
    "ends_q": torch.tensor([0, 3, 10], dtype=torch.int32),
    "ends_k": torch.tensor([0, 4, 14], dtype=torch.int32),
    "upper_left": causal_upper_left(Q, K),
    "lower_right": causal_lower_right(Q, K),
}  # fmt: skip


class Row(NamedTuple):
    library: str
    there: str
    here: str
    converter: str


def rows() -> list[Row]:
    """The table, whose cells are code."""
    text = PAGE.read_text("utf-8")
    body = re.search(r"^\| library \| there \| here \| converter \|\n\|[-|]+\n((?:\|.*\n)+)", text,
                     re.MULTILINE)  # fmt: skip
    assert body
    found = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body[1].splitlines()]
    return [Row(*(_code(cell) for cell in row)) for row in found]


def _code(cell: str) -> str:
    inside = re.match(r"`+ ?(.*?) ?`+", cell.strip())
    return (inside[1] if inside else cell.strip()).replace("\\|", "|")


def arguments(code: str) -> dict[str, Any]:
    found: dict[str, Any] = eval(f"dict({code})", NAMES)
    return found


def by_rule(allowed: Tensor, *, scale: float | None = None, softcap: float | None = None,
            added: Tensor | None = None) -> Tensor:  # fmt: skip
    """The formula, with what is allowed written out."""
    scores = q @ k.mT * (1 / math.sqrt(D) if scale is None else scale)
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = scores if added is None else scores + added
    return scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v


PLACE = torch.arange(Q)[:, None] + (K - Q)
"""Where each query stands: with a cache, the last at the last key."""
KEY = torch.arange(K)[None, :]


def sdpa(*, enable_gqa: bool = False, **given: Any) -> Tensor:
    groups = 2 if enable_gqa else 1
    grouped = (t[:, ::groups] for t in (k, v))
    return scaled_dot_product_attention(q, *grouped, enable_gqa=enable_gqa, **given)


def multihead(**given: Any) -> Tensor:
    """`nn.MultiheadAttention` whose projections do nothing."""
    layer = torch.nn.MultiheadAttention(H * D, H, bias=False, batch_first=True, dtype=q.dtype)
    one = torch.eye(H * D, dtype=q.dtype)
    layer.in_proj_weight.data, layer.out_proj.weight.data = one.repeat(3, 1), one
    out = layer(*(t.transpose(1, 2).flatten(2) for t in (q, k, v)), need_weights=False, **given)[0]
    return out.detach().unflatten(-1, (H, D)).transpose(1, 2)


def huggingface(*, attention_mask: Tensor | None = None, is_causal: bool = False,
                sliding_window: int | None = None, scaling: float | None = None,
                softcap: float | None = None) -> Tensor:  # fmt: skip
    """What transformers documents: positions go on after the cache, and a causal window counts the
    query."""
    allowed = (PLACE >= KEY) if is_causal else torch.ones(Q, K, dtype=torch.bool)
    if sliding_window is not None and is_causal:
        allowed = allowed & (sliding_window > PLACE - KEY)
    elif sliding_window is not None:
        allowed = allowed & ((PLACE - KEY).abs() <= sliding_window)
    allowed = allowed.expand(B, 1, Q, K)
    if attention_mask is not None:
        allowed = allowed & attention_mask.bool()[:, None, None]
    return by_rule(allowed, scale=scaling, softcap=softcap)


def flash(*, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
          softmax_scale: float | None = None, softcap: float = 0.0,
          alibi_slopes: Tensor | None = None) -> Tensor:  # fmt: skip
    """What FlashAttention documents: everything aligned to the end, -1 for an open side."""
    left, right = (math.inf if side < 0 else side for side in window_size)
    away = PLACE - KEY
    allowed = (away <= left) & (-away <= (0 if causal else right))
    slopes = None if alibi_slopes is None else -alibi_slopes[:, None, None] * away.abs()
    return by_rule(allowed, scale=softmax_scale, softcap=softcap or None, added=slopes)


def tokens(t: Tensor) -> Tensor:
    """[B, H, N, D] as [B · N, H, D]."""
    return t.transpose(1, 2).flatten(0, 1)


def flash_varlen(*, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool = False) -> Tensor:
    """What FlashAttention documents: tokens end to end, each sequence aligned to its own end."""
    found = []
    of_queries, of_keys = (cut.diff().tolist() for cut in (cu_seqlens_q, cu_seqlens_k))
    parts = tokens(q).split(of_queries), tokens(k).split(of_keys), tokens(v).split(of_keys)
    for cut in zip(*parts, strict=True):
        one_q, one_k, one_v = (t.transpose(0, 1) for t in cut)
        scores = one_q @ one_k.mT / math.sqrt(D)
        n, m = scores.shape[-2:]
        later = torch.ones(n, m, dtype=torch.bool).triu(m - n + 1) & causal
        found.append((scores.masked_fill(later, -math.inf).softmax(-1) @ one_v).transpose(0, 1))
    return torch.cat(found)


def flex(*, mask_mod: Any = None, score_mod: Any = None, enable_gqa: bool = False,
         scale: float | None = None) -> Tensor:  # fmt: skip
    blocks = None if mask_mod is None else create_block_mask(mask_mod, None, None, Q, K, "cpu")
    groups = 2 if enable_gqa else 1
    grouped = (t[:, ::groups] for t in (k, v))
    with warnings.catch_warnings():
        # It says that it is slow without the compiler.
        warnings.simplefilter("ignore")
        found = flex_attention(
            q, *grouped, score_mod=score_mod, block_mask=blocks, enable_gqa=enable_gqa, scale=scale
        )
    assert isinstance(found, Tensor)
    return found


RUN: dict[str, Callable[..., Tensor]] = {
    "F.scaled_dot_product_attention": sdpa,
    "nn.MultiheadAttention": multihead,
    "Hugging Face": huggingface,
    "FlashAttention": flash,
    "flash_attn_varlen_func": flash_varlen,
    "FlexAttention": flex,
}


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.library}: {row.there}"[:60])
def test_a_row_is_what_the_library_computes(row: Row) -> None:
    want = RUN[row.library](**arguments(row.there))
    groups = 2 if "enable_gqa" in row.there else 1
    here = {} if row.here == "–" else arguments(row.here)
    given, said = (q, k[:, ::groups], v[:, ::groups]), {}
    if "cu_seqlens" in here:
        given = tokens(q), tokens(k), tokens(v)
        said = {"cu_seqlens": (torch.tensor([0, B * Q]), torch.tensor([0, B * K]))}
    found = regard.attention(*given, **here)
    torch.testing.assert_close(found, want)
    plain = regard.attention(*given, **said)
    assert groups == 2 or not torch.allclose(plain, want), "the row changes nothing"
    if row.converter != "–":
        here["mask"] = eval(row.converter, NAMES)
        torch.testing.assert_close(regard.attention(q, k, v, **here), want)


def test_every_library_and_every_converter_is_there() -> None:
    found = rows()
    assert {row.library for row in found} == set(RUN)
    for name in ("from_sdpa", "from_multihead", "from_huggingface", "from_flash"):
        assert any(name in row.converter for row in found)
    assert len(found) > 20
