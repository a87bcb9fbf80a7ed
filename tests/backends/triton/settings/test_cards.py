"""Kernels compiled for cards that are not there: none takes more memory than its card has.

These are the hungriest; `python -m regard.backends.triton.prepared.check_cards` compiles all kinds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from regard.backends.passes import Pull
from regard.backends.triton import arguments
from regard.backends.triton.additive import passes as additive
from regard.backends.triton.forward import forward
from regard.backends.triton.linear import passes as linear
from regard.backends.triton.pairs import INTERPRETED
from regard.backends.triton.prepared import check_cards
from regard.backends.triton.prepared.check_cards import Taken, call, taken
from regard.backends.triton.prepared.common_calls import launches, rows
from regard.backends.triton.questions.received import received_by_keys
from regard.backends.triton.recurrent import passes as recurrent
from regard.backends.triton.settings import tuning
from regard.backends.triton.settings.cards import CARDS
from regard.backends.triton.settings.shared_memory import (
    of_forward,
    of_key_gradients,
    of_query_gradients,
    of_second_pass,
)
from regard.inputs import AttentionInputs
from regard.scores.comparison import TanhSum

pytestmark = [
    pytest.mark.skipif(INTERPRETED.value, reason="interpreted kernels are not launched"),
    pytest.mark.compiled,
]
BFLOAT, FLOAT = torch.bfloat16, torch.float32
PASSES: dict[str, Callable[[AttentionInputs], object]] = {
    "forward_tiles": partial(forward, statistics=True),
    "keys_and_values": partial(check_cards.learn, entropy=True),
    "queries": partial(check_cards.learn, entropy=True),
    "_received": lambda x: received_by_keys(x, tuning.looking_settings(x), rows(x)),
    "_pooled_by_cell": check_cards.mapped,
}


def _taken(name: str, x: AttentionInputs, capability: int, *, allocate: bool) -> tuple[Taken, int]:
    """What a kernel of a call takes of a card, and what was estimated."""
    wanted = {
        what: one
        for what, one in launches(capability, [partial(PASSES[name], x)]).items()
        if one[0].kernel.fn.__name__ == name and not one[2].get("MANY")
    }
    assert len(wanted) == 1
    (found,) = taken(wanted, capability, allocate=allocate)
    token = arguments.stands_for.set(capability)
    try:
        return found, _estimated(name, x, capability)
    finally:
        arguments.stands_for.reset(token)


def _estimated(name: str, x: AttentionInputs, capability: int) -> int:
    row, card = tuning._row(x), CARDS[capability]
    if name == "forward_tiles":
        how = tuning.forward_settings(x, statistics=True)
        return of_forward(how, row, card, checked=how.careful or how.splits > 1)
    if name == "keys_and_values":
        return of_key_gradients(tuning.backward_settings(x).keys, row, card)
    if name == "queries":
        return of_query_gradients(tuning.backward_settings(x).queries, row, card)
    return of_second_pass(tuning.looking_settings(x), row, card)


@pytest.mark.parametrize(
    ("capability", "name", "dtype", "width", "kind", "queries"),
    [
        (80, "forward_tiles", BFLOAT, 128, "none", 4096),
        (89, "keys_and_values", BFLOAT, 128, "none", 4096),
        (100, "forward_tiles", BFLOAT, 128, "none", 4096),
        (120, "forward_tiles", BFLOAT, 128, "none", 4096),
    ],
)
def test_kernels_compile_and_fit(
    capability: int, name: str, dtype: torch.dtype, width: int, kind: str, queries: int
) -> None:
    x = call(dtype, width, kind, queries, 4096, check_cards.HEADS)
    found, estimated = _taken(name, x, capability, allocate=False)
    assert found.fits(CARDS[capability])
    assert found.shared <= estimated


@pytest.mark.parametrize("capability", [80, 89])
@pytest.mark.parametrize(
    ("name", "dtype", "width", "kind", "queries"),
    [
        ("forward_tiles", BFLOAT, 64, "documents", 512),
        ("forward_tiles", BFLOAT, 64, "holes", 512),
        ("forward_tiles", BFLOAT, 128, "relative", 4096),
        ("forward_tiles", FLOAT, 128, "none", 4096),
        ("forward_tiles", FLOAT, 256, "causal", 40),
        ("forward_tiles", FLOAT, 256, "none", 1),
        ("forward_tiles", BFLOAT, 256, "none", 4096),
        ("_received", BFLOAT, 256, "dense", 4096),
        ("keys_and_values", BFLOAT, 256, "none", 4096),
        ("queries", BFLOAT, 128, "none", 4096),
        ("queries", BFLOAT, 256, "none", 4096),
        ("queries", BFLOAT, 64, "dense", 4096),
        ("_pooled_by_cell", BFLOAT, 128, "causal", 4096),
    ],
)
def test_kernels_are_allocated_no_more_than_was_estimated(
    capability: int, name: str, dtype: torch.dtype, width: int, kind: str, queries: int
) -> None:
    keys = 512 if kind in ("documents", "holes") else 4096
    x = call(dtype, width, kind, queries, keys, check_cards.HEADS)
    found, estimated = _taken(name, x, capability, allocate=True)
    assert found.fits(CARDS[capability])
    assert found.shared <= estimated


@pytest.mark.parametrize(("dtype", "width"), [(FLOAT, 128), (BFLOAT, 256)])
def test_checks_for_hidden_nan_fit_tensor_memory(dtype: torch.dtype, width: int) -> None:
    """They keep four products of all values, and that memory is small."""
    x = call(dtype, width, "causal", 4096, 4096, check_cards.HEADS)
    wanted = launches(100, [partial(forward, x, statistics=True)])
    found = list(taken(wanted, 100, allocate=True))
    assert {one.name for one in found} == {"forward_tiles", "mend"}
    assert all(one.fits(CARDS[100]) for one in found)


def _linear(dtype: torch.dtype, width: int) -> None:
    """Both passes of linear attention, with a limit of keys and a state at the start."""
    q, k = (torch.empty(1, heads, 4096, width, dtype=dtype, device="meta") for heads in (4, 2))
    call = linear.Call("elu_plus_one", True, torch.empty(1, dtype=torch.int32, device="meta"))
    start = torch.empty(1, 2, width, width + 1, device="meta")
    found = linear.forward(call, q, k, k, start)
    linear.backward(call, q, k, k, found, torch.empty_like(q), found.total, None)


def _additive(dtype: torch.dtype, width: int) -> None:
    """Both passes of additive attention."""
    x = replace(
        call(dtype, width, "causal", 512, 512, 2),
        comparison=TanhSum(torch.empty(width, device="meta")),
    )
    found, kept = additive.forward(x, statistics=True)
    additive.backward(x, found, kept, Pull(torch.empty_like(found.out), None, None))


def _recurrent(dtype: torch.dtype, width: int) -> None:
    """Both passes of the gated delta rule, in segments where the width allows it."""
    q, k = (torch.empty(1, heads, 16384, width, dtype=dtype, device="meta") for heads in (4, 2))
    numbers = torch.empty(k.shape[:3], device="meta")
    start = torch.empty(1, 2, width, width, device="meta")
    given = recurrent.Given(q, k, k, numbers, numbers, start)
    found = recurrent.forward(given, 1.0)
    recurrent.backward(given, 1.0, found.kept, torch.empty_like(q), start)


@pytest.mark.parametrize(
    "passes", [_linear, _additive, _recurrent], ids=["linear", "additive", "recurrent"]
)
@pytest.mark.parametrize(("dtype", "width"), [(FLOAT, 256), (BFLOAT, 128)], ids=str)
def test_linear_and_additive_kernels_fit(
    passes: Callable[[torch.dtype, int], None], dtype: torch.dtype, width: int
) -> None:
    """The card that has least memory."""
    wanted = launches(89, [partial(passes, dtype, width)])
    found = list(taken(wanted, 89, allocate=True))
    assert len({one.name for one in found}) >= 4
    assert all(one.fits(CARDS[89]) for one in found)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("passes", "name"),
    [
        (_linear, "outputs"),
        (_linear, "key_gradients"),
        (_additive, "additive_queries"),
        (_recurrent, "query_and_key_gradients"),
    ],
    ids=["outputs", "key_gradients", "additive_queries", "recurrent"],
)
def test_linear_and_additive_kernels_compile(
    capability: int, passes: Callable[[torch.dtype, int], None], name: str
) -> None:
    wanted = launches(capability, [partial(passes, BFLOAT, 64)])
    mine = {what: one for what, one in wanted.items() if one[0].kernel.fn.__name__ == name}
    (found,) = taken(mine, capability, allocate=False)
    assert found.fits(CARDS[capability])


def test_what_does_not_fit_is_seen() -> None:
    """The settings of Hopper on a card with less memory."""
    x = call(BFLOAT, 256, "none", 4096, 4096, check_cards.HEADS)
    wanted = launches(80, [partial(forward, x, statistics=True)])
    (found,) = taken(wanted, 80, allocate=True)
    assert found.fits(CARDS[80])
    assert not found.fits(CARDS[89])
