"""The Triton kernels against float64: interpreted on a CPU (TRITON_INTERPRET=1), or on a GPU
(--device cuda).

Every mask meets every bias, score, extra and precision, and each of these meets each other; then
every way of running the forward kernel, and what only kernels can get wrong.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, masks
from regard.backends.contract import Rows
from regard.backends.passes import Pull
from regard.backends.reference import Reference, ReferencePass
from regard.inputs import AttentionInputs
from regard.values import Shape
from tests.parity import cases
from tests.parity.cases import BIASES, EXTRAS, MASKS, Case, Sizes, assert_conforms, observed

pytestmark = pytest.mark.interpreted

SMALL = Sizes(B=2, H=2, G=1, Q=19, K=37, D=8, E=6)
LOW = (torch.float32, torch.bfloat16, torch.float16)
ALIKE = (
    "none", "causal", "causal_window", "causal_from_start", "future_only", "window", "prefix",
    "first_keys", "longformer", "dilated", "nothing",
)  # fmt: skip
DOTS = ("scaled_dot", "dot", "general", "cosine")
ADDED = [bias for bias in BIASES if bias != "pairwise"]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that every case has several rows of them, full and partial."""
    from regard.backends.triton import backward, forward
    from regard.backends.triton.questions import second_pass
    from regard.backends.triton.settings.tuning import Backward, Forward, Looking, Tile

    how: dict[str, Any] = {"warps": 4, "stages": 1}
    monkeypatch.setattr(forward, "forward_settings", lambda x, **_: Forward(16, 16, **how))
    monkeypatch.setattr(
        backward, "backward_settings", lambda x: Backward(Tile(16, 16, **how), Tile(16, 16, **how))
    )
    monkeypatch.setattr(second_pass, "looking_settings", lambda x: Looking(16, 16, **how))


def every_pair() -> list[Case]:
    """Masks and extras in full, biases, scores and precisions taking turns so that all meet."""
    found = []
    for i, mask in enumerate(MASKS):
        for j, extra in enumerate(EXTRAS):
            bias = ADDED[(i + j) % len(ADDED)]
            score = DOTS[(i // 4 + 3 * j) % len(DOTS)]
            # One batch entry is enough where no mask tells them apart; "all" drops in two.
            alike = mask in ALIKE and extra != "all"
            sizes = replace(SMALL, B=1) if alike else SMALL
            found.append(Case(mask, score, bias, extra, LOW[(i + 2 * j) % len(LOW)], sizes))
    return found


def test_all_pairs_meet() -> None:
    names = ("mask", "score", "bias", "extra", "dtype")
    kinds = {"mask": MASKS, "score": DOTS, "bias": ADDED, "extra": EXTRAS, "dtype": LOW}
    for first in names:
        for second in names:
            met = {(getattr(c, first), getattr(c, second)) for c in every_pair()}
            wanted = len(kinds[first]) * (len(kinds[second]) if first != second else 1)
            assert len(met) == wanted, f"{first} and {second}"


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", every_pair(), ids=str)
def test_kernels(case: Case) -> None:
    from regard.backends.triton import Triton
    from regard.backends.triton.questions.second_pass import TritonPass

    inputs, learned = case.build()
    assert Triton().refuses(inputs, statistics=True) == []
    # The questions know nothing of dropout and sinks but through lse.
    second = TritonPass() if case.extra in ("plain", "softcap") else ReferencePass()
    got = observed(Triton(), inputs, learned, second)
    assert_conforms(case, got, ReferencePass())


@pytest.mark.parametrize("mask", ["none", "causal", "causal_window", "causal_padding", "documents"])
@pytest.mark.parametrize(
    ("packed", "splits"),
    [(False, 1), (False, 2), (True, 1), (True, 4)],
    ids=["alone", "split", "packed", "both"],
)
def test_packed_and_split(
    mask: str, packed: bool, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.backends.triton import Triton, forward
    from regard.backends.triton.settings.tuning import Forward

    case = Case(mask, "scaled_dot", "alibi", "all", torch.float32, Sizes(H=4, G=2, Q=5, K=61))
    packed = packed and mask != "documents"
    settings = Forward(16, 16, packed=packed, splits=splits, warps=4, stages=1, careful=splits == 1)
    monkeypatch.setattr(forward, "forward_settings", lambda x, **_: settings)
    inputs, learned = case.build()
    got = observed(Triton(), inputs, learned, ReferencePass())
    assert_conforms(case, got, ReferencePass())


@pytest.mark.parametrize("careful", [False, True], ids=["mended", "careful"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hidden_nan_is_mended_or_kept_out_at_once(
    careful: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.backends.triton import Triton, forward
    from regard.backends.triton.settings.tuning import Forward

    settings = Forward(16, 16, warps=4, stages=1, careful=careful)
    monkeypatch.setattr(forward, "forward_settings", lambda x, **_: settings)
    inputs, _ = Case("causal", dtype=dtype, sizes=SMALL).build()
    clean = Triton().observe(inputs)
    assert clean.out.isfinite().all()
    # No query sees the last key but the last, which sees everything.
    v = inputs.v.clone()
    v[:, :, -1] = torch.nan
    spoilt = Triton().observe(replace(inputs, v=v))
    torch.testing.assert_close(spoilt.out[:, :, :-1], clean.out[:, :, :-1], rtol=0, atol=0)
    assert spoilt.out[:, :, -1].isnan().all()
    torch.testing.assert_close(spoilt.lse, clean.lse, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "mask", "extra"),
    [("plain", "none", "plain"), ("plain", "causal", "softcap"), ("careful", "causal", "plain"),
     ("careful", "causal_padding", "softcap"), ("split", "causal_window", "plain"),
     ("split", "none", "softcap"), ("packed", "causal_padding", "plain"),
     ("packed", "causal_window", "softcap")],
)  # fmt: skip
def test_the_first_key_told_by_the_forward_pass(
    mask: str, kind: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.backends.contract import Noted
    from regard.backends.triton.forward import run
    from regard.backends.triton.settings.tuning import Forward

    how: dict[str, Any] = {"careful": kind == "careful", "packed": kind == "packed"}
    settings = Forward(16, 16, warps=4, stages=1, splits=2 if kind == "split" else 1, **how)
    sizes = Sizes(B=2, H=4, G=2, Q=5, K=37, D=8, E=6)
    inputs, _ = Case(mask, bias="alibi", extra=extra, sizes=sizes).build()
    found, _ = run(inputs, settings, statistics=True)
    assert isinstance(found, Noted)
    want = ReferencePass().first_logit(inputs)
    torch.testing.assert_close(found.first, want, rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("mask", ["none", "causal", "causal_window", "causal_padding"])
def test_the_first_key_of_one_call_after_the_other(mask: str) -> None:
    """What was looked up for the first is used for the second, whose numbers are others."""
    from regard.backends.tiled import TiledPass
    from regard.backends.triton.questions.second_pass import TritonPass

    inputs, _ = Case(mask, dtype=torch.bfloat16, sizes=SMALL).build()
    second, want = TritonPass(), TiledPass()
    for factor in (1, 3, -2):
        x = replace(inputs, q=inputs.q.detach() * factor, k=inputs.k.detach().flip(2))
        for y in (x, replace(x, q=x.q[:, :1], k=x.k[:, :1], v=x.v[:, :1])):
            torch.testing.assert_close(
                second.first_logit(y), want.first_logit(y), rtol=1e-5, atol=1e-5
            )
    assert not copy.deepcopy(second)._looks


@pytest.mark.parametrize("mask", ["none", "causal_padding"])
def test_heads_of_a_group_fill_several_tiles(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.backends.triton import Triton, forward
    from regard.backends.triton.settings.tuning import Forward

    settings = Forward(16, 16, packed=True, splits=2, warps=4, stages=1)
    monkeypatch.setattr(forward, "forward_settings", lambda x, **_: settings)
    case = Case(mask, dtype=torch.float32, sizes=Sizes(B=2, H=5, G=1, Q=5, K=37))
    inputs, learned = case.build()
    got = observed(Triton(), inputs, learned, ReferencePass())
    assert_conforms(case, got, ReferencePass())


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("D", "E"), [(1, 40), (16, 1), (33, 16)])
def test_widths(D: int, E: int) -> None:
    from regard.backends.triton import Triton
    from regard.backends.triton.questions.second_pass import TritonPass

    case = Case("causal", sizes=Sizes(B=1, H=2, G=1, Q=17, K=17, D=D, E=E))
    inputs, learned = case.build()
    got = observed(Triton(), inputs, learned, TritonPass())
    assert_conforms(case, got, ReferencePass())


@pytest.mark.usefixtures("small_tiles")
def test_lists_of_tiles_end_with_the_last_query_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that hides nothing, but is walked by lists: its last tiles stick out."""
    from regard.backends.triton import Triton
    from regard.backends.triton.layout import is_simple
    from regard.backends.triton.questions.second_pass import TritonPass

    every = masks.prefix(SMALL.K) | masks.window(3, 3)
    monkeypatch.setitem(MASKS, "all by lists", lambda s: every)
    case = Case("all by lists", "scaled_dot", "alibi", "plain", torch.float32, SMALL)
    inputs, learned = case.build()
    assert not is_simple(inputs.mask)
    got = observed(Triton(), inputs, learned, TritonPass())
    assert_conforms(case, got, ReferencePass())


@pytest.mark.parametrize("mask", ["none", "causal", "causal_window", "causal_padding"])
@pytest.mark.parametrize("n", [40, 300])
@pytest.mark.parametrize("D", [64, 96, 128])
def test_as_set_for_real_calls(mask: str, n: int, D: int) -> None:
    """Also where a GPU has kernels of its own for such widths, and where cuDNN attends."""
    from regard.backends.triton import Triton
    from regard.backends.triton.questions.second_pass import TritonPass

    if cases.DEVICE == "cpu":
        pytest.skip("interpreted ones are tried in poisoned memory")
    sizes = Sizes(B=2, H=4, G=2 if D == 96 else 4, Q=n, K=n, D=D, E=D)
    dtype = {64: torch.float16, 96: torch.bfloat16, 128: torch.bfloat16}[D]
    case = Case(mask, dtype=dtype, sizes=sizes)
    inputs, learned = case.build()
    assert_conforms(case, observed(Triton(), inputs, learned, TritonPass()), ReferencePass())
    assert_conforms(case, observed(Triton(), inputs, learned, None), None)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", ["none", "documents"])
def test_wide_heads_with_a_bias(mask: str, dtype: torch.dtype, D: int) -> None:
    """The tiles that are set for them fit into a multiprocessor."""
    from regard.backends.triton import Triton
    from regard.backends.triton.questions.second_pass import TritonPass

    if cases.DEVICE == "cpu":
        pytest.skip("only a GPU runs out of shared memory")
    case = Case(mask, bias="dense", dtype=dtype, sizes=Sizes(B=1, H=2, G=2, Q=150, K=150, D=D, E=D))
    inputs, learned = case.build()
    assert_conforms(case, observed(Triton(), inputs, learned, TritonPass()), ReferencePass())


@pytest.mark.parametrize("backend", ["triton", "sdpa"])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_hidden_is_seen_by_libraries_either(backend: str, D: int, bad: float) -> None:
    if cases.DEVICE == "cpu":
        pytest.skip("a GPU's own kernels are tried")
    n, late = 300, 170
    q, k, v = (torch.randn(1, 2, n, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    broken = v.clone()
    broken[:, 0, late] = bad
    for wrong in (
        (q, k, broken),
        (q, k.index_fill(2, torch.tensor([late], device="cuda"), bad), v),
    ):
        learned = (
            [t.clone().requires_grad_() for t in (q, k, v)],
            [t.clone().requires_grad_() for t in wrong],
        )
        want, got = (
            regard.attention(*three, mask=masks.causal(), backend=backend) for three in learned
        )
        assert not got[:, 0, late:].isfinite().any(-1).all()
        _assert_near(got[:, :, :late], want[:, :, :late])
        pull = torch.randn_like(want)
        pull[:, :, late:] = 0
        early = [
            torch.autograd.grad(out, three[0], pull)[0][:, :, :late]
            for out, three in zip((want, got), learned, strict=True)
        ]
        _assert_near(early[1], early[0])


def _assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """As two kernels agree that round to bfloat16 at different times."""
    size = float(want.detach().abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=size * 2**-7)


def _is_hopper() -> bool:
    from regard.backends.triton.arguments import generation

    return cases.DEVICE != "cpu" and generation(torch.device("cuda", 0)) == 9


ON_HOPPER = [
    *(
        Case(mask, sizes=Sizes(B=2, H=4, G=2, Q=433, K=601, D=D, E=E))
        for mask in ("none", "causal", "causal_window", "causal_padding", "prefix")
        for D, E in ((64, 64), (128, 128), (96, 96), (256, 256), (192, 128))
        if D in (64, 128) or mask in ("causal", "prefix")
    ),
    *(
        Case(mask, bias=bias, extra=extra, sizes=Sizes(B=2, H=4, G=2, Q=433, K=601, D=D, E=D))
        for mask, bias, extra, D in (
            ("causal", "alibi", "plain", 128), ("none", "alibi", "sink", 64),
            ("causal", "none", "softcap", 128), ("prefix", "none", "softcap", 256),
            ("causal", "none", "sink", 128), ("prefix", "alibi", "sink", 256),
            ("causal", "none", "dropout", 128), ("prefix", "none", "dropout", 64),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("queued", [False, True], ids=["stages", "queued"])
@pytest.mark.parametrize("case", ON_HOPPER, ids=lambda c: f"{c}-{c.sizes.D}-{c.sizes.E}")
def test_programs_on_hopper_take_tile_after_tile(
    case: Case, queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which they do where there are more tiles than multiprocessors, as in no other case."""
    from regard.backends.triton import Triton, forward, hopper
    from regard.backends.triton.settings.tuning import Forward, fits_hopper

    if not _is_hopper():
        pytest.skip("only on Hopper do they stay")
    wide = case.sizes.D > 128
    if queued and wide:
        pytest.skip("there is no room for a second place")
    monkeypatch.setattr(hopper.forward, "processors", lambda _: 3)
    how = Forward(128, 64 if wide else 128, stages=2 if wide or queued else 3, hopper=True,
                  queued=queued)  # fmt: skip
    monkeypatch.setattr(forward, "forward_settings", lambda x, **_: how)
    case = replace(case, dtype=torch.bfloat16 if case.sizes.D >= 128 else torch.float16)
    for asked in (ReferencePass(), None):
        inputs, learned = case.build()
        assert fits_hopper(inputs)
        assert_conforms(case, observed(Triton(), inputs, learned, asked), asked)


@pytest.mark.parametrize("what", ["numbers", "ties", "one column", "rising", "NaN"])
@pytest.mark.parametrize("many", [1, 8, 11, 16])
@pytest.mark.parametrize(
    ("kind", "D"),
    [("none", 64), ("causal", 128), ("window", 96), ("padding", 64), ("documents", 128)],
)
def test_the_strongest_keys_on_hopper(
    kind: str, D: int, many: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from regard.backends.triton.questions import top_keys as general

    if not _is_hopper():
        pytest.skip("elsewhere there is one kernel")
    mask = {
        "none": None,
        "causal": masks.causal(),
        "window": masks.causal() & masks.window(100),
        "padding": masks.padding([600, 5, 0]),
        "documents": masks.documents(torch.arange(433, device="cuda") // 90),
    }[kind]
    keys = 433 if kind == "documents" else 601
    q = torch.randn(3, 4, 433, D, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(3, 2, keys, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    if what == "ties":
        k = k[:, :, :5].repeat(1, 1, 121, 1)[:, :, :keys]
    if what == "one column":
        # Of all tiles: more keys reach the bound than there is room for.
        k[:, :, 5::128] *= 8
    if what == "rising":
        k = k[:, :, :1] * torch.linspace(0.1, 2, keys, device="cuda", dtype=k.dtype)[:, None]
    if what == "NaN":
        k[:, :, 130] = math.nan
    t = regard.trace(q, k, v, mask=mask, backend="triton")
    assert general.runs_on_hopper(t.inputs, many)
    got = t.top(many)
    # From a kind that is known.
    again = t.top(many)
    assert torch.equal(again.indices, got.indices)
    assert torch.equal(again.values.nan_to_num(7), got.values.nan_to_num(7))
    monkeypatch.setattr(general, "runs_on_hopper", lambda x, many: False)
    want = t.top(many)
    assert torch.equal(got.indices, want.indices)
    torch.testing.assert_close(got.values, want.values, equal_nan=True, rtol=1e-4, atol=1e-6)


@pytest.mark.interpreted
def test_marked_tiles_of_queries_alone_are_done_again() -> None:
    from regard.backends.contract import Top
    from regard.backends.triton.hopper.octets import ROWS
    from regard.backends.triton.questions import top_keys
    from regard.backends.triton.settings.tuning import looking_settings

    q, k, v = (torch.randn(2, 2, ROWS + 100, 16, device=cases.DEVICE) for _ in range(3))
    t = regard.trace(q, k, v, mask=masks.causal(), backend="triton")
    want = t.top(3)
    marks = torch.tensor([[0, 1], [0, 0], [1, 0], [1, 1]], dtype=torch.int32, device=q.device)
    to = Top(torch.full_like(want.values, -7), torch.full_like(want.indices, -7))
    # The kernel's own tiles, of which one has queries of two that may be marked.
    how = replace(looking_settings(t.inputs), rows=128)
    top_keys._by_any_card(t.inputs, how, t.lse, 3, to, marks.view(-1))
    done = marks.repeat_interleave(ROWS, 1)[:, : ROWS + 100].view(2, 2, -1) > 0
    for got, told in zip(to, want, strict=True):
        assert torch.equal(got[done], told[done])
        assert (got[~done] == -7).all()


@pytest.mark.parametrize("D", [64, 128, 256])
def test_questions_that_are_asked_again(D: int) -> None:
    """Of other tensors of the same kind, what was decided for the first holds."""
    if cases.DEVICE == "cpu":
        pytest.skip("launches are made again on a GPU")
    for _ in range(4):
        q, k, v = (torch.randn(2, n, 700, D, device="cuda").bfloat16() for n in (4, 2, 2))
        t = regard.trace(q, k, v, mask=masks.causal(), backend="triton")
        want = regard.Trace.of(q, k, t.lse, mask=masks.causal(), backend="tiled")
        torch.testing.assert_close(t.received(), want.received(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(t.top(5).values, want.top(5).values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["none", "causal"])
@pytest.mark.parametrize("ours", [False, True], ids=["shorter", "long"])
@pytest.mark.parametrize("D", [64, 128])
def test_long_calls_on_hopper_are_ours(D: int, ours: bool, mask: masks.Mask | None) -> None:
    """Up to some length a library attends where no statistics are asked for."""
    from regard.backends.triton.settings.tuning import LONG

    if not _is_hopper():
        pytest.skip("only on Hopper is there a choice")
    n = LONG[D] if ours else LONG[D] - 1
    # Enough heads that to reach the library is worth the while.
    q, k, v = (torch.randn(1, 32, n, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    plan = regard.plan(q, k, v, mask=mask)
    assert plan.backend == ("sdpa" if mask is None and not ours else "triton")
    assert ("cuDNN" in plan.inner_loop) == (mask is not None and not ours)
    _assert_near(regard.attention(q, k, v, mask=mask), regard.trace(q, k, v, mask=mask).out)


def test_calls_that_learn_are_ours_only_with_a_quick_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from regard.backends.triton import cudnn, outruns_cudnn
    from regard.backends.triton.settings import tuning

    monkeypatch.setattr(tuning, "outruns_cudnn", lambda _: True)
    inputs, _ = Case().build()
    for by_cudnn in (False, True):
        monkeypatch.setattr(cudnn, "runs_output_backward", lambda _, by_cudnn=by_cudnn: by_cudnn)
        assert outruns_cudnn(inputs) == by_cudnn
        with torch.no_grad():
            assert outruns_cudnn(inputs)


def _as_cudnn_does(x: AttentionInputs, rows: Rows, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Its backward pass: weights from log-sum-exp, and their mean from the output. 0 · NaN is NaN,
    of pairs that a mask hides too."""
    from regard.backends.triton import cudnn

    scale, causal = cudnn.scale_and_causal(x)
    q, k, v, out, g = (t.double() for t in (x.q, x.k, x.v, rows.out, g))
    k, v = (t.repeat_interleave(x.group, 1) for t in (k, v))
    p = (q @ k.mT * scale - rows.lse.double()[..., None]).exp()
    p = p.tril() if causal else p
    ds = p * (g @ v.mT - (g * out).sum(-1, keepdim=True)) * scale
    dk, dv = ((t.mT @ to).unflatten(1, (-1, x.group)).sum(2) for t, to in ((ds, q), (p, g)))
    return (ds @ k).to(x.q.dtype), dk.to(x.q.dtype), dv.to(x.q.dtype)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("place", [30, 150])
@pytest.mark.parametrize("part", ["k", "v"])
def test_gradients_that_a_hidden_nan_spoilt_are_mended(
    part: str, place: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of queries that do not see it. (All keys are seen by one that does.)"""
    from regard.backends.triton import Triton, cudnn

    if not _is_hopper():
        monkeypatch.setattr(cudnn, "runs_backward", lambda x, pull: True)
        monkeypatch.setattr(cudnn, "backward", _as_cudnn_does)
    dtype = torch.bfloat16 if _is_hopper() else torch.float32
    sizes = Sizes(B=2, H=2, G=groups, Q=200, K=200, D=64, E=64)
    case = Case("causal", "scaled_dot", "none", "plain", dtype, sizes)
    inputs, learned = case.build()
    exact, leaves = case.build(torch.float64)
    pull = torch.randn_like(inputs.q)
    want = torch.autograd.grad(Reference().attend(exact), leaves, pull.double())
    with torch.no_grad():
        getattr(inputs, part)[0, :, place] = math.nan
    got = torch.autograd.grad(Triton().attend(inputs), learned, pull)
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for mine, its in zip(got, want, strict=True):
        scale = float(its.abs().max())
        torch.testing.assert_close(mine[1].double(), its[1], atol=tolerance * scale, rtol=0)
    scale = float(want[0].abs().max())
    hidden = slice(None), slice(0, place)
    torch.testing.assert_close(
        got[0][0][hidden].double(), want[0][0][hidden], atol=tolerance * scale, rtol=0
    )
    assert got[0][0][:, place].isnan().all()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_cudnn_need_not_know_of_a_sink(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backward pass, which has weights from log-sum-exp, and their mean from the output."""
    from regard.backends.triton import Triton, cudnn

    if not _is_hopper():
        monkeypatch.setattr(cudnn, "runs_backward", lambda x, pull: True)
        monkeypatch.setattr(cudnn, "backward", _as_cudnn_does)
    n = 160 if _is_hopper() else 37
    dtype = torch.bfloat16 if _is_hopper() else torch.float32
    sizes = Sizes(B=2, H=2, G=2, Q=n, K=n, D=64, E=64)
    case = Case(mask, "scaled_dot", "none", "sink", dtype, sizes)
    inputs, learned = case.build()
    out = Triton().attend(inputs)
    pull = torch.randn_like(out)
    assert cudnn.runs_backward(inputs, Pull(pull, None, None))
    got = torch.autograd.grad(out, learned, pull)
    exact, leaves = case.build(torch.float64)
    want = torch.autograd.grad(Reference().attend(exact), leaves, pull.double())
    for mine, its in zip(got, want, strict=True):
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        scale = float(its.abs().max())
        assert float((mine.double() - its).abs().max()) <= tolerance * scale


def test_limits_lie_where_the_tensors_do() -> None:
    from regard.backends.triton.layout import rule_of
    from regard.values import Shape

    mask = masks.causal(offset=0) & masks.prefix(100)
    rule = rule_of(mask, Shape(3, 1, 8, 8), (16, 16), torch.device("meta"), by_keys=False)
    assert (rule.limits.device.type, rule.limits.shape) == ("meta", (3,))


def test_more_heads_than_programs_are_refused() -> None:
    from regard.backends.triton import why_not
    from regard.backends.triton.forward import forward

    x = torch.zeros(1, 1, 2, 8, device=cases.DEVICE)
    for heads, refused in ((65_535, 0), (65_536, 1)):
        q = x.expand(1, heads, 2, 8)
        inputs = replace(Case().build()[0], q=q, k=q, v=q)
        reasons = [reason for reason in why_not(inputs) if "65,535 heads" in reason]
        assert len(reasons) == refused
    # As a compiled call, which is not bound to a size, would find out.
    with pytest.raises(RegardError, match="65536 heads"):
        forward(inputs, statistics=False)


def test_kernels_run_where_their_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.backends.triton.arguments import on_card

    class There:
        device = torch.device("cuda", 1)

    for current, guarded in ((0, True), (1, False)):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert isinstance(on_card(There()), torch.cuda.device) == guarded  # type: ignore[arg-type]


def test_a_decoding_step_packs_and_splits() -> None:
    from regard.backends.triton.settings.tuning import forward_settings

    q, k = torch.zeros(1, 8, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 4096, 64)
    k = k.to(q)
    inputs, _ = Case().build()
    how = forward_settings(
        type(inputs)(q, k, k, inputs.comparison, None),  # one query, many keys
        statistics=True,
    )
    assert how.packed
    assert how.splits > 1


@pytest.mark.parametrize(("H", "Q", "few"), [(71, 1, True), (8, 16, True), (8, 17, False)])
def test_many_heads_of_one_key_head_are_packed(H: int, Q: int, few: bool) -> None:
    """Though they take more than one tile."""
    from regard.backends.triton.settings.tuning import forward_settings

    q, k = torch.zeros(1, H, Q, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 4096, 64)
    inputs = replace(Case().build()[0], q=q, k=k.to(q), v=k.to(q))
    assert forward_settings(inputs, statistics=True).packed == few


@pytest.mark.parametrize("B", [1, 3, 64, 200])
@pytest.mark.parametrize("K", [1024, 1025, 4100, 1 << 17])
def test_every_split_on_hopper_has_keys(B: int, K: int) -> None:
    """And there are no more splits than are merged at once."""
    from regard.backends.triton import arguments
    from regard.backends.triton.settings.tuning import forward_settings

    q = torch.empty(B, 128, 1, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(B, 1, K, 128, dtype=torch.bfloat16, device="meta")
    token = arguments.stands_for.set(90)
    try:
        how = forward_settings(replace(Case().build()[0], q=q, k=k, v=k), statistics=True)
    finally:
        arguments.stands_for.reset(token)
    assert how.hopper
    assert 2 <= how.splits <= 64
    each = arguments.tiles_of(arguments.tiles_of(K, how.keys), how.splits) * how.keys
    assert (how.splits - 1) * each < K


@pytest.mark.parametrize(
    ("H", "G", "K", "D", "extra"),
    [
        (128, 1, 4100, 128, "plain"), (71, 1, 2000, 64, "sink"), (160, 2, 1024, 96, "softcap"),
        (96, 1, 1500, 256, "plain"),
    ],
)  # fmt: skip
def test_heads_of_one_key_head_are_rows_on_hopper(
    H: int, G: int, K: int, D: int, extra: str
) -> None:
    """One query each, and the keys split over programs: the last split has fewer of them."""
    from regard.backends.triton import Triton
    from regard.backends.triton.settings.tuning import forward_settings

    if not _is_hopper():
        pytest.skip("only Hopper has these instructions")
    sizes = Sizes(B=2, H=H, G=G, Q=1, K=K, D=D, E=D)
    case = Case("none", extra=extra, sizes=sizes, dtype=torch.bfloat16)
    for asked in (ReferencePass(), None):
        inputs, learned = case.build()
        how = forward_settings(inputs, statistics=asked is not None)
        assert how.hopper
        assert how.splits > 1
        assert_conforms(case, observed(Triton(), inputs, learned, asked), asked)


def test_trace_and_questions_by_name() -> None:
    q, k, v = (torch.randn(1, 2, 20, 8, device=cases.DEVICE) for _ in range(3))
    got = regard.trace(q, k, v, mask=masks.causal(), backend="triton")
    want = regard.trace(q, k, v, mask=masks.causal(), backend="tiled")
    assert got.backend == "triton"
    for name in ("out", "lse", "entropy", "max_logit"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name))
    torch.testing.assert_close(got.received(), want.received())
    torch.testing.assert_close(got.map(5), want.map(5))
    assert torch.equal(got.top(3).indices, want.top(3).indices)


def test_refusals_say_why() -> None:
    x = torch.zeros(1, 1, 4, 8, dtype=torch.float64, device=cases.DEVICE)
    with pytest.raises(RegardError, match="its kernels compute in float32"):
        regard.attention(x, x, x, backend="triton")
    wide = torch.zeros(1, 1, 4, 300, device=cases.DEVICE)
    with pytest.raises(RegardError, match="heads up to 256 wide"):
        regard.attention(wide, wide, wide, backend="triton")
    y = torch.zeros(1, 1, 4, 8, device=cases.DEVICE)
    with pytest.raises(RegardError, match="dot products only"):
        regard.attention(y, y, y, score=regard.scores.distance(), backend="triton")


_LATE = torch.arange(75)[None, None, None] < torch.tensor([40, 0])[:, None, None, None]
RUNS: dict[str, masks.Mask] = {
    "documents": masks.documents((torch.arange(75) > 70).int() + torch.arange(75) // 33),
    "prefix": (masks.causal() | masks.prefix([50, 3])) & masks.padding([60, 75]),
    # Queries that see nothing: the first ones, and those in the middle.
    "late": masks.ignore(torch.ones(75, 75, dtype=torch.bool).triu(1) | _LATE),
    "gap": masks.causal() & masks.ignore((torch.arange(75) // 10 == 4)[:, None].expand(75, 75)),
}


@pytest.mark.parametrize("name", RUNS)
def test_runs_of_keys(name: str) -> None:
    """Masks told by their ends, in tiles that lie across them: each question, and gradients."""
    from regard.backends.triton.layout import rule_of
    from regard.backends.triton.rules import SPANS

    mask = RUNS[name]
    q = torch.randn(2, 2, 75, 16, device=cases.DEVICE, requires_grad=True)
    k, v = (torch.randn(2, 1, 75, 16, device=cases.DEVICE, requires_grad=True) for _ in "kv")
    found = []
    for backend in ("triton", "reference"):
        t = regard.trace(q, k, v, mask=mask, backend=backend)
        pulled = torch.autograd.grad(t.out.square().sum() + t.entropy.sum(), (q, k, v))
        asked = (t.received(), t.map(7), t.mass([0, 50]), t.mean_logit, t.top(2).values)
        found.append((t.out, t.lse, t.max_logit, t.entropy, *asked, *pulled))
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, atol=3e-4, rtol=3e-4)
    shape = Shape(2, 2, 75, 75)
    bound = mask.bind(shape, q.device)
    assert rule_of(bound, shape, (64, 64), q.device, by_keys=True).kind is SPANS


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("mask", ["none", "causal", "documents", "keep"])
def test_logits_of_minus_infinity_alone_are_no_empty_row(mask: str, queries: int) -> None:
    given = {
        "none": None,
        "causal": masks.causal(),
        "documents": masks.documents(torch.arange(20) // 7),
        "keep": masks.keep(torch.arange(20) % 3 != 1),
    }[mask]
    q, k, v = (torch.randn(1, 2, n, 8, device=cases.DEVICE) for n in (queries, 20, 20))
    k[..., 0] = -1 - k[..., 0].abs()
    q[..., 0] = 1.0
    q[0, 0, queries // 2, 0] = math.inf
    found = [regard.trace(q, k, v, mask=given, backend=name) for name in ("triton", "reference")]
    for ours, right in zip(*(t.rows for t in found), strict=True):
        torch.testing.assert_close(ours, right, equal_nan=True, atol=1e-4, rtol=1e-4)
    assert found[0].lse.isnan().sum() == 1


def test_a_table_of_tiles_is_made_once_for_a_mask() -> None:
    from regard.backends.triton.layout import _MADE

    q, k, v = (torch.randn(1, 1, 20, 8, device=cases.DEVICE) for _ in range(3))
    mask = masks.keep(torch.ones(20, 20, dtype=torch.bool, device=cases.DEVICE).tril())
    _MADE.held.clear()
    first = regard.attention(q, k, v, mask=mask, backend="triton")
    again = regard.attention(q, k, v, mask=mask, backend="triton")
    # Its runs, and their tiles.
    assert len(_MADE.held) == 2
    assert torch.equal(first, again)
    # A mask changed in place is another mask.
    mask.tensors()[0][..., 0] = False
    mask.tensors()[0][..., 0, 1] = True
    changed = regard.attention(q, k, v, mask=mask, backend="triton")
    want = regard.attention(q, k, v, mask=mask, backend="tiled")
    torch.testing.assert_close(changed, want)
