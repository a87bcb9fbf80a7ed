"""A typed program, for users who check theirs: `mypy --strict examples/typed.py` finds nothing.

    python examples/typed.py

Each `assert_type` says what a call gives, as a type checker sees it; it does nothing at run time.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import assert_type

import torch
from torch import Tensor, nn

import regard
from regard import biases, cost, interpret, linear, masks, models, scores, view
from regard.interpret import metrics
from regard.monitoring import Report
from regard.monitoring.rules import EntropyCollapse
from regard.seen import Layer, Seen


def calls(q: Tensor, k: Tensor, v: Tensor, folder: Path) -> Tensor:
    """Attention, and what a trace of it answers."""
    mask = masks.causal() & (masks.window(128) | masks.prefix(4))
    assert_type(mask, masks.Mask)
    assert_type(mask.count(500), int)
    trace = regard.trace(q, k, v, mask=mask)
    assert_type(trace, regard.Trace)
    assert_type(trace.out, Tensor)
    assert_type((trace.lse, trace.max_logit, trace.entropy), tuple[Tensor, Tensor, Tensor])
    assert_type(trace.weights(queries=[1, 2], heads=[0]), Tensor)
    assert_type(trace.map(4, queries=(0, 4), pool="max"), Tensor)
    best = trace.top(3)
    assert_type((best.values, best.indices), tuple[Tensor, Tensor])
    trace.save(folder / "one.regard")
    assert_type(regard.Trace.of(q, k, trace.lse, mask=mask), regard.Trace)
    plan = regard.plan(q, k, v, mask=mask)
    assert_type(plan, regard.Plan)
    assert_type(cost.call(q, k, v, mask=mask).flops("needed"), int)
    kept = interpret.heavy_hitters(trace, 4, recent=2)
    assert_type(kept, interpret.Kept)
    assert_type(linear.attention(q, k, v), Tensor)
    out = regard.attention(q, k, v, score=scores.cosine(0.1), bias=biases.alibi([0.5, 0.25]))
    assert_type(out, Tensor)
    try:
        regard.attention(q, k, v, backend="none")
    except regard.RegardError as error:
        print(error)
    return out


class Block(nn.Module):
    """A module as people write them: what a child gives is Any in PyTorch, and named here."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = regard.nn.MultiHeadAttention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, mask=masks.causal())
        return x + out


def watching(model: nn.Module, x: Tensor, folder: Path) -> dict[str, float]:
    """What was seen of a model, kept in a file and read again."""
    with regard.watch(model, keep="traces") as seen:
        model(x)
    assert_type(seen, Seen)
    seen.save(folder / "run.regard")
    again = regard.load(folder / "run.regard")
    assert_type(view.page(again, folder / "run.html"), Path)
    entropies = {}
    for name, layer in seen.items():
        assert_type(layer, Layer)
        assert_type(layer.trace, regard.Trace)
        entropies[name] = float(layer.trace.entropy.mean())
    return entropies


def training(model: nn.Module, x: Tensor) -> list[Report]:
    """A monitored step, with QK-clip and a rule."""
    reports: list[Report] = []
    with regard.Monitor(
        model, every=1, to=reports.append, rules=[EntropyCollapse()], qk_clip=100.0
    ) as monitor:
        model(x).square().mean().backward()
        report = monitor.step()
        assert_type(report, Report | None)
    for heads in reports[0].layers.values():
        assert_type(heads.entropy, tuple[float, ...])
    return reports


def studying(text: str) -> interpret.Effects:
    """What heads of a trained model do to its loss, and what each token gave."""
    small = models.load("regard-small", device="cpu")
    assert_type(small, models.OwnReader)
    ids = torch.tensor([small.encode(text)])
    effects = interpret.ablate(small.model, ids, metrics.loss(), layers="blocks.7.*")
    assert_type(effects, interpret.Effects)
    assert_type(interpret.attribute(small.model, ids, metrics.loss()), interpret.Attribution)
    return effects


def main() -> None:
    torch.manual_seed(0)
    block, x = Block(32, 2), torch.randn(1, 8, 32)
    with TemporaryDirectory() as name:
        folder = Path(name)
        q, k, v = torch.randn(3, 1, 2, 8, 16)
        calls(q, k, v, folder)
        print(watching(block, x, folder))
    print(training(block, x)[0])
    print(studying("Lily had a red ball. Lily had a red"))


if __name__ == "__main__":
    main()
