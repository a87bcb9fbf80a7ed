"""Calls that ranks share, each held to the formulas over all pairs."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import regard
from regard import RegardError, biases, masks, parallel, scores
from regard.backends.questions import differentiable
from regard.parallel import Layout, choice, collectives
from regard.parallel.methods.ring.block_questions import OfRows
from regard.parallel.ranks import ranks_of
from tests.parallel import dtensor_cases
from tests.parallel.dense_formulas import BLOCK, BLOCKS, HEADS, KEYS, MAP, QUERIES, REGION, Whole

N = 37
"""Tokens: as many as fit no number of ranks."""
LENGTHS = [9, 1, 20, 7]
IDS = torch.tensor([i for i, n in enumerate(LENGTHS) for _ in range(n)])
MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.causal() & masks.window(6),
    "documents": masks.causal() & masks.documents(IDS),
    # The second sequence has no keys: nothing of it sees anything.
    "padding": masks.causal() & masks.padding([30, 0]),
}
LAYOUTS: dict[str, Callable[[int], Layout]] = {
    "contiguous": partial(parallel.contiguous, N),
    "zigzag": partial(parallel.zigzag, N),
    "by_document": partial(parallel.by_document, LENGTHS),
}
METHODS = ("ulysses", "all_gather", "ring")
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
ROWS = ("out", "lse", "entropy", "max_logit", "mean_logit", "std_logit", "min_logit", "mass", "top",
        "recall")  # fmt: skip
LEARNED = ("out", "lse", "entropy", "max_logit", "mean_logit", "mass", "received", "weights", "map",
           "map sum", "map max", "recall", "mean recall", "target", "target of some")  # fmt: skip


def inputs(groups: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sizes = (2, 4, N, 8), (2, groups, N, 8), (2, groups, N, 5)
    return [torch.randn(n, generator=draw, dtype=torch.float64).to(dtype) for n in sizes]


def weights_of_loss(answers: dict[str, Tensor]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(t.shape, generator=draw, dtype=torch.float64).to(t.dtype)
        for name, t in answers.items()
    }


def loss(answers: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
    total = answers["out"].new_zeros(())
    for name in LEARNED:
        t = answers[name]
        # A row that sees nothing is at −∞, which no loss counts.
        total = total + (torch.where(t.isfinite(), t, 0.0) * weights[name]).sum()
    return total


def asked(t: parallel.ParallelTrace) -> dict[str, Tensor]:
    recall = t.recall(BLOCKS, BLOCK)
    return {
        "out": t.out,
        "lse": t.lse,
        "entropy": t.entropy,
        "max_logit": t.max_logit,
        "mean_logit": t.mean_logit,
        "mass": t.mass(KEYS),
        "top": t.top(3).values,
        "received": t.received(),
        "weights": t.weights(QUERIES, KEYS, HEADS),
        "map": t.map(MAP),
        "map sum": t.map(MAP, *REGION, pool="sum"),
        "map max": t.map(MAP, *REGION, pool="max"),
        "std_logit": t.std_logit,
        "min_logit": t.min_logit,
        "recall": recall.rows,
        "mean recall": recall.mean,
        "target": t.indexer_target(BLOCK[1]),
        "target of some": t.indexer_target(BLOCK[1], REGION[0]),
    }


def sharded(name: str, t: Tensor, layout: Layout, mesh: Any) -> Tensor:
    if name == "target of some":
        start, stop = REGION[0]
        mine = layout.positions(ranks_of(mesh).rank)
        return t[:, mine[(mine >= start) & (mine < stop)] - start]
    if name == "target":
        return layout.shard(t, 1, mesh)
    return layout.shard(t, 2, mesh) if name in (*ROWS, "received") else t


def shared_call(
    method: str,
    mask: str,
    groups: int,
    layout: str,
    dtype: torch.dtype = torch.float64,
    within: float = 1e-12,
    mesh: Any = None,
    ranks: int = 2,
    seed: int = 0,
    **options: Any,
) -> None:
    """Every answer, and the gradients of a loss of all of them."""
    laid = LAYOUTS[layout](ranks)
    whole = [t.double().requires_grad_() for t in inputs(groups, dtype, seed)]
    truth_options, truth_learned = learning(options)
    own_options, own_learned = learning(options)
    truth = Whole(*whole, MASKS[mask], truth_options).answers()
    weights = weights_of_loss(truth)
    loss(truth, weights).backward()

    mine = [laid.shard(t.detach().to(dtype), 2, mesh).requires_grad_() for t in whole]
    t = parallel.trace(
        *mine, mesh=mesh, layout=laid, method=method, mask=MASKS[mask], **own_options
    )
    assert t.method.name == method
    got = asked(t)
    for name, answer in got.items():
        near(name, answer, sharded(name, truth[name], laid, mesh), within)
    if "sink" not in options:
        given = laid.unshard(got["received"].detach(), 2, mesh).sum(-1)
        near("all that was received", given, (truth["lse"] > -torch.inf).sum(-1), 10 * within)
    plain = parallel.attention(
        *mine, mesh=mesh, layout=laid, method=method, mask=MASKS[mask], **own_options
    )
    near("attention", plain, sharded("out", truth["out"], laid, mesh), within)
    own = {name: sharded(name, w.to(dtype), laid, mesh) for name, w in weights.items()}
    loss(got, own).backward()
    for name, x, true in zip("qkv", mine, whole, strict=True):
        assert x.grad is not None
        near(f"gradient of {name}", x.grad, laid.shard(true.grad, 2, mesh), within)
    for name, own_tensor in own_learned.items():
        assert own_tensor.grad is not None
        total = own_tensor.grad.clone()
        dist.all_reduce(total, group=t.call.ranks.group)
        near(f"gradient of {name}", total, truth_learned[name].grad, within)


def learning(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Options with tensors that learn, and these; a bias is given as what makes it, and its."""
    learned = {}
    made = dict(options)
    for name, value in options.items():
        maker, tensor = value if isinstance(value, tuple) else (lambda t: t, value)
        if isinstance(tensor, Tensor):
            learned[name] = tensor.clone().requires_grad_()
            made[name] = maker(learned[name])
    return made, learned


def near(name: str, got: Tensor, truth: Tensor, within: float) -> None:
    assert got.shape == truth.shape, f"{name}: {list(got.shape)}, not {list(truth.shape)}"
    got, truth = got.detach().double(), truth.detach()
    wild = ~truth.isfinite()
    assert torch.equal(got[wild], truth[wild]), f"{name}: infinities differ"
    off = (got - truth)[~wild].abs()
    most = float(off.max()) if off.numel() else 0.0
    allowed = within * max(1.0, float(truth[~wild].abs().max()) if off.numel() else 0.0)
    assert most <= allowed, f"{name}: off by {most:.3g}, allowed {allowed:.3g}"


def combinations() -> dict[str, Callable[[], None]]:
    """Calls in which any three of a method, mask, grouping and layout meet."""
    places = itertools.product(range(len(MASKS)), range(3), range(3))
    return dict(_combined(m, g, n, m + 2 * g + n) for m, g, n in places)


def products() -> dict[str, Callable[[], None]]:
    """Fewer of them, in which any two meet."""
    places = itertools.product(range(len(MASKS)), range(3))
    return dict(_combined(m, g, m + g, m + 2 * g) for m, g in places)


def _combined(m: int, g: int, n: int, how: int) -> tuple[str, Callable[[], None]]:
    mask, groups = list(MASKS)[m], (4, 2, 1)[g]
    layout, method = list(LAYOUTS)[n % 3], METHODS[how % 3]
    name = f"{method}, {mask}, {groups} key heads, {layout}"
    return name, partial(shared_call, method, mask, groups, layout)


RING_TOLD = {("sink", "zigzag"), ("alibi", "contiguous"), ("dense", "zigzag")}
"""What is told where keys go round: each way to cut it once."""


def by_pairs(table: Tensor) -> biases.Bias:
    return biases.pairwise(lambda b, h, q, k: table[h, q, k])


def with_options() -> dict[str, Callable[[], None]]:
    """What else a call may be told, in turns with the methods."""
    draw = torch.Generator().manual_seed(3)

    def numbers(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64)

    slopes = torch.tensor([0.3, 0.1, 0.5, 0.0], dtype=torch.float64)
    told: dict[str, dict[str, Any]] = {
        "sink": {"sink": numbers(4), "softcap": 1.5, "scale": 0.7},
        "alibi": {"bias": (biases.alibi, slopes)},
        "relative": {"bias": (biases.relative, numbers(4, 9))},
        "dense": {"bias": (biases.dense, numbers(1, 4, N, N))},
        "pairwise": {"bias": (by_pairs, numbers(4, N, N))},
    }
    return {
        f"{method}, {layout}, {name}": partial(shared_call, method, mask, 2, layout, **options)
        for name, options in told.items()
        for method, layout, mask in (
            ("ulysses", "zigzag", "padding"),
            ("all_gather", "zigzag", "padding"),
            ("all_gather", "contiguous", "window"),
            ("ring", "zigzag", "padding"),
            ("ring", "contiguous", "window"),
        )
        # Heads are cut of what is told of each; places, of what depends on distance.
        if (method == "ulysses") <= (name in ("sink", "dense"))
        and (layout == "contiguous") <= (name in ("alibi", "relative"))
        and (method == "ring") <= ((name, layout) in RING_TOLD)
    }


def in_single_precision() -> dict[str, Callable[[], None]]:
    return {f"{method}, float32": partial(single_precision, method) for method in METHODS}


def single_precision(method: str) -> None:
    """As near to the truth as plain arithmetic of that precision comes."""
    from tests.parity.agreement import assert_as_exact, errors

    laid, mask = parallel.zigzag(N, 2), MASKS["documents"]

    def mine(answers: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: sharded(n, t.detach(), laid, None) for n, t in answers.items()}

    def formula(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
        whole = [t.to(dtype).requires_grad_() for t in inputs(2, torch.float32, seed)]
        answers = Whole(*whole, mask, {}).answers()
        loss(answers, weights_of_loss(answers)).backward()
        gradients = {f"d{n}": laid.shard(t.grad, 2) for n, t in zip("qkv", whole, strict=True)}
        return mine(answers) | gradients

    draws = [errors(formula(s, torch.float32), formula(s, torch.float64)) for s in range(3)]
    own = [laid.shard(t, 2).requires_grad_() for t in inputs(2, torch.float32)]
    got = asked(parallel.trace(*own, layout=laid, mask=mask, method=method))
    whole = Whole(*inputs(2, torch.float32), mask, {}).answers()
    loss(got, mine(weights_of_loss(whole))).backward()
    got |= {f"d{n}": t.grad for n, t in zip("qkv", own, strict=True)}
    assert_as_exact({n: t.detach() for n, t in got.items()}, formula(0, torch.float64), draws)


def in_half_precision() -> None:
    """Half precision travels as it is."""
    laid = parallel.contiguous(N, 2)
    q, k, v = (t.bfloat16() for t in inputs(2, torch.float32))
    one = regard.attention(q, k, v, mask=masks.causal())
    for method in METHODS:
        mine = [laid.shard(t, 2).requires_grad_() for t in (q, k, v)]
        out = parallel.attention(*mine, layout=laid, mask=masks.causal(), method=method)
        assert out.dtype == torch.bfloat16
        # What two blocks gave was rounded twice.
        near = {"rtol": 2**-7, "atol": 2**-8} if method == "ring" else {}
        torch.testing.assert_close(out, laid.shard(one, 2), **near)
        out.sum().backward()
        assert mine[1].grad is not None


def with_large_logits() -> None:
    """Logits of thousands, which single precision cannot tell apart, in whatever blocks they are
    seen. Weights and what they give to learn from are those of one process."""
    laid, mask = parallel.zigzag(N, 2), masks.causal()
    q, k, v = inputs(2, torch.float32)
    # All logits are about 1,800: their differences are those of other calls.
    q[..., 0], k[..., 0] = 70.0, 73.0
    for sink in (None, torch.tensor([1805.0, 5e3, 0.0, -1.0])):
        one = [t.clone().requires_grad_() for t in (q, k, v)]
        true = regard.trace(*one, mask=mask, sink=sink)
        wanted = torch.autograd.grad(true.received().square().sum(), one[:2])
        for method in METHODS:
            mine = [laid.shard(t.detach(), 2).requires_grad_() for t in one]
            t = parallel.trace(*mine, layout=laid, mask=mask, method=method, sink=sink)
            near("received", t.received(), laid.shard(true.received(), 2), 1e-6)
            near("weights", t.weights(), true.weights(), 1e-6)
            near("map", t.map(MAP), true.map(MAP), 1e-6)
            near("top", t.top(3).values, laid.shard(true.top(3).values, 2), 1e-6)
            near("mass", t.mass(KEYS), laid.shard(true.mass(KEYS), 2), 1e-6)
            near("recall", t.recall(BLOCKS, BLOCK).mean, true.recall(BLOCKS, BLOCK).mean, 1e-6)
            gradients = torch.autograd.grad(t.received().square().sum(), mine[:2])
            for name, g, want in zip("qk", gradients, wanted, strict=True):
                # Through the lse, which was rounded to 2^-13, and times 70.
                near(f"gradient of {name}", g, laid.shard(want, 2), 2e-2)
    vast = [laid.shard(t.double(), 2) for t in (1e10 * q, k, v)]
    t = parallel.trace(*vast, layout=laid, mask=mask, method="ring")
    refused("too large to compute weights block by block", t.received)


def in_other_modes() -> None:
    """Inference, autocast and checkpoints, one after the other with one layout."""
    laid = parallel.zigzag(N, 2)
    q, k, v = inputs(2, torch.float32)
    mask = masks.causal() & masks.documents(IDS)
    true = regard.trace(q, k, v, mask=mask)
    for method in METHODS:
        mine = [laid.shard(t, 2).requires_grad_() for t in (q, k, v)]
        call = partial(parallel.attention, layout=laid, mask=mask, method=method)
        with torch.inference_mode():
            t = parallel.trace(*mine, layout=laid, mask=mask, method=method)
            near("out", t.out, laid.shard(true.out, 2), 1e-5)
            near("received", t.received(), laid.shard(true.received(), 2), 1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            assert call(*mine).dtype == torch.bfloat16
        call(*mine).square().sum().backward()
        plain = [t.grad.clone() for t in mine]
        for t in mine:
            t.grad = None
        checkpoint(call, *mine, use_reentrant=False).square().sum().backward()
        assert all(torch.equal(t.grad, g) for t, g in zip(mine, plain, strict=True))
        t = parallel.trace(*mine, layout=laid, mask=mask, method=method)
        assert not t.detach().received().requires_grad
        compiled = torch.compile(lambda *x, f=call: f(*x) * 2, backend="eager")
        near("compiled", compiled(*mine), laid.shard(2 * true.out, 2), 1e-5)
    model = Attending(call)
    with pytest.warns(regard.RegardWarning, match="does not see"), regard.watch(model):
        model(*mine)


class Attending(torch.nn.Module):
    """A model one layer of which is a call across ranks."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.call(regard.attention(q, k, k), k, v)


def refused(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(RegardError, match=words):
        call()


def refusals() -> None:
    """What cannot be shared is refused by name, on all ranks alike."""
    laid = parallel.contiguous(N, 2)
    q, k, v = (laid.shard(t, 2) for t in inputs(4, torch.float32))

    def call(*qkv: Any, **options: Any) -> Callable[[], object]:
        return lambda: parallel.attention(*(qkv or (q, k, v)), **{"layout": laid} | options)

    refused("has no dropout", call(dropout=0.1, training=True))
    call(dropout=0.1)()
    refused("no jagged", call(cu_seqlens=torch.tensor([0, 4])))
    nested = torch.nested.nested_tensor([q[0], q[1]], layout=torch.jagged)
    refused("nested tensor", call(nested, nested, nested))
    refused("four axes", call(q[0], k[0], v[0]))
    refused("unknown method", call(method="rings"))
    refused("3 heads cannot be dealt out", call(q[:, :3], k[:, :3], v[:, :3], method="ulysses"))
    refused("share 3 key heads unevenly", call(
        q.repeat(1, 3, 1, 1)[:, :6], k[:, :3], v[:, :3], method="ulysses"
    ))  # fmt: skip
    refused("documents: one id per key", call(mask=masks.documents([0] * 9)))
    refused("bare mask tensor", call(mask=torch.ones(N, N, dtype=torch.bool)))
    refused("tokens are cut along one axis", call(mesh=init_device_mesh("cpu", (2, 1))))
    refused("a layout for 3 ranks", call(layout=parallel.contiguous(N, 3)))
    assert parallel.plan(q[:, :3], k[:, :3], v[:, :3], layout=laid).method == "all_gather"
    plan = parallel.plan(q, k, v, layout=laid, mask=masks.causal())
    assert plan.method == "ulysses"
    assert "not ring        it could" in str(plan)
    plan = parallel.plan(q, k, v, layout=laid, mask=masks.causal(), method="ring")
    # At each of two steps the busiest rank: 18 queries see themselves, then 19 see 18 keys.
    steps = sum(range(1, 20)) + 19 * 18
    assert plan.busiest == pytest.approx(steps * 2 / sum(range(1, 38)))
    assert plan.sent == plan.held == 2 * 4 * 19 * (8 + 5) * 4
    keys_that_do_not_fit(q, k, v, laid)
    plan = parallel.plan(q, k, v, layout=laid, mask=masks.causal(), method="all_gather")
    # The last rank has 19 queries, that see 19 to 37 keys.
    assert plan.busiest == pytest.approx(sum(range(19, 38)) * 2 / sum(range(1, 38)))
    assert plan.sent == 2 * 4 * 19 * (8 + 5) * 4


def keys_that_do_not_fit(q: Tensor, k: Tensor, v: Tensor, laid: Layout) -> None:
    """Where heads cannot be dealt out and gathered keys are too many, keys go round."""
    three = [t[:, :3] for t in (q, k, v)]
    known = choice.room
    choice.room = lambda device: 8.0 * 2 * 3 * N * (8 + 5) * 4 - 1
    try:
        plan = parallel.plan(*three, layout=laid)
        assert plan.method == "ring"
        assert "more than 1/8 of the device's" in str(plan)
        assert parallel.trace(*three, layout=laid).method.name == "ring"
        assert parallel.plan(*three, layout=laid, method="all_gather").method == "all_gather"
    finally:
        choice.room = known


def blocks_that_are_hidden() -> None:
    """A block that the mask hides is not looked at; a second derivative is refused by name."""
    laid = parallel.contiguous(N, 2)
    mine = [laid.shard(t, 2).requires_grad_() for t in inputs(2, torch.float64)]
    looked: list[int] = []
    ask = OfRows.ask

    def counted(self: OfRows, block: Any, row: Tensor | None) -> Any:
        looked.append(len(block.places))
        return ask(self, block, row)

    OfRows.ask = counted  # type: ignore[method-assign]
    try:
        for mask, seen in ((masks.causal(), [1, 2]), (masks.window(0, 0), [1, 1])):
            looked.clear()
            out = parallel.attention(*mine, layout=laid, mask=mask, method="ring")
            out.sum().backward()
            # Once, and once more for the gradients.
            assert len(looked) == 2 * seen[dist.get_rank()], looked
    finally:
        OfRows.ask = ask  # type: ignore[method-assign]
    out = parallel.attention(*mine, layout=laid, method="ring")
    (g,) = torch.autograd.grad(out.sum(), mine[0], create_graph=True)
    refused("differentiable once", lambda: g.sum().backward())
    refused("cannot run this call", lambda: parallel.attention(
        *mine, layout=laid, method="ring", backend="sdpa"
    ))  # fmt: skip


def ranks_that_differ() -> None:
    """Different calls are told apart before anybody waits, and the next call is right again."""
    rank = dist.get_rank()
    laid = parallel.contiguous(N, 2)
    q, k, v = (laid.shard(t, 2) for t in inputs(4, torch.float32))

    def call(*qkv: Tensor, **options: Any) -> Callable[[], object]:
        return lambda: parallel.trace(*(qkv or (q, k, v)), **{"layout": laid} | options)

    width = masks.window(3 + rank)
    refused(r"mask[\s\S]*window\(3\) on rank 0 but window\(4\) on rank 1", call(mask=width))
    refused("different calls: mask\\n", call(mask=width & masks.documents(IDS)))
    refused("tensor 0 of mask", call(mask=masks.documents(IDS + (IDS > 2) * rank)))
    doubled = [t.double() if rank else t for t in (q, k, v)]
    refused("different calls: k, q, v", call(*doubled))
    refused("layout", call(layout=[laid, parallel.contiguous(N, 2)][0] if rank else _swapped()))
    learning = q.clone().requires_grad_(bool(rank))
    refused("which tensors want gradients", call(learning, k, v))
    if rank:
        refused("19 tokens by", call(q[:, :, 1:], k, v))
    else:
        refused("rank 1 refused what was asked", call())
    t = parallel.trace(q, k, v, layout=laid)
    refused("question", lambda: t.map(3 + rank))
    call()()


def a_rank_that_alone_asks_wrongly(method: str) -> None:
    """A question that is wrong on one rank ends on all of them, at once, with the rank and its
    reason. The next question is right again."""
    rank = dist.get_rank()
    laid = parallel.contiguous(N, 2)
    t = parallel.trace(
        *(laid.shard(x, 2) for x in inputs(2, torch.float32)), layout=laid, method=method
    )
    far = N + 5 if rank else 1
    wrong: dict[str, Callable[[], object]] = {
        "queries: index out of range": lambda: t.weights(queries=[far]),
        "heads: index out of range": lambda: t.logits(heads=[far]),
        "keys: index out of range": lambda: t.mass([far]),
        "map: a region of queries": lambda: t.map(4, queries=(0, far)),
        "indexer_target: a region of queries": lambda: t.indexer_target(4, (0, far)),
    }
    start = time.monotonic()
    for why, ask in wrong.items():
        refused(why if rank else rf"rank 1 refused what was asked[\s\S]*{why}", ask)
    assert time.monotonic() - start < 30
    many = torch.arange(70) % (N - 1)
    refused("question", lambda: t.weights(queries=many + rank))
    assert t.weights(queries=many).shape[2] == 70


def a_rank_that_alone_is_refused(backend: str) -> None:
    """A backend that has nothing for the rank without tokens is refused on all. Where it runs
    nowhere on this machine, the other rank has a reason of its own and gives that."""
    few, why = parallel.contiguous(1, 2), "for empty tensors"
    one = inputs(4, torch.float32)[1][:, :, :1]
    q, k = few.shard(one, 2), few.shard(one, 2)
    try:
        regard.plan(one, one, one, backend=backend)
        elsewhere = rf"rank 0 refused what was asked[\s\S]*{why}"
    except RegardError as error:
        elsewhere = re.escape(str(error).splitlines()[0])
    refused(
        elsewhere if dist.get_rank() else why,
        lambda: parallel.attention(q, k, k, layout=few, method="all_gather", backend=backend),
    )


def statistics_that_ride_along(dtype: torch.dtype) -> None:
    """A trace sends as many messages as attention does; a question, or a whole trace, one."""
    counted = []
    plain = {name: getattr(dist, name) for name in ("all_to_all_single", GATHER)}

    def counting(name: str) -> Callable[..., object]:
        def call(*args: Any, **options: Any) -> object:
            counted.append(name)
            return plain[name](*args, **options)

        return call

    def messages(ask: Callable[[], object]) -> int:
        counted.clear()
        ask()
        # One of them compares what ranks are about to do.
        return len(counted) - 1

    laid = parallel.zigzag(N, 2)
    whole = [t.to(dtype) for t in inputs(2, torch.float64)]
    mine = [laid.shard(t, 2) for t in whole]
    true = regard.trace(*whole, mask=masks.causal())
    told: dict[str, Any] = {"layout": laid, "mask": masks.causal(), "method": "ulysses"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting("all_to_all_single"))
        patch.setattr(collectives, "_all_gather", counting(GATHER))
        assert messages(lambda: parallel.attention(*mine, **told)) == 2
        assert messages(lambda: parallel.trace(*mine, **told)) == 2
        t = parallel.trace(*mine, **told)
        assert messages(lambda: t.top(3)) == 1
        assert messages(t.full) == 1
    assert (t.out.dtype, t.lse.dtype) == (dtype, torch.float32)
    assert torch.equal(t.top(3).indices, laid.shard(true.top(3).indices, 2))
    assert torch.equal(t.full().inputs.k, true.inputs.k)
    near("entropy", t.entropy, laid.shard(true.entropy, 2).double(), 1e-5)
    near("all entropies", t.full().entropy, true.entropy.double(), 1e-5)
    # Their gradients ride back together.
    one, own = ([t.detach().requires_grad_() for t in some] for some in (whole, mine))
    true, t = regard.trace(*one, mask=masks.causal()), parallel.trace(*own, **told)
    for each in (true, t):
        (each.out.float().square().sum() + each.lse.sum() + each.entropy.sum()).backward()
    for x, y in zip(own, one, strict=True):
        torch.testing.assert_close(x.grad, laid.shard(y.grad, 2))
    # Of what nobody learns from, no gradient is worked out: that of max_logit goes over all pairs.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(differentiable.AskedVjp, "apply", None)
        parallel.trace(*own, **told).out.sum().backward()


def _swapped() -> parallel.Layout:
    """A layout with shards as long as those of another."""
    return parallel.Layout((((0, 10), (20, 28)), ((10, 20), (28, 37))), "contiguous(37, 2)")


def shapes_at_the_edge() -> None:
    """Ranks without tokens, more keys than queries, and a whole trace of it all."""
    q, k, v = inputs(2, torch.float64)
    few = parallel.contiguous(1, 2)
    assert few.lengths == (0, 1)
    for method in METHODS:
        one = [few.shard(t[:, :, :1], 2).requires_grad_() for t in (q, k, v)]
        t = parallel.trace(*one, layout=few, method=method)
        assert torch.equal(t.received(), t.lse.new_ones(t.lse.shape))
        (t.out.sum() + t.map(1).sum()).backward()
        laid, longer = parallel.zigzag(5, 2), parallel.contiguous(N, 2)
        for mask in (masks.causal(), masks.window(2, 1)):
            t = parallel.trace(
                laid.shard(q[:, :, :5], 2), longer.shard(k, 2), longer.shard(v, 2), layout=laid,
                key_layout=longer, mask=mask, method=method, score=scores.cosine(0.2),
            )  # fmt: skip
            true = regard.trace(q[:, :, :5], k, v, mask=mask, score=scores.cosine(0.2))
            near("out", t.out, laid.shard(true.out, 2), 1e-12)
            near("received", t.received(), longer.shard(true.received(), 2), 1e-12)
            found, wanted = t.top(4), true.top(4)
            assert torch.equal(found.indices, laid.shard(wanted.indices, 2))
            whole = t.full()
            near("weights", whole.weights(), true.weights(), 1e-12)
            near("logits", t.logits(), true.logits(), 1e-12)
            assert "ParallelTrace(rank " in repr(t)
            assert set(t.placements) >= {"out", "received", "map"}
        # A rank that has queries, and no keys.
        mine = laid.shard(q[:, :, :5], 2), few.shard(k[:, :, :1], 2), few.shard(v[:, :, :1], 2)
        t = parallel.trace(*mine, layout=laid, key_layout=few, method=method, sink=torch.zeros(4))
        true = regard.trace(q[:, :, :5], k[:, :, :1], v[:, :, :1], sink=torch.zeros(4))
        near("entropy", t.entropy, laid.shard(true.entropy, 2), 1e-12)
        near("received", t.received(), few.shard(true.received(), 2), 1e-12)
        assert torch.equal(t.top(3).indices, laid.shard(true.top(3).indices, 2))
    x = torch.arange(5.0).requires_grad_()
    whole_again = laid.unshard(laid.shard(x, 0), 0)
    assert torch.equal(whole_again, x)
    # Both ranks have the whole, whose loss counts once: each has learned of its own tokens.
    (whole_again * whole_again).sum().backward()
    own = torch.zeros(5).index_fill(0, laid.positions(dist.get_rank()), 1.0)
    assert torch.equal(x.grad, 2 * x.detach() * own)


def a_rank_that_hangs() -> None:
    """Rank 1 does not come in time: rank 0 is told so when the group's time is over, and where."""
    rank, seconds = dist.get_rank(), 2
    group = dist.new_group([0, 1], timeout=timedelta(seconds=seconds))
    mesh = DeviceMesh.from_group(group, "cpu")
    x = torch.randn(1, 2, 4, 4)
    parallel.trace(x, x, x, mesh=mesh)
    if rank == 0:
        start = time.monotonic()
        refused(
            r"all_gather failed on rank 0 of 2[\s\S]*[Tt]imed? ?out",
            lambda: parallel.trace(x, x, x, mesh=mesh, method="ring"),
        )
        assert seconds / 2 < time.monotonic() - start < 30
    dist.barrier()


def a_rank_that_is_gone() -> None:
    """The last case: rank 1 ends here, and rank 0 is told."""
    if dist.get_rank() == 0:
        x = torch.randn(1, 2, 4, 4)
        refused(
            r"all_gather failed on rank 0 of 2[\s\S]*RuntimeError", lambda: parallel.trace(x, x, x)
        )


def of_two() -> dict[str, Callable[[], None]]:
    return {
        **products(),
        **with_options(),
        **in_single_precision(),
        "half precision": in_half_precision,
        "large logits": with_large_logits,
        "other modes": in_other_modes,
        "refusals": refusals,
        "blocks that are hidden": blocks_that_are_hidden,
        "ranks that differ": ranks_that_differ,
        **{
            f"{method}, a rank that alone asks wrongly": partial(
                a_rank_that_alone_asks_wrongly, method
            )
            for method in METHODS
        },
        "a rank that sdpa alone refuses": partial(a_rank_that_alone_is_refused, "sdpa"),
        "a rank that flex alone refuses": partial(a_rank_that_alone_is_refused, "flex"),
        "statistics that ride along": partial(statistics_that_ride_along, torch.float32),
        "statistics wider than the output": partial(statistics_that_ride_along, torch.bfloat16),
        "shapes at the edge": shapes_at_the_edge,
        **dtensor_cases.of_two(),
        "a rank that hangs": a_rank_that_hangs,
        "a rank that is gone": a_rank_that_is_gone,
    }


def meshed(method: str) -> None:
    """Two batches at once, each shared by two of four ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("batches", "tokens"))
    seed = mesh["batches"].get_local_rank()
    shared_call(method, "documents", 2, "zigzag", mesh=mesh["tokens"], seed=seed)


def example(port: int) -> None:
    """The example of the documentation, started as torchrun does it; it prints what is said."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    text = (Path(__file__).parents[2] / "docs" / "parallel.md").read_text("utf-8")
    blocks = re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)
    program, shown = blocks[0], blocks[1].split("\n", 1)[1]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "ranks.py", "exec"), {"__name__": "__main__"})
    assert printed.getvalue() == ("" if os.environ["RANK"] != "0" else shown)


def of_documentation(port: int) -> dict[str, Callable[[], None]]:
    return {"example": partial(example, port)}


def of_four() -> dict[str, Callable[[], None]]:
    return {
        **dtensor_cases.of_four(),
        "ulysses, 1 key head for 4 ranks": partial(
            shared_call, "ulysses", "window", 1, "by_document", ranks=4
        ),
        "ulysses, 2 key heads for 4 ranks": partial(
            shared_call, "ulysses", "padding", 2, "zigzag", ranks=4
        ),
        "all_gather, 4 ranks": partial(
            shared_call, "all_gather", "documents", 2, "by_document", ranks=4
        ),
        "ring, 1 key head for 4 ranks": partial(
            shared_call, "ring", "window", 1, "by_document", ranks=4
        ),
        "ulysses, 2 × 2": partial(meshed, "ulysses"),
        "ring, 2 × 2": partial(meshed, "ring"),
        "all_gather, 2 × 2": partial(meshed, "all_gather"),
    }
