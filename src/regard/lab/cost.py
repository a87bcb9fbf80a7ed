"""What forms of attention cost, measured beside what was predicted, and what the cheap ones lose.

CLAIM: Eager attention takes time and memory as n². Fused, it takes memory as n and time as n²
still. A sliding window and linear attention take time as n and overtake it from some length on.
regard.cost foresees memory, and bounds times from below. The cheap forms recall less.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from statistics import linear_regression
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import regard
from regard import cost, masks
from regard.cost.rates import Device
from regard.cost.this_machine import processor
from regard.lab.apparatus.experiments import About, Progress, Result, Tell, seeded
from regard.lab.apparatus.held_memory import peak
from regard.lab.reports.cost import (
    ASKED,
    FORMS,
    NEAR,
    PAIRS,
    VALUES,
    answer,
    checks,
    panels,
)
from regard.masks import Mask
from regard.nn import LinearAttention, MultiHeadAttention, linear_attention

ABOUT = About(
    name="cost",
    title="What forms of attention cost, and what the cheap ones lose",
    claim=(
        "Eager attention takes time and memory as n². Fused, it takes memory as n and time as n² "
        "still. A sliding window and linear attention take time as n and overtake it from some "
        "length on. regard.cost foresees memory, and bounds times from below. What is saved is "
        "paid for: the cheap forms recall less of what lies far back."
    ),
    method=(
        "One causal call, two heads 64 wide in float32 on one thread, at growing lengths: eager "
        "(the n×n matrix written out), fused (regard.attention), the same with a window of 128 "
        "keys, the same with sparse blocks of 128 (its own block, the one before, and every "
        "eighth), and regard.nn.linear_attention. Time is the processor's, the least of several "
        "rounds in which all take turns. Memory is the most that PyTorch's allocator held beside "
        "the inputs, from its profiler.",
        "regard.cost predicts the first four from the same tensors and masks. Its times are "
        "bounds: the device is one thread of this machine, of which matrix products and copies "
        "were measured just before, at their best. Linear attention, which has no pairs to count, "
        "is counted by hand.",
        "A crossing is the first length from which one form is quicker than another at every "
        "longer one, too. Then one block with each form learns to recall: 48 pairs of a key and a "
        "value are shown, and values are asked for by key. The window sees the last 16, the blocks "
        "are of 8.",
    ),
    change=(
        "Widen the window: at which width does recall come back, and what does it cost?",
        "Make BLOCK 64, less than the kernel's tiles of 128: what becomes of the sparse blocks?",
        "Change every=8 in layout(): sparse blocks still grow as n². Make them grow as n.",
        "Run with --full, which goes to 16,384 tokens. Where is eager attention then?",
        "Use torch.relu as the feature of linear attention: does recall change?",
    ),
    full={"lengths": (256, 512, 1024, 2048, 4096, 8192, 16384), "steps": 1500},
    seeds=3,
)  # fmt: skip

HEADS, WIDTH, SEEN, BLOCK, CHUNK = 2, 64, 128, 128, 64
MOST_EAGER = 4096
"""Above it eager attention would take gigabytes."""
ROUND = 250
"""Steps of learning that take about as long as a round of all forms."""
KEYS, SMALL = 64, 8
"""Different keys of the recall task, and how many of them a block has."""


def run(
    *,
    seed: int = 0,
    lengths: Sequence[int] = (256, 512, 1024, 2048, 4096),
    repeats: int = 4,
    steps: int = 400,
    progress: Tell | None = None,
) -> Result:
    """Measure every form at every length, predict it, and train each to recall."""
    recalling = [form for form in FORMS if form != "eager"]
    step = Progress(1 + repeats * ROUND + len(recalling) * steps, progress)
    with seeded(seed):
        device = this_machine()
        step("measuring this machine")
        measured = measure(FORMS, lengths, repeats, lambda: step("measuring attention", ROUND))
    for form, runs in measured.items():
        for n, one in zip(lengths, runs, strict=False):
            one |= foreseen(form, n, device)
    recall = {}
    for form in recalling:
        with seeded(seed):
            recall[form] = train(Recaller(form), steps, lambda: step("learning to recall"))
    numbers = {
        "device": device.as_dict(),
        "lengths": list(lengths),
        "measured": measured,
        "slopes": {form: slopes(lengths, found) for form, found in measured.items()},
        "crossings": {
            f"{a} over {b}": crossing(measured[a], measured[b], lengths)
            for a, b in (("fused", "eager"), ("window", "fused"), ("blocks", "fused"),
                         ("linear", "fused"), ("linear", "window"))
        },
        "recall": recall,
    }  # fmt: skip
    settings = {"seed": seed, "lengths": list(lengths), "repeats": repeats, "steps": steps}
    return Result(ABOUT, settings, checks(numbers), answer(numbers), numbers, panels(numbers))


def eager(
    q: Float[Tensor, "b h n d"], k: Float[Tensor, "b h n d"], v: Float[Tensor, "b h n d"]
) -> Float[Tensor, "b h n d"]:
    """The textbook's formula, step by step, as models run it when asked for weights."""
    n = q.shape[2]
    hidden = torch.full((n, n), -torch.inf).triu_(1)[None, None]
    logits = q @ k.mT
    logits = logits * q.shape[-1] ** -0.5
    logits = logits + hidden
    return torch.softmax(logits, -1) @ v


def layout(blocks: int, every: int = 8) -> Bool[Tensor, "t t"]:
    """Which block sees which: its own, the one before, and every so many.

    >>> layout(4, 2).int()
    tensor([[1, 0, 1, 0],
            [1, 1, 1, 0],
            [1, 1, 1, 0],
            [1, 0, 1, 1]], dtype=torch.int32)
    """
    place = torch.arange(blocks)
    apart = place[:, None] - place
    return (apart == 0) | (apart == 1) | (place % every == 0)


def mask_of(form: str, n: int, seen: int = SEEN, block: int = BLOCK) -> Mask:
    """What a form allows."""
    if form == "window":
        return masks.causal() & masks.window(seen - 1)
    if form == "blocks":
        return masks.causal() & masks.blocks(layout(-(-n // block)), block)
    return masks.causal()


def measure(
    forms: Sequence[str], lengths: Sequence[int], repeats: int, done: Callable[[], None]
) -> dict[str, list[dict[str, float]]]:
    """Seconds and bytes of a call of each form at each length. They take turns, so that what else
    the machine does for a while slows all of them, and the least of the rounds is of a quiet one.
    """
    calls = {
        form: [call_of(form, n) for n in lengths if form != "eager" or n <= MOST_EAGER]
        for form in forms
    }
    least = {form: [math.inf] * len(each) for form, each in calls.items()}
    for _ in range(repeats):
        for form, each in calls.items():
            least[form] = [
                min(old, quickest(call, 2)) for old, call in zip(least[form], each, strict=True)
            ]
        done()
    return {
        form: [
            {"seconds": seconds, "bytes": float(peak(call))}
            for seconds, call in zip(least[form], each, strict=True)
        ]
        for form, each in calls.items()
    }


def call_of(form: str, n: int) -> Callable[[], Tensor]:
    """A call of so many tokens."""
    q, k, v = torch.randn(3, 1, HEADS, n, WIDTH)
    mask = mask_of(form, n)

    def call() -> Tensor:
        if form == "eager":
            return eager(q, k, v)
        if form == "linear":
            return linear_attention(q, k, v, chunk=CHUNK)
        return regard.attention(q, k, v, mask=mask)

    return call


def foreseen(form: str, n: int, device: Device) -> dict[str, float]:
    """Seconds at best and bytes of one call, as regard.cost counts them; by hand if linear."""
    if form == "linear":
        return {"predicted_seconds": 2 * linear_macs(n) / device.rate("float32")}
    x = torch.empty(1, HEADS, n, WIDTH, device="meta")
    counted = cost.call(x, x, x, mask=mask_of(form, n))
    how: Literal["eager", "fused"] = "eager" if form == "eager" else "fused"
    return {
        "predicted_seconds": counted.time(device, how=how).seconds,
        "predicted_bytes": float(getattr(counted, how).peak),
    }


def this_machine() -> Device:
    """One thread of it: how fast its matrix products and copies are at best."""
    a, b, out = torch.zeros(3, 1024, 1024)
    source = torch.ones(1 << 26, dtype=torch.uint8)
    target = torch.empty_like(source)
    rate = 2 * 1024**3 / quickest(lambda: torch.mm(a, b, out=out), 10)
    bandwidth = 2 * len(source) / quickest(lambda: target.copy_(source), 10)
    return Device(f"one thread of {processor()}", {"float32": rate}, bandwidth)


def quickest(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the processor that a call takes, the least of some. One thread works, so that
    this is the time on a clock; but others that use the machine do not count."""
    call()
    taken = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        taken.append(time.process_time() - start)
    return min(taken)


def linear_macs(n: int) -> int:
    """Multiply–adds of linear attention: pairs within a chunk, and the matrix of all before."""
    return HEADS * n * (CHUNK * (2 * WIDTH + 1) + 2 * WIDTH * (WIDTH + 1))


def slopes(lengths: Sequence[int], found: Sequence[dict[str, float]]) -> dict[str, float]:
    """The powers of n as which time and memory grow, over the longer half of the lengths."""
    half = max(0, min(len(found) // 2, len(found) - 2))
    x = [math.log(n) for n in lengths[half : len(found)]]
    return {
        what: linear_regression(x, [math.log(one[what]) for one in found[half:]]).slope
        for what in ("seconds", "bytes")
    }


def crossing(
    one: Sequence[dict[str, float]], other: Sequence[dict[str, float]], lengths: Sequence[int]
) -> int | None:
    """The first length from which one is quicker at every longer one, too.

    >>> quick, slow = [{"seconds": 2.0}, {"seconds": 3.0}], [{"seconds": 1.0}, {"seconds": 4.0}]
    >>> crossing(quick, slow, [10, 20]), crossing(slow, quick, [10, 20])
    (20, None)
    """
    quicker = [a["seconds"] < b["seconds"] for a, b in zip(one, other, strict=False)]
    behind = [i for i, first in enumerate(quicker) if not first]
    start = behind[-1] + 1 if behind else 0
    return lengths[start] if start < len(quicker) else None


class Recaller(nn.Module):
    """One block with one form of attention, which looks values up by their keys."""

    def __init__(self, form: str, width: int = 32) -> None:
        super().__init__()
        self.key, self.value = nn.Embedding(KEYS, width), nn.Embedding(VALUES + 1, width)
        self.norm, self.last = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mask = mask_of(form, PAIRS + ASKED, NEAR, SMALL)
        linear = form == "linear"
        self.attention = LinearAttention(width, 4) if linear else MultiHeadAttention(width, 4)
        self.said = nn.Linear(width, VALUES)

    def forward(
        self, keys: Int[Tensor, "b n"], values: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b a v"]:
        x = self.key(keys) + self.value(values)
        x = x + self.attention(self.norm(x), mask=self.mask)
        logits: Tensor = self.said(self.last(x[:, PAIRS:]))
        return logits


def pairs(batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values as they are shown and asked for [b n], the values that are right [b a], and
    how far back each was shown [b a]. Asked keys come with the value VALUES, which means: what?"""
    keys = torch.rand(batch, KEYS).argsort(1)[:, :PAIRS]
    values = torch.randint(VALUES, (batch, PAIRS))
    asked = torch.rand(batch, PAIRS).argsort(1)[:, :ASKED]
    shown = torch.cat([keys, keys.gather(1, asked)], 1)
    told = torch.cat([values, torch.full((batch, ASKED), VALUES)], 1)
    back = PAIRS + torch.arange(ASKED) - asked
    return shown, told, values.gather(1, asked), back


def train(model: Recaller, steps: int, done: Callable[[], None]) -> dict[str, float]:
    """How much is recalled: of all, of what was shown lately, and of what lies farther back."""
    optimiser = torch.optim.Adam(model.parameters(), lr=6e-3)
    for _ in range(steps):
        keys, values, right, _ = pairs(32)
        optimiser.zero_grad()
        cross_entropy(model(keys, values).mT, right).backward()
        optimiser.step()
        done()
    keys, values, right, back = pairs(256)
    with torch.no_grad():
        hit = (model(keys, values).argmax(-1) == right).float()
    near = back < NEAR
    return {"all": float(hit.mean()), "near": float(hit[near].mean()),
            "far": float(hit[~near].mean())}  # fmt: skip
