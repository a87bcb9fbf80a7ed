"""Traces of calls that were made elsewhere: by another kernel, another library, another rank; and
of weights that somebody has at hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard import biases, masks
from regard.backends.contract import Rows, SecondPass
from regard.calls.choice import choose
from regard.errors import RegardError
from regard.inputs import AttentionInputs, check
from regard.jagged import JaggedTrace, pack_tokens
from regard.masks.algebra import Mask
from regard.traces import Trace
from regard.transforms import may_learn

LOOKED_AT = 4
"""Rows of each head that are worked out to see whether an lse belongs to q and k."""
ROUNDED = {torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""How far a row of many narrow numbers may be from 1 in all."""


class GivenRows(Rows):
    """Rows of which the lse was given. What was not is worked out, in one pass over the pairs, when
    somebody asks for it."""

    _known: dict[str, Tensor]
    _later: Callable[[], Rows]
    _values: bool
    """Whether there is an output, or values to make it of."""

    def __new__(
        cls, known: dict[str, Tensor], later: Callable[[], Rows], *, values: bool
    ) -> GivenRows:
        self = super().__new__(cls, *4 * [known["lse"]])
        self._known, self._later, self._values = known, later, values
        return self

    def at_hand(self) -> tuple[Tensor, ...]:
        return tuple(self._known.values())

    def _get(self, name: str) -> Tensor:
        if name not in self._known:
            self._known = self._later()._asdict() | self._known
        return self._known[name]

    def __iter__(self) -> Any:
        return (self._get(name) for name in self._fields)

    def __getitem__(self, which: Any) -> Any:
        return tuple(self)[which]

    @property
    def out(self) -> Tensor:
        if not self._values:
            raise RegardError(
                "this trace was made without values, so it has no output",
                got="Trace.of(q, k, lse)",
                do="Trace.of(q, k, lse, v=v), or out= if the output is at hand",
            )
        return self._get("out")

    @property
    def max_logit(self) -> Tensor:
        return self._get("max_logit")

    @property
    def entropy(self) -> Tensor:
        return self._get("entropy")

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        known = {name: change(t) for name, t in self._known.items()}
        return GivenRows(known, lambda: Rows(*map(change, self)), values=self._values)

    def __reduce__(self) -> Any:
        return Rows, tuple(self)


def given_trace(
    q: Tensor,
    k: Tensor,
    lse: Any,
    *,
    v: Tensor | None,
    out: Any,
    mask: Mask | None,
    backend: str | None,
    cu_seqlens: Any,
    verify: bool,
    **options: Any,
) -> Trace:
    """What `Trace.of` says."""
    sequences, given = None, mask
    values = _no_values(k) if v is None else v
    if cu_seqlens is not None:
        packed = pack_tokens(q, k, values, cu_seqlens, mask, options["bias"])
        sequences, (q, k, values), mask = packed.sequences, packed.qkv, packed.mask
        lse = _checked(lse, (q.shape[2], q.shape[1]), "lse", "[tokens, heads]").T[None]
        if out is not None:
            want = (q.shape[2], q.shape[1], values.shape[-1])
            out = _checked(out, want, "out", "[tokens, heads, width]").transpose(0, 1)[None]
    inputs = check(q, k, values, mask=mask, **options, dropout=0.0, training=False)
    B, H, Q, _ = inputs.shape
    lead = tuple(q.shape[:-1])
    lse = _checked(lse, lead, "lse", "the axes of q without the last").reshape(B, H, Q)
    lse = lse.to(inputs.compute_dtype)
    # Some kernels say +inf of a row that sees nothing.
    lse = lse.masked_fill(lse == math.inf, -math.inf)
    known = {"lse": lse}
    if out is not None:
        width = out.shape[-1:] if v is None else values.shape[-1:]
        out = _checked(out, (*lead, *width), "out", "q's axes, with the width of the values")
        known["out"] = out.reshape(B, H, Q, *width)
    if may_learn(inputs.tensors()) and not may_learn([lse]):
        # The gradient of exp(logit − lse) with an lse that stays would be that of no softmax.
        inputs = inputs.map_tensors(Tensor.detach)
    chosen = choose(inputs, backend, statistics=True)
    questions = chosen.questions()
    if verify:
        _verify(inputs, lse, questions)

    values_there = v is not None or out is not None
    rows = GivenRows(known, lambda: chosen.observe(inputs), values=values_there)
    if sequences is not None:
        return JaggedTrace(inputs, rows, chosen.name, questions, given, sequences)
    return Trace(inputs, rows, chosen.name, questions, given)


def _no_values(k: Tensor) -> Tensor:
    return k.new_empty(*k.shape[:-1], 0) if k.ndim else k


def _checked(t: Any, want: tuple[int, ...], name: str, accepted: str) -> Tensor:
    if not isinstance(t, Tensor) or tuple(t.shape) != want or not t.is_floating_point():
        got = f"{t.dtype} {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
        raise RegardError(
            f"Trace.of: {name} does not fit q and k",
            got=got,
            accepted=f"floating point {list(want)}: {accepted}",
        )
    return t


@torch.no_grad()
def _verify(x: AttentionInputs, lse: Tensor, questions: SecondPass) -> None:
    """Whether an lse is that of q, k and the rest, by a few rows of each head."""
    _, _, Q, K = x.shape
    if not lse.numel() or not K or lse.device.type == "meta":
        return
    rows = torch.linspace(0, Q - 1, min(Q, LOOKED_AT), device=lse.device).long().unique()
    s = questions.logits(x, rows, torch.arange(K, device=lse.device))
    if x.sink is not None:
        sink = x.sink.to(s.dtype).view(-1, 1, 1).expand(*s.shape[:3], 1)
        s = torch.cat([s, sink], -1)
    is_so, got = s.logsumexp(-1), lse[:, :, rows].to(s.dtype)
    half = x.q.dtype in (torch.float16, torch.bfloat16)
    within = (0.05 if half else 1e-3) * (1 + is_so.abs().nan_to_num(posinf=0.0) / 10)
    # What is NaN in either was not finite to begin with.
    wrong = ((got - is_so).abs() > within) & ~(got.isnan() | is_so.isnan())
    wrong |= (got == -math.inf) != (is_so == -math.inf)
    if not wrong.any():
        return
    b, h, i = wrong.nonzero()[0].tolist()
    found, true = float(got[b, h, i]), float(is_so[b, h, i])
    base_two = abs(found * math.log(2) - true) <= float(within[b, h, i])
    raise RegardError(
        "Trace.of: lse is not that of these q and k with this mask, scale and bias",
        got=f"{found:.6g} where log Σ exp(logit) is {true:.6g} (batch entry {b}, head {h}, query "
        f"{int(rows[i])})",
        accepted="the natural logarithm of each row's sum, after scale, mask, soft-cap and bias",
        do="lse * math.log(2): it looks like a logarithm to base 2"
        if base_two and true
        else "give mask=, scale=, softcap=, bias= and sink= as the kernel had them",
    )


def trace_of_weights(weights: Float[Tensor, "*bh q k"]) -> Trace:
    """A trace whose weights are these: queries and keys that say nothing, and the logarithms of the
    weights as what is added to their logits."""
    _check_weights(weights)
    own = weights.detach()
    wide = own if own.dtype == torch.float64 else own.float()
    Q, K = wide.shape[-2:]
    q, k = (wide.new_zeros(*wide.shape[:-2], n, 1) for n in (Q, K))
    seen = wide > 0
    logits = torch.where(seen, wide, 1.0).log()
    # exp(logit - 0): the weights as they are, also where narrow ones do not add up to 1 exactly.
    lse = torch.where(seen.any(-1), 0.0, -torch.inf).to(wide)
    return Trace.of(
        q, k, lse, mask=masks.keep(seen), bias=biases.dense(logits), scale=1.0, verify=False
    )


def _check_weights(weights: Any) -> None:
    accepted = "a tensor [queries, keys], [batch, queries, keys] or [batch, heads, queries, keys]"
    if not isinstance(weights, Tensor):
        raise RegardError("weights are a tensor", got=type(weights).__name__, accepted=accepted)
    if not weights.is_floating_point() or not 2 <= weights.ndim <= 4 or not weights.numel():
        raise RegardError(
            "these are not attention weights",
            got=f"{weights.dtype} {list(weights.shape)}",
            accepted=accepted,
        )
    total = weights.detach().double().sum(-1)
    near = ROUNDED.get(weights.dtype, 1e-3)
    # A row that sees nothing has no weights.
    wrong = ~(((total - 1).abs() <= near) | (total == 0)) | (weights.detach() < 0).any(-1)
    if bool(wrong.any()):
        first = wrong.nonzero()[0].tolist()
        raise RegardError(
            "weights are 0 or more, and those of a row add up to 1",
            got=f"{int(wrong.sum())} rows that do not; the first, {first}, adds up to "
            f"{float(total[tuple(first)]):.4g}",
            accepted="what softmax gave, before dropout; rows of zeros see nothing",
            do="give weights.softmax(-1) for logits, or weights / weights.sum(-1, keepdim=True)",
        )
