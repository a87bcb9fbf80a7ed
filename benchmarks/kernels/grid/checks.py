"""Is a call right: a part of it against the formula in float64.

The part is one key head of one text with all the query heads that share it, and rows spread over
the text: as many as stay cheap. In the backward pass the output's gradient is 0 elsewhere, so that
the part's rows alone say what its keys and values must get.

An answer may err twice as much as the same formula with every operation in the call's own
precision, plus one rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import regard
from benchmarks.kernels.grid.clock import Run
from benchmarks.kernels.grid.peers import Call, output
from regard.backends.dropout import kept

ROWS, ROOM = 2048, 1 << 27
"""Rows of a part at most, and pairs."""
ALLOWED, PEERS_ALLOWED = 2, 8
"""Times the error of plain arithmetic. Peers are only asked whether they run the same call."""
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Part:
    call: Call
    b: int
    g: int
    heads: slice
    rows: Tensor

    @staticmethod
    def of(call: Call) -> Part:
        case = call.case
        group = case.H // case.G
        many = max(1, min(case.Q, ROWS, ROOM // (group * case.n)))
        rows = torch.linspace(0, case.Q - 1, many, dtype=torch.float64).long()
        last = case.G - 1
        heads = slice(last * group, case.H)
        return Part(call, case.B - 1, last, heads, rows.unique().to(call.q.device))

    def rows_of(self, t: Tensor) -> Tensor:
        return t[self.b, self.heads][:, self.rows]

    def keys_of(self, t: Tensor) -> Tensor:
        return t[self.b, self.g]

    def pull(self) -> Tensor:
        """The output's gradient, 0 beside the part."""
        only = torch.zeros_like(self.call.pull)
        only[self.b, self.heads, self.rows] = self.rows_of(self.call.pull)
        return only

    def answers(self, given: list[Tensor]) -> Named:
        """The part of an output, and of gradients in the order of the call's leaves."""
        out, *gradients = given
        found = {"out": self.rows_of(out)}
        for leaf, t in zip(self.call.leaves, gradients, strict=False):
            match leaf:
                case "q":
                    part = self.rows_of(t)
                case "sink":
                    part = t[self.heads]
                case _:
                    part = self.keys_of(t)
            found[f"{leaf}'s gradient"] = part
        return found

    def formula(self, dtype: torch.dtype, seed: Tensor | None) -> Named:
        """Attention as it is written, every operation in one precision."""
        call, kind = self.call, self.call.kind
        grad = call.case.backward
        q = self.rows_of(call.q.detach()).to(dtype).requires_grad_(grad)
        k, v = (self.keys_of(t.detach()).to(dtype).requires_grad_(grad) for t in (call.k, call.v))
        device = q.device
        b = torch.tensor(self.b, device=device)
        h = torch.arange(call.case.H, device=device)[self.heads]
        place = torch.arange(len(k), device=device)
        at = b, h[:, None, None], self.rows[:, None], place
        s = q @ k.T * q.shape[-1] ** -0.5
        if kind.change is not None:
            s = kind.change(s, *at).to(dtype)
        if kind.rule is not None:
            s = s.masked_fill(~kind.rule(*at), -math.inf)
        sink = None
        if kind.sink is not None:
            sink = kind.sink.detach()[self.heads].to(dtype).requires_grad_(grad)
            s = torch.cat([s, sink[:, None, None].expand(*s.shape[:2], 1)], -1)
        p = torch.softmax(s, -1)[..., : len(k)]
        if kind.dropout:
            assert seed is not None
            stays = kept(seed, kind.dropout, b[None], h, self.rows, place)[0]
            p = p * stays / (1 - kind.dropout)
        out = p @ v
        leaves = {"q": q, "k": k, "v": v} | ({} if sink is None else {"sink": sink})
        found = {"out": out.detach()}
        if grad:
            pull = self.rows_of(call.pull).to(dtype)
            gradients = torch.autograd.grad(out, list(leaves.values()), pull)
            names = [f"{leaf}'s gradient" for leaf in leaves]
            found |= dict(zip(names, gradients, strict=True))
        return found


def why_wrong(got: Named, truth: Named, plain: Named, times: int = ALLOWED) -> str:
    """What errs too much; nothing if the answers are right."""
    for name, answer in got.items():
        if not bool(answer.isfinite().all()):
            return f"{name} has NaN or infinity"
        error, allowed = (float((t.double() - truth[name]).norm()) for t in (answer, plain[name]))
        rounding = torch.finfo(answer.dtype).eps * float(truth[name].norm())
        if error > times * allowed + rounding:
            return f"{name} errs by {error:.3g}, plain arithmetic by {allowed:.3g}"
    return ""


class Check:
    """The truth about a call, and whether runs tell it."""

    def __init__(self, call: Call) -> None:
        self.call, self.part = call, Part.of(call)
        self.known: tuple[Named, Named] | None = None

    def why_wrong(self, run: Run) -> str:
        """Of one of regard's runs: its output, and its gradients where they are asked for."""
        answer = run.forward()
        given = [output(answer).detach()]
        if self.call.case.backward:
            given += self.call.gradients(answer, self.part.pull())
        seed = answer.inputs.seed if isinstance(answer, regard.Trace) else None
        if self.call.kind.dropout and seed is None:
            # Which weights `attention` dropped is not told.
            return "" if all(bool(t.isfinite().all()) for t in given) else "NaN or infinity"
        return self._compared(given, seed, ALLOWED)

    def why_other(self, run: Run) -> str:
        """Why the output of a peer, whose dropout is its own, is not one to this call."""
        if self.call.kind.dropout:
            return ""
        with run.chosen():
            out = run.forward().detach()
        return self._compared([out], None, PEERS_ALLOWED)

    def _compared(self, given: list[Tensor], seed: Tensor | None, times: int) -> str:
        if self.known is None or seed is not None:
            own = self.call.q.dtype
            self.known = self.part.formula(torch.float64, seed), self.part.formula(own, seed)
        return why_wrong(self.part.answers(given), *self.known, times)
