"""The tour: each of its numbers against attention worked out by hand, and what it says without."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch

import regard
from regard import biases, masks, scores
from regard.seen import Seen
from regard.view.atlas import Atlas
from regard.view.tour import pair_numbers, shown_pair, tour

WORDS = ["to", "be", "or", "not", "to", "see"]


def drawn(n: int = 6, d: int = 8, heads: int = 2) -> tuple[torch.Tensor, ...]:
    chance = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, heads, n, d, generator=chance) for _ in range(3))


def sums(told: dict[str, Any]) -> list[str]:
    return [step.get("sum", "").replace("\xa0", " ").replace("−", "-") for step in told["steps"]]


def test_every_number_is_that_of_attention_by_hand() -> None:
    q, k, v = drawn()
    atlas = Atlas.of(regard.trace(q, k, v, mask=masks.causal()), WORDS)
    head, i, j = 1, 4, 2
    products = (q[0, head, i].double() * k[0, head].double()).sum(-1)
    logits = products / math.sqrt(8)
    exps = logits[: i + 1].exp()
    found = pair_numbers(atlas[0], head, i, j)
    torch.testing.assert_close(found.products, products)
    torch.testing.assert_close(found.logits[: i + 1], logits[: i + 1], rtol=1e-5, atol=1e-6)
    assert found.logits[i + 1 :].tolist() == [-math.inf]
    assert found.seen == i + 1
    assert math.exp(found.lse) == pytest.approx(float(exps.sum()), rel=1e-5)
    share = exps / exps.sum()
    torch.testing.assert_close(found.weights[: i + 1], share, rtol=1e-5, atol=1e-7)
    assert found.out is not None
    wanted = share @ v[0, head, : i + 1].double()
    torch.testing.assert_close(found.out, wanted, rtol=1e-5, atol=1e-6)
    told = tour(atlas[0], head, i, j)
    json.dumps(told, allow_nan=False)
    tokens, meets, logit, softmax, values = sums(told)
    assert tokens == "‘to’ #4 → ‘or’ #2"
    assert meets == f"q · k = {float(products[j]):.4g}"
    assert logit == f"{float(products[j]):.4g} ÷ √8 = {float(logits[j]):.4g}"
    assert softmax == f"{float(exps[j]):.4g} ÷ {float(exps.sum()):.4g} = {100 * share[j]:.3g} %"
    length = float(v[0, head, j].double().norm())
    assert values == f"length {length:.4g} × {100 * share[j]:.3g} % = {length * share[j]:.4g}"
    # What stands in the table of shares adds up to all of them.
    cells = [row["cells"][-1] for row in told["steps"][3]["table"]["rows"]]
    assert sum(float(re.sub(r"[^\d.]", "", cell)) for cell in cells) == pytest.approx(100, abs=0.5)
    assert [word["kind"] for word in told["steps"][0]["words"]] == [
        None, None, "own", None, "asks", None,
    ]  # fmt: skip


def test_a_masked_pair_gets_nothing() -> None:
    q, k, v = drawn()
    told = tour(Atlas.of(regard.trace(q, k, v, mask=masks.causal()), WORDS)[0], 0, 1, 3)
    assert sums(told)[2:4] == ["logit = -∞", "share = 0 %"]
    assert "masked" in told["steps"][2]["text"]


def test_what_else_is_done_to_a_logit_is_said() -> None:
    q, k, v = drawn()
    t = regard.trace(q, k, v, bias=biases.alibi([0.5, 0.25]), softcap=5.0, scale=0.5)
    found = pair_numbers(Atlas.of(t)[0], 1, 5, 0)
    text = tour(Atlas.of(t)[0], 1, 5, 0)["steps"][2]["text"]
    assert "soft-capped at 5" in text
    assert "a bias" in text
    logit = float(t.logits(queries=[5], heads=[1])[0, 0, 0, 0])
    assert f"{logit:.4g}".replace("-", "−") in text
    assert found.scale == 0.5
    assert sums(tour(Atlas.of(t)[0], 1, 5, 0))[2].split(" = ")[0].endswith("× 0.5")
    other = tour(Atlas.of(regard.trace(q, k, v, score=scores.distance(1.0)))[0], 0, 2, 1)
    assert "something else than a dot product" in other["steps"][1]["text"]


def test_what_a_trace_does_not_hold_is_said() -> None:
    q, k, v = drawn()
    whole = regard.trace(q, k, v)
    bare = tour(Atlas.of(whole.weights())[0], 0, 2, 1)
    assert "made of weights alone" in bare["steps"][1]["text"]
    assert "not in this trace" in bare["steps"][4]["text"]
    assert bare["share"] == pytest.approx(float(whole.weights()[0, 0, 2, 1]), rel=1e-5)
    kept = tour(Atlas.of(regard.Trace.of(q, k, whole.lse))[0], 0, 2, 1)
    assert sums(kept)[1].startswith("q · k = ")
    assert "not in this trace" in kept["steps"][4]["text"]


def test_the_pair_that_is_shown_rests_nowhere() -> None:
    p = torch.tensor([[1.0, 0, 0, 0], [0.9, 0.1, 0, 0], [0.3, 0.3, 0.4, 0], [0.4, 0.1, 0.2, 0.3]])
    of = Atlas.of(p)[0]
    assert shown_pair(of, 0) == (2, 1)
    assert shown_pair(of, 0, 3) == (3, 2)
    assert shown_pair(Atlas.of(torch.eye(3))[0], 0) == (0, 0)
    with pytest.raises(regard.RegardError, match="there is no such key"):
        tour(of, 0, 2, 9)


def test_steps_of_generating_have_their_own_rows() -> None:
    q, k, v = drawn()
    first = regard.trace(q[:, :, :4], k[:, :, :4], v[:, :, :4], mask=masks.causal())
    then = regard.trace(q[:, :, 4:5], k[:, :, :5], v[:, :, :5], mask=masks.causal())
    seen = Seen()
    for number, t in enumerate((first, then)):
        seen.layer("a").take(t, number, number, keep=True)
    of = Atlas.of(seen)[0]
    whole = regard.trace(q[:, :, :5], k[:, :, :5], v[:, :, :5], mask=masks.causal())
    for query in (1, 4):
        found = pair_numbers(of, 1, query, 1)
        want = whole.weights(queries=[query], heads=[1])[0, 0, 0].double()
        torch.testing.assert_close(found.weights, want, rtol=1e-5, atol=1e-7)
