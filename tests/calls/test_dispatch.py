"""Which backend runs what, what a plan says, and what importing costs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard import RegardError, biases, masks, scores
from regard.calls import remembered
from regard.calls.dispatch import BACKENDS
from regard.values import Shape
from tests.fresh_process import FreshProcesses
from tests.traces.test_traces import Largest

N = 300


def x(*axes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(axes, generator=torch.Generator().manual_seed(0)).to(dtype)


X = x(2, 4, N, 8)
WIDE = x(2, 4, 1100, 8)


def learned(t: Tensor) -> Tensor:
    return t.clone().requires_grad_()


PICKS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "plain": ((X, X, X), {}, "sdpa"),
    "plain-with-gradients": ((learned(X), X, X), {}, "sdpa"),
    "float64": ((X.double(),) * 3, {}, "sdpa"),
    "short-bfloat16": ((X[:, :, :20].bfloat16(),) * 3, {}, "sdpa"),
    "scale": ((X, X, X), {"scale": 2.0}, "sdpa"),
    "grouped": ((X, X[:, :2], X[:, :2]), {}, "sdpa"),
    "causal": ((X, X, X), {"mask": masks.causal()}, "tiled"),
    "causal-with-gradients": ((learned(X), X, X), {"mask": masks.causal()}, "tiled"),
    "short-causal-with-gradients": (
        (learned(X[:, :, :60]), X, X), {"mask": masks.causal()}, "sdpa",
    ),
    "long-causal": ((WIDE,) * 3, {"mask": masks.causal()}, "tiled"),
    "long-causal-with-gradients": ((learned(WIDE), WIDE, WIDE), {"mask": masks.causal()}, "tiled"),
    "long-bfloat16": ((WIDE.bfloat16(),) * 3, {}, "tiled"),
    "long-causal-bfloat16": ((WIDE.bfloat16(),) * 3, {"mask": masks.causal()}, "tiled"),
    "long-bfloat16-with-gradients": ((learned(WIDE.bfloat16()),) * 3, {}, "tiled"),
    "short-causal-bfloat16": (
        (X[:, :, :20].bfloat16(),) * 3, {"mask": masks.causal()}, "sdpa",
    ),
    "decoding-bfloat16": ((WIDE[:, :, :1].bfloat16(), *[WIDE.bfloat16()] * 2), {}, "sdpa"),
    "keep-bfloat16": (
        (WIDE.bfloat16(),) * 3, {"mask": masks.keep(torch.ones(1100, 1100).bool())}, "sdpa",
    ),
    "decoding": ((WIDE[:, :, :1], WIDE, WIDE), {"mask": masks.causal()}, "sdpa"),
    "decoding-by-a-window": ((WIDE[:, :, :1], WIDE, WIDE), {"mask": masks.window(9)}, "tiled"),
    "a-window-that-masks-nothing": ((X, X, X), {"mask": masks.window(N, N)}, "sdpa"),
    "causal-from-the-start": (
        (WIDE[:, :, :1000], WIDE, WIDE), {"mask": masks.causal(offset=0)}, "tiled",
    ),
    "causal-to-the-end": ((WIDE[:, :, :1000], WIDE, WIDE), {"mask": masks.causal()}, "tiled"),
    "short-padding": ((X, X, X), {"mask": masks.padding([7, N])}, "sdpa"),
    "long-padding": ((WIDE,) * 3, {"mask": masks.padding([7, 1100])}, "tiled"),
    "short-window": ((X, X, X), {"mask": masks.window(9)}, "tiled"),
    "long-window": ((WIDE,) * 3, {"mask": masks.causal() & masks.window(9)}, "tiled"),
    "keep": ((WIDE,) * 3, {"mask": masks.keep(torch.ones(1100, 1100).bool())}, "sdpa"),
    "general": ((X, X, X), {"score": scores.general(torch.eye(8))}, "sdpa"),
    "cosine": ((X, X, X), {"score": scores.cosine(0.1)}, "sdpa"),
    "distance": ((X, X, X), {"score": scores.distance()}, "tiled"),
    "softcap": ((X, X, X), {"softcap": 3.0}, "tiled"),
    "sink": ((X, X, X), {"sink": torch.zeros(4)}, "tiled"),
    "alibi": ((X, X, X), {"bias": biases.alibi([1.0] * 4)}, "tiled"),
    "dense": ((X, X, X), {"bias": biases.dense(torch.zeros(N, N))}, "sdpa"),
    "learned-dense": (
        (X, X, X), {"bias": biases.dense(learned(torch.zeros(N, N)))}, "tiled",
    ),
    "dense-and-mask": (
        (X, X, X), {"bias": biases.dense(torch.zeros(N, N)), "mask": masks.causal()}, "tiled",
    ),
    "dropout": ((X, X, X), {"dropout": 0.1, "training": True}, "tiled"),
    "dropout-not-training": ((X, X, X), {"dropout": 0.1}, "sdpa"),
    "narrow-values": ((X, X, X[..., :4]), {}, "tiled"),
    "no-queries": ((X[:, :, :0], X, X), {}, "tiled"),
}  # fmt: skip


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends that really run, in order; none is known from earlier calls."""
    names: list[str] = []
    monkeypatch.setattr(remembered, "KNOWN", {})
    monkeypatch.setattr(remembered, "BOUND", {})
    monkeypatch.setattr(remembered, "RECENT", {False: (), True: ()})
    for name, backend in BACKENDS.items():
        for method in ("attend", "observe"):
            run = getattr(backend, method)

            def spy(inputs: Any, name: str = name, run: Any = run) -> Any:
                names.append(name)
                return run(inputs)

            monkeypatch.setattr(backend, method, spy, raising=True)

        def spied(inputs: Any, *, statistics: bool, name: str, repeated: Any) -> Any:
            run = repeated(inputs, statistics=statistics)
            if run is None:
                return None

            def again(*given: Any) -> Any:
                before = len(names)
                answer = run(*given)
                # It may call PyTorch without a detour.
                names.extend([name] if len(names) == before else [])
                return answer

            return again

        for method in ("repeated", "bound_anew"):
            if hasattr(backend, method):
                spy_of = partial(spied, name=name, repeated=getattr(backend, method))
                monkeypatch.setattr(backend, method, spy_of)
    return names


def test_a_function_that_stands_in_for_pytorchs_is_called_while_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remembered, "KNOWN", {})
    monkeypatch.setattr(remembered, "RECENT", {False: (), True: ()})
    x = torch.randn(1, 2, 5, 8)
    own = regard.attention(x, x, x)
    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", lambda q, *_, **__: q + 7)
        assert torch.equal(regard.attention(x, x, x), x + 7)
    assert torch.equal(regard.attention(x, x, x), own)


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Lets this CPU have instructions for half precision, or have none."""

    def settle(has: bool) -> None:
        fused = "regard.backends.tiled.fused"
        monkeypatch.setattr(f"{fused}._multiplies", lambda dtype: has)
        monkeypatch.setattr(f"{fused}._multiplies_narrow", lambda inputs: has)

    return settle


@pytest.mark.parametrize("call", PICKS)
def test_what_attention_picks(call: str, ran: list[str], half: Callable[[bool], None]) -> None:
    half(True)
    tensors, options, expected = PICKS[call]
    assert regard.plan(*tensors, **options).backend == expected
    assert ran == []
    regard.attention(*tensors, **options)
    assert ran == [expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [4, 1100])
def test_half_precision_without_instructions_for_it(
    dtype: torch.dtype, n: int, half: Callable[[bool], None], request: pytest.FixtureRequest
) -> None:
    """PyTorch's own kernel then takes up to a hundred times as long."""
    tensors = [WIDE[:, :, :n].to(dtype)] * 3
    half(False)
    plan = regard.plan(*tensors)
    assert plan.backend == "tiled"
    quicker = "runs only when asked for: tiled, compiled for this CPU, is quicker"
    assert plan.refusals["sdpa"] == [quicker]
    assert (
        regard.plan(*tensors, bias=biases.dense(torch.zeros(n, n, dtype=dtype))).backend == "sdpa"
    )
    half(True)
    assert regard.plan(*tensors).backend == ("sdpa" if n < 64 else "tiled")
    half(False)
    request.getfixturevalue("uncompiled")
    assert regard.plan(*tensors).backend == "sdpa"


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "keep"])
@pytest.mark.parametrize("narrow", [False, True])
def test_half_precision_with_instructions_for_it(
    narrow: bool, mask: str, half: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's backward pass takes twice as long; where the loop does not multiply matrices as
    they are, its forward pass does not."""
    half(True)
    monkeypatch.setattr("regard.backends.tiled.fused._multiplies_narrow", lambda inputs: narrow)
    for n in (16, 256, 512):
        made = {
            "none": None, "causal": masks.causal(), "padding": masks.padding([n]),
            "keep": masks.keep(torch.ones(1, 1, n, n, dtype=torch.bool).tril()),
        }[mask]  # fmt: skip
        x = WIDE[:, :, :n].bfloat16()
        plainly = regard.plan(x, x, x, mask=made).backend
        learning = regard.plan(x.clone().requires_grad_(), x, x, mask=made).backend
        by_pytorch = {"none": not narrow, "causal": not narrow and n < 512, "padding": n > 256}
        assert plainly == (
            "sdpa" if (n < 64 and mask != "padding") or by_pytorch.get(mask, True) else "tiled"
        )
        assert learning == ("sdpa" if n < 64 else "tiled")


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize(
    ("mask", "n", "by_ours"),
    [
        (masks.padding([100]), 100, (True, False)),
        (masks.documents(torch.arange(200) // 9), 200, (True, False)),
        (masks.causal() | masks.global_tokens([0, 7]), 100, (True, False)),
        (masks.dilated(4), 250, (True, True)),
        (masks.prefix(10), 400, (True, True)),
        # What a mask says is written already, or a function says it, or tables must be made.
        (masks.keep(torch.ones(100, 100).bool().tril()), 100, (False, False)),
        (masks.where(lambda b, h, q, k: (q + k) % 3 != 0), 100, (False, False)),
        (masks.dilated(4), 400, (False, False)),
        (masks.documents(torch.arange(400) // 9), 400, (False, False)),
    ],
)
def test_masks_that_pytorch_wants_written_out(
    mask: masks.Mask, n: int, by_ours: tuple[bool, bool], learns: bool,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    x = torch.randn(1, 4, n, 64)
    given = x.clone().requires_grad_(learns), x, x
    assert regard.plan(*given, mask=mask).backend == ("tiled" if by_ours[learns] else "sdpa")
    request.getfixturevalue("uncompiled")
    assert regard.plan(*given, mask=mask).backend == "sdpa"


def test_one_row_of_a_head_is_left_to_pytorch() -> None:
    """Its products are none of matrices."""
    q, k = torch.randn(1, 4, 1, 64), torch.randn(1, 4, 128, 64)
    for mask in (masks.padding([100]), masks.prefix(7), masks.dilated(3)):
        assert regard.plan(q, k, k, mask=mask).backend == "sdpa"
        assert regard.plan(q, k[:, :1], k[:, :1], mask=mask).backend == "tiled"


def test_what_can_be_differentiated_twice_stays_so() -> None:
    """Without its fused kernels PyTorch can."""
    x = torch.randn(1, 2, 100, 32).bfloat16()
    for mask in (None, masks.causal(), masks.prefix(10), masks.padding([70])):
        leaf = x.clone().requires_grad_()
        regard.attention(leaf, x, x, mask=mask)
        with sdpa_kernel(SDPBackend.MATH):
            out = regard.attention(leaf, x, x, mask=mask)
            (first,) = torch.autograd.grad(out.float().square().sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(first.float().sum(), leaf)
        assert second.isfinite().all()


def test_long_causal_calls_where_the_compiled_loop_wins(request: pytest.FixtureRequest) -> None:
    plan = regard.plan(WIDE, WIDE, WIDE, mask=masks.causal())
    assert plan.refusals["sdpa"] == [
        "runs only when asked for: tiled, compiled for this CPU, is quicker"
    ]
    request.getfixturevalue("uncompiled")
    assert regard.plan(WIDE, WIDE, WIDE, mask=masks.causal()).backend == "sdpa"


@pytest.mark.parametrize("call", PICKS)
def test_traces_come_from_tiled(call: str, ran: list[str]) -> None:
    tensors, options, _ = PICKS[call]
    assert regard.plan(*tensors, **options, statistics=True).backend == "tiled"
    assert regard.trace(*tensors, **options).backend == "tiled"
    assert ran == ["tiled"]


@pytest.mark.parametrize("name", ["sdpa", "tiled", "reference"])
def test_a_named_backend_runs(name: str, ran: list[str]) -> None:
    out = regard.attention(X, X, X, mask=masks.causal(), backend=name)
    # The reference's output comes out of its observation.
    assert set(ran) == {name}
    torch.testing.assert_close(out, regard.attention(X, X, X, mask=masks.causal()))
    if name != "sdpa":
        assert regard.trace(X, X, X, backend=name).backend == name
        assert ran[-1] == name


def test_a_named_backend_never_falls_back(ran: list[str]) -> None:
    with pytest.raises(RegardError) as error:
        regard.attention(X, X, X, softcap=3.0, sink=torch.zeros(4), backend="sdpa")
    assert str(error.value) == (
        "backend 'sdpa' cannot run this call: it has no soft-cap; it has no sink\n"
        "  accepted: backends that can: 'tiled', 'reference'\n"
        "  do:       name one of them, or leave backend= out"
    )
    with pytest.raises(RegardError, match="it keeps no row statistics"):
        regard.trace(X, X, X, backend="sdpa")
    with pytest.raises(RegardError, match="unknown backend") as error:
        regard.attention(X, X, X, backend="flash")
    assert "'sdpa', 'triton', 'flex', 'tiled', 'reference' or None" in str(error.value)
    assert ran == []


REFUSALS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "softcap": ((X, X, X), {"softcap": 3.0}, "it has no soft-cap"),
    "sink": ((X, X, X), {"sink": torch.zeros(4)}, "it has no sink"),
    "distance": ((X, X, X), {"score": scores.distance()}, "it compares by dot products only"),
    "alibi": (
        (X, X, X),
        {"bias": biases.alibi([1.0] * 4)},
        "it would write the bias out as an n×n tensor",
    ),
    "window": (
        (WIDE,) * 3, {"mask": masks.window(9)}, "it would write the mask out as an n×n tensor",
    ),
    "dropout": (
        (X, X, X), {"dropout": 0.1, "training": True}, "its fused CPU kernel has no dropout",
    ),
    "narrow-values": (
        (X, X, X[..., :4]), {}, "its fused CPU kernel wants values as wide as keys",
    ),
    "learned-bias": (
        (X, X, X),
        {"bias": biases.dense(learned(torch.zeros(N, N)))},
        "its fused kernels give a bias no gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSALS)
def test_why_a_plan_does_not_take_sdpa(call: str) -> None:
    tensors, options, reason = REFUSALS[call]
    plan = regard.plan(*tensors, **options)
    assert plan.refusals["sdpa"] == [reason]
    assert plan.refusals["reference"] == ["runs only when asked for: it builds the n×n matrix"]
    assert f"not sdpa        {reason}\n" in str(plan)


def test_a_plan_of_a_named_backend() -> None:
    plan = regard.plan(X, X, X, backend="reference")
    assert plan.backend == "reference"
    assert plan.refusals["sdpa"] == []
    assert plan.refusals["tiled"] == []
    assert "not tiled       it could, but ranks lower" in str(plan)
    with pytest.raises(RegardError, match="it has no sink"):
        regard.plan(X, X, X, sink=torch.zeros(4), backend="sdpa")


def pairs_to_flops(pairs: int, D: int, E: int) -> int:
    return 2 * pairs * (D + E)


@pytest.mark.parametrize("backend", ["sdpa", "tiled", "reference"])
def test_flops_of_a_call_without_a_mask(backend: str) -> None:
    plan = regard.plan(X, X, X, backend=backend)
    flops = pairs_to_flops(2 * 4 * N * N, 8, 8)
    assert (plan.flops_needed, plan.flops_executed, plan.flops_dense) == (flops, flops, flops)
    assert plan.bytes_moved == 4 * X.nbytes


def test_flops_of_causal() -> None:
    n, key_tile = 1024, 128
    q, v = x(1, 2, n, 16), x(1, 2, n, 8)
    plan = regard.plan(q, q, v, mask=masks.causal())
    assert plan.backend == "tiled"
    assert plan.flops_needed == pairs_to_flops(2 * n * (n + 1) // 2, 16, 8)
    assert plan.flops_dense == pairs_to_flops(2 * n * n, 16, 8)
    # Rows come in tiles of 128; each looks at whole key tiles up to its last row.
    visited = sum(128 * -(-(start + 128) // key_tile) * key_tile for start in range(0, n, 128))
    assert plan.flops_executed == pairs_to_flops(2 * visited, 16, 8)
    assert plan.flops_needed < plan.flops_executed < plan.flops_dense


def test_flops_of_a_window(request: pytest.FixtureRequest) -> None:
    n, left = 1000, 50
    q, v = x(3, 2, n, 4), x(3, 2, n, 4)
    plan = regard.plan(q, q, v, mask=masks.causal() & masks.window(left))
    pairs = n * (left + 1) - left * (left + 1) // 2
    assert plan.flops_needed == pairs_to_flops(6 * pairs, 4, 4)
    rows = 128
    visited = tiles = 0
    for start in range(0, n, rows):
        stop = min(start + rows, n)
        visited += (stop - start) * (stop - max(0, start - left))
        for key in range(0, n, 128):
            last = min(key + 128, n)
            if key < stop and last > start - left:
                tiles += (stop - start) * (last - key)
    assert plan.flops_executed == pairs_to_flops(6 * visited, 4, 4)
    request.getfixturevalue("uncompiled")
    plan = regard.plan(q, q, v, mask=masks.causal() & masks.window(left))
    assert plan.flops_executed == pairs_to_flops(6 * tiles, 4, 4)


def test_flops_follow_each_sequence_and_head() -> None:
    plan = regard.plan(X, X, X, mask=masks.padding([10, 200]))
    assert plan.flops_needed == pairs_to_flops(4 * N * (10 + 200), 8, 8)
    keep = torch.rand(1, 4, N, N, generator=torch.Generator().manual_seed(1)) < 0.1
    plan = regard.plan(X, X, X, mask=masks.keep(keep))
    assert plan.flops_needed == pairs_to_flops(2 * int(keep.sum()), 8, 8)


def test_a_plan_prints_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.backends.flex.VECTORS", "AVX2")
    q = torch.zeros(1, 2, 1024, 64)
    plan = regard.plan(q, q, q, mask=masks.causal(), softcap=20.0)
    lines = str(plan).splitlines()
    assert lines[0] == (
        "attention of q [1, 2, 1024, 64], k [1, 2, 1024, 64], v [1, 2, 1024, 64], float32 on cpu, "
        "mask=causal()"
    )
    assert lines[1:-1] == [
        "  backend         tiled",
        "  inner loop      compiled for this CPU, products and all",
        "  not sdpa        it has no soft-cap",
        "  not triton      its kernels run on CUDA; elsewhere only interpreted, with "
        "TRITON_INTERPRET=1",
        "  not flex        runs only when asked for on CPU or with a bias: it compiles for seconds",
        "  not reference   runs only when asked for: it builds the n×n matrix",
        "  needed FLOPs    269 M (50.0% of dense)",
        "  executed FLOPs  302 M (56.2% of dense)",
        "  dense FLOPs     537 M (100.0% of dense)",
        "  bytes moved     2.1 MB",
    ]
    assert lines[-1].startswith("  peak memory     ")
    assert lines[-1].endswith("kB beside the inputs")


def test_a_plan_of_a_trace_says_so() -> None:
    plan = regard.plan(X, X, X, statistics=True)
    assert plan.call.startswith("trace of q ")
    assert plan.refusals["sdpa"] == ["it keeps no row statistics"]
    assert plan.refusals["flex"][0] == "it reports no entropy"
    less = regard.plan(X, X, X, backend="tiled")
    # Three float32 numbers a row.
    assert plan.peak_memory - less.peak_memory == 3 * 4 * 2 * 4 * N


def test_a_plan_over_a_million_tokens() -> None:
    n = 1 << 20
    q = torch.zeros(1, 1, 1, 128).expand(1, 8, n, 128)
    with Largest() as seen:
        plan = regard.plan(q, q, q, mask=masks.causal(), statistics=True)
    assert plan.flops_needed == pairs_to_flops(8 * n * (n + 1) // 2, 128, 128)
    assert plan.flops_needed < plan.flops_executed < 1.01 * plan.flops_needed
    # A few numbers per query at most, far from the gigabytes of the inputs.
    assert seen.bytes <= 4 * 8 * n
    assert "needed FLOPs    2.25 P (50.0% of dense)" in str(plan)


HEAVY = (
    "triton transformers rich typer matplotlib anywidget regard.view regard.parallel "
    "torch._inductor torch._dynamo torch.nn.attention.flex_attention sympy"
)


def test_importing_is_light(fresh: FreshProcesses) -> None:
    """What torch itself imports is its own business; regard adds none of these."""
    program = (
        "import sys, torch; before = set(sys.modules); import regard; "
        f"heavy = {HEAVY.split()!r}; "
        "print([m for m in heavy if m in sys.modules and m not in before])"
    )
    assert fresh(program).out.strip() == "[]"


def test_the_import_test_names_real_modules() -> None:
    for name in ("rich", "typer", "torch._inductor", "torch._dynamo"):
        assert importlib.util.find_spec(name) is not None


def test_public_names_exist() -> None:
    assert sorted(regard.__all__) == regard.__all__
    for name in regard.__all__:
        assert getattr(regard, name) is not None
    for module in (regard.masks, regard.scores, regard.biases, regard.nn):
        for name in module.__all__:
            assert getattr(module, name) is not None


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(2)], ids=str)
def test_tensors_without_numbers_give_shapes(mask: masks.Mask | None) -> None:
    q, k = torch.empty(2, 4, 5, 8, device="meta"), torch.empty(2, 2, 7, 8, device="meta")
    out = regard.attention(q, k, k[..., :3], mask=mask)
    assert (out.shape, out.device.type) == ((2, 4, 5, 3), "meta")
    layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    regard.nn.replace_attention(layer)
    assert layer.to("meta")(torch.empty(2, 5, 16, device="meta")).shape == (2, 5, 16)


@dataclass(frozen=True, eq=False, repr=False)
class Listed(masks.Mask):
    """A mask of somebody's own, made of what can be neither hashed nor known to stay."""

    keys: list[int]

    def bind(self, shape: Shape, device: torch.device) -> masks.Mask:
        return self

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return torch.isin(k, torch.tensor(self.keys)) & (q >= 0)


@pytest.mark.parametrize("whole", [False, True], ids=["alone", "in another"])
def test_masks_of_ones_own_are_looked_at_each_time(whole: bool) -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    own = Listed([0])
    mask = own & masks.causal() if whole else own
    out = regard.attention(q, k, v, mask=mask, backend="reference")
    torch.testing.assert_close(out[..., 4, :], v[..., 0, :])
    own.keys[:] = [1]
    out = regard.attention(q, k, v, mask=mask, backend="reference")
    torch.testing.assert_close(out[..., 4, :], v[..., 1, :])


def test_one_query_gives_one_answer() -> None:
    q, k, v = torch.randn(8), torch.randn(5, 8), torch.randn(5, 3)
    right = regard.attention(q[None], k, v)[0]
    mine = regard.attention(q, k, v)
    assert torch.equal(mine, right)
    assert torch.equal(regard.trace(q, k, v).out[0], right)
    assert regard.plan(q, k, v).backend == regard.plan(q[None], k, v).backend
