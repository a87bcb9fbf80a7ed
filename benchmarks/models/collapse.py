"""Attention that collapses: a run goes wrong, the monitor says so first, QK-clip keeps it alive.

A small transformer learns to recite: 32 random letters, then the same again. Only attention can do
that; without it the loss is log 32 = 3.47. Of each seed three runs, from the same weights and on
the same data:

    stable      scores scaled by 1/√d, learning rate 0.005
    too fast    no scale, and a learning rate that grows to 0.03 in 200 steps
    QK-clip     the same, with Monitor(qk_clip=20)

Drawn is the seed whose run ends worst without QK-clip.

python -m benchmarks.models.collapse [--seeds 0 1 2] [--steps 600]

Takes about three minutes on one core.
"""

from __future__ import annotations

import argparse
import math
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard
from benchmarks.measurement import RESULTS, write
from regard.monitoring import Finding, Report

LETTERS, SPAN, WIDTH, HEADS, LAYERS, BATCH = 32, 32, 64, 4, 2, 16
EVERY = 10
CHANCE = math.log(LETTERS)
LABELS = {
    "stable": "scaled by 1/√d, learning rate 0.005",
    "too fast": "no scale, learning rate up to 0.03",
    "QK-clip": "no scale, learning rate up to 0.03, QK-clip at 20",
}


class Attention(nn.Module):
    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)
        )
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        parts = (project(x) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        out: Tensor = self.out_proj(y.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.attention = Attention(scale)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        out: Tensor = x + self.mlp(self.between(x))
        return out


class Model(nn.Module):
    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(LETTERS, WIDTH), nn.Embedding(2 * SPAN, WIDTH)
        self.blocks = nn.Sequential(*(Block(scale) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.letters(ids) + self.places.weight[: ids.shape[1]]
        out: Tensor = self.head(self.norm(self.blocks(x)))
        return out


@dataclass
class Run:
    name: str
    seed: int
    scale: float | None
    peak: float
    """The largest learning rate."""
    warm: int
    """How many steps the learning rate grows up to there."""
    clip: float | None = None
    loss: list[float] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    def train(self, steps: int) -> None:
        torch.manual_seed(self.seed)
        model, source = Model(self.scale), torch.Generator().manual_seed(self.seed)
        optimiser = torch.optim.Adam(model.parameters(), self.peak)
        with regard.Monitor(
            model, every=EVERY, look=1, to=self.reports.append, qk_clip=self.clip
        ) as monitor:
            for step in range(steps):
                grown = min(1.0, (step + 1) / self.warm)
                optimiser.param_groups[0]["lr"] = self.peak * grown
                once = torch.randint(LETTERS, (BATCH, SPAN), generator=source)
                ids = torch.cat([once, once], 1)
                logits = model(ids[:, :-1])[:, SPAN - 1 :]
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, SPAN:].flatten())
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                monitor.step()
                self.loss.append(loss.item())

    @property
    def smooth(self) -> list[float]:
        """The mean loss of each window."""
        return [sum(self.loss[i : i + EVERY]) / EVERY for i in range(0, len(self.loss), EVERY)]

    @property
    def max_logit(self) -> list[float]:
        return [max(max(h.max_logit) for h in r.layers.values()) for r in self.reports]

    @property
    def entropy(self) -> list[float]:
        """The mean over all heads."""
        return [
            sum(sum(h.entropy) for h in r.layers.values()) / (LAYERS * HEADS) for r in self.reports
        ]

    @property
    def told(self) -> list[Finding]:
        return [finding for report in self.reports for finding in report.findings]

    @property
    def diverged(self) -> int | None:
        """When a loss that had been below 0.2 is back above 0.5, for good."""
        learned, back = False, None
        for i, loss in enumerate(self.smooth):
            learned = learned or loss < 0.2
            if loss < 0.5:
                back = None
            elif learned and back is None:
                back = (i + 1) * EVERY
        return back


def summary(run: Run) -> dict[str, Any]:
    first = run.told[0] if run.told else None
    return {
        "run": run.name,
        "seed": run.seed,
        "scale": "1/√d" if run.scale is None else run.scale,
        "learning rate": f"{run.peak:g} after {run.warm} steps",
        "best loss": min(run.smooth),
        "last loss": run.smooth[-1],
        "largest logit": max(run.max_logit),
        "last entropy": run.entropy[-1],
        "first warning": "–" if first is None else f"step {first.step}: {first.rule}",
        "loss then": None if first is None else run.smooth[first.step // EVERY - 1],
        "diverged at step": run.diverged,
    }


def course(runs: list[Run], apart: int) -> list[dict[str, Any]]:
    """All runs side by side, some windows of them."""
    return [
        {"step": (i + 1) * EVERY}
        | {
            f"{what} ({run.name})": values[i]
            for what in ("loss", "max logit", "entropy")
            for run in runs
            for values in [{"loss": run.smooth, "max logit": run.max_logit}.get(what, run.entropy)]
        }
        for i in range(apart - 1, len(runs[0].smooth), apart)
    ]


def draw(runs: list[Run], steps: int) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    colours = dict(zip((run.name for run in runs), ("#8a8f98", "#c8102e", "#00798c"), strict=True))
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(8.5, 8.2), sharex=True, height_ratios=(1.3, 1, 1), layout="constrained"
    )
    x = range(EVERY, steps + 1, EVERY)
    for run in runs:
        look: dict[str, Any] = {"color": colours[run.name], "linewidth": 1.8}
        top.plot(range(1, steps + 1), run.loss, color=colours[run.name], alpha=0.25, linewidth=0.7)
        top.plot(x, run.smooth, label=LABELS[run.name], **look)
        middle.plot(x, run.max_logit, **look)
        bottom.plot(x, run.entropy, **look)
    top.set_ylabel("loss")
    top.axhline(CHANCE, color="#444", linewidth=0.8, linestyle=":")
    top.text(steps, CHANCE + 0.08, "chance", ha="right", va="bottom", fontsize=8, color="#444")
    top.set_ylim(-0.1, 4.6)
    middle.set_ylabel("largest logit")
    middle.set_yscale("log")
    middle.axhline(100, color="#444", linewidth=0.8, linestyle=":")
    rule = "rule: logit explosion, above 100"
    middle.text(steps, 112, rule, ha="right", va="bottom", fontsize=8, color="#444")
    bottom.set_ylabel("entropy, mean of heads\n(share of the most it could be)")
    bottom.set_ylim(0, 1)
    bottom.set_xlabel("step")
    wrong = runs[1]
    for axis in (top, middle, bottom):
        axis.spines[["top", "right"]].set_visible(False)
        if wrong.told:
            axis.axvline(wrong.told[0].step, color=colours[wrong.name], linewidth=1, linestyle="--")
        if wrong.diverged is not None:
            axis.axvspan(wrong.diverged, steps, color=colours[wrong.name], alpha=0.06, linewidth=0)
    if wrong.told:
        first = wrong.told[0]
        top.annotate(
            f"the monitor warns: {first.rule},\n{first.layer}, head {first.head}: "
            f"{first.value:.0f}",
            (first.step, 2.5),
            xytext=(8, 0),
            textcoords="offset points",
            fontsize=9,
            color=colours[wrong.name],
            va="center",
        )
    if wrong.diverged is not None:
        top.text(
            steps, 4.35, "the loss has diverged", fontsize=9, ha="right", va="center",
            color=colours[wrong.name],
        )  # fmt: skip
    top.legend(frameon=False, loc="upper right", bbox_to_anchor=(0.8, 1.02), fontsize=9)
    figure.suptitle("Attention that collapses, as a monitor sees it", fontsize=12)
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / "collapse.png", dpi=140)


def main() -> None:
    given = argparse.ArgumentParser()
    given.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given.add_argument("--steps", type=int, default=600)
    asked = given.parse_args()
    # Tensors this small gain nothing from more; and one thread adds up in one order.
    torch.set_num_threads(1)
    every = [
        (
            Run("stable", seed, None, 0.005, 50),
            Run("too fast", seed, 1.0, 0.03, 200),
            Run("QK-clip", seed, 1.0, 0.03, 200, clip=20.0),
        )
        for seed in asked.seeds
    ]
    for run in (run for runs in every for run in runs):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", regard.RegardWarning)
            run.train(asked.steps)
        print(f"{run.name}, seed {run.seed}: loss {run.smooth[-1]:.3g}", flush=True)
    drawn = list(max(every, key=lambda runs: runs[1].smooth[-1]))
    told = drawn[1].told
    print(f"\nThe first warning, seed {drawn[1].seed}:\n\n{told[0] if told else 'none'}\n")
    tables = {
        "Runs": [summary(run) for runs in every for run in runs],
        f"Course of seed {drawn[0].seed}": course(drawn, 5),
    }
    write("collapse", tables, {"steps": asked.steps})
    draw(drawn, asked.steps)


if __name__ == "__main__":
    main()
