"""What was measured as rows, and each group's worst and mean ratio."""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from benchmarks.kernels.grid.cases import Case
from benchmarks.kernels.grid.peers import OURS, PEERS

Row = dict[str, Any]
RATIOS = {name: f"{name} / best" for name in OURS}
OF_CUDNN = "of a cuDNN forward"


def rated(case: Case, times: dict[str, float], work: float, unit: str, peers: Iterable[str]) -> Row:
    """A row: rates of everybody, and ours beside the best peer's. `work` is what a call does:
    FLOPs, or bytes that it reads."""
    scale = 1e9 if unit == "TFLOP/s" else 1e6
    able = [name for name in times if name not in OURS]
    best = min(able, key=lambda name: times[name], default=None)
    row: Row = {"case": str(case)}
    row |= {f"{name} ms": times[name] for name in OURS}
    for name in (*OURS, *peers):
        row[f"{name} {unit}"] = work / times[name] / scale if name in times else None
    row["best peer"] = best
    for name, ratio in RATIOS.items():
        row[ratio] = None if best is None else times[best] / times[name]
    return row


def peers_of(rows: list[dict[str, float]]) -> list[str]:
    """Who could do any case of a group, in the usual order."""
    found = {name for times in rows for name in times} - set(OURS)
    return [name for name in (*PEERS, *sorted(found - set(PEERS))) if name in found]


def summary(groups: dict[str, list[Row]], planned: dict[str, int]) -> list[Row]:
    """Of each group the worst ratio and the geometric mean; which case is the worst."""
    found = []
    for group, rows in groups.items():
        row: Row = {"group": group, "cases": f"{len(rows)} of {planned[group]}"}
        worst: dict[str, Row] = {}
        for name, ratio in RATIOS.items():
            known = [r for r in rows if r[ratio] is not None]
            least = min(known, key=itemgetter(ratio), default=None)
            row[f"{name}: worst"] = None if least is None else least[ratio]
            row[f"{name}: mean"] = geometric_mean([r[ratio] for r in known])
            if least is not None:
                worst[name] = least
        said = dict.fromkeys(f"{r['case']} ({r['best peer']})" for r in worst.values())
        found.append(row | {"worst cases": "; ".join(said) or None})
    return found


def summary_of_looking(rows: list[Row]) -> list[Row]:
    found = []
    for question in dict.fromkeys(row["question"] for row in rows):
        asked = [r for r in rows if r["question"] == question and r[OF_CUDNN] is not None]
        most = max(asked, key=itemgetter(OF_CUDNN), default=None)
        found.append(
            {
                "question": question,
                "worst": None if most is None else most[OF_CUDNN],
                "mean": geometric_mean([r[OF_CUDNN] for r in asked]),
                "worst case": None if most is None else most["case"],
            }
        )
    return found


def geometric_mean(numbers: list[float]) -> float | None:
    return math.exp(sum(map(math.log, numbers)) / len(numbers)) if numbers else None
