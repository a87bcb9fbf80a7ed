"""Why scores are divided by √d: the claim is stated in ABOUT, and run() tests it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from statistics import linear_regression
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import regard
from regard.errors import RegardError
from regard.lab.apparatus.experiments import About, Progress, Result, Tell, seeded
from regard.lab.reports.scaling import SCALES, answer, of_softmax, of_training, panels
from regard.monitoring import LogitExplosion, Report

ABOUT = About(
    name="scaling",
    title="Why scores are divided by √d",
    claim=(
        "The dot product of two random vectors of width d has variance d. Undivided, softmax "
        "saturates as heads grow wider, its gradient vanishes and training suffers; divided by d "
        "it is nearly uniform and learns late; divided by √d it is neither."
    ),
    method=(
        "Queries and keys are drawn with entries of variance 1, as they are in a fresh layer. For "
        "each width d we take the variance of q·k before and after it is divided, the entropy of "
        "softmax over 64 keys as a share of the most it can be, the size of softmax's own gradient "
        "(the Frobenius norm of ∂p/∂s), and the gradient that reaches the queries when the output "
        "is pushed somewhere. Gradients are those of the median query: of a saturated softmax the "
        "mean is that of the few queries that hang between two keys.",
        "Then one small model learns to look things up: it is shown sixteen pairs of a key and a "
        "value and asked for the values of some keys. One head, as wide as the model; nothing "
        "differs between the three runs but what scores are divided by. A regard.Monitor watches "
        "each run with its rule against exploding logits, which warns above 100. All three are "
        "trained with several seeds, and figures are ranges over them: a run that is unstable "
        "makes much of the last digit of a sum, which differs between kinds of CPUs too.",
    ),
    change=(
        "Train with --full, ten times as long: does the undivided model get there?",
        "Narrow the head (width=16): with d this small, is there anything left to fix?",
        "Draw queries with variance 1/d instead of 1. Which scaling is right then?",
        "Replace Adam by plain gradient descent in train(): Adam rescales small gradients, which "
        "hides much of what dividing by d costs.",
    ),
    full={
        "samples": 4096,
        "steps": 3000,
        "seeds": 5,
        "widths": (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    },
    seeds=3,
)

KEYS, VALUES, PAIRS, ASKED, BATCH = 32, 16, 16, 4, 64


def scales(d: int) -> dict[str, float]:
    """What scores are multiplied by, by name."""
    return dict(zip(SCALES, (1.0, d**-0.5, 1 / d), strict=True))


def run(
    *,
    seed: int = 0,
    widths: Sequence[int] = (4, 8, 16, 32, 64, 128, 256, 512, 1024),
    samples: int = 512,
    width: int = 256,
    steps: int = 300,
    seeds: int = 3,
    progress: Tell | None = None,
) -> Result:
    """Measure softmax at several widths, and train the lookup with each scaling at one.

    >>> result = run(widths=(16, 64, 256), samples=64, steps=0)
    >>> [check.holds for check in result.checks][:2]
    [True, True]
    """
    if len(set(widths)) < 2 or min(widths) < 1:
        raise RegardError(
            "widths= says at which widths of a head to measure",
            got=f"{list(widths)}",
            accepted="two or more different numbers, each 1 or more",
        )
    step = Progress(len(widths) + 3 * steps * seeds, progress)
    with seeded(seed):
        fresh = []
        for d in widths:
            fresh.append(measure(d, samples))
            step("measuring softmax")
    trained, ends = {}, {}
    for name, scale in scales(width).items():
        found = []
        for i in range(seeds):
            with seeded(seed + i):
                found.append(train(Lookup(width, scale), steps, lambda: step("training")))
        trained[name], ends[name] = found[0], [_end(one) for one in found]
    slope = linear_regression(
        [math.log(d) for d in widths], [math.log(m["variance"]) for m in fresh]
    )
    numbers = {
        "variance_slope": slope.slope,
        "widths": list(widths),
        "fresh": fresh,
        "trained": trained,
        "ends": ends,
    }
    settings = {"seed": seed, "widths": list(widths), "samples": samples, "width": width,
                "steps": steps, "seeds": seeds}  # fmt: skip
    checks = (*of_softmax(numbers), *(of_training(ends, steps) if steps else ()))
    return Result(ABOUT, settings, checks, answer(numbers, width), numbers, panels(numbers))


def measure(d: int, samples: int, keys: int = 64) -> dict[str, Any]:
    """Softmax over random keys of width d: the variance of q·k, and for each scale what follows."""
    q = torch.randn(samples, d, requires_grad=True)
    k, v, push = torch.randn(keys, d), torch.randn(keys, d), torch.randn(samples, d)
    found: dict[str, Any] = {"variance": float((q.detach() @ k.T).var())}
    for name, scale in scales(d).items():
        t = regard.trace(q, k, v, score=regard.scores.dot(), scale=scale)
        (reaching,) = torch.autograd.grad((t.out * push / d**0.5).sum(), q)
        weights, sizes = t.weights().detach(), reaching.norm(dim=-1)
        found[name] = {
            "variance": found["variance"] * scale**2,
            "entropy": float(t.entropy.detach().mean()) / math.log(keys),
            "saturated": float((weights.amax(-1) > 0.99).float().mean()),
            "jacobian": float(jacobian_size(weights).median()),
            "gradient": float(sizes.median()),
            "gradient_mean": float(sizes.mean()),
        }
    return found


def jacobian_size(p: Float[Tensor, "... k"]) -> Float[Tensor, "..."]:
    """The Frobenius norm of ∂p/∂s = diag(p) - p pᵀ: 0 where softmax is saturated.

    >>> jacobian_size(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.5000, 0.0000])
    """
    two = p.square().sum(-1)
    return (two - 2 * p.pow(3).sum(-1) + two.square()).clamp(min=0).sqrt()


class Lookup(nn.Module):
    """Asked keys attend to the keys that were shown, and read their values."""

    def __init__(self, d: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.key, self.value = nn.Embedding(KEYS, d), nn.Embedding(VALUES, d)
        self.q_proj, self.k_proj = (nn.Linear(d, d, bias=False) for _ in range(2))
        # Queries and keys begin with entries of variance 1.
        nn.init.normal_(self.q_proj.weight, std=d**-0.5)
        nn.init.normal_(self.k_proj.weight, std=d**-0.5)
        self.read = nn.Linear(d, VALUES)

    def forward(
        self, asked: Int[Tensor, "b a"], keys: Int[Tensor, "b n"], values: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b a v"]:
        q, k = self.q_proj(self.key(asked)), self.k_proj(self.key(keys))
        found = regard.attention(q, k, self.value(values), scale=self.scale)
        logits: Tensor = self.read(found)
        return logits


def lookups() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Asked keys, the keys and values shown, and the values that are right."""
    keys = torch.rand(BATCH, KEYS).argsort(1)[:, :PAIRS]
    values = torch.randint(VALUES, (BATCH, PAIRS))
    asked = torch.randint(PAIRS, (BATCH, ASKED))
    return keys.gather(1, asked), keys, values, values.gather(1, asked)


def train(model: nn.Module, steps: int, done: Any) -> dict[str, Any]:
    """The losses and accuracies of a run, and what a monitor warned of."""
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-4)
    losses, accuracies = [], []
    reports: list[Report] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", regard.RegardWarning)
        monitor = regard.Monitor(
            model, every=10, look=10, to=reports.append, rules=[LogitExplosion()], quiet=steps + 1
        )
        for _ in range(steps):
            asked, keys, values, right = lookups()
            logits = model(asked, keys, values)
            loss = cross_entropy(logits.flatten(0, 1), right.flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            monitor.step()
            losses.append(loss.item())
            accuracies.append(float((logits.argmax(-1) == right).float().mean()))
            done()
        monitor.close()
    found = [finding for report in reports for finding in report.findings]
    return {
        "loss": losses,
        "accuracy": accuracies,
        "learned_at": _learned_at(accuracies),
        "looked_at": [report.step for report in reports],
        "max_logit": [report.layers[""].max_logit[0] for report in reports],
        "warnings": [{"rule": f.rule, "step": f.step, "text": str(f)} for f in found],
    }


def _learned_at(accuracies: Sequence[float], enough: float = 0.9, run: int = 5) -> int | None:
    """The first step from which accuracy was enough for some steps in a row."""
    good = [a >= enough for a in accuracies]
    starts = (i + 1 for i in range(len(good) - run + 1) if all(good[i : i + run]))
    return next(starts, None)


def _end(run: dict[str, Any]) -> dict[str, Any]:
    """What one run came to."""
    last = run["accuracy"][-10:]
    return {
        "learned_at": run["learned_at"],
        "accuracy": sum(last) / max(len(last), 1),
        "warned_at": run["warnings"][0]["step"] if run["warnings"] else None,
    }
