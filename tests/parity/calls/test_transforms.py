"""Derivatives and maps by PyTorch's transforms: every one is right, or refused with a reason.

The formula in float64 is held to finite differences, the other backends to the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import regard
from regard import RegardError, biases, masks, scores
from regard.backends import vmap_entries
from regard.backends.passes import taken_apart
from regard.inputs import check
from tests.parity import cases
from tests.parity.cases import DEFAULTS

TRITON = pytest.param("triton", marks=pytest.mark.interpreted)
either = pytest.mark.parametrize("backend", ["tiled", TRITON])
pytestmark = [
    # Asked for by name, PyTorch's kernels are mapped in a loop.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
]

Function = Callable[..., Tensor]
B, H, Q, K, D = 2, 2, 3, 4, 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=source, dtype=torch.float64)


def qkv(groups: int = H) -> list[Tensor]:
    return [draw(B, H, Q, D), draw(B, groups, K, D, seed=1), draw(B, groups, K, D, seed=2)]


def waves(w: Tensor, u: Tensor) -> biases.Bias:
    return biases.pairwise(lambda b, h, q, k: u[b] * torch.sin(w[h] * (q - k)))


WAVES = waves(draw(H), draw(B))
ODD = masks.where(lambda b, h, q, k: (q + b + h) % 3 != k)
Options = Callable[..., dict[str, Any]]
CALLS: dict[str, tuple[list[Tensor], Options]] = {
    "plain": (qkv(), lambda: {}),
    "causal": (qkv(), lambda: {"mask": masks.causal()}),
    "window": (qkv(), lambda: {"mask": masks.window(1, 1)}),
    "padding": (qkv(), lambda: {"mask": masks.padding(torch.tensor([2, 4]))}),
    "nothing seen": (qkv(), lambda: {"mask": masks.padding(torch.tensor([0, 4]))}),
    "softcap": (qkv(), lambda: {"softcap": 1.5}),
    "grouped": (qkv(1), lambda: {"mask": masks.causal()}),
    "sink": ([*qkv(), draw(H)], lambda s: {"sink": s}),
    "alibi": ([*qkv(), draw(H).abs()], lambda b: {"bias": biases.alibi(b), "softcap": 2.0}),
    "relative": ([*qkv(), draw(H, 5)], lambda b: {"bias": biases.relative(b)}),
    "dense": ([*qkv(), draw(B, 1, Q, K)], lambda b: {"bias": biases.dense(b)}),
    "functions": (qkv(), lambda: {"bias": WAVES, "mask": ODD}),
    "additive": (
        [*qkv(1), draw(D, 3), draw(D, 3), draw(H, 3)],
        lambda *w: {"score": scores.additive(*w), "mask": masks.causal()},
    ),
    "cosine": (qkv(), lambda: {"score": scores.cosine(0.3)}),
    "distance": (qkv(), lambda: {"score": scores.distance(2.0)}),
    "distance_plain": (qkv(1), lambda: {"score": scores.distance(squared=False)}),
}  # fmt: skip
SDPA = ("plain", "causal", "window", "padding", "grouped")


def inputs(call: str, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [t.to(cases.DEVICE, dtype) for t in CALLS[call][0]]


def answers(call: str, backend: str | None, *, rows: bool) -> Function:
    """All that a call gives and that has a derivative, as one vector; or the output alone."""
    options = CALLS[call][1]

    def run(q: Tensor, k: Tensor, v: Tensor, *own: Tensor) -> Tensor:
        if not rows:
            return regard.attention(q, k, v, backend=backend, **options(*own)).flatten()
        t = regard.trace(q, k, v, backend=backend, **options(*own))
        # A row that sees nothing has a log-sum-exp of minus infinity, whatever the inputs.
        lse = t.lse.masked_fill(t.lse.detach() == -torch.inf, 0.0)
        return torch.cat([t.out.flatten(), lse.flatten(), t.entropy.flatten()])

    return run


@cache
def truth(call: str, *, rows: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What the formula gives, and its derivatives by every tensor: [answers, ...]."""
    function, given = answers(call, "reference", rows=rows), inputs(call)
    everything = tuple(range(len(given)))
    return function(*given), jacrev(function, everything)(*given)


@pytest.mark.parametrize("call", CALLS)
def test_the_formula_has_the_derivatives_that_differences_have(call: str) -> None:
    function, given = answers(call, "reference", rows=True), inputs(call)
    _, slopes = truth(call, rows=True)
    step = 1e-6
    for i, slope in enumerate(slopes):
        way = draw(*given[i].shape, seed=9).to(cases.DEVICE)
        ends = [
            function(*given[:i], given[i] + s * step * way, *given[i + 1 :]) for s in (1.0, -1.0)
        ]
        found = (slope.flatten(1) @ way.flatten()).view_as(ends[0])
        assert_close(found, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)


def _numbers(n: int, like: Tensor) -> Tensor:
    return draw(n, like.numel(), seed=4).to(like)


def _ways(given: list[Tensor]) -> list[Tensor]:
    return [draw(*t.shape, seed=9).to(t) for t in given]


def _along(slopes: tuple[Tensor, ...], ways: list[Tensor]) -> Tensor:
    steps = zip(slopes, ways, strict=True)
    return sum(s.flatten(1) @ way.flatten().to(s) for s, way in steps)  # type: ignore[return-value]


def check_grad(f: Function, given: list[Tensor], value: Tensor, slopes: Any) -> list[Any]:
    (pull,) = _numbers(1, value)
    found = grad(lambda *x: (f(*x) * pull.to(x[0])).sum(), tuple(range(len(given))))(*given)
    return [(found, tuple(torch.einsum("a,a...->...", pull, s) for s in slopes))]


def check_jacrev(f: Function, given: list[Tensor], value: Tensor, slopes: Any) -> list[Any]:
    return [(jacrev(f, tuple(range(len(given))))(*given), slopes)]


def check_jvp(f: Function, given: list[Tensor], value: Tensor, slopes: Any) -> list[Any]:
    ways = _ways(given)
    got = jvp(f, tuple(given), tuple(ways))
    return [(got, (value, _along(slopes, ways)))]


def check_jvp_by_some(f: Function, given: list[Tensor], value: Tensor, slopes: Any) -> list[Any]:
    """Where only one tensor moves."""
    found = []
    for i, way in enumerate(_ways(given)):
        _, got = jvp(lambda x, i=i: f(*given[:i], x, *given[i + 1 :]), (given[i],), (way,))
        found.append((got, _along(slopes[i : i + 1], [way])))
    return found


def check_jacfwd(f: Function, given: list[Tensor], value: Tensor, slopes: Any) -> list[Any]:
    return [(jacfwd(f, tuple(range(len(given))))(*given), slopes)]


def check_dual(f: Function, given: list[Tensor], value: Tensor, slopes: Any) -> list[Any]:
    """Forward mode without torch.func: with and without gradients, and nothing that moves."""
    ways = _ways(given)
    found = []
    for learned in (False, True):
        with forward_ad.dual_level():
            starts = [t.clone().requires_grad_(learned) for t in given]
            duals = [forward_ad.make_dual(t, way) for t, way in zip(starts, ways, strict=True)]
            got = forward_ad.unpack_dual(f(*duals))
            still = forward_ad.unpack_dual(f(*starts))
        assert still.tangent is None
        found.append(((got.primal.detach(), got.tangent), (value, _along(slopes, ways))))
    return found


def check_batched(f: Function, given: list[Tensor], value: Tensor, slopes: Any) -> list[Any]:
    """Several gradients at once, of a plain call."""
    learned = [t.clone().requires_grad_() for t in given]
    pulls = _numbers(2, value)
    out = f(*learned)
    found = torch.autograd.grad(out, learned, pulls.to(out), is_grads_batched=True)
    return [(found, tuple(torch.einsum("na,a...->n...", pulls, s) for s in slopes))]


def check_jacobian(f: Function, given: list[Tensor], value: Tensor, slopes: Any) -> list[Any]:
    found = torch.autograd.functional.jacobian(f, tuple(given), vectorize=True)
    return [(found, slopes)]


def check_jacobian_forward(
    f: Function, given: list[Tensor], value: Tensor, slopes: Any
) -> list[Any]:
    found = torch.autograd.functional.jacobian(
        f, tuple(given), vectorize=True, strategy="forward-mode"
    )
    return [(found, slopes)]


def check_vmap(f: Function, given: list[Tensor], value: Tensor, slopes: Any) -> list[Any]:
    """Everything mapped, over the axis in front and the one at the end; then one tensor alone."""
    doubled = [torch.stack([t, t]) for t in given]
    behind = [torch.stack([t, t], -1) for t in given]
    found = [vmap(f)(*doubled), vmap(f, in_dims=-1)(*behind)]
    for i in range(len(given)):
        axes = tuple(0 if j == i else None for j in range(len(given)))
        found.append(vmap(f, in_dims=axes)(*given[:i], doubled[i], *given[i + 1 :]))
    both = torch.stack([value, value])
    return [(one, both) for one in found]


def check_vmap_grad(f: Function, given: list[Tensor], value: Tensor, slopes: Any) -> list[Any]:
    """A gradient for each entry, where all tensors are mapped and where the first alone is."""
    (pull,) = _numbers(1, value)
    every = tuple(range(len(given)))
    each = grad(lambda *x: (f(*x) * pull.to(x[0])).sum(), every)
    want = tuple(torch.einsum("a,a...->...", pull, s).expand(2, *s.shape[1:]) for s in slopes)
    doubled = [torch.stack([t, t]) for t in given]
    some = vmap(each, in_dims=(0, *(None for _ in given[1:])))(doubled[0], *given[1:])
    return [(vmap(each)(*doubled), want), (some, want)]


def check_grad_vmap(f: Function, given: list[Tensor], value: Tensor, slopes: Any) -> list[Any]:
    """The gradient of a map, in which what is not mapped is shared."""
    (pull,) = _numbers(1, value)

    def total(*x: Tensor) -> Tensor:
        one = vmap(f, in_dims=(0, *(None for _ in x[1:])))(torch.stack([x[0], x[0]]), *x[1:])
        return (one * pull.to(one)).sum()

    found = grad(total, tuple(range(len(given))))(*given)
    return [(found, tuple(2 * torch.einsum("a,a...->...", pull, s) for s in slopes))]


def check_vmap_jvp(f: Function, given: list[Tensor], value: Tensor, slopes: Any) -> list[Any]:
    ways = _ways(given)
    each = vmap(lambda *x: jvp(f, x, tuple(ways))[1])
    two = vmap(lambda *w: jvp(f, tuple(given), w)[1])
    want = _along(slopes, ways)
    moved = two(*(torch.stack([way, -way]) for way in ways))
    return [
        (each(*(torch.stack([t, t]) for t in given)), torch.stack([want, want])),
        (moved, torch.stack([want, -want])),
    ]


def check_jvp_vmap(f: Function, given: list[Tensor], value: Tensor, slopes: Any) -> list[Any]:
    ways = _ways(given)
    many, steps = ([torch.stack([t, t]) for t in some] for some in (given, ways))
    got = jvp(vmap(f), tuple(many), tuple(steps))
    want = _along(slopes, ways)
    return [(got, (torch.stack([value, value]), torch.stack([want, want])))]


REVERSE: dict[str, Callable[..., list[Any]]] = {
    "grad": check_grad,
    "batched": check_batched,
    "vmap(grad)": check_vmap_grad,
    "grad(vmap)": check_grad_vmap,
    "vmap": check_vmap,
    "jacrev": check_jacrev,
    "jacobian": check_jacobian,
}
FORWARD: dict[str, Callable[..., list[Any]]] = {
    "jvp": check_jvp,
    "jvp by some": check_jvp_by_some,
    "dual": check_dual,
    "vmap(jvp)": check_vmap_jvp,
    "jvp(vmap)": check_jvp_vmap,
    "jacfwd": check_jacfwd,
    "jacobian forward": check_jacobian_forward,
}
ALL = REVERSE | FORWARD
# Interpreted kernels take their time for each entry.
FEW = [t for t in ALL if not t.startswith("jac") and t != "jvp by some"]


def assert_right(transform: str, call: str, backend: str | None, **close: Any) -> None:
    rows = backend != "sdpa"
    dtype = torch.float32 if backend in ("sdpa", "triton") else torch.float64
    tolerance = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {}
    function, given = answers(call, backend, rows=rows), inputs(call, dtype)
    for found, want in ALL[transform](function, given, *truth(call, rows=rows)):
        assert_close(found, want, check_dtype=False, **tolerance, **close)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("transform", ALL)
def test_tiled_under_every_transform(transform: str, call: str) -> None:
    assert_right(transform, call, "tiled")


@pytest.mark.parametrize("call", ["plain", "padding", "sink", "additive"])
@pytest.mark.parametrize("transform", ALL)
def test_the_reference_under_every_transform(transform: str, call: str) -> None:
    assert_right(transform, call, "reference")


@pytest.mark.parametrize("call", SDPA)
@pytest.mark.parametrize("transform", REVERSE)
def test_sdpa_under_every_transform_but_forward_mode(transform: str, call: str) -> None:
    try:
        assert_right(transform, call, "sdpa")
    except RegardError as error:
        # On a card it does not run under torch.func, and has no kernel for float64.
        if cases.DEVICE != "cuda" or "backend 'sdpa' cannot run this call" not in str(error):
            raise


@pytest.mark.parametrize("call", ["plain", "padding"])
@pytest.mark.parametrize("transform", FEW)
def test_the_choice_of_a_backend_under_every_transform(transform: str, call: str) -> None:
    function, given = answers(call, None, rows=False), inputs(call)
    for found, want in ALL[transform](function, given, *truth(call, rows=False)):
        assert_close(found, want)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("transform", "call"),
    [(t, "padding") for t in FEW] + [("jvp", "sink"), ("vmap(grad)", "relative")],
)
def test_triton_under_transforms(transform: str, call: str) -> None:
    assert_right(transform, call, "triton")


def three(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return inputs("plain", dtype)


SECOND: dict[str, Callable[[Function, Tensor], Any]] = {
    "grad(grad)": lambda f, q: grad(lambda x: grad(lambda y: f(y).sin().sum())(x).sin().sum())(q),
    "jvp(grad)": lambda f, q: jvp(grad(lambda y: f(y).sin().sum()), (q,), (q,)),
    "grad(jvp)": lambda f, q: grad(lambda x: jvp(f, (x,), (q,))[1].sum())(q),
    "jvp(jvp)": lambda f, q: jvp(lambda x: jvp(f, (x,), (q,))[1], (q,), (q,)),
    "hessian": lambda f, q: torch.func.hessian(lambda y: f(y).sin().sum())(q),
    "vmap(grad(grad))": lambda f, q: vmap(
        grad(lambda x: grad(lambda y: f(y).sin().sum())(x).sin().sum())
    )(q[None]),
    "autograd": lambda f, q: torch.autograd.functional.hessian(lambda y: f(y).sin().sum(), q),
    "dual and backward": lambda f, q: _backward_of_a_tangent(f, q),
}


def _backward_of_a_tangent(f: Function, q: Tensor) -> None:
    start = q.clone().requires_grad_()
    with forward_ad.dual_level():
        forward_ad.unpack_dual(f(forward_ad.make_dual(start, q))).tangent.sum().backward()


@either
@pytest.mark.parametrize("what", SECOND)
def test_a_second_derivative_is_refused(what: str, backend: str) -> None:
    q, k, v = three()
    with pytest.raises(RegardError, match=f"the {backend} backend is differentiable once") as error:
        SECOND[what](lambda x: regard.attention(x, k, v, backend=backend), q)
    assert 'backend="reference"' in str(error.value)


@pytest.mark.parametrize("what", SECOND)
def test_the_reference_has_second_derivatives(what: str) -> None:
    q, k, v = three()
    SECOND[what](lambda x: regard.attention(x, k, v, backend="reference"), q)


@pytest.mark.parametrize("what", ["jvp", "dual", "jvp(vmap)"])
def test_pytorchs_kernels_refuse_forward_mode(what: str) -> None:
    with pytest.raises(RegardError, match="its fused kernels have no forward mode") as error:
        assert_right(what, "plain", "sdpa")
    assert "backends that can: 'tiled'" in str(error.value).replace("'triton', ", "")


@pytest.mark.parametrize("what", ["vmap", "jvp", "dual"])
def test_flex_refuses_transforms(what: str) -> None:
    function = answers("plain", "flex", rows=False)
    with pytest.raises(RegardError, match=r"torch\.func and forward mode do not see into what it"):
        ALL[what](function, three(), *truth("plain", rows=False))


def test_a_plan_says_why_pytorchs_kernels_are_left_alone() -> None:
    plans = []

    def ask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        plans.append(regard.plan(q, k, v))
        return q

    vmap(ask)(*(t[None] for t in three()))
    (reason,) = plans[0].refusals["sdpa"]
    if cases.DEVICE == "cuda":
        assert reason == "its CUDA kernels do not run under torch.func"
    else:
        assert reason == "runs only when asked for under torch.func: PyTorch would map it in a loop"
    assert plans[0].backend != "sdpa"


@pytest.mark.parametrize("operator", ["tiled", "tiled_backward", "tiled_tangent"])
def test_an_operator_by_itself_refuses_forward_mode(operator: str) -> None:
    """torch.library would give tangents of zero."""
    x = check(*three(), **DEFAULTS)
    call, (q, k, v, sink, seed, *own) = taken_apart(x)
    out, lse, _, entropy, kept = torch.ops.regard.tiled(
        q, k, v, sink, seed, own, *call.told, True, False
    )
    rows = (out, lse, kept, entropy)
    rest = (k, v, sink, seed, own, *call.told)
    run: dict[str, Function] = {
        "tiled": lambda q: torch.ops.regard.tiled(q, *rest, True, False)[0],
        "tiled_backward": lambda q: torch.ops.regard.tiled_backward(
            out, None, None, *rows, q, *rest, False
        )[0],
        "tiled_tangent": lambda q: torch.ops.regard.tiled_tangent(
            q, k, v, None, own, *rows, q, *rest, True
        )[0],
    }
    with pytest.raises(RegardError, match=f"regard::{operator} has no forward mode"):
        jvp(run[operator], (q,), (q,))
    refused = pytest.raises(RegardError, match=f"regard::{operator} has no forward mode")
    with forward_ad.dual_level(), refused:
        run[operator](forward_ad.make_dual(q, q))
    run[operator](q)


def test_tangents_are_seen_by_who_looks_at_operators() -> None:
    """A recorded graph holds the operators, below all transforms, and gives the same."""
    q, k, v = three(torch.float64)

    def call(q: Tensor, k: Tensor, v: Tensor, way: Tensor) -> tuple[Tensor, Tensor]:
        def look(q: Tensor) -> Tensor:
            return regard.trace(q, k, v, mask=masks.causal(), backend="tiled").entropy

        return jvp(look, (q,), (way,))[1], vmap(grad(lambda q: look(q).sum()))(q[None])

    graph = make_fx(call, tracing_mode="fake")(q, k, v, 3 * q)
    names = {str(node.target) for node in graph.graph.nodes}
    assert {
        f"regard.{name}.default" for name in ("tiled", "tiled_backward", "tiled_tangent")
    } <= names
    assert_close(graph(-q, k, v, 2 * q), call(-q, k, v, 2 * q))


QUESTIONS: dict[str, Callable[[regard.Trace], Tensor]] = {
    "received()": lambda t: t.received(),
    "top(2)": lambda t: t.top(2).values,
    "map()": lambda t: t.map(2),
    "mean_logit": lambda t: t.mean_logit,
    "max_logit": lambda t: t.max_logit,
    "weights()": lambda t: t.weights(queries=[0, 1]),
    "mass()": lambda t: t.mass([0, 1]),
}


def mean_of_allowed(t: regard.Trace) -> Tensor:
    s = t.logits()
    return s.masked_fill(s == -torch.inf, 0.0).sum(-1) / (s > -torch.inf).sum(-1)


WRITTEN_OUT: dict[str, Callable[[regard.Trace], Tensor]] = {
    "received()": lambda t: t.weights().sum(-2),
    "map()": lambda t: torch.stack(
        [rows.mean(-2).unflatten(-1, (2, 2)).mean(-1) for rows in t.weights().split(2, -2)], -2
    ),
    "mean_logit": mean_of_allowed,
    "max_logit": lambda t: t.logits().amax(-1),
}
"""Questions that have gradients, made of those that are differentiable by themselves."""


@pytest.mark.parametrize("backend", ["reference", "tiled", TRITON])
@pytest.mark.parametrize("question", QUESTIONS)
def test_questions_under_transforms(question: str, backend: str) -> None:
    """An answer without a derivative is given, and says so where one is taken; others have
    gradients, also under vmap."""
    if backend == "triton" and question in ("map()", "mean_logit", "received()"):
        pytest.skip("its gradients share their code with those of max_logit; slow to interpret")
    ask = QUESTIONS[question]
    q, k, v = three(torch.float32 if backend == "triton" else torch.float64)
    mask = masks.causal() & masks.padding(torch.tensor([3, 4]))

    def look(q: Tensor, name: str = backend, *, cut: bool = False) -> Tensor:
        t = regard.trace(q, k, v, mask=mask, softcap=2.0, backend=name)
        return ask(t.detach() if cut else t)

    def exact(q: Tensor) -> Tensor:
        return look(q, "reference")

    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5} if backend == "triton" else {}
    assert_close(vmap(look)(torch.stack([q, -q])), torch.stack([exact(q), exact(-q)]), **close)
    value, still = jvp(lambda x: look(x, cut=True) + 0 * x.sum(), (q,), (q,))
    assert_close(value, exact(q), **close)
    assert not still.any()
    if question in ("weights()", "mass()"):
        assert_close(jvp(look, (q,), (q,)), jvp(exact, (q,), (q,)), **close)
        pull = grad(lambda x: look(x).sin().sum())(q)
        assert_close(pull, grad(lambda x: exact(x).sin().sum())(q), **close)
        return
    forward = [
        lambda: jvp(look, (q,), (q,)),
        lambda: jvp(vmap(look), (q[None],), (q[None],)),
    ]
    if question in WRITTEN_OUT:
        formula = WRITTEN_OUT[question]

        def dense(q: Tensor) -> Tensor:
            return formula(regard.trace(q, k, v, mask=mask, softcap=2.0, backend="reference"))

        pull = grad(lambda x: look(x).sin().sum())
        assert_close(pull(q), grad(lambda x: dense(x).sin().sum())(q), **close)
        assert_close(vmap(pull)(torch.stack([q, -q]))[1], pull(-q), **close)
        both = grad(lambda x: vmap(look)(torch.stack([x, -x])).sin().sum())(q)
        assert_close(both, pull(q) - pull(-q), **close)
    else:
        forward.append(lambda: grad(lambda x: look(x).sum())(q))
    for derive in forward:
        with pytest.raises(RegardError) as error:
            derive()
        assert f"{question} has no derivative" in str(error.value)
        assert f"trace.detach().{question}" in str(error.value)


@pytest.mark.parametrize("transform", ["batched", "jacobian", "dual", "jacobian forward"])
def test_what_a_function_has_captured_is_learned(transform: str) -> None:
    learned = [t.to(cases.DEVICE) for t in (*qkv(), draw(H), draw(B))]

    def call(backend: str) -> Function:
        def run(q: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
            return regard.attention(q, k, v, bias=waves(w, u), backend=backend).flatten()

        return run

    exact = torch.autograd.functional.jacobian(call("reference"), tuple(learned))
    for found, want in ALL[transform](call("tiled"), learned, call("reference")(*learned), exact):
        assert_close(found, want)


def test_a_function_is_read_outside_of_transforms() -> None:
    q, k, v = three()
    w, u = draw(H).to(q), draw(B).to(q)
    with pytest.raises(RegardError, match="cannot be read under a transform") as error:
        grad(lambda w: regard.attention(q, k, v, bias=waves(w, u)).sum())(w)
    assert "make the mask or bias once, outside" in str(error.value)


@pytest.mark.parametrize("question", ["weights()", "mass()"])
@pytest.mark.parametrize("squared", [True, False], ids=["squared", "plain"])
def test_tangents_of_weights_of_distances(question: str, squared: bool) -> None:
    """PyTorch's own distances have none."""
    q, k, v = three(torch.float64)
    way, score = 3 * q.flip(-1), scores.distance(2.0, squared=squared)

    def look(q: Tensor, backend: str) -> Tensor:
        return QUESTIONS[question](regard.trace(q, k, v, score=score, backend=backend))

    want, got = (jvp(partial(look, backend=name), (q,), (way,)) for name in ("reference", "tiled"))
    assert want[1].abs().max() > 0.01
    assert_close(got, want)


@pytest.mark.parametrize("question", ["weights()", "mass()"])
@pytest.mark.parametrize("squared", [True, False], ids=["squared", "plain"])
def test_many_gradients_of_weights_of_distances(question: str, squared: bool) -> None:
    """Those of PyTorch's own distances are wrong where many are asked for at once."""
    q, k, v = three(torch.float64)
    score = scores.distance(2.0, squared=squared)

    def look(q: Tensor, k: Tensor, backend: str) -> Tensor:
        return QUESTIONS[question](regard.trace(q, k, v, score=score, backend=backend))

    for argnum in (0, 1):
        want, got = (
            jacrev(partial(look, backend=name), argnum)(q, k) for name in ("reference", "tiled")
        )
        assert want.abs().max() > 0.01
        assert_close(got, want)


@either
@pytest.mark.parametrize("question", ["weights()", "mass()"])
def test_weights_of_what_is_mapped_beside_q_and_k(question: str, backend: str) -> None:
    q, k, v = three()
    sink, values = draw(3, H).to(q), draw(3, *v.shape).to(q)

    def look(sink: Tensor, v: Tensor, name: str = backend) -> Tensor:
        return QUESTIONS[question](regard.trace(q, k, v, sink=sink, backend=name))

    want = torch.stack([look(*one, "reference") for one in zip(sink, values, strict=True)])
    assert_close(vmap(look)(sink, values), want)
    assert_close(vmap(look, (None, 0))(sink[0], values), want[:1].expand_as(want))


@pytest.mark.parametrize("mapped", [0, 1], ids=["queries", "keys"])
def test_mapped_tangents_of_weights_of_additive_scores(mapped: int) -> None:
    shapes = (1, 1, 3, 2), (1, 1, 4, 2), (2, 3), (2, 3), (3,)
    q, k, *learned = (draw(*shape).to(cases.DEVICE, torch.float64) for shape in shapes)
    several = torch.stack([(q, k)[mapped], -(q, k)[mapped]])

    def moved(one: Tensor, backend: str) -> Tensor:
        def look(q: Tensor, k: Tensor, *learned: Tensor) -> Tensor:
            return regard.trace(q, k, k, score=scores.additive(*learned), backend=backend).weights()

        own = (one, k, *learned) if mapped == 0 else (q, one, *learned)
        return jvp(look, own, own)[1]

    want = torch.stack([moved(one, "reference") for one in several])
    assert_close(vmap(partial(moved, backend="tiled"))(several), want)


@pytest.mark.parametrize("question", ["weights()", "mass()"])
def test_tangents_of_weights_where_logits_are_large(question: str) -> None:
    """There questions are answered in float64, by a log-sum-exp of their own."""
    q = torch.full((1, 1, 2, 4), 60.0, device=cases.DEVICE)
    k = 20 + draw(1, 1, K, 4).to(q) / 60
    way = draw(1, 1, K, 4, seed=9).to(q) / 60

    def ask(k: Tensor, backend: str) -> Tensor:
        return QUESTIONS[question](regard.trace(q.to(k), k, k, backend=backend))

    _, want = jvp(lambda k: ask(k, "reference"), (k.double(),), (way.double(),))
    assert want.abs().max() > 0.1
    for backend in ("reference", "tiled"):
        with forward_ad.dual_level():
            found = forward_ad.unpack_dual(ask(forward_ad.make_dual(k, way), backend)).tangent
        assert_close(found, want.float(), rtol=1e-2, atol=1e-2)


@either
def test_hidden_nan_stays_hidden_under_transforms(backend: str) -> None:
    q, k, v = three()
    mask = masks.padding(torch.tensor([2, 2]))
    bad_k, bad_v = k.clone(), v.clone()
    bad_k[:, :, 2:] = torch.nan
    bad_v[:, :, 2:] = torch.inf

    def call(k: Tensor, v: Tensor, name: str) -> Function:
        return lambda q: regard.attention(q, k, v, mask=mask, backend=name)

    want, got = call(k, v, "reference"), call(bad_k, bad_v, backend)
    assert_close(jvp(got, (q,), (q,)), jvp(want, (q,), (q,)))
    assert_close(vmap(got)(torch.stack([q, -q])), vmap(want)(torch.stack([q, -q])))
    each = [vmap(grad(lambda x, f=f: f(x).sin().sum()))(q[None]) for f in (got, want)]
    assert_close(*each)
    if backend == "tiled" and cases.DEVICE == "cpu":
        assert_close(vmap(call(bad_k, bad_v, "sdpa"))(q[None]), want(q)[None])


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_dropout_under_transforms(backend: str) -> None:
    q, k, v = three(torch.float64)

    def call(q: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, dropout=0.5, training=True, backend=backend)

    def seeded(q: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(5)
        return call(q, v)

    one, step = seeded(q, v), 1e-6
    ends = [seeded(q + s * step * q, v + s * step * v) for s in (1.0, -1.0)]
    found = jvp(seeded, (q, v), (q, v))
    assert_close(found, (one, (ends[0] - ends[1]) / (2 * step)), rtol=1e-6, atol=1e-7)
    torch.manual_seed(5)
    same = vmap(call, randomness="same")(torch.stack([q, q]), torch.stack([v, v]))
    assert_close(same, torch.stack([one, one]))
    many = [torch.stack([t] * 8) for t in (q, v)]
    torch.manual_seed(5)
    unlike = vmap(call, randomness="different")(*many)
    assert all(not torch.equal(unlike[i], unlike[i + 1]) for i in range(7))
    with pytest.raises(RuntimeError, match="random operation"):
        vmap(call)(*many)


@either
def test_everything_beside_q_k_and_v_can_be_mapped(backend: str) -> None:
    """Masks, biases and sinks that differ from entry to entry."""
    q, k, v = three()
    keep = draw(3, B, 1, Q, K).to(cases.DEVICE) > -1
    bias, sink = draw(3, 1, H, Q, K).to(q), draw(3, H).to(q)

    def call(keep: Tensor, bias: Tensor, sink: Tensor, name: str = backend) -> Tensor:
        mask, added = masks.keep(keep), biases.dense(bias)
        return regard.trace(q, k, v, mask=mask, bias=added, sink=sink, backend=name).entropy

    want = torch.stack([call(*one, "reference") for one in zip(keep, bias, sink, strict=True)])
    assert_close(vmap(call)(keep, bias, sink), want)


def test_many_entries_are_mapped_in_lots(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more heads at a time than a kernel has programs for."""
    monkeypatch.setattr(vmap_entries, "MOST", 3 * B * H)
    q, k, v = three(torch.float64)
    many = torch.stack([i * q for i in range(8)])
    mask = masks.padding(torch.tensor([2, 4]))

    def call(q: Tensor, backend: str) -> Tensor:
        return regard.attention(q, k, v, mask=mask, backend=backend)

    want = torch.stack([call(q, "reference") for q in many])
    assert_close(vmap(lambda q: call(q, "tiled"))(many), want)


@pytest.mark.parametrize("mask", [masks.causal() & masks.window(2), None], ids=["window", "none"])
def test_gradients_of_each_sample_of_a_module(mask: masks.Mask | None) -> None:
    torch.manual_seed(0)
    module = regard.nn.MultiHeadAttention(8, 2).to(cases.DEVICE, torch.float64)
    weights = dict(module.named_parameters())
    samples = draw(4, 5, 8).to(cases.DEVICE)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        out = functional_call(module, weights, (x[None],), {"mask": mask})
        return out.square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(weights, samples)
    for i, x in enumerate(samples):
        module.zero_grad()
        module(x[None], mask=mask).square().sum().backward()
        for name, weight in module.named_parameters():
            assert_close(found[name][i], weight.grad)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch")
@pytest.mark.parametrize("what", ["grad", "vmap", "jvp", "dual"])
def test_transforms_leave_a_compiled_graph(what: str) -> None:
    """The operators of a graph have no forward mode: a full one is refused, others are right."""
    q, k, v = three(torch.float64)

    def call(x: Tensor, backend: str = "tiled") -> Tensor:
        return regard.attention(x, k, v, softcap=2.0, backend=backend)

    transforms: dict[str, Callable[[Function], Function]] = {
        "grad": lambda f: lambda x: grad(lambda y: f(y).sin().sum())(x),
        "vmap": lambda f: lambda x: vmap(f)(torch.stack([x, -x])),
        "jvp": lambda f: lambda x: jvp(f, (x,), (2 * x,))[1],
        "dual": lambda f: f,
    }
    whole = torch.compile(transforms[what](call), fullgraph=True, backend="aot_eager")
    parts = torch.compile(transforms[what](call), backend="aot_eager")
    if what != "dual":
        want = transforms[what](lambda x: call(x, "reference"))(q)
        with pytest.raises(Exception, match="no forward mode and no batching rule inside"):
            whole(q)
        assert_close(parts(q), want)
        return
    _, want = jvp(lambda x: call(x, "reference"), (q,), (q,))
    # Compiled where nothing moves, and used where something does.
    assert_close(whole(q), parts(q))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        with pytest.raises(Exception, match="no forward mode and no batching rule inside"):
            whole(dual)
        assert_close(forward_ad.unpack_dual(parts(dual)).tangent, want)
