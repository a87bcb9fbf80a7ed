"""Two calls that differ in one thing, in both orders and again: each is answered for itself.

Whatever is remembered of a kind of call (a plan, a kernel, the layout of a buffer), no call may be
answered with what was remembered of another. Black box: only the public functions are asked.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, biases, masks, scores
from tests.parity import cases
from tests.parity.calls.call import BASES, KINDS, Call, assert_each_right, common, draw, odd

both_kinds = pytest.mark.parametrize("kind", KINDS)
# On a card each kind of call has kernels for each base; on a CPU they share their way.
both = pytest.mark.parametrize(
    ("base", "kind"),
    [(base, kind) for base in BASES for kind in KINDS]
    if cases.DEVICE != "cpu"
    else [("odd", "attention"), ("common", "trace")],
)


def in_turns(base: str, kind: str, one: Call, other: Call) -> None:
    """One order with the one base and the other with the other: what was remembered of the calls
    of one order does not count in the other."""
    order = [one, other] if base == "odd" else [other, one]
    assert_each_right(kind, [*order, order[0]])


# The same numbers, elsewhere in memory.


def transposed(t: Tensor) -> Tensor:
    """As a projection is split into heads."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def crosswise(t: Tensor) -> Tensor:
    """The width is not the last axis in memory."""
    return t.mT.contiguous().mT


def displaced(t: Tensor) -> Tensor:
    """Beginning at an address that no vector load can take."""
    memory = torch.zeros(t.numel() + 1, dtype=t.dtype, device=t.device)
    memory[1:] = t.flatten()
    return memory[1:].view(t.shape)


def in_wider_rows(t: Tensor) -> Tensor:
    """Rows with a gap behind them, so that most begin at an odd address."""
    wider = torch.full((*t.shape[:-1], t.shape[-1] + 1), math.nan, dtype=t.dtype, device=t.device)
    wider[..., :-1] = t
    return wider[..., :-1]


def every_other(t: Tensor) -> Tensor:
    """Every second token of twice as many."""
    twice = torch.full((*t.shape[:2], 2 * t.shape[2], t.shape[3]), math.nan).to(t)
    twice[:, :, ::2] = t
    return twice[:, :, ::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (transposed, crosswise, displaced, in_wider_rows, every_other)
}


@both
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(layout: str, base: str, kind: str) -> None:
    one = BASES[base]()
    in_turns(base, kind, one, one.map_qkv(LAYOUTS[layout]))


@both
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("layout", ["transposed", "displaced"])
def test_layout_of_one_tensor(layout: str, which: str, base: str, kind: str) -> None:
    one = BASES[base]().change(mask=masks.causal())
    in_turns(base, kind, one, one.change(**{which: LAYOUTS[layout](getattr(one, which))}))


def _expanded(t: Tensor, axis: int) -> Tensor:
    return t.narrow(axis, 0, 1).expand(t.shape)


@both
@pytest.mark.parametrize("axis", [0, 1], ids=["batch", "heads"])
def test_keys_expanded(axis: int, base: str, kind: str) -> None:
    """Stride 0, beside the same numbers written out."""
    one = BASES[base]()
    flat = one.change(k=_expanded(one.k, axis), v=_expanded(one.v, axis))
    in_turns(base, kind, flat, flat.map_qkv(Tensor.contiguous))


# Another argument.


def narrowed(call: Call, **to: int) -> Call:
    """Fewer batch entries (B), heads (H, G), queries (Q), keys (K), widths (D, E)."""
    places = {"q": "BHQD", "k": "BGKD", "v": "BGKE"}
    new = {}
    for name, axes in places.items():
        t = getattr(call, name)
        cut = tuple(slice(to.get(axis)) for axis in axes)
        new[name] = t[cut].contiguous()
    return call.change(**new)


def _table(call: Call, seed: int = 0) -> Tensor:
    return draw(*call.q.shape[:3], call.k.shape[2], seed=seed) > -0.3


def _ids(call: Call, size: int) -> Tensor:
    ids = torch.arange(call.k.shape[2]) // size
    return ids.expand(call.q.shape[0], -1).contiguous()


def _sink(call: Call) -> Tensor:
    return draw(call.q.shape[1])


def _relative(call: Call, seed: int = 0) -> biases.Bias:
    return biases.relative(draw(call.q.shape[1], 5, seed=seed))


def _where(remainder: int) -> masks.Mask:
    return masks.where(lambda b, h, q, k: (q + k + b) % 3 != remainder)


Change = Callable[[Call], tuple[Call, Call]]
CHANGES: dict[str, Change] = {
    "float16": lambda c: (c, c.map_qkv(Tensor.half)),
    "float64": lambda c: (c, c.map_qkv(Tensor.double)),
    "bfloat16-float32": lambda c: (c.map_qkv(Tensor.bfloat16), c.map_qkv(Tensor.float)),
    "queries": lambda c: (c, narrowed(c, Q=c.q.shape[2] - 1)),
    "keys": lambda c: (c, narrowed(c, K=c.k.shape[2] - 1)),
    "keys, causal": lambda c: (
        c.change(mask=masks.causal()), narrowed(c, K=c.k.shape[2] - 5).change(mask=masks.causal()),
    ),
    "one query": lambda c: (c.change(mask=masks.causal()),
                            narrowed(c, Q=1).change(mask=masks.causal())),
    "one key": lambda c: (c, narrowed(c, K=1)),
    "batch": lambda c: (c, narrowed(c, B=1)),
    "heads": lambda c: (narrowed(c, G=2), narrowed(c, H=2, G=2)),
    "groups": lambda c: (c, narrowed(c, G=1)),
    "heads and groups": lambda c: (c, narrowed(c, H=2, G=1)),
    "width": lambda c: (c, narrowed(c, D=c.q.shape[3] - 1)),
    "value width": lambda c: (c, narrowed(c, E=c.v.shape[3] - 1)),
    "half the width": lambda c: (c, narrowed(c, D=c.q.shape[3] // 2, E=c.v.shape[3] // 2)),
    "scale": lambda c: (c.change(scale=0.2), c.change(scale=0.3)),
    "a scale": lambda c: (c, c.change(scale=0.7)),
    "a negative scale": lambda c: (c.change(mask=masks.causal()),
                                   c.change(scale=-0.3, mask=masks.causal())),
    "softcap": lambda c: (c.change(softcap=1.5), c.change(softcap=2.5)),
    "a softcap": lambda c: (c, c.change(softcap=1.5)),
    "a mask": lambda c: (c, c.change(mask=masks.causal())),
    "window": lambda c: (c.change(mask=masks.window(5, 3)), c.change(mask=masks.window(6, 3))),
    "window to the right": lambda c: (
        c.change(mask=masks.window(5, 3)), c.change(mask=masks.window(5, 2)),
    ),
    "causal window": lambda c: (
        c.change(mask=masks.causal()), c.change(mask=masks.causal() & masks.window(9)),
    ),
    "offset": lambda c: (
        c.change(mask=masks.causal(offset=0)), c.change(mask=masks.causal(offset=4)),
    ),
    "offset of its own": lambda c: (
        c.change(mask=masks.causal()), c.change(mask=masks.causal(offset=2)),
    ),
    "nothing seen": lambda c: (
        c.change(mask=masks.causal(offset=0)), c.change(mask=masks.causal(offset=-5)),
    ),
    "the other way": lambda c: (
        c.change(mask=masks.causal()), c.change(mask=~masks.causal()),
    ),
    "lengths": lambda c: (
        c.change(mask=masks.padding([4, 21])), c.change(mask=masks.padding([21, 4])),
    ),
    "documents": lambda c: (
        c.change(mask=masks.causal() & masks.documents(_ids(c, 11))),
        c.change(mask=masks.causal() & masks.documents(_ids(c, 7))),
    ),
    "prefix": lambda c: (
        c.change(mask=masks.causal() | masks.prefix(12)),
        c.change(mask=masks.causal() | masks.prefix(13)),
    ),
    "and-or": lambda c: (
        c.change(mask=masks.causal() & masks.prefix(12)),
        c.change(mask=masks.causal() | masks.prefix(12)),
    ),
    "global tokens": lambda c: (
        c.change(mask=masks.window(3, 3) | masks.global_tokens([0])),
        c.change(mask=masks.window(3, 3) | masks.global_tokens([5])),
    ),
    "dilated": lambda c: (
        c.change(mask=masks.causal() & masks.dilated(2)),
        c.change(mask=masks.causal() & masks.dilated(3)),
    ),
    "table": lambda c: (
        c.change(mask=masks.keep(_table(c))), c.change(mask=masks.keep(_table(c, seed=1))),
    ),
    "polarity": lambda c: (
        c.change(mask=masks.keep(_table(c))), c.change(mask=masks.ignore(_table(c))),
    ),
    "table of fewer axes": lambda c: (
        c.change(mask=masks.keep(_table(c))), c.change(mask=masks.keep(_table(c)[:1, :1])),
    ),
    "function": lambda c: (c.change(mask=_where(0)), c.change(mask=_where(1))),
    "a bias": lambda c: (c, c.change(bias=_relative(c))),
    "bias": lambda c: (c.change(bias=_relative(c)), c.change(bias=_relative(c, seed=1))),
    "kind of bias": lambda c: (
        c.change(bias=_relative(c)), c.change(bias=biases.alibi(draw(c.q.shape[1]).abs() / 8)),
    ),
    "dense bias": lambda c: (
        c.change(bias=biases.dense(draw(c.q.shape[2], c.k.shape[2]))),
        c.change(bias=biases.dense(draw(c.q.shape[2], c.k.shape[2], seed=1))),
    ),
    "a sink": lambda c: (c, c.change(sink=_sink(c))),
    "sink": lambda c: (c.change(sink=_sink(c)), c.change(sink=_sink(c) + 1)),
    "training": lambda c: (c.change(dropout=0.3), c.change(dropout=0.3, training=True)),
    "dropout": lambda c: (
        c.change(dropout=0.3, training=True), c.change(dropout=0.4, training=True),
    ),
    "score": lambda c: (c, c.change(score=scores.cosine(0.3))),
    "temperature": lambda c: (
        c.change(score=scores.cosine(0.3)), c.change(score=scores.cosine(0.4)),
    ),
}  # fmt: skip


@both
@pytest.mark.parametrize("change", CHANGES)
def test_argument(change: str, base: str, kind: str) -> None:
    if cases.DEVICE != "cpu" and kind == "attention" and change in ("training", "dropout"):
        pytest.skip("PyTorch's kernels, which attend there, draw weights to drop of their own")
    if cases.DEVICE != "cpu" and kind == "trace" and change == "one key":
        pytest.skip(
            "a fused multiply-add leaves an entropy of 1e-6 where nothing is left to choose"
        )
    in_turns(base, kind, *CHANGES[change](BASES[base]()))


@both
def test_seed_of_dropout(base: str, kind: str) -> None:
    """Drawn for each call anew from PyTorch's generator, and the same again for the same seed."""
    one = BASES[base]()

    def out(seed: int, **how: Any) -> Tensor:
        torch.manual_seed(seed)
        if kind == "attention":
            return regard.attention(one.q, one.k, one.v, **how)
        return regard.trace(one.q, one.k, one.v, **how).out

    dropped = {"dropout": 0.4, "training": True}
    first, again, other = (out(seed, **dropped) for seed in (1, 1, 2))
    following = regard.attention(one.q, one.k, one.v, **dropped)
    torch.testing.assert_close(first, again)
    assert not torch.allclose(first, other, atol=1e-2)
    assert not torch.allclose(other, following, atol=1e-2)
    torch.testing.assert_close(out(1, dropout=0.4), out(2))


# Interpreted kernels take their time: few of them, with few heads.
INTERPRETED = ("keys, causal", "groups", "window", "lengths", "table")


@pytest.mark.interpreted
@pytest.mark.parametrize("change", INTERPRETED)
def test_argument_of_the_kernels(change: str) -> None:
    one, other = CHANGES[change](narrowed(odd(), H=2))
    assert_each_right("trace", [one, other, one], "triton")


@pytest.mark.interpreted
@pytest.mark.parametrize("layout", ["transposed", "displaced"])
def test_layout_for_the_kernels(layout: str) -> None:
    one = narrowed(odd(), H=2)
    assert_each_right("trace", [one, one.map_qkv(LAYOUTS[layout]), one], "triton")


# What wants gradients.

LEARNED = {"nothing": "", "q": "q", "k": "k", "v": "v", "q and v": "qv", "all": "qkv"}


def learning(call: Call, names: str) -> Call:
    return call.change(
        **{n: getattr(call, n).detach().clone().requires_grad_(n in names) for n in "qkv"}
    )


@both
@pytest.mark.parametrize("after", [name for name in LEARNED if name != "all"])
def test_learned_tensors(after: str, base: str, kind: str) -> None:
    one = BASES[base]().change(mask=masks.causal())
    every, some = learning(one, "qkv"), learning(one, LEARNED[after])
    in_turns(base, kind, every, some)
    assert some.ask(kind).found["out"].requires_grad == bool(LEARNED[after])


@both
@pytest.mark.parametrize("which", ["sink", "bias"])
def test_a_learned_option(which: str, base: str, kind: str) -> None:
    fixed, table = draw(4, 5), draw(4, 5).requires_grad_()
    options: dict[str, tuple[Any, Any]] = {
        "sink": (draw(4), draw(4).requires_grad_()),
        "bias": (biases.relative(fixed), biases.relative(table)),
    }
    in_turns(base, kind, *(BASES[base]().change(**{which: option}) for option in options[which]))


@both
def test_parameters(base: str, kind: str) -> None:
    one = learning(BASES[base](), "qkv")
    in_turns(base, kind, one, one.map_qkv(lambda t: torch.nn.Parameter(t.detach().clone())))


# The same tensors with other numbers.


def _shift(t: Tensor) -> None:
    t.copy_(t.roll(1, -1) * 1.25)


@both
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_numbers_changed_in_place(which: str, base: str, kind: str) -> None:
    call = BASES[base]().change(mask=masks.causal())
    for _ in range(3):
        assert_each_right(kind, [call])
        _shift(getattr(call, which))
        call = call.change()


def _kept(base: Call) -> tuple[Tensor, dict[str, Any]]:
    table = _table(base)
    return table, {"mask": masks.keep(table)}


def _kept_causal(base: Call) -> tuple[Tensor, dict[str, Any]]:
    table = _table(base)
    return table, {"mask": masks.causal() & ~masks.keep(table)}


def _padded(base: Call) -> tuple[Tensor, dict[str, Any]]:
    lengths = torch.tensor([4, 21]).to(cases.DEVICE)
    return lengths, {"mask": masks.causal() & masks.padding(lengths)}


def _documents(base: Call) -> tuple[Tensor, dict[str, Any]]:
    ids = _ids(base, 11).to(cases.DEVICE)
    return ids, {"mask": masks.causal() & masks.documents(ids)}


def _from_cpu(base: Call) -> tuple[Tensor, dict[str, Any]]:
    ids = _ids(base, 11).cpu()
    return ids, {"mask": masks.causal() & masks.documents(ids)}


def _padded_from_cpu(base: Call) -> tuple[Tensor, dict[str, Any]]:
    lengths = torch.tensor([4, 21])
    return lengths, {"mask": masks.causal() & masks.padding(lengths)}


def _kept_from_cpu(base: Call) -> tuple[Tensor, dict[str, Any]]:
    table = _table(base).cpu()
    return table, {"mask": masks.keep(table)}


def _biased(base: Call) -> tuple[Tensor, dict[str, Any]]:
    table = draw(base.q.shape[1], 5)
    return table, {"bias": biases.relative(table)}


def _densely_biased(base: Call) -> tuple[Tensor, dict[str, Any]]:
    table = draw(base.q.shape[2], base.k.shape[2])
    return table, {"bias": biases.dense(table)}


def _sunk(base: Call) -> tuple[Tensor, dict[str, Any]]:
    sink = draw(base.q.shape[1])
    return sink, {"sink": sink}


HELD = {
    "table": _kept, "causal and table": _kept_causal, "lengths": _padded, "documents": _documents,
    "documents of a CPU": _from_cpu, "lengths of a CPU": _padded_from_cpu,
    "table of a CPU": _kept_from_cpu, "relative": _biased, "dense": _densely_biased, "sink": _sunk,
}  # fmt: skip


@both
@pytest.mark.parametrize("holder", HELD)
def test_an_option_changed_in_place(holder: str, base: str, kind: str) -> None:
    """The mask, bias or sink is the same object; the tensor in it holds other numbers."""
    one = BASES[base]()
    tensor, option = HELD[holder](one)
    before = tensor.clone()
    for turn in range(4):
        assert_each_right(kind, [one.change(**option)])
        # Past those who count how often a tensor is written to, if that is possible.
        target = torch.from_numpy(tensor.numpy()) if tensor.is_cpu else tensor
        target.copy_(before if turn % 2 else before.flip(-1))
        assert not tensor.equal(before) or turn % 2


@both
@pytest.mark.parametrize("holder", HELD)
def test_an_option_changed_before_the_backward_pass(holder: str, base: str, kind: str) -> None:
    """As a buffer that is filled anew for each part of a batch. Gradients are those of the call as
    it was made, or refused."""
    one = BASES[base]().map_qkv(lambda t: t.requires_grad_())
    for _ in range(3):
        tensor, option = HELD[holder](one)
        call = one.change(**option)
        assert_each_right(kind, [call])
        answer = call.ask(kind)
        tensor.copy_(tensor.flip(-1))
        try:
            call.assert_right(answer)
        except RegardError as error:
            assert "written to before its backward pass" in str(error)  # noqa: PT017
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017


def test_a_mask_made_for_inference_lets_others_learn() -> None:
    one = odd().map_qkv(lambda t: t.requires_grad_())
    with torch.inference_mode():
        lengths = torch.tensor([4, 21], device=cases.DEVICE)
    assert_each_right("attention", [one.change(mask=masks.padding(lengths), softcap=2.0)])


@both
def test_memory_used_again(base: str, kind: str) -> None:
    """Tensors of other shapes, types and numbers at one address, as after a step of training."""
    whole = BASES[base]()
    size = max(t.numel() * t.element_size() for t in (whole.q, whole.k, whole.v))
    memory = [torch.zeros(size, dtype=torch.uint8, device=cases.DEVICE) for _ in range(3)]

    def put(call: Call) -> Call:
        placed = []
        for at, t in zip(memory, (call.q, call.k, call.v), strict=True):
            there = at.view(t.dtype)[: t.numel()].view(t.shape)
            placed.append(there.copy_(t))
        return Call(*placed, call.options)

    shapes = [
        whole,
        narrowed(whole, Q=whole.q.shape[2] - 3),
        narrowed(whole, B=1),
        whole.map_qkv(Tensor.half),
        narrowed(whole, D=whole.q.shape[3] // 2),
        whole.map_qkv(lambda t: t.flip(-1).contiguous()),
        whole,
    ]
    for call in shapes:
        answer = put(call).ask(kind).values()
        assert_each_right(kind, [call])
        # Looked at once the memory holds something else.
        for at in memory:
            at.zero_()
        for name, value in call.ask(kind).values().items():
            torch.testing.assert_close(answer[name], value, rtol=2e-2, atol=2e-2)


@both
def test_a_trace_outlives_the_next(base: str, kind: str) -> None:
    """An answer is a tensor of its own: the next call of the same kind does not write into it."""
    one = BASES[base]().change(mask=masks.causal())
    answer = one.ask(kind)
    kept = {name: value.clone() for name, value in answer.found.items()}
    one.map_qkv(lambda t: t.flip(2).contiguous()).ask(kind)
    for name, value in answer.found.items():
        assert torch.equal(value, kept[name]), name


# NaN and infinities behind a mask, then gone, then back.


@both
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf], ids=str)
def test_hidden_numbers(number: float, base: str, kind: str) -> None:
    lengths = torch.tensor([4, 21]).to(cases.DEVICE)
    clean = learning(BASES[base]().change(mask=masks.padding(lengths)), "qkv")
    wild = learning(clean, "qkv")
    with torch.no_grad():
        for t in (wild.k, wild.v):
            t[0, :, 4:] = number
            t[1, :, 21:] = number
    for answer in [call.ask(kind) for call in (clean, wild, clean, wild)]:
        clean.assert_right(answer)


# Axes and refusals.


@both_kinds
def test_axes(kind: str) -> None:
    """The same numbers as [B, H, N, D], [B, N, D] and [N, D], in turns."""
    one = common()
    q, k, v = (t[:, :1] for t in (one.q, one.k, one.v))
    wanted = Call(q, k, v, {"mask": masks.causal()})
    want = wanted.ask(kind)
    wanted.assert_right(want)
    for _ in range(2):
        for taken in (lambda t: t, lambda t: t[:, 0], lambda t: t[0, 0], lambda t: t[None]):
            got = wanted.map_qkv(taken).ask(kind)
            for name, value in got.found.items():
                torch.testing.assert_close(value, taken(want.found[name]), rtol=2e-2, atol=2e-2)


REFUSED: dict[str, Callable[[Call], Call]] = {
    "heads": lambda c: narrowed(c, H=3),
    "batch": lambda c: c.change(q=c.q[:1]),
    "dtypes": lambda c: c.change(k=c.k.double()),
    "lengths": lambda c: c.change(v=c.v[:, :, 1:]),
    "dropout": lambda c: c.change(dropout=1.5),
    "softcap": lambda c: c.change(softcap=-1.0),
    "sink": lambda c: c.change(sink=draw(7)),
    "table": lambda c: c.change(mask=masks.keep(torch.ones(3, 5).bool())),
    "a bare tensor": lambda c: c.change(mask=_table(c)),
}


@both_kinds
@pytest.mark.parametrize("change", REFUSED)
def test_a_refusal_is_not_forgotten(change: str, kind: str) -> None:
    """Nor does it stay: the call that was right before is right after."""
    one = odd()
    wrong = REFUSED[change](one)
    texts = []
    for _ in range(3):
        assert_each_right(kind, [one])
        with pytest.raises(RegardError) as error:
            wrong.ask(kind)
        texts.append(str(error.value))
    assert len(set(texts)) == 1


@both
def test_a_backend_by_name(base: str, kind: str) -> None:
    one = BASES[base]().change(mask=masks.causal())
    names = ["tiled", "reference"] + (["sdpa"] if kind == "attention" and base == "common" else [])
    for name in names:
        for backend in (None, name, None, name):
            assert_each_right(kind, [one], backend)
    with pytest.raises(RegardError, match="unknown backend"):
        one.ask(kind, "nonesuch")
    assert_each_right(kind, [one])


def test_a_trace_names_the_backend_that_was_asked() -> None:
    one = odd()
    for name in ("tiled", "reference", "tiled"):
        assert regard.trace(one.q, one.k, one.v, backend=name).backend == name
    usual = regard.trace(one.q, one.k, one.v).backend
    assert usual == regard.plan(one.q, one.k, one.v, statistics=True).backend != "reference"


# Threads.


@both_kinds
def test_threads_with_calls_of_their_own(kind: str) -> None:
    chosen = ["a mask", "groups", "window", "bfloat16-float32", "a sink", "lengths"]
    sequences = [[*CHANGES[name](odd()), *CHANGES[name](odd())] for name in chosen]
    together = threading.Barrier(len(sequences))
    troubles: list[BaseException] = []
    # The generator is one for all threads; nothing here draws from it.
    answers: list[list[Any]] = [[] for _ in sequences]

    def work(calls: list[Call], into: list[Any]) -> None:
        try:
            together.wait(10)
            for _ in range(3):
                into.extend((call, call.ask(kind)) for call in calls)
        except BaseException as trouble:
            troubles.append(trouble)

    threads = [
        threading.Thread(target=work, args=both) for both in zip(sequences, answers, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not troubles, troubles
    for found in answers:
        assert len(found) == 12
        for call, answer in found:
            call.assert_right(answer)
