"""Tokens end to end with cu_seqlens: each sequence answers as if it were alone."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.testing import assert_close

import regard
from regard import RegardError, biases, masks
from regard.jagged import inputs as packing
from regard.jagged.cu_seqlens import _READ, read
from regard.masks.tiles import Tiles
from regard.values import Shape

LENGTHS = (3, 7, 1, 0, 5)
ENDS = torch.tensor([0, 3, 10, 11, 11, 16], dtype=torch.int32)
N = 16


@pytest.fixture
def without_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would refuse first, in its own words; and it does not know nested tensors."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=source, dtype=torch.float64)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return numbers(N, 4, 8), numbers(N, 2, 8, seed=1), numbers(N, 2, 3, seed=2)


def alone(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def jagged(x: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(list(x.split(LENGTHS)), layout=torch.jagged).transpose(
        1, 2
    )


def test_answers_are_held_like_the_inputs() -> None:
    q, k, v = qkv()
    t = regard.trace(q, k, v, cu_seqlens=ENDS, mask=masks.causal())
    assert t.out.shape == (N, 4, 3)
    assert t.out.is_contiguous()
    for row in (t.lse, t.max_logit, t.entropy, t.mean_logit, t.received()):
        assert row.shape == (N, 4)
    assert t.top(2).indices.shape == (N, 4, 2)
    assert torch.equal(t.out, regard.attention(q, k, v, cu_seqlens=ENDS, mask=masks.causal()))


def test_each_sequence_has_a_trace() -> None:
    q, k, v = qkv()
    options: dict[str, Any] = {"mask": masks.causal() & masks.window(3), "softcap": 2.0}
    t = regard.trace(q, k, v, cu_seqlens=ENDS, **options)
    assert len(t) == 5
    assert [one.lse.shape for one in t] == [(1, 4, n) for n in LENGTHS]
    start = 0
    for i, cut in enumerate(zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)):
        want = regard.trace(*map(alone, cut), **options, backend="reference")
        rows = slice(start, start := start + LENGTHS[i])
        for name in ("out", "lse", "max_logit", "entropy", "mean_logit"):
            assert_close(alone(getattr(t, name)[rows]), getattr(want, name))
            assert_close(getattr(t[i], name), getattr(want, name))
        assert_close(alone(t.received()[rows]), want.received())
        n = want.top(2).indices.shape[-1]
        assert torch.equal(alone(t.top(2).indices[rows])[..., :n], want.top(2).indices)
        if LENGTHS[i]:
            assert_close(t[i].weights(), want.weights())
            assert_close(t[i, 1:3].map(2), want[:, 1:3].map(2))


@pytest.mark.usefixtures("without_hook")
def test_they_are_the_sequences_of_a_nested_tensor() -> None:
    """One way for both: the same numbers, bit by bit."""
    q, k, v = qkv()
    options: dict[str, Any] = {"mask": masks.causal(), "bias": biases.alibi([0.3, 0.7, 0.1, 0.5])}
    nested = regard.attention(jagged(q), jagged(k), jagged(v), **options)
    out = regard.attention(q, k, v, cu_seqlens=ENDS, **options)
    assert torch.equal(nested.transpose(1, 2).values(), out)


def test_queries_and_keys_may_be_cut_at_different_places() -> None:
    """As when a cache holds the start of each sequence; aligned to the end of each."""
    q, k, v = numbers(6, 4, 8), numbers(N, 2, 8, seed=1), numbers(N, 2, 3, seed=2)
    cut, lengths = torch.tensor([0, 1, 5, 6, 6, 6]), (1, 4, 1, 0, 0)
    out = regard.attention(q, k, v, cu_seqlens=(cut, ENDS), mask=masks.causal())
    pieces = zip(q.split(lengths), k.split(LENGTHS), v.split(LENGTHS), strict=True)
    want = [regard.attention(*map(alone, one), mask=masks.causal())[0] for one in pieces]
    assert_close(out, torch.cat(want, 1).transpose(0, 1))
    t = regard.trace(q, k, v, cu_seqlens=(cut, ENDS), mask=masks.causal() & masks.padding([7] * 5))
    assert_close(t[1].out[0].transpose(0, 1), out[1:5])
    assert_close(t[1].weights().sum(-1), torch.ones(1, 4, 4, dtype=torch.float64))


@pytest.mark.parametrize("backend", ["reference", "tiled", None])
@pytest.mark.parametrize(
    "ends", [torch.tensor([0, N]), (torch.tensor([0, N]), torch.tensor([0, N]))]
)
def test_one_sequence_is_the_plain_call(ends: Any, backend: str | None) -> None:
    q, k, v = qkv()
    options: dict[str, Any] = {
        "mask": masks.causal(),
        "bias": biases.dense(numbers(N, N)[None, None]),
    }
    out = regard.attention(q, k, v, cu_seqlens=ends, **options, backend=backend)
    want = regard.attention(*map(alone, (q, k, v)), **options, backend=backend)
    assert torch.equal(alone(out), want)
    t = regard.trace(q, k, v, cu_seqlens=ends, **options, backend=backend)
    plain = regard.trace(*map(alone, (q, k, v)), **options, backend=backend)
    assert torch.equal(t[0].weights(), plain.weights())
    assert torch.equal(alone(t.lse), plain.lse)


@pytest.mark.parametrize("ends", [[0], [0, 0], [0, 0, 0]])
def test_there_may_be_no_tokens(ends: list[int]) -> None:
    x = torch.zeros(0, 4, 8)
    cut = torch.tensor(ends)
    assert regard.attention(x, x, x, cu_seqlens=cut, mask=masks.causal()).shape == (0, 4, 8)
    t = regard.trace(x, x, x, cu_seqlens=cut, mask=masks.causal())
    assert len(t) == len(ends) - 1
    assert [one.lse.shape for one in t] == [(1, 4, 0)] * len(t)


def test_masks_of_each_sequence() -> None:
    """Lengths speak of sequences as of batch entries."""
    x = numbers(8, 2, 4)
    out = regard.attention(x, x, x, cu_seqlens=torch.tensor([0, 3, 8]), mask=masks.padding([2, 4]))
    for start, stop, seen in ((0, 3, 2), (3, 8, 4)):
        one = alone(x[start:stop])
        assert_close(
            alone(out[start:stop]), regard.attention(one, one, one, mask=masks.padding([seen]))
        )


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal() & masks.window(10, None),
        masks.window(None, 1) & masks.window(3, 1),
        ~(masks.causal() & masks.window(2)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("keys", [[1, 1], [2, 1], [0, 1]], ids=str)
def test_queries_before_all_keys(keys: list[int], mask: masks.Mask, backend: str) -> None:
    """They are farther from the keys than any key is from another, and what masks nothing between
    keys still masks them."""
    queries = [3, 5]
    q, k = torch.randn(sum(queries), 2, 4), torch.randn(sum(keys), 2, 4)
    ends = tuple(torch.tensor([0, *n]).cumsum(0).int() for n in (queries, keys))
    found = regard.attention(q, k, k, cu_seqlens=ends, mask=mask, backend=backend)
    for part, own, n in zip(found.split(queries), k.split(keys), range(2), strict=True):
        mine = q.split(queries)[n]
        wanted = regard.attention(
            *(t.transpose(0, 1)[None] for t in (mine, own, own)), mask=mask, backend="reference"
        )
        assert_close(part, wanted[0].transpose(0, 1))


def test_a_trace_can_be_cut_from_autograd() -> None:
    x = numbers(N, 2, 4).requires_grad_()
    t = regard.trace(x, x, x, cu_seqlens=ENDS).detach()
    assert not t.out.requires_grad
    assert not t[1].out.requires_grad


def test_transforms_of_functions() -> None:
    q, k, v = qkv()

    def total(q: Tensor) -> Tensor:
        return regard.attention(q, k, v, cu_seqlens=ENDS, mask=masks.causal()).square().sum()

    learned = q.clone().requires_grad_()
    (want,) = torch.autograd.grad(total(learned), [learned])
    assert_close(grad(total)(q), want)
    assert_close(jvp(total, (q,), (k.repeat(1, 2, 1),))[1], (want * k.repeat(1, 2, 1)).sum())
    assert_close(vmap(grad(total))(torch.stack([q, q])), torch.stack([want, want]))


def test_sequences_are_the_same_for_all_of_a_map() -> None:
    q, k, v = qkv()
    with pytest.raises(RegardError, match="cu_seqlens cannot be read here") as error:
        vmap(lambda ends: regard.attention(q, k, v, cu_seqlens=ends))(torch.stack([ENDS, ENDS]))
    assert "the same sequences for all of a map" in str(error.value)


def test_layers_share_a_mask_and_what_is_made_of_it() -> None:
    x = numbers(N, 2, 4)
    first, again = (
        regard.trace(x, x, x, cu_seqlens=ENDS.clone(), mask=masks.causal()) for _ in "ab"
    )
    assert first.inputs.mask is again.inputs.mask
    other = regard.trace(x, x, x, cu_seqlens=ENDS, mask=masks.window(2))
    assert other.inputs.mask is not first.inputs.mask
    # A tensor in a mask may be another by the next call.
    lengths = torch.tensor([3, 7, 1, 0, 5])
    before = regard.attention(x, x, x, cu_seqlens=ENDS, mask=masks.padding(lengths))
    lengths.clamp_max_(1)
    after = regard.attention(x, x, x, cu_seqlens=ENDS, mask=masks.padding(lengths))
    assert not torch.allclose(before, after)
    for n in range(30):
        regard.attention(x, x, x, cu_seqlens=torch.tensor([0, n % 16, 16]))
    assert len(packing._MASKS) <= packing._ROOM


def test_a_mask_of_ones_own_may_change() -> None:
    @dataclass(eq=False)
    class Until(masks.Mask):
        place: int

        def bind(self, shape: Shape, device: torch.device) -> masks.Mask:
            return self

        def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k <= self.place) & (q >= 0)

        def judge(self, tiles: Tiles) -> Tensor:
            return torch.ones(1, 1, len(tiles.q0), dtype=torch.int8)

    x, first, second = numbers(N, 2, 4), Until(1), Until(1)
    before = regard.attention(x, x, x, cu_seqlens=ENDS, mask=first)
    first.place = 3
    assert_close(regard.attention(x, x, x, cu_seqlens=ENDS, mask=second), before)
    assert not torch.allclose(regard.attention(x, x, x, cu_seqlens=ENDS, mask=first), before)


def test_what_is_remembered_serves_with_and_without_gradients() -> None:
    x = numbers(N, 2, 4).requires_grad_()
    cut = torch.tensor([0, 2, 9, 16])
    with torch.inference_mode():
        regard.attention(x, x, x, cu_seqlens=cut, mask=masks.causal())
    regard.attention(x, x, x, cu_seqlens=cut, mask=masks.causal(), backend="tiled").sum().backward()
    assert x.grad is not None


def test_writing_into_cu_seqlens_is_seen() -> None:
    x, cut = numbers(N, 2, 4), torch.tensor([0, 4, 16])
    before = regard.attention(x, x, x, cu_seqlens=cut)
    cut.numpy()[1] = 9
    after = regard.attention(x, x, x, cu_seqlens=cut)
    assert not torch.allclose(before, after)
    assert_close(after, regard.attention(x, x, x, cu_seqlens=torch.tensor([0, 9, 16])))


@pytest.mark.usefixtures("without_hook")
def test_on_a_card_they_are_read_once() -> None:
    class Far:
        """A tensor of a card, as far as reading knows."""

        device, _version, times = torch.device("cuda"), 0, 0

        def is_inference(self) -> bool:
            return False

        def tolist(self) -> list[int]:
            self.times += 1
            return [0, 3]

    far: Any = Far()
    assert read(far) == read(far) == (0, 3)
    assert far.times == 1
    far._version = 1
    read(far)
    assert far.times == 2
    known = len(_READ)
    del far
    assert len(_READ) == known - 1


def test_a_plan_counts_each_sequence() -> None:
    q = torch.empty(3000, 2, 4, device="meta")
    cut = torch.tensor([0, 2000, *range(2001, 3001)])
    plan = regard.plan(q, q, q, cu_seqlens=cut, mask=masks.causal())
    assert plan.flops_needed == 2 * 2 * 8 * (2000 * 2001 // 2 + 1000)


def test_a_watcher_sees_one_call() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return regard.attention(
                x, x, x, cu_seqlens=torch.tensor([0, 3, 8]), mask=masks.causal()
            )

    model, x = torch.nn.Sequential(Layer()), numbers(8, 2, 4)
    with regard.watch(model, keep="traces") as seen:
        out = model(x)
    assert_close(out, model(x))
    assert repr(seen["0"].trace.mask) == "packed(causal(), [3, 5], [3, 5])"
    assert not seen["0"].trace.weights()[0, :, 3:, :3].any()


@pytest.mark.compiled
def test_compiled_calls_run_between_graphs_or_are_refused() -> None:
    def call(x: Tensor, ends: Tensor) -> Tensor:
        return 2 * regard.attention(x + 1, x, x, cu_seqlens=ends, mask=masks.causal())

    x = numbers(N, 2, 4).requires_grad_()
    with warnings.catch_warnings():
        # The compiler deprecates parts of itself while it works.
        warnings.simplefilter("ignore")
        compiled = torch.compile(call, backend="eager")
        for ends in (ENDS, torch.tensor([0, 9, 16])):
            got, want = compiled(x, ends), call(x, ends)
            assert_close(got, want)
            assert_close(torch.autograd.grad(got.sum(), x), torch.autograd.grad(want.sum(), x))
        torch.compiler.reset()
        with pytest.raises(Exception, match="regard reads cu_seqlens"):
            torch.compile(call, fullgraph=True, backend="eager")(x, ENDS)


X = numbers(8, 2, 4)
META = torch.zeros(3, dtype=torch.int32, device="meta")
REFUSED: dict[str, tuple[Any, Any, list[str]]] = {
    "lengths": ((X, X, X), [3, 5], ["tells where sequences begin and end", "list of int, int"]),
    "half": ((X, X, X), (ENDS, 8), ["tuple of Tensor, int", "a pair of them"]),
    "nothing in it": ((X, X, X), [], ["list of nothing"]),
    "no tensor": ((X, X, X), 8, ["begin and end", "got:      int", "int32 or int64 tensor"]),
    "three": ((X, X, X), (ENDS,) * 3, ["tuple of Tensor, Tensor, Tensor", "a pair of them"]),
    "floats": (
        (X, X, X),
        torch.tensor([0.0, 3.0, 8.0]),
        ["cu_seqlens counts tokens in whole numbers", "float32", "cu_seqlens.to(torch.int32)"],
    ),
    "a late start": (
        (X, X, X),
        torch.tensor([3, 8]),
        ["cu_seqlens does not begin at 0", "[3, 8]", "lengths.cumsum(0), (1, 0)"],
    ),
    "a way down": (
        (X, X, X),
        torch.tensor([0, 5, 3, 8]),
        ["cu_seqlens goes down", "[0, 5, 3, 8]", "equal neighbours are an empty sequence"],
    ),
    "an early end": (
        (X, X, X),
        torch.tensor([0, *range(1, 8)]),
        [
            "does not end at the number of tokens",
            "[0, 1, 2, 3, 4, 5, 6, 7] for q [8, 2, 4]",
            "8 as",
        ],
    ),
    "many": (
        (X, X, X),
        torch.arange(20),
        ["[0, 1, 2, 3, …, 16, 17, 18, 19] for q [8, 2, 4], which has 8 tokens"],
    ),
    "one for two lengths": (
        (X, X[:5], X[:5]),
        torch.tensor([0, 3, 8]),
        ["cu_seqlens does not end at the number of tokens", "for k [5, 2, 4]"],
    ),
    "keys that end elsewhere": (
        (X, X[:5], X[:5]),
        (torch.tensor([0, 8]), torch.tensor([0, 4])),
        ["cu_seqlens_k does not end at the number of tokens", "[0, 4] for k [5, 2, 4]"],
    ),
    "other numbers of sequences": (
        (X, X, X),
        (torch.tensor([0, 3, 8]), torch.tensor([0, 8])),
        ["different numbers of sequences", "q 2, k 1", "cu_seqlens_q and cu_seqlens_k as long"],
    ),
    "a batch axis": (
        (X, X, X),
        torch.tensor([[0, 3, 8]]),
        ["cu_seqlens is one list for all sequences, without a batch axis", "[1, 3]"],
    ),
    "nothing": ((X, X, X), torch.tensor([], dtype=torch.int32), ["[0]", "for no sequences: [0]"]),
    "a batch": (
        (X[None], X[None], X[None]),
        torch.tensor([0, 3, 8]),
        ["without a batch axis", "q [1, 8, 2, 4]", "q [total_q, H, D]", "t[0]"],
    ),
    "nested": ((jagged(numbers(N, 2, 4)),) * 3, ENDS, ["bring their lengths along", "q nested"]),
    "another device": (
        (X, X, X),
        META,
        ["cu_seqlens lives on another device", "meta, while q is on cpu", "cu_seqlens.to('cpu')"],
    ),
    "no tokens": ((8, X, X), ENDS, ["q must be a tensor"]),
    "fewer values": ((X, X, X[:5]), torch.tensor([0, 8]), ["each key needs its value"]),
}


@pytest.mark.usefixtures("without_hook")
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("call", [regard.attention, regard.trace, regard.plan])
def test_what_is_refused(call: Any, name: str) -> None:
    given, cut, words = REFUSED[name]
    with pytest.raises(RegardError) as error:
        call(*given, cu_seqlens=cut)
    for word in words:
        assert word in str(error.value)


OPTIONS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a function of places": (
        {"bias": biases.pairwise(lambda b, h, q, k: q * k)},
        ["a function of pairs, for sequences that have no length in common", "alibi(slopes)"],
    ),
    "a table": (
        {"bias": biases.dense(torch.zeros(1, 1, 8, 8, dtype=torch.float64))},
        ["a tensor of pairs, for sequences that have no length in common"],
    ),
    "a bare mask": ({"mask": torch.ones(8, 8) > 0}, ["a bare mask tensor"]),
}


@pytest.mark.usefixtures("without_hook")
@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_mean_nothing_here(name: str) -> None:
    options, words = OPTIONS[name]
    with pytest.raises(RegardError) as error:
        regard.attention(X, X, X, cu_seqlens=torch.tensor([0, 3, 8]), **options)
    for word in words:
        assert word in str(error.value)
