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
from regard.lab.experiments import About, Check, Progress, Result, Tell, seeded
from regard.lab.panels import Line, Lines, smoothed
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
    return {"undivided": 1.0, "by √d": d**-0.5, "by d": 1 / d}


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
    checks = (*_of_softmax(numbers), *(_of_training(ends, steps) if steps else ()))
    return Result(ABOUT, settings, checks, _answer(numbers, width), numbers, _panels(numbers))


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


def _of_softmax(numbers: dict[str, Any]) -> tuple[Check, ...]:
    slope, d, last = numbers["variance_slope"], numbers["widths"][-1], numbers["fresh"][-1]
    raw, root, whole = (last[name] for name in scales(1))
    # What narrow vectors give depends on the few numbers that were drawn.
    wide = [m for m in numbers["fresh"] if m["variance"] > 10] or numbers["fresh"]
    kept = [m["by √d"]["entropy"] for m in wide]
    return (
        Check("the variance of q·k grows as d", f"as d to the {slope:.2f}", abs(slope - 1) < 0.05),
        Check(
            "undivided, softmax saturates",
            f"entropy {raw['entropy']:.0%} of the most at d = {d}",
            raw["entropy"] < 0.25,
        ),
        Check(
            "and its gradient vanishes",
            f"that of the median query is {raw['gradient'] / root['gradient']:.2g} of what it is "
            "divided by √d",
            raw["gradient"] < 0.5 * root["gradient"],
        ),
        Check(
            "divided by √d, entropy does not depend on d",
            f"{min(kept):.0%} to {max(kept):.0%}",
            max(kept) - min(kept) < 0.06,
        ),
        Check(
            "divided by d, softmax is nearly uniform and passes little on",
            f"entropy {whole['entropy']:.1%}, gradient {whole['gradient'] / root['gradient']:.2g} "
            "of that divided by √d",
            whole["entropy"] > 0.99 and whole["gradient"] < 0.2 * root["gradient"],
        ),
    )


def _of_training(ends: dict[str, list[dict[str, Any]]], steps: int) -> tuple[Check, ...]:
    learned = {
        name: [steps if one["learned_at"] is None else one["learned_at"] for one in runs]
        for name, runs in ends.items()
    }
    raw, root, whole = learned.values()
    warned = {name: [one["warned_at"] is not None for one in runs] for name, runs in ends.items()}
    told = [name for name, did in warned.items() if any(did)]
    return (
        Check(
            "undivided, training suffers",
            _reached(ends["undivided"], steps),
            all(late > 3 * soon for late, soon in zip(raw, root, strict=True)),
        ),
        Check(
            "divided by √d it learns soonest",
            f"{_reached(ends['by √d'], steps)}; divided by d {_reached(ends['by d'], steps)}",
            max(root) < steps and all(soon < late for soon, late in zip(root, whole, strict=True)),
        ),
        Check(
            "a monitor would have told",
            "it warned: " + (", ".join(told) or "never"),
            all(warned["undivided"]) and told == ["undivided"],
        ),
    )


def _reached(runs: Sequence[dict[str, Any]], steps: int) -> str:
    """How far runs of several seeds came, as a range."""
    learned = [one["learned_at"] for one in runs]
    if None not in learned:
        return f"90% right after {_range(learned)} steps"
    return f"{_range([round(100 * one['accuracy']) for one in runs])}% right after {steps} steps"


def _range(values: Sequence[int]) -> str:
    """
    >>> _range([55, 52, 60]), _range([7, 7])
    ('52 to 60', '7')
    """
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _answer(numbers: dict[str, Any], width: int) -> str:
    d, last, trained = numbers["widths"][-1], numbers["fresh"][-1], numbers["trained"]
    entropy = {name: last[name]["entropy"] for name in scales(1)}
    said = (
        f"The variance of q·k grows as d to the {numbers['variance_slope']:.2f} "
        f"({last['variance']:.0f} at d = {d}). At that width softmax over 64 keys has "
        f"{entropy['undivided']:.0%} of the largest entropy undivided, {entropy['by √d']:.0%} "
        f"divided by √d and {entropy['by d']:.1%} divided by d; undivided, "
        f"{last['undivided']['saturated']:.0%} of queries put more than 99% of their weight on one "
        "key."
    )
    said += f" {_of_gradients(numbers)}"
    steps, ends = len(trained["undivided"]["accuracy"]), numbers["ends"]
    if not steps:
        return said
    runs = ", ".join(
        f"{name if name == 'undivided' else f'divided {name}'} {_reached(found, steps)}"
        for name, found in ends.items()
    )
    warned = [one["warned_at"] for one in ends["undivided"] if one["warned_at"] is not None]
    monitor = (
        f"A monitor warned of the undivided one at step {_range(warned)}, in {len(warned)} of "
        f"{len(ends['undivided'])} runs"
        if warned
        else "A monitor warned of none of it"
    )
    return (
        f"{said} Trained to look things up at width {width}, over {len(ends['undivided'])} seeds: "
        f"{runs}. {monitor}."
    )


def _of_gradients(numbers: dict[str, Any]) -> str:
    """Why gradients of undivided scores are the larger ones where heads are narrow."""
    widths, fresh = numbers["widths"], numbers["fresh"]
    times = [m["undivided"]["gradient"] / m["by √d"]["gradient"] for m in fresh]
    at = times.index(max(times))
    d = widths[at]
    return (
        f"Undivided gradients are larger at first, {times[at]:.2g} times at d = {d}: the chain "
        f"rule multiplies by what scores are multiplied by, which is √d = {d**0.5:.2g} times as "
        f"much undivided. Without that factor they are {times[at] / d**0.5:.2g} times as large "
        f"there, and {times[-1] / widths[-1] ** 0.5:.1g} at d = {widths[-1]}."
    )


def _panels(numbers: dict[str, Any]) -> tuple[Lines, ...]:
    widths, fresh, names = numbers["widths"], numbers["fresh"], list(scales(1))

    def against_width(what: str) -> list[Line]:
        return [Line(name, widths, [m[name][what] for m in fresh]) for name in names]

    softmax = (
        Lines(
            "Variance of q·k",
            "Undivided it is d, the dashed line. Divided by √d it is 1 at every width, and divided "
            "by d it is 1/d.",
            "width d", "variance",
            [*against_width("variance"), Line("d", widths, list(widths), dashed=True)],
            log_x=True, log_y=True,
        ),
        Lines(
            "Entropy of softmax over 64 keys",
            "100 % looks at all keys alike, 0 % at one. Only division by √d does not depend on d.",
            "width d", "share of the most", against_width("entropy"), log_x=True, percent=True,
        ),
        Lines(
            "Gradient that reaches the median query",
            "Undivided it breaks down as softmax saturates; divided by d it fades as 1/√d. In "
            "narrow heads the undivided one is larger, since it is multiplied by 1 instead of 1/√d "
            "on its way.",
            "width d", "norm of ∂(out·r)/∂q", against_width("gradient"), log_x=True, log_y=True,
        ),
        Lines(
            "What softmax itself passes on",
            "The norm of ∂p/∂s of the median query, without the factor that scores were multiplied "
            "by.",
            "width d", "norm of ∂p/∂s", against_width("jacobian"), log_x=True, log_y=True,
        ),
    )  # fmt: skip
    trained = numbers["trained"]
    if not trained[names[0]]["loss"]:
        return softmax
    return (
        *softmax,
        Lines(
            "Training: loss", "The first seed. The same model and data; only the scale differs.",
            "step", "loss, nats",
            [Line(name, *smoothed(run["loss"])) for name, run in trained.items()],
        ),
        Lines(
            "Training: answers that are right", "The first seed. Chance is 1 in 16.",
            "step", "accuracy",
            [Line(name, *smoothed(run["accuracy"])) for name, run in trained.items()],
            percent=True,
        ),
        Lines(
            "Largest logit, as a monitor sees it",
            "Above the dashed line regard.Monitor warns of a logit explosion.",
            "step", "largest logit",
            [*(Line(n, r["looked_at"], r["max_logit"]) for n, r in trained.items()),
             Line("warns", [0, len(trained[names[0]]["loss"])], [LogitExplosion().above] * 2,
                  dashed=True)],
            log_y=True,
        ),
    )  # fmt: skip
