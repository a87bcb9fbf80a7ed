"""A cost model of calls that ranks share: what 64 of them would take. Nothing is measured here;
rates are assumed, or given by whoever measured them (parallel_gpu.py).

Work is what a layer's pairs cost at a stated rate, times how much more the busiest rank has; travel
is the bytes that the plan counts at a stated bandwidth, and a latency for each message. Under a
ring a step takes the longer of both; the other methods travel first and work then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from regard import masks, parallel
from regard.monitoring.ranks import OF_LARGEST, OF_SUMS
from regard.parallel.balance import busiest, busiest_round
from regard.parallel.call import Call, checked_call
from regard.parallel.choice import traffic_of
from regard.parallel.ranks import Ranks

COLUMNS = "32 heads over 8, width 128, bf16, causal, zigzag"


@dataclass(frozen=True)
class Rates:
    """What is assumed, or was measured, of devices and of the links between them."""

    flops: float = 400e12
    """Of attention, a second."""
    bandwidth: float = 50e9
    """Bytes a second that a rank sends: the slowest link on the way decides."""
    latency: float = 20e-6
    """Seconds of a message."""

    def __str__(self) -> str:
        return (
            f"{self.flops / 1e12:.3g} TFLOP/s of attention a device, "
            f"{self.bandwidth / 1e9:.3g} GB/s sent by a rank, {self.latency * 1e6:.3g} µs a message"
        )


RATES = Rates()


def _call(tokens: int, ranks: int) -> Call:
    layout = parallel.zigzag(tokens, ranks)
    # Shapes without memory.
    q, k, v = (
        torch.zeros(1, dtype=torch.bfloat16).expand(1, heads, layout.lengths[0], 128)
        for heads in (32, 8, 8)
    )
    nobody: Any = None
    return checked_call(
        q, k, v, Ranks(nobody, 0, ranks), layout, None, mask=masks.causal(), score=None, bias=None,
        softcap=None, sink=None, scale=None, dropout=0.0, training=False, cu_seqlens=None,
    )  # fmt: skip


def seconds(call: Call, method: str, rates: Rates = RATES) -> tuple[float, float]:
    """A forward pass, and a backward pass."""
    B, H, Q, _ = call.shape
    W, D = call.ranks.size, call.inputs.q.shape[3]
    pairs = B * H * masks.causal().count(Q)
    even = 4 * D * pairs / W / rates.flops
    uneven = {"all_gather": busiest, "ring": busiest_round}.get(method, lambda _: 1.0)(call)
    work = even * uneven
    sent = traffic_of(call, method).sent * call.inputs.q.element_size()
    steps = max(W - 1, 1)
    travel = (sent / rates.bandwidth + steps * rates.latency) if W > 1 else 0.0
    # A backward pass has five products for the two of a forward pass; a ring makes these again.
    if method == "ring":
        # Gradients go round in float32 beside their keys.
        back = max(3.5 * work, 3 * travel + 2 * travel / steps)
        return max(work, travel), back
    # Gradients of gathered keys are summed in float32.
    return work + travel, 2.5 * work + travel * (2 if method == "all_gather" else 1)


def scaling_rows(lengths: tuple[int, ...], rates: Rates = RATES) -> list[dict[str, Any]]:
    """Each method on 8 and 64 ranks."""
    rows = []
    for tokens in lengths:
        alone = sum(seconds(_call(tokens, 1), "ulysses", rates))
        for ranks in (8, 64):
            call = _call(tokens, ranks)
            for method in ("ulysses", "all_gather", "ring"):
                # Heads that cannot be dealt out to so many ranks.
                if method == "ulysses" and 32 % ranks:
                    continue
                forward, backward = seconds(call, method, rates)
                held = traffic_of(call, method).held * 2
                rows.append(
                    {
                        "tokens": f"{tokens:,}",
                        "ranks": ranks,
                        "method": method,
                        "predicted forward ms": forward * 1e3,
                        "predicted backward ms": backward * 1e3,
                        "predicted efficiency": alone / ranks / (forward + backward),
                        "held MB": held / 1e6,
                    }
                )
    return rows


def monitor_rows(layers: int = 32, heads: int = 32, step: float = 0.5) -> list[dict[str, Any]]:
    """Two sums over all ranks at each report, by trees: a message up and one down a level."""
    rows = []
    size = 4 * (1 + layers * heads) * (OF_LARGEST + OF_SUMS)
    for ranks in (8, 64):
        taken = 2 * 2 * math.ceil(math.log2(ranks)) * RATES.latency + 2 * size / RATES.bandwidth
        rows.append(
            {
                "ranks": ranks,
                "bytes": size,
                "predicted ms of a window": taken * 1e3,
                "predicted share of 50 steps of 500 ms": taken / (50 * step),
            }
        )
    return rows
