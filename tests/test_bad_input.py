"""What calls refuse, word for word where it matters, and what they answer when there is nothing."""

from __future__ import annotations

import math

import jaxtyping
import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, biases, masks, scores


@pytest.fixture(autouse=True)
def without_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong input reaches regard's own checks even when the shape-checking hook is on."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def ones(*axes: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.ones(axes, dtype=dtype, device=device)


X = ones(2, 4, 5, 8)
CALLS = {"attention": regard.attention, "trace": regard.trace, "plan": regard.plan}

TENSORS = {
    "k-is-a-list": ((X, [[1.0]], X), {}, ["k must be a tensor", "got:      list", "torch.Tensor"]),
    "v-is-none": ((X, X, None), {}, ["v must be a tensor", "NoneType"]),
    "one-axis": (
        (ones(5), ones(5), ones(5)),
        {},
        ["same axes", "q [5], k [5], v [5]", "[B, H, N, D], or with more axes before H;"],
    ),
    "one-query": ((ones(8), ones(2, 5, 8), ones(2, 5, 8)), {}, ["same axes", "q [8], k [2, 5, 8]"]),
    "five-axes": ((X[None], X, X), {}, ["the same axes", "q [1, 2, 4, 5, 8]"]),
    "mixed-axes": (
        (X, X[0], X),
        {},
        ["the same axes", "q [2, 4, 5, 8], k [4, 5, 8], v [2, 4, 5, 8]"],
    ),
    "mixed-types": (
        (X, X.double(), X),
        {},
        ["one floating-point type", "q torch.float32, k torch.float64, v torch.float32",
         "float64, float32, bfloat16, float16"],
    ),
    "integers": ((X.long(),) * 3, {}, ["one floating-point type", "q torch.int64"]),
    "complex": ((X.to(torch.complex64),) * 3, {}, ["one floating-point type", "complex64"]),
    "mixed-devices": (
        (X, X.to("meta"), X), {}, ["different devices", "q cpu, k meta, v cpu", "one device"],
    ),
    "batch-sizes": (
        (X, X[:1], X[:1]),
        {},
        ["different batch sizes", "q [2, 4, 5, 8], k [1, 4, 5, 8], v [1, 4, 5, 8]"],
    ),
    "a-value-too-few": (
        (X, X, X[:, :, :4]), {}, ["each key needs its value", "v [2, 4, 4, 8]", "same heads"],
    ),
    "value-heads": ((X, X, X[:, :2]), {}, ["each key needs its value", "v [2, 2, 5, 8]"]),
    "uneven-groups": (
        (X, X[:, :3], X[:, :3]),
        {},
        ["4 query heads cannot share 3 key heads evenly", "grouped-query attention"],
    ),
    "more-key-heads": ((X[:, :2], X, X), {}, ["2 query heads cannot share 4 key heads evenly"]),
    "no-key-heads": ((X, X[:, :0], X[:, :0]), {}, ["4 query heads cannot share 0 key heads"]),
    "widths": (
        (X, X[..., :6], X),
        {},
        ["scaled_dot compares queries and keys of one width", "q 8 wide, k 6 wide",
         "scores.general(W) or scores.additive(Wq, Wk, w)"],
    ),
}  # fmt: skip

NUMBERS = {
    "scale-nan": ({"scale": math.nan}, ["scale must be finite", "nan", "a finite number"]),
    "scale-inf": ({"scale": math.inf}, ["scale must be finite", "inf"]),
    "scale-inf-dot": ({"scale": -math.inf, "score": scores.dot()}, ["must be finite", "-inf"]),
    "softcap-0": ({"softcap": 0.0}, ["softcap bounds the logits", "0.0", "a number above 0"]),
    "softcap-below": ({"softcap": -2.0}, ["softcap bounds the logits", "-2.0"]),
    "softcap-nan": ({"softcap": math.nan}, ["softcap bounds the logits", "nan"]),
    "softcap-inf": ({"softcap": math.inf}, ["softcap bounds the logits", "inf"]),
    "dropout-1": ({"dropout": 1.0}, ["the share of weights to drop", "1.0", "0 <= dropout < 1"]),
    "dropout-below": ({"dropout": -0.1}, ["the share of weights to drop", "-0.1"]),
    "dropout-nan": ({"dropout": math.nan}, ["the share of weights to drop", "nan"]),
    "dropout-training": ({"dropout": 1.5, "training": True}, ["the share of weights to drop"]),
}  # fmt: skip

KINDS = {
    "bare-mask": (
        {"mask": ones(5, 5).bool()},
        ["does not say what True means", "torch.bool [5, 5]",
         "masks.keep(t) if True is attended to, masks.ignore(t) if True is masked",
         "biases.dense(t) for numbers to add"],
    ),
    "bare-float-mask": ({"mask": ones(5, 5)}, ["torch.float32 [5, 5]", "biases.dense(t)"]),
    "mask-is-a-word": (
        {"mask": "causal"}, ["mask= takes a value from regard.masks", "got:      str", "causal()"],
    ),
    "mask-is-a-function": ({"mask": masks.causal}, ["mask= takes a value", "function"]),
    "mask-is-a-bias": ({"mask": biases.alibi([1.0] * 4)}, ["mask= takes a value", "Alibi"]),
    "score-is-a-word": ({"score": "dot"}, ["a value from regard.scores", "cosine(0.1)"]),
    "score-is-a-mask": ({"score": masks.causal()}, ["score= takes a value", "Causal"]),
    "bias-is-a-tensor": (
        {"bias": ones(5, 5)}, ["bias= takes a value from regard.biases", "Tensor", "dense(tensor)"],
    ),
}  # fmt: skip

SINKS = {
    "length": (
        {"sink": ones(3)},
        ["sink= is one logit per head", "float32 [3] for 4 heads", "a floating-point tensor [4]"],
    ),
    "axes": ({"sink": ones(4, 1)}, ["sink= is one logit per head", "[4, 1] for 4 heads"]),
    "type": ({"sink": ones(4).long()}, ["sink= is one logit per head", "torch.int64 [4]"]),
    "device": ({"sink": ones(4, device="meta")}, ["sink= lives on another device", "meta", "cpu"]),
}  # fmt: skip

MASKS = {
    "batch": ({"mask": masks.padding([1, 2, 3])}, ["is for another batch size", "a batch of 2"]),
    "documents": ({"mask": masks.documents([0, 1])}, ["one id per key", "batch 2 and 5 keys"]),
    "keep": (
        {"mask": masks.keep(ones(5, 4).bool())},
        ["fits neither queries nor batch", "[Q, K] = [5, 5] or [B, K] = [2, 5]"],
    ),
    "heads": (
        {"mask": masks.keep(ones(1, 3, 5, 5).bool())},
        ["does not fit the call", "[1, 3, 5, 5] for [B, H, Q, K] = [2, 4, 5, 5]"],
    ),
}  # fmt: skip

BIASES = {
    "slopes": (
        {"bias": biases.alibi([1.0, 2.0])}, ["one slope per head", "2 slopes for 4 heads", "[4]"],
    ),
    "relative-heads": (
        {"bias": biases.relative(ones(3, 5))},
        ["one row per head", "a table [3, 5] for 4 heads", "[4 or 1, 2·reach + 1]"],
    ),
    "dense": (
        {"bias": biases.dense(ones(5, 6))},
        ["the bias does not fit the call", "[1, 1, 5, 6] for [B, H, Q, K] = [2, 4, 5, 5]"],
    ),
    "device": (
        {"bias": biases.dense(ones(5, 5, device="meta"))},
        ["lives on another device", "meta, while q is on cpu", "bias.to('cpu')"],
    ),
}  # fmt: skip

# Made when asked for: some of these values are wrong already as they are made.
SCORES = {
    "scale-cosine": (
        lambda: {"score": scores.cosine(0.5), "scale": 2.0},
        ["cosine(0.5) has its own sharpness", "scale=2.0", "dot(), scaled_dot() or general(W)"],
    ),
    "scale-distance": (
        lambda: {"score": scores.distance(), "scale": 2.0}, ["has its own sharpness"],
    ),
    "scale-additive": (
        lambda: {"score": scores.additive(ones(8, 3), ones(8, 3), ones(3)), "scale": 2.0},
        ["has its own sharpness"],
    ),
    "general-width": (
        lambda: {"score": scores.general(ones(8, 7))},
        ["W does not lie between these queries and keys", "W [8, 7], q 8 wide, k 8 wide", "[8, 8]"],
    ),
    "general-heads": (
        lambda: {"score": scores.general(ones(3, 8, 8))},
        ["general: W is one parameter for all heads or one per head", "[3, 8, 8] for 4 heads",
         "2 axes, or 3 with 4 first"],
    ),
    "additive-hidden": (
        lambda: {"score": scores.additive(ones(8, 3), ones(8, 4), ones(3))},
        ["the matrices do not fit", "Wq [8, 3], Wk [8, 4], w [3]", "Wq [query width, hidden]"],
    ),
    "additive-width": (
        lambda: {"score": scores.additive(ones(7, 3), ones(8, 3), ones(3))},
        ["the matrices do not fit", "q 8 wide"],
    ),
    "additive-heads": (
        lambda: {"score": scores.additive(ones(8, 3), ones(8, 3), ones(2, 3))},
        ["additive: w is one parameter", "[2, 3] for 4 heads"],
    ),
    "cosine-heads": (
        lambda: {"score": scores.cosine(ones(3))},
        ["cosine: temperature is one parameter", "[3] for 4 heads"],
    ),
}  # fmt: skip


def check(words: list[str], call, *args, **kwargs) -> None:
    with pytest.raises(RegardError) as error:
        call(*args, **kwargs)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name, call):
    args, kwargs, words = TENSORS[name]
    check(words, call, *args, **kwargs)


ARGUMENTS = {
    f"{group}-{name}": case
    for group, cases in {
        "number": NUMBERS, "kind": KINDS, "sink": SINKS, "mask": MASKS, "bias": BIASES,
    }.items()
    for name, case in cases.items()
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(name, call):
    kwargs, words = ARGUMENTS[name]
    check(words, call, X, X, X, **kwargs)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name, call):
    make, words = SCORES[name]
    check(words, call, X, X, X, **make())


@pytest.mark.parametrize("score", [scores.dot(), scores.cosine(), scores.distance()], ids=repr)
def test_scores_of_one_width(score):
    words = ["compares queries and keys of one width", "q 8 wide, k 6 wide", "scores.additive"]
    check(words, regard.attention, X, X[..., :6], X, score=score)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: scores.cosine(0.0), ["cosine: temperature must be positive", "0.0"]),
        (lambda: scores.cosine(-1.0), ["cosine: temperature must be positive", "a number above 0"]),
        (lambda: scores.distance(0.0), ["distance: bandwidth must be positive"]),
        (lambda: scores.distance(math.nan), ["distance: bandwidth must be positive", "nan"]),
        (lambda: scores.distance(math.inf), ["distance: bandwidth must be positive", "inf"]),
        (lambda: biases.alibi([1, 2]), ["one slope per head", "int64 [2]", "floating-point"]),
        (lambda: biases.alibi(ones(2, 2)), ["one slope per head", "[2, 2]"]),
        (lambda: biases.relative(ones(2, 4)), ["one column per distance", "[2, 4]", "odd number"]),
        (lambda: biases.relative(ones(5)), ["one column per distance", "[5]"]),
        (lambda: biases.relative(ones(1, 5).long()), ["one column per distance", "int64"]),
        (lambda: biases.dense(ones(2, 2).bool()), ["bool [2, 2]", "masks.keep(t) or masks.ignore"]),
        (lambda: biases.dense(ones(2)), ["float32 [2]", "[Q, K] or [B, H, Q, K] (any axis 1)"]),
    ],
)  # fmt: skip
def test_scores_and_biases_that_cannot_be_made(make, words):
    check(words, make)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_unknown_backend(call):
    words = ["unknown backend", "'fast'", "'sdpa'", "'tiled'", "'reference'", "or None"]
    check(words, call, X, X, X, backend="fast")


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"softcap": 5.0}, "it has no soft-cap"),
        ({"sink": ones(4)}, "it has no sink"),
        ({"score": scores.distance()}, "it compares by dot products only"),
        ({"bias": biases.alibi([1.0] * 4)}, "n×n"),
        ({"dropout": 0.5, "training": True}, "no dropout"),
    ],
    ids=["softcap", "sink", "score", "bias", "dropout"],
)
def test_a_refused_backend_says_why_and_who_can(kwargs, reason):
    words = ["backend 'sdpa' cannot run this call", reason, "backends that can: ", "'tiled'",
             "'reference'", "name one of them, or leave backend= out"]  # fmt: skip
    check(words, regard.attention, X, X, X, backend="sdpa", **kwargs)
    assert regard.attention(X, X, X, **kwargs).shape == X.shape


def test_a_refusal_gives_every_reason():
    with pytest.raises(RegardError) as error:
        regard.trace(X, X, X, backend="sdpa", softcap=5.0, sink=ones(4))
    text = str(error.value)
    assert "it keeps no row statistics; " in text
    assert "it has no soft-cap; it has no sink" in text
    able = next(line for line in text.split("\n") if "backends that can" in line)
    assert "'sdpa'" not in able


@pytest.fixture(scope="module", params=["tiled", "reference"])
def trace(request) -> regard.Trace:
    return regard.trace(X, X, X, mask=masks.causal(), backend=request.param)


def test_top(trace):
    check(["top counts keys", "got:      0", "1 or more"], trace.top, 0)
    check(["top counts keys", "-3"], trace.top, -3)


@pytest.mark.parametrize("what", ["queries", "keys", "heads"])
def test_weights_out_of_range(trace, what):
    n = 4 if what == "heads" else 5
    for index in (n, -n - 1, [0, n]):
        words = [
            f"{what}: index out of range",
            str(n if index != -n - 1 else index),
            f"-{n} to {n - 1}",
        ]
        check(words, trace.weights, **{what: index})
    assert trace.weights(**{what: -n}).equal(trace.weights(**{what: 0}))


@pytest.mark.parametrize("what", ["queries", "keys", "heads"])
@pytest.mark.parametrize(
    "index",
    [[0.5], torch.zeros(1, 1, dtype=torch.long), [True, False], torch.tensor(True)],
    ids=str,
)
def test_weights_chosen_by_something_else(trace, what, index):
    words = [f"{what} cannot be chosen by this", "an index, a slice, a list of indices", "booleans"]
    check(words, trace.weights, **{what: index})


def test_mass_out_of_range(trace):
    check(["keys: index out of range", "[7]", "-5 to 4"], trace.mass, 7)


def test_a_trace_of_batch_entries_out_of_range(trace):
    check(["batch: index out of range", "-2 to 1"], lambda: trace[2])
    check(["heads: index out of range", "-4 to 3"], lambda: trace[0, 4])


@pytest.mark.parametrize("rank", [2, 3])
def test_heads_of_inputs_without_heads(rank):
    x = ones(*(2, 5, 8)[3 - rank :])
    seen = regard.trace(x, x, x)
    words = ["heads= needs inputs that have heads", f"{rank}-D inputs", "[B, H, N, D]"]
    check(words, seen.weights, heads=[0])


@pytest.mark.parametrize("cells", [0, -1, (0, 3), (3, 0)])
def test_maps_of_no_cells(trace, cells):
    check(["map counts cells", str(cells), "1 or more"], trace.map, cells)


@pytest.mark.parametrize("region", [(3, 2), (-1, 3), (0, 6), (6, 6)])
@pytest.mark.parametrize("what", ["queries", "keys"])
def test_maps_of_no_region(trace, what, region):
    words = [f"a region of {what} is (start, stop)", str(region), "0 <= start <= stop <= 5"]
    check(words, trace.map, 2, **{what: region})


def test_maps_of_no_pool(trace):
    words = ["map: unknown pool", "'median'", "'mean', 'max' or 'sum'"]
    check(words, trace.map, 2, pool="median")


def test_a_region_of_nothing_is_an_empty_map(trace):
    assert trace.map(3, queries=(2, 2)).shape == (2, 4, 0, 3)
    assert trace.map(3, keys=(5, 5)).shape == (2, 4, 3, 0)


BACKENDS = [None, "tiled", "reference"]


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.prefix(2)], ids=repr)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keys(backend, mask):
    none = X[:, :, :0]
    out = regard.attention(X, none, none, mask=mask, backend=backend)
    assert out.equal(torch.zeros_like(X))
    seen = regard.trace(X, none, none, mask=mask, backend=backend)
    rows = torch.zeros(2, 4, 5)
    assert seen.out.equal(out)
    assert seen.lse.equal(rows - math.inf)
    assert seen.max_logit.equal(rows - math.inf)
    assert seen.entropy.equal(rows)
    assert seen.weights().shape == (2, 4, 5, 0)
    assert seen.received().shape == (2, 4, 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_keys_but_a_sink(backend):
    none, sink = X[:, :, :0], torch.arange(4.0)
    seen = regard.trace(X, none, none, sink=sink, backend=backend)
    assert seen.out.equal(torch.zeros_like(X))
    torch.testing.assert_close(seen.lse, sink[:, None].expand(2, 4, 5))
    assert seen.entropy.equal(torch.zeros(2, 4, 5))


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.prefix(2)], ids=repr)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_queries(backend, mask):
    none = X[:, :, :0]
    assert regard.attention(none, X, X, mask=mask, backend=backend).shape == (2, 4, 0, 8)
    seen = regard.trace(none, X, X, mask=mask, backend=backend)
    assert seen.out.shape == (2, 4, 0, 8)
    assert seen.lse.shape == seen.entropy.shape == seen.max_logit.shape == (2, 4, 0)
    assert seen.weights().shape == (2, 4, 0, 5)
    assert seen.received().equal(torch.zeros(2, 4, 5))


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=repr)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_batch(backend, mask):
    none = X[:0]
    assert regard.attention(none, none, none, mask=mask, backend=backend).shape == (0, 4, 5, 8)
    seen = regard.trace(none, none, none, mask=mask, backend=backend)
    assert seen.lse.shape == (0, 4, 5)
    assert seen.weights().shape == (0, 4, 5, 5)
    assert seen.received().shape == (0, 4, 5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_that_sees_nothing(backend):
    q, k, v = (ones(1, 1, 3, 4).requires_grad_() for _ in range(3))
    nothing = masks.keep(torch.tensor([[True] * 3, [False] * 3, [True] * 3]))
    seen = regard.trace(q, k, v, mask=nothing, backend=backend)
    assert seen.out[0, 0, 1].equal(torch.zeros(4))
    assert seen.lse[0, 0].tolist()[1] == -math.inf
    assert seen.entropy[0, 0].tolist()[1] == 0
    assert seen.weights()[0, 0, 1].equal(torch.zeros(3))
    seen.out.sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_width(backend):
    """Vectors without entries are all alike: every key weighs the same."""
    none = ones(1, 2, 5, 0)
    v = torch.arange(5.0).view(1, 1, 5, 1).expand(1, 2, 5, 1)
    out = regard.attention(none, none, v, backend=backend)
    torch.testing.assert_close(out, torch.full((1, 2, 5, 1), 2.0))


def test_q_is_a_list():
    with pytest.raises(RegardError, match="q must be a tensor"):
        regard.attention([[1.0]], X, X)


def test_q_elsewhere():
    with pytest.raises(RegardError, match="different devices"):
        regard.attention(X.to("meta"), X, X)


def test_plan_without_data():
    assert regard.plan(*[X.to("meta")] * 3).flops_dense > 0


def test_sink_is_a_list():
    with pytest.raises(RegardError, match="sink="):
        regard.attention(X, X, X, sink=[0.0] * 4)


@pytest.mark.parametrize(
    "score",
    [
        scores.general(torch.eye(8)),
        scores.additive(torch.eye(8), torch.eye(8), torch.ones(8)),
        scores.cosine(torch.ones(())),
    ],
    ids=repr,
)
def test_scores_elsewhere(score):
    with pytest.raises(RegardError, match="another device"):
        regard.attention(X, X, X, score=score.to("meta"))


def test_no_rows_at_all():
    assert regard.trace(X, X, X).weights(queries=[]).shape == (2, 4, 0, 5)
    assert regard.trace(X, X, X).mass([]).equal(torch.zeros(2, 4, 5))


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_a_key_that_is_named_twice_has_its_mass_once(backend):
    t = regard.trace(X, X, X, backend=backend)
    torch.testing.assert_close(t.mass([1, 1]), t.weights(keys=[1]).squeeze(-1))
    torch.testing.assert_close(t.mass([4, -1, 0, 4]), t.mass([0, 4]))


def test_numpy_numbers():
    np = pytest.importorskip("numpy")
    regard.trace(X, X, X, mask=masks.window(np.int64(2)), scale=np.float32(0.5))


def test_training_that_is_none_after_a_call_that_was_right() -> None:
    """Calls with a bias are remembered on a CPU."""
    q, k, v = torch.zeros(3, 1, 4, 20, 8)
    bias = biases.alibi([0.1] * 4)
    for ask in (regard.attention, regard.trace):
        ask(q, k, v, bias=bias)
        with pytest.raises(RegardError, match="training"):
            ask(q, k, v, bias=bias, training="yes")
