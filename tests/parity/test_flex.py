"""FlexAttention behind the same calls: compiled kernels, held to float64 like every other backend.

Each kind of call compiles C++ for seconds on CPU, so a few cases cover what can be combined.
"""

from __future__ import annotations

import math
import re
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, biases, masks, scores
from regard.backends.flex import Flex
from regard.backends.reference import Reference
from regard.inputs import check
from tests.parity.agreement import assert_as_exact, errors
from tests.parity.cases import DEFAULTS, plain

pytestmark = pytest.mark.compiled

MISSING = [
    reason
    for reason, missing in {
        "its CPU kernel is made of AVX2 instructions, which this CPU lacks": (
            torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512")
        ),
        "it needs a C++ compiler on CPU": not any(map(shutil.which, ("g++", "clang++", "cl"))),
    }.items()
    if missing
]
"""What its kernels need and this machine does not have."""
LENGTHS = torch.tensor([90, 150])


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=source).to(dtype)


def qkv(
    H: int = 4, G: int = 4, Q: int = 150, K: int = 150, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """Lengths past one tile of 128, and no multiple of it."""
    return [
        numbers(2, H, Q, 16, dtype=dtype),
        numbers(2, G, K, 16, seed=1, dtype=dtype),
        numbers(2, G, K, 16, seed=2, dtype=dtype),
    ]


def run(*tensors: Tensor, **options: Any) -> Tensor:
    with warnings.catch_warnings():
        # The compiler deprecates parts of itself while it works.
        warnings.simplefilter("ignore")
        return regard.attention(*tensors, **options, backend="flex")


def hold(*tensors: Tensor, **options: Any) -> None:
    if MISSING:
        with pytest.raises(RegardError, match=re.escape("; ".join(MISSING))):
            run(*tensors, **options)
        return

    def formula(dtype: torch.dtype, draw: int = 0) -> Tensor:
        again = [
            t if not draw else numbers(*t.shape, seed=9 * draw + i) for i, t in enumerate(tensors)
        ]
        rounded = [t.to(tensors[0].dtype).to(dtype) for t in again]
        inputs = check(*rounded, **(DEFAULTS | options))
        return Reference().attend(inputs if dtype == torch.float64 else plain(inputs))

    truth = formula(torch.float64)
    low = tensors[0].dtype
    wanted = {"out": truth}
    rough = [
        errors({"out": formula(low, draw)}, {"out": formula(torch.float64, draw)})
        for draw in range(3)
    ]
    assert_as_exact({"out": run(*tensors, **options)}, wanted, rough)


CASES: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "plain": ({}, lambda: {}),
    "causal-to-the-end": ({"Q": 40}, lambda: {"mask": masks.causal()}),
    "grouped-window-padding": (
        {"G": 2}, lambda: {"mask": masks.window(20, 9) & masks.padding(LENGTHS)},
    ),
    "softcap-alibi": (
        {},
        lambda: {"softcap": 2.0, "bias": biases.alibi(biases.slopes(4)), "mask": masks.causal()},
    ),
    "relative": ({"K": 170}, lambda: {"bias": biases.relative(numbers(4, 31))}),
    "dense": ({}, lambda: {"bias": biases.dense(numbers(1, 4, 150, 150))}),
    "bfloat16": ({"dtype": torch.bfloat16}, lambda: {"mask": masks.causal()}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_flex(case: str) -> None:
    sizes, options = CASES[case]
    hold(*qkv(**sizes), **options())


FUNCTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "mask": lambda: {"mask": masks.where(lambda b, h, q, k: (q * k + b) % 3 != h % 2)},
    "known mask": lambda: {"mask": masks.where(lambda b, h, q, k: (q >= k) & (k < LENGTHS[b]))},
    "bias": lambda: {"bias": biases.pairwise(lambda b, h, q, k: TABLE[h, (q * k) % 5] + 0.1 * b)},
}
TABLE = numbers(4, 5)


@pytest.mark.parametrize("case", FUNCTIONS)
def test_functions_as_flex_takes_them(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced as its kernels are, but run without them, so that any machine can."""
    from torch.nn.attention.flex_attention import flex_attention

    traced = torch.compile(flex_attention, dynamic=False, backend="aot_eager")
    monkeypatch.setattr("regard.backends.flex._compiled", lambda: traced)
    inputs = check(*qkv(), **(DEFAULTS | FUNCTIONS[case]()))
    with warnings.catch_warnings():
        # The compiler deprecates parts of itself while it works.
        warnings.simplefilter("ignore")
        got = Flex().attend(inputs)
    torch.testing.assert_close(got, Reference().attend(inputs))


def test_poison_in_hidden_values_never_leaks() -> None:
    q, k, v = qkv()
    mask = masks.causal() & masks.padding(LENGTHS)
    if MISSING:
        with pytest.raises(RegardError, match=re.escape("; ".join(MISSING))):
            run(q, k, v, mask=mask)
        return
    clean = run(q, k, v, mask=mask)
    k[0, :, 90:], v[0, :, 90:] = math.nan, math.inf
    v[1, 0, 140, 3] = math.nan
    got = run(q, k, v, mask=mask)
    seen = torch.zeros_like(got, dtype=torch.bool)
    seen[1, 0, 140:, 3] = True
    assert got[seen].isnan().all()
    torch.testing.assert_close(got[~seen], clean[~seen])


REFUSALS: dict[str, tuple[Callable[[], list[Tensor]], dict[str, Any], str]] = {
    "gradients": (
        lambda: [t.requires_grad_() for t in qkv()], {}, "it has no backward pass on CPU",
    ),
    "dropout": (qkv, {"dropout": 0.1, "training": True}, "it has no dropout"),
    "float64": (lambda: qkv(dtype=torch.float64), {}, "it has no float64 kernel"),
    "sink": (
        qkv, {"sink": torch.zeros(4)}, "it gives no log-sum-exp on CPU, which a sink needs",
    ),
    "distance": (qkv, {"score": scores.distance()}, "it compares by dot products only"),
    "no-queries": (lambda: qkv(Q=0), {}, "it has no kernel for empty tensors"),
    "narrow-values": (
        lambda: [*qkv()[:2], qkv()[2][..., :8]], {}, "its CPU kernel wants values as wide as keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_flex_refuses(case: str) -> None:
    make, options, reason = REFUSALS[case]
    also = "".join(f"; {missing}" for missing in MISSING)
    with pytest.raises(RegardError) as error:
        regard.attention(*make(), **options, backend="flex")
    first = str(error.value).splitlines()[0]
    assert first == f"backend 'flex' cannot run this call: {reason}{also}"
    assert "'tiled'" in str(error.value)


def test_flex_refuses_a_trace() -> None:
    with pytest.raises(RegardError, match="it reports no entropy"):
        regard.trace(*qkv(), backend="flex")


def of_length(n: int) -> list[Tensor]:
    """A kind of call that no other test has run: what is known to run is not asked again."""
    return [t[:, :, :n] for t in qkv()]


def test_flex_refuses_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RegardError, match=r"it needs a C\+\+ compiler on CPU"):
        regard.attention(*of_length(7), backend="flex")


def test_a_cpu_without_the_instructions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.backends.flex.VECTORS", "DEFAULT")
    with pytest.raises(RegardError, match="AVX2 instructions, which this CPU lacks"):
        regard.attention(*of_length(9), backend="flex")
