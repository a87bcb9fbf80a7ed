"""Calls recorded once and replayed with other numbers: CUDA graphs, by hand and by the compiler.

Needs a card: --device cuda.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from tests.parity import cases
from tests.parity.calls.call import KINDS, Answer, Call, draw

pytestmark = pytest.mark.skipif(
    cases.DEVICE == "cpu", reason="CUDA graphs need a card: --device cuda"
)

MASKS: dict[str, Callable[[], masks.Mask | None]] = {
    "none": lambda: None,
    "causal": masks.causal,
    "window": lambda: masks.causal() & masks.window(40),
    "documents": lambda: masks.causal() & masks.documents(_ids()),
    "dilated": lambda: masks.dilated(3),
    "prefix": lambda: masks.prefix(50),
}
SHAPES = {"own": (2, 4, 4, 160, 160), "grouped": (2, 8, 2, 160, 160), "decoding": (2, 8, 2, 1, 300)}
widths = pytest.mark.parametrize("width", [64, 128])


def _ids() -> Tensor:
    return (torch.arange(160, device=cases.DEVICE) // 50).expand(2, -1).contiguous()


def call_of(mask: str, shape: str, width: int, seed: int = 0) -> Call:
    B, H, G, Q, K = SHAPES[shape]
    shapes = [(B, H, Q, width), (B, G, K, width), (B, G, K, width)]
    three = [draw(*s, seed=seed + i, dtype=torch.bfloat16) for i, s in enumerate(shapes)]
    return Call(*three, {"mask": MASKS[mask]()})


PAIRS = [
    (mask, shape)
    for mask in MASKS
    for shape in SHAPES
    if mask != "documents" or shape != "decoding"
]


def ask(kind: str, call: Call) -> dict[str, Tensor]:
    if kind == "attention":
        return {"out": regard.attention(call.q, call.k, call.v, **call.options)}
    t = regard.trace(call.q, call.k, call.v, **call.options)
    rows = {"out": t.out, "lse": t.lse, "entropy": t.entropy, "max_logit": t.max_logit}
    return rows | {"received": t.received()}


def recorded(
    run: Callable[[], dict[str, Tensor]],
) -> tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]:
    """As PyTorch's documentation has it: warmed up on another stream, then recorded."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


@torch.no_grad()
@widths
@pytest.mark.parametrize(("mask", "shape"), PAIRS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_call(kind: str, mask: str, shape: str, width: int) -> None:
    held = call_of(mask, shape, width)
    graph, found = recorded(lambda: ask(kind, held))
    for seed in (0, 10, 20):
        new = call_of(mask, shape, width, seed)
        for there, numbers in zip((held.q, held.k, held.v), (new.q, new.k, new.v), strict=True):
            there.copy_(numbers)
        graph.replay()
        answer = Answer(kind, {name: t.clone() for name, t in found.items()}, [])
        # A plain call in between leaves the recorded one as it is.
        new.assert_right(Answer(kind, ask(kind, new), []))
        new.assert_right(answer)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", ["documents", "dilated"])
def test_a_graph_keeps_what_it_reads_of_a_mask(mask: str, kind: str) -> None:
    """Also when many other masks have come, and memory that was let go of is written to."""
    held = call_of(mask, "own", 64)
    graph, found = recorded(lambda: ask(kind, held))
    for i in range(40):
        call = call_of("none", "own", 64)
        ids = (torch.arange(160, device=cases.DEVICE) // (i + 2)).expand(2, -1).contiguous()
        other = masks.documents(ids) if mask == "documents" else masks.dilated(i + 4)
        ask(kind, Call(call.q, call.k, call.v, {"mask": other}))
    garbage = [torch.full((1 << n,), 1 << 20, dtype=torch.int32).cuda() for n in range(5, 20)] * 8
    garbage = [t.clone() for t in garbage]
    graph.replay()
    held.assert_right(Answer(kind, {name: t.clone() for name, t in found.items()}, []))
    del garbage


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_first_made_while_a_graph_is_captured(kind: str) -> None:
    """What is computed meanwhile is there only once the graph is replayed: others do not wait."""
    run = functools.partial(ask, kind)
    # So that no kernel is compiled meanwhile.
    for n in (1, 2, 3):
        call = call_of("prefix", "own", 64, seed=n)
        run(Call(call.q[:1], call.k[:1], call.v[:1], {"mask": masks.prefix(20 + n)}))
    held = call_of("none", "own", 64)
    held = Call(held.q, held.k, held.v, {"mask": masks.prefix(33)})
    torch.cuda.synchronize()
    garbage = [torch.full((8,), 1 << 20, dtype=torch.int32).cuda() for _ in range(64)]
    del garbage
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(held)
    held.assert_right(Answer(kind, run(held), []))
    graph.replay()
    held.assert_right(Answer(kind, {name: t.clone() for name, t in found.items()}, []))


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_step_of_training(kind: str) -> None:
    """Forward and backward in one graph."""
    held = call_of("causal", "grouped", 128)
    learned = held.map_qkv(lambda t: t.requires_grad_())

    def run() -> dict[str, Tensor]:
        if kind == "attention":
            out = regard.attention(learned.q, learned.k, learned.v, mask=masks.causal())
        else:
            out = regard.trace(learned.q, learned.k, learned.v, mask=masks.causal()).out
        pulls = torch.autograd.grad(out, learned.learned(), torch.ones_like(out))
        return dict(zip("qkv", pulls, strict=True))

    graph, found = recorded(run)
    for seed in (10, 20):
        new = call_of("causal", "grouped", 128, seed)
        with torch.no_grad():
            for name in "qkv":
                getattr(learned, name).copy_(getattr(new, name))
        graph.replay()
        replayed = {name: t.clone() for name, t in found.items()}
        for name, plain in run().items():
            scale = float(plain.abs().max())
            torch.testing.assert_close(replayed[name], plain, rtol=0.016, atol=0.01 * scale)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize(("mask", "shape"), PAIRS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_compiled_to_reduce_overhead(kind: str, mask: str, shape: str) -> None:
    rule = MASKS[mask]()

    def run(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        if kind == "attention":
            return {"out": regard.attention(q, k, v, mask=rule)}
        t = regard.trace(q, k, v, mask=rule)
        return {"out": t.out, "lse": t.lse, "entropy": t.entropy, "max_logit": t.max_logit}

    graph = torch.compile(run, fullgraph=True, mode="reduce-overhead")
    for seed in (0, 10, 20, 30):
        call = call_of(mask, shape, 64, seed)
        torch.compiler.cudagraph_mark_step_begin()
        found = {name: t.clone() for name, t in graph(call.q, call.k, call.v).items()}
        call.assert_right(Answer(kind, found, []))
