"""The table of cases that every backend is held to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from regard import biases, masks, scores
from regard.backends.contract import Backend
from regard.backends.reference import Reference
from regard.inputs import AttentionInputs, check
from tests.parity.agreement import Named, Plain, assert_as_exact, errors

DEVICE = "cpu"
WHOLE = False
"""Whether any three kinds meet, or any two."""
DEFAULTS: dict[str, Any] = {
    "mask": None,
    "score": None,
    "bias": None,
    "softcap": None,
    "sink": None,
    "scale": None,
    "dropout": 0.0,
    "training": False,
}
"""What a call leaves out."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sizes:
    """Lengths of a case. Odd ones, with fewer key heads and another value width."""

    B: int = 2
    H: int = 4
    G: int = 2
    Q: int = 27
    K: int = 37
    D: int = 8
    E: int = 6


Draw = Callable[..., Tensor]


def _layout(s: Sizes) -> Tensor:
    cells = torch.arange(-(-s.Q // 8) * -(-s.K // 8)).view(-(-s.Q // 8), -(-s.K // 8))
    return cells % 3 != 1


def _ids(s: Sizes) -> Tensor:
    return torch.stack([torch.arange(s.K) // 11, torch.arange(s.K) // 7 % 3])[: s.B]


def _table(s: Sizes) -> Tensor:
    return torch.rand(s.B, s.H, s.Q, s.K, generator=torch.Generator().manual_seed(5)) > 0.6


@cache
def _where() -> masks.Mask:
    """A function that tells batch entries and heads apart, and has no outline."""
    return masks.where(lambda b, h, q, k: (q * k + b) % 3 != h % 2)


def _pairwise(table: Tensor) -> biases.Bias:
    def added(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return table[h, (q * k) % 5] + 0.1 * b

    return biases.pairwise(added)


MASKS: dict[str, Callable[[Sizes], masks.Mask | None]] = {
    "none": lambda s: None,
    "causal": lambda s: masks.causal(),
    "causal_from_start": lambda s: masks.causal(offset=0),
    "future_only": lambda s: ~masks.causal(),
    "window": lambda s: masks.window(5, 3),
    "causal_window": lambda s: masks.causal() & masks.window(6),
    "padding": lambda s: masks.padding(torch.tensor([s.K - 9, s.K])[: s.B]),
    "causal_padding": lambda s: masks.causal() & masks.padding(torch.tensor([4, s.K - 3])[: s.B]),
    "documents": lambda s: masks.causal() & masks.documents(_ids(s)),
    "prefix": lambda s: masks.causal() | masks.prefix(12),
    "first_keys": lambda s: masks.causal() & masks.prefix(12),
    "longformer": lambda s: masks.window(3, 3) | masks.global_tokens([0, s.K - 5]),
    "dilated": lambda s: masks.causal() & masks.window(12) & masks.dilated(3),
    "blocks": lambda s: masks.blocks(_layout(s), 8),
    "keep": lambda s: masks.keep(_table(s)),
    "ignore": lambda s: masks.ignore(_table(s)[:, :1]),
    "where": lambda s: masks.causal() & _where(),
    "nothing": lambda s: masks.keep(torch.zeros(1, 1, 1, 1, dtype=torch.bool)),
}

SCORES: dict[str, Callable[[Sizes, Draw], tuple[scores.Score | None, list[Tensor]]]] = {
    "scaled_dot": lambda s, draw: (None, []),
    "dot": lambda s, draw: (scores.dot(), []),
    "general": lambda s, draw: _with(scores.general, draw(s.H, s.D, s.D)),
    "additive": lambda s, draw: _with(scores.additive, draw(s.D, 5), draw(s.D, 5), draw(s.H, 5)),
    "cosine": lambda s, draw: (scores.cosine(0.3), []),
    "distance": lambda s, draw: (scores.distance(2.0), []),
    "distance_plain": lambda s, draw: (scores.distance(squared=False), []),
}

BIASES: dict[str, Callable[[Sizes, Draw], tuple[biases.Bias | None, list[Tensor]]]] = {
    "none": lambda s, draw: (None, []),
    "alibi": lambda s, draw: _with(biases.alibi, draw(s.H).abs() / 8),
    "relative": lambda s, draw: _with(biases.relative, draw(s.H, 9)),
    "dense": lambda s, draw: _with(biases.dense, draw(1, s.H, s.Q, s.K)),
    "pairwise": lambda s, draw: _with(_pairwise, draw(s.H, 5)),
}

EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": True},
    "dropout": {"dropout": 0.25, "training": True},
    "all": {"softcap": 3.0, "sink": True, "dropout": 0.1, "training": True},
}


def _with(make: Callable[..., Any], *tensors: Tensor) -> tuple[Any, list[Tensor]]:
    return make(*tensors), list(tensors)


@dataclass(frozen=True)
class Case:
    """One call, in any precision: the same numbers, rounded."""

    mask: str = "none"
    score: str = "scaled_dot"
    bias: str = "none"
    extra: str = "plain"
    dtype: torch.dtype = torch.float32
    sizes: Sizes = field(default_factory=Sizes)
    seed: int = 3

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.mask}-{self.score}-{self.bias}-{self.extra}-{dtype}"

    def build(self, precision: torch.dtype | None = None) -> tuple[AttentionInputs, list[Tensor]]:
        """Checked inputs in a precision (the case's own by default), and every learned tensor."""
        s, source = self.sizes, torch.Generator().manual_seed(self.seed)
        learned: list[Tensor] = []

        def draw(*shape: int) -> Tensor:
            numbers = torch.randn(*shape, generator=source, dtype=torch.float64).to(self.dtype)
            learned.append(numbers.to(precision or self.dtype).to(DEVICE).requires_grad_())
            return learned[-1]

        q, k, v = draw(s.B, s.H, s.Q, s.D), draw(s.B, s.G, s.K, s.D), draw(s.B, s.G, s.K, s.E)
        score, _ = SCORES[self.score](s, draw)
        bias, _ = BIASES[self.bias](s, draw)
        mask = MASKS[self.mask](s)
        extra = dict(EXTRAS[self.extra])
        extra["sink"] = draw(s.H) if extra.get("sink") else None
        options = DEFAULTS | {"mask": mask, "score": score, "bias": bias} | extra
        torch.manual_seed(11)
        inputs = check(q, k, v, **options)
        return inputs, learned


def plain(inputs: AttentionInputs) -> AttentionInputs:
    return Plain(**{name: getattr(inputs, name) for name in inputs.__dataclass_fields__})


def observed(
    backend: Backend,
    inputs: AttentionInputs,
    learned: list[Tensor],
    second: Any | None,
    *,
    gradients: bool = True,
) -> Named:
    """Everything a backend can be asked about a call."""
    if second is None:
        out = backend.attend(inputs)
        found, differentiable = {"out": out}, [out]
    else:
        rows = backend.observe(inputs)
        found = {
            "out": rows.out,
            "lse": rows.lse,
            "max_logit": rows.max_logit,
            "entropy": rows.entropy,
        }
        differentiable = [rows.out, rows.lse, rows.entropy]
        found |= questions(second, inputs, rows.lse.detach())
    if gradients:
        source = torch.Generator().manual_seed(7)
        pulls = [
            torch.randn(t.shape, generator=source, dtype=torch.float64).to(t)
            for t in differentiable
        ]
        given = torch.autograd.grad(differentiable, learned, pulls, allow_unused=True)
        for i, (tensor, grad) in enumerate(zip(learned, given, strict=True)):
            found[f"gradient {i}"] = torch.zeros_like(tensor) if grad is None else grad
    return {name: value.detach().cpu() for name, value in found.items()}


def questions(second: Any, x: AttentionInputs, lse: Tensor) -> Named:
    _, _, Q, K = x.shape
    rows = torch.tensor(sorted({0, Q // 2, Q - 1}), device=lse.device)
    keys = torch.arange(0, K, 3, device=lse.device)
    top = second.top(x, lse, 4)
    middle = ((Q // 4, Q - Q // 5), (K // 5, K - K // 4))
    cells = (min(2, middle[0][1] - middle[0][0]), min(3, middle[1][1] - middle[1][0]))
    with torch.no_grad():
        # Not learned from, it may be answered in another way.
        mass = second.mass(x, lse, keys)
    return {
        "received": second.received(x, lse),
        "top": top.values,
        "weights": second.weights(x, lse, rows, keys),
        "mass": second.mass(x, lse, keys),
        "mass, not learned": mass,
        "mean_logit": second.mean_logit(x),
        # Few cells, some larger than a small tile: interpreted kernels take their time for each.
        "map mean": second.pooled(x, lse, (1, min(2, K)), (0, Q), (0, K), "mean"),
        "map sum": second.pooled(x, lse, cells, *middle, "sum"),
        "map max": second.pooled(x, lse, cells, *middle, "max"),
    }


def truth_and_plain(
    case: Case, second: Any | None, *, gradients: bool = True
) -> tuple[Named, Named]:
    """The formula in float64, and in the case's own precision (float32 for float64)."""
    reference = Reference()
    exact, learned = case.build(torch.float64)
    truth = observed(reference, exact, learned, second, gradients=gradients)
    low = torch.float32 if case.dtype == torch.float64 else case.dtype
    rough, learned = replace(case, dtype=low).build()
    return truth, observed(reference, plain(rough), learned, second, gradients=gradients)


def assert_conforms(case: Case, got: Named, second: Any | None) -> None:
    """Hold results to the formula in float64, by what plain arithmetic errs.

    A sum of few numbers can come out right by luck, so before a result is called wrong the plain
    errors of four more draws are taken into account.
    """

    def plain_errors(seed: int) -> tuple[Named, Named]:
        truth, rough = truth_and_plain(replace(case, seed=seed), second)
        return truth, errors({n: rough[n] for n in got}, {n: truth[n] for n in got})

    truth, first = plain_errors(case.seed)
    truth = {name: truth[name] for name in got}
    try:
        assert_as_exact(got, truth, [first])
    except AssertionError:
        more = [plain_errors(case.seed + i)[1] for i in range(1, 5)]
        assert_as_exact(got, truth, [first, *more])
