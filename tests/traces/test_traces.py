"""The Trace: how it prints, is cut, moved and asked, and what it never allocates."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regard
from regard import RegardError, Trace, biases, masks, scores
from regard.backends.tiled.backward import Backward
from regard.backends.tiled.forward import forward

BACKENDS = ("reference", "tiled")
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def qkv(B: int = 3, H: int = 4, G: int = 2, Q: int = 5, K: int = 6, D: int = 4) -> list[Tensor]:
    return [numbers(B, H, Q, D), numbers(B, G, K, D, seed=1), numbers(B, G, K, D, seed=2)]


REPRS = {
    "plain": (
        lambda: regard.trace(*qkv(G=4)),
        "Trace(batch 3, heads 4, queries 5, keys 6, width 4, float32 on cpu, by tiled)",
    ),
    "grouped": (
        lambda: regard.trace(*qkv(), mask=masks.causal() & masks.window(3)),
        "Trace(batch 3, heads 4 over 2, queries 5, keys 6, width 4, float32 on cpu, "
        "mask=causal() & window(3), by tiled)",
    ),
    "two-axes": (
        lambda: regard.trace(*(t[0, 0].bfloat16() for t in qkv()), backend="reference"),
        "Trace(batch 1, heads 1, queries 5, keys 6, width 4, bfloat16 on cpu, by reference)",
    ),
    "all-said": (
        lambda: regard.trace(
            *qkv(G=4),
            mask=masks.causal(),
            bias=biases.relative(numbers(4, 7)),
            softcap=30.0,
            sink=numbers(4),
            scale=0.3,
        ),
        "Trace(batch 3, heads 4, queries 5, keys 6, width 4, float32 on cpu, mask=causal(), "
        "bias=relative, softcap=30, a sink per head, scale=0.3, by tiled)",
    ),
    "default-scale": (
        lambda: regard.trace(*qkv(G=4), scale=0.5),
        "Trace(batch 3, heads 4, queries 5, keys 6, width 4, float32 on cpu, by tiled)",
    ),
    "no-dot": (
        lambda: regard.trace(*qkv(G=4), score=scores.distance()),
        "Trace(batch 3, heads 4, queries 5, keys 6, width 4, float32 on cpu, by tiled)",
    ),
}


@pytest.mark.parametrize("kind", REPRS)
def test_repr(kind: str) -> None:
    make, text = REPRS[kind]
    assert repr(make()) == text


@every_backend
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_answers_have_the_axes_of_the_inputs(backend: str, rank: int) -> None:
    axes = {4: (3, 4), 3: (3,), 2: ()}[rank]
    q, k, v = numbers(*axes, 5, 4), numbers(*axes, 6, 4), numbers(*axes, 6, 2)
    t = regard.trace(q, k, v, mask=masks.causal(), backend=backend)
    assert t.out.shape == (*axes, 5, 2)
    for name in ("lse", "max_logit", "entropy", "mean_logit", "std_logit", "min_logit"):
        assert getattr(t, name).shape == (*axes, 5)
    assert t.received().shape == (*axes, 6)
    assert t.top(3).values.shape == t.top(3).indices.shape == (*axes, 5, 3)
    assert t.top(99).values.shape == (*axes, 5, 6)
    assert t.weights().shape == (*axes, 5, 6)
    assert t.weights(queries=[1], keys=slice(0, 2)).shape == (*axes, 1, 2)
    assert t.mass(0).shape == (*axes, 5)
    assert t.map(3).shape == (*axes, 3, 3)
    assert t.map((2, 4)).shape == (*axes, 2, 4)
    assert t.map(99).shape == (*axes, 5, 6)
    assert t.map(3, queries=(1, 3), keys=(2, 2)).shape == (*axes, 2, 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_statistics_are_at_least_float32(dtype: torch.dtype) -> None:
    t = regard.trace(*(x.to(dtype) for x in qkv()))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert t.out.dtype == dtype
    found = (t.lse, t.max_logit, t.entropy, t.received(), t.weights(), t.map(2), t.top(2).values)
    assert {x.dtype for x in found} == {wide}


PER_HEAD = {
    "plain": lambda: {},
    "mask-per-head": lambda: {"mask": masks.keep(numbers(3, 4, 5, 6, seed=3) > -0.5)},
    "mask-per-batch": lambda: {"mask": masks.causal() & masks.padding([2, 6, 4])},
    "documents": lambda: {"mask": masks.documents(torch.arange(18).view(3, 6) // 4)},
    "alibi": lambda: {"bias": biases.alibi([0.1, 0.3, 1.0, 2.0])},
    "relative": lambda: {"bias": biases.relative(numbers(4, 7))},
    "relative-shared": lambda: {"bias": biases.relative(numbers(1, 7))},
    "dense": lambda: {"bias": biases.dense(numbers(3, 4, 5, 6))},
    "dense-shared": lambda: {"bias": biases.dense(numbers(1, 4, 1, 6))},
    "sink": lambda: {"sink": numbers(4)},
    "additive": lambda: {
        "score": scores.additive(numbers(4, 3), numbers(4, 3, seed=1), numbers(4, 3))
    },
    "general": lambda: {"score": scores.general(numbers(4, 4, 4))},
    "cosine": lambda: {"score": scores.cosine(torch.tensor([0.1, 0.2, 0.5, 1.0]))},
    "softcap": lambda: {"softcap": 1.0},
}

PARTS: dict[str, tuple[Any, list[int], list[int]]] = {
    "one": (0, [0], [0, 1, 2, 3]),
    "last": (-1, [2], [0, 1, 2, 3]),
    "batch": (slice(1, None), [1, 2], [0, 1, 2, 3]),
    "heads": ((0, [1, 3]), [0], [1, 3]),
    "a-group": ((None, slice(2, 4)), [0, 1, 2], [2, 3]),
    "backwards": (([2, 0], [3, 0, 1]), [2, 0], [3, 0, 1]),
    "one-head": ((slice(None), -2), [0, 1, 2], [2]),
    "all-heads": ((range(2), slice(None)), [0, 1], [0, 1, 2, 3]),
    "booleans": (([True, False, True], torch.tensor([False, True, True, True])), [0, 2], [1, 2, 3]),
}


def answers(t: Trace) -> dict[str, Tensor]:
    """Computed when asked for, by another question each."""
    return {
        "mean_logit": t.mean_logit, "weights": t.weights(), "received": t.received(),
        "map": t.map(3), "top": t.top(2).values, "mass": t.mass([0, 2]),
    }  # fmt: skip


@cache
def whole(backend: str, call: str) -> tuple[Trace, dict[str, Tensor]]:
    t = regard.trace(*qkv(), **PER_HEAD[call](), backend=backend)
    return t, answers(t)


@every_backend
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("call", PER_HEAD)
def test_a_part_answers_like_the_part_of_the_whole(backend: str, call: str, part: str) -> None:
    t, told = whole(backend, call)
    which, batch, heads = PARTS[part]
    some = t[which]
    assert isinstance(some, Trace)
    for name in ("out", "lse", "max_logit", "entropy"):
        assert torch.equal(getattr(some, name), getattr(t, name)[batch][:, heads])
    for name, answer in answers(some).items():
        assert_close(answer, told[name][batch][:, heads])
    few = some.weights(queries=[3, 1], keys=slice(1, 5))
    assert_close(few, told["weights"][batch][:, heads][:, :, [3, 1]][..., 1:5])


def test_a_part_of_a_part() -> None:
    t = regard.trace(*qkv(), sink=numbers(4))
    assert_close(t[1:, [0, 2, 3]][1, [-1]].weights(), t.weights()[2:3, 3:4])


def test_weights_of_some_heads() -> None:
    t = regard.trace(*qkv(), bias=biases.alibi([0.1, 0.3, 1.0, 2.0]))
    for heads, places in (
        (2, [2]),
        ([3, 0], [3, 0]),
        (slice(1, 3), [1, 2]),
        (range(0, 4, 2), [0, 2]),
        ([-1], [3]),
    ):
        assert_close(t.weights(heads=heads), t.weights()[:, places])


CHOICES: dict[str, tuple[Any, list[int]]] = {
    "index": (2, [2]),
    "negative": (-1, [4]),
    "slice": (slice(1, 4), [1, 2, 3]),
    "steps": (slice(None, None, 2), [0, 2, 4]),
    "backwards": (slice(None, None, -2), [4, 2, 0]),
    "an-empty-slice": (slice(4, 1), []),
    "before-the-first": (slice(3, -4), []),
    "range": (range(1, 5, 2), [1, 3]),
    "list": ([4, 0, 0], [4, 0, 0]),
    "negatives": ([-5, -1], [0, 4]),
    "tuple": ((1, 3), [1, 3]),
    "tensor": (torch.tensor([3, -2]), [3, 3]),
    "small-integers": (torch.tensor([3, 1], dtype=torch.int32), [3, 1]),
    "booleans": ([False, True, False, False, True], [1, 4]),
    "boolean-tensor": (torch.arange(5) > 2, [3, 4]),
    "nothing": (slice(0, 0), []),
    "no-true": (torch.zeros(5, dtype=torch.bool), []),
}


@every_backend
@pytest.mark.parametrize("choice", CHOICES)
def test_ways_to_choose(backend: str, choice: str) -> None:
    chosen, places = CHOICES[choice]
    t = regard.trace(*qkv(K=5), mask=masks.causal(), backend=backend)
    whole = t.weights()
    assert_close(t.weights(queries=chosen), whole[:, :, places])
    assert_close(t.weights(keys=chosen), whole[..., places])
    assert_close(t.weights(queries=chosen, keys=chosen), whole[:, :, places][..., places])
    # The keys of a mass are a set.
    assert_close(t.mass(chosen), whole[..., sorted({*places})].sum(-1))


REFUSED: dict[str, tuple[Any, str]] = {
    "past-the-end": (5, "queries: index out of range\n  got:      [5]\n  accepted: -5 to 4"),
    "before-the-start": ([0, -6], "accepted: -5 to 4"),
    "floats": (torch.tensor([0.5]), "queries cannot be chosen by this"),
    "two-axes": ([[0, 1]], "an index, a slice, a list of indices, or 5 booleans"),
    "too-few-booleans": ([True, False], "or 5 booleans"),
    "text": (
        "a",
        "queries cannot be chosen by this\n  got:      'a'\n  accepted: an index",
    ),
    "one-boolean": (True, "queries cannot be chosen by this"),
    "nothing-in-a-list": ([None], "got:      [None]"),
    "a-set": ({1}, "got:      {1}"),
    "complex": (torch.tensor([1j]), "queries cannot be chosen by this"),
    "a-slice-of-words": (slice("a", 5), "got:      slice('a', 5, None)"),
    "a-slice-without-steps": (slice(0, 5, 0), "got:      slice(0, 5, 0)"),
}


@pytest.mark.parametrize("choice", REFUSED)
def test_choices_that_are_refused(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Outside the tests nobody checks annotations.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    chosen, text = REFUSED[choice]
    t = regard.trace(*qkv())
    if isinstance(chosen, list) and isinstance(chosen[0], list):
        chosen = torch.tensor(chosen)
    with pytest.raises(RegardError) as error:
        t.weights(queries=chosen)
    assert text in str(error.value)


def test_questions_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    t = regard.trace(*qkv())
    with pytest.raises(RegardError, match="top counts keys"):
        t.top(0)
    with pytest.raises(RegardError, match="map counts cells"):
        t.map((3, 0))
    with pytest.raises(RegardError, match=r"a region of keys is \(start, stop\)"):
        t.map(3, keys=(2, 7))
    with pytest.raises(RegardError, match="a region of queries"):
        t.map(3, queries=(3, 2))
    with pytest.raises(RegardError, match=r"must be a whole number\n  got:      '3' \(str\)"):
        t.top("3")
    with pytest.raises(RegardError, match=r"top: n must be a whole number\n  got:      2.5"):
        t.top(2.5)
    with pytest.raises(RegardError, match="a number of cells must be a whole number"):
        t.map("a")
    with pytest.raises(RegardError, match="a number of cells must be a whole number"):
        t.map((2, 2.5))
    with pytest.raises(RegardError, match=r"cells are a number, or \(rows, columns\)"):
        t.map((1, 2, 3))
    for region in (
        "ab",
        5,
        slice(0, 5, 2),
        slice("a", 5),
        range(0, 4, 2),
        range(0, 9),
        (0, 1, 2),
        (-1, 2),
    ):
        with pytest.raises(RegardError, match=r"a region of queries is \(start, stop\)") as error:
            t.map(4, queries=region)
        assert "0 <= start <= stop <= 5; or a slice or range without steps" in str(error.value)
    with pytest.raises(RegardError, match="an end of a region of keys must be a whole"):
        t.map(4, keys=(0, 2.5))
    flat = regard.trace(*(x[0, 0] for x in qkv()))
    with pytest.raises(RegardError, match="heads= needs inputs that have heads"):
        flat.weights(heads=[0])
    with pytest.raises(RegardError, match="heads= needs inputs that have heads"):
        flat.logits(heads=[0])


def test_a_region_can_be_a_slice_or_a_range() -> None:
    t = regard.trace(*qkv())
    wanted = t.map(2, queries=(1, 4), keys=(0, 6))
    for rows, columns in (
        (slice(1, 4), slice(None)),
        (range(1, 4), range(6)),
        (slice(1, -1), slice(0, 99)),
        (slice(1, 4, 1), (0, 6)),
    ):
        assert torch.equal(t.map(2, queries=rows, keys=columns), wanted)
    assert t.map(2, queries=slice(4, 1)).shape == (3, 4, 0, 2)


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_a_trace_gives_one_of_each_batch_entry(rank: int) -> None:
    axes = {4: (3, 4), 3: (3,), 2: ()}[rank]
    x = numbers(*axes, 5, 4)
    t = regard.trace(x, x, x, mask=masks.causal())
    each = list(t)
    assert len(t) == len(each) == (1 if rank == 2 else 3)
    assert_close(torch.cat([one.lse.view(-1, 5) for one in each]), t.lse.view(-1, 5))
    assert bool(regard.trace(*qkv())[:0])


@every_backend
@pytest.mark.parametrize("call", PER_HEAD)
def test_logits_are_what_the_weights_are_made_of(backend: str, call: str) -> None:
    t = regard.trace(*qkv(), **PER_HEAD[call](), backend=backend)
    s = t.logits()
    assert_close((s - t.lse[..., None]).exp(), t.weights())
    assert_close(s.amax(-1), t.max_logit)
    assert_close(t.logits(queries=[3, 1], keys=slice(1, 5)), s[:, :, [3, 1]][..., 1:5])
    assert_close(t.logits(heads=[2]), s[:, 2:3])


@every_backend
def test_logits_are_exact_where_weights_are_nothing(backend: str) -> None:
    q, k, v = qkv(G=4)
    t = regard.trace(1e3 * q, k, v, mask=masks.causal(), backend=backend)
    seen = masks.causal().dense(5, 6).expand(3, 4, 5, 6)
    wanted = (1e3 * q.double()) @ k.double().mT / 2
    assert (t.weights()[seen] == 0).any()
    assert_close(t.logits()[seen].double(), wanted[seen], rtol=1e-5, atol=1e-3)
    assert (t.logits()[~seen] == -torch.inf).all()


@every_backend
def test_logits_are_differentiable(backend: str) -> None:
    q, k, v = (t.double().requires_grad_() for t in qkv(B=1, H=2, G=1, Q=3, K=4, D=2))

    def ask(q: Tensor, k: Tensor) -> Tensor:
        return regard.trace(q, k, v, softcap=2.0, backend=backend).logits(queries=[0, 2])

    assert torch.autograd.gradcheck(ask, (q, k))


@every_backend
def test_weights_are_differentiable(backend: str) -> None:
    q, k, v = (t.double().requires_grad_() for t in qkv(B=1, H=2, G=1, Q=3, K=4, D=2))

    def ask(q: Tensor, k: Tensor) -> Tensor:
        t = regard.trace(q, k, v, mask=masks.causal(), softcap=2.0, backend=backend)
        return torch.cat(
            [t.weights(queries=[0, 2], keys=[1, 3]).flatten(), t.mass([0, 2]).flatten()]
        )

    assert torch.autograd.gradcheck(ask, (q, k))
    (slope,) = torch.autograd.grad(ask(q, k).sum(), q)
    assert slope.any()


@every_backend
def test_detach_cuts_a_trace_from_autograd(backend: str) -> None:
    q, k, v = (t.requires_grad_() for t in qkv())
    table, sink = numbers(4, 7).requires_grad_(), numbers(4).requires_grad_()
    t = regard.trace(q, k, v, bias=biases.relative(table), sink=sink, backend=backend)
    still = t.detach()
    assert t.out.requires_grad
    assert t.weights().requires_grad
    for answer in (still.out, still.lse, still.entropy, still.weights(), still.mass(0)):
        assert not answer.requires_grad
    assert not any(x.requires_grad for x in still.inputs.tensors())
    assert torch.equal(still.weights(), t.weights())
    assert q.requires_grad


def test_to_moves_everything() -> None:
    t = regard.trace(
        *qkv(),
        mask=masks.causal() & masks.padding([2, 6, 4]),
        bias=biases.relative(numbers(4, 7)),
        score=scores.additive(numbers(4, 3), numbers(4, 3, seed=1), numbers(4, 3)),
        sink=numbers(4),
    )
    away = t.to("meta")
    assert {x.device.type for x in (*away.inputs.tensors(), *away.rows)} == {"meta"}
    assert len(away.inputs.tensors()) == 7
    assert "on meta" in repr(away)
    assert away.lse.shape == t.lse.shape
    assert t.out.device.type == "cpu"
    back = t.to("cpu")
    assert torch.equal(back.weights(), t.weights())


class Largest(TorchDispatchMode):
    """Remembers the largest storage that any operation gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return out


N = 4096
LONG: dict[str, masks.Mask | None] = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.causal() & masks.window(100),
    "padding": masks.causal() & masks.padding([3000]),
}


def largest(ask: Any) -> int:
    with Largest() as seen:
        ask()
    return seen.bytes


def test_the_meter_sees_a_matrix() -> None:
    q, k, v = qkv(B=1, H=1, G=1, Q=512, K=512, D=16)
    assert largest(lambda: regard.trace(q, k, v, backend="reference")) >= 512 * 512 * 4
    assert largest(lambda: regard.trace(q, k, v).weights()) >= 512 * 512 * 4


@pytest.mark.parametrize("kind", LONG)
def test_nothing_of_n_by_n_is_ever_allocated(kind: str) -> None:
    q, k, v = qkv(B=1, H=1, G=1, Q=N, K=N, D=16)
    dense = N * N * 4

    t = regard.trace(q, k, v, mask=LONG[kind]).detach()

    def ask() -> None:
        # The passes inside the operators, where the meter does not reach on its own.
        passed = forward(t.inputs, statistics=True)
        Backward(t.inputs, passed, t.out, t.lse, t.entropy, bias=False).run()
        assert torch.equal(passed.rows.out, t.out)
        t.received()
        t.map(64)
        t.map(64, queries=(100, 3000), keys=(0, 2000), pool="max")
        t.top(8)
        t.mass(0)
        t.weights(queries=[5, N - 1])
        _ = t.mean_logit

    # A tile of logits is 2^17 numbers or more, whatever the length.
    assert (1 << 17) * 4 <= largest(ask) <= dense / 16
