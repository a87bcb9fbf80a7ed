"""Sequences of different lengths as jagged nested tensors: each answers as if it were alone."""

from __future__ import annotations

import warnings
from typing import Any

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import regard
from regard import RegardError, biases, masks
from regard.masks.packed import Packed
from regard.values import Shape, decode, encode

every_backend = pytest.mark.parametrize("backend", ["reference", "tiled"])
LENGTHS = (3, 7, 1, 0, 5)
KEYS = (4, 7, 9, 2, 6)


@pytest.fixture(autouse=True)
def without_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences have no length in common that a signature could name."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def parts(lengths: tuple[int, ...], heads: int, width: int, seed: int = 0) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed + width)
    return [torch.randn(n, heads, width, generator=source, dtype=torch.float64) for n in lengths]


def jagged(sequences: list[Tensor]) -> Tensor:
    """[B, H, j, D] from sequences [n, H, D]; gradients reach the sequences."""
    return torch.nested.as_nested_tensor(sequences, layout=torch.jagged).transpose(1, 2)


def alone(sequence: Tensor) -> Tensor:
    return sequence.transpose(0, 1)[None]


EQUAL: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"mask": masks.causal()},
    "causal from the start": {"mask": masks.causal(offset=0)},
    "moved": {"mask": masks.causal(offset=1)},
    "window": {"mask": masks.causal() & masks.window(2)},
    "dilated": {"mask": ~masks.dilated(2)},
    "prefix": {"mask": masks.causal() | masks.prefix(2)},
    "global": {"mask": masks.window(1, 1) | masks.global_tokens([0])},
    "alibi": {"bias": biases.alibi([0.3, 0.7, 0.1, 0.5])},
    "relative": {"bias": biases.relative(torch.linspace(0, 1, 5).repeat(4, 1))},
    "more": {"softcap": 2.0, "sink": torch.ones(4, dtype=torch.float64), "scale": 0.7},
}
UNEQUAL = ("nothing", "causal", "window", "dilated", "prefix", "more")
CASES = [(name, LENGTHS) for name in EQUAL] + [(name, KEYS) for name in UNEQUAL]


@every_backend
@pytest.mark.parametrize(("name", "keys"), CASES, ids=str)
def test_sequences_answer_as_if_alone(name: str, keys: tuple[int, ...], backend: str) -> None:
    q, k, v = parts(LENGTHS, 4, 8), parts(keys, 2, 8, seed=1), parts(keys, 2, 3, seed=2)
    options = EQUAL[name]
    t = regard.trace(jagged(q), jagged(k), jagged(v), **options, backend=backend)
    out = regard.attention(jagged(q), jagged(k), jagged(v), **options)
    assert out.is_nested
    assert out.layout == torch.jagged
    assert out.shape[:2] == (5, 4)
    assert out.shape[3] == 3
    assert len(t) == 5
    for i, (one_q, one_k, one_v) in enumerate(zip(q, k, v, strict=True)):
        want = regard.trace(
            alone(one_q), alone(one_k), alone(one_v), **options, backend="reference"
        )
        assert_close(out[i], want.out[0])
        every = ("out", "lse", "max_logit", "entropy", "mean_logit", "std_logit", "min_logit")
        for answer in every:
            assert_close(getattr(t, answer)[i], getattr(want, answer)[0])
            assert_close(getattr(t[i], answer), getattr(want, answer))
        assert_close(t.received()[i], want.received()[0])
        n = min(2, len(one_k))
        assert_close(t.top(2).values[i][..., :n], want.top(2).values[0])
        if len(one_q):
            assert_close(t[i].weights(), want.weights())
            assert_close(t[i, 1:3].map(2), want[:, 1:3].map(2))
            assert_close(t[i].mass(0), want.mass(0))
        assert t[i].mask == options.get("mask")


def test_the_strongest_keys_are_places_of_their_own_sequence() -> None:
    x = parts((2, 4), 1, 4)
    t = regard.trace(jagged(x), jagged(x), jagged(x), mask=masks.causal())
    for i, one in enumerate(x):
        want = regard.trace(alone(one), alone(one), alone(one), mask=masks.causal()).top(2)
        assert torch.equal(t.top(2).indices[i], want.indices[0])


def test_masks_of_each_sequence() -> None:
    """Lengths and tables speak of sequences as of batch entries."""
    x = parts((3, 5), 2, 4)
    table = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(1)) > 0.4
    mask = masks.padding([2, 5]) & masks.keep(table)
    t = regard.trace(jagged(x), jagged(x), jagged(x), mask=mask)
    for i, one in enumerate(x):
        n = len(one)
        seen = masks.keep(table[i : i + 1, :, :n, :n]) & masks.padding([(2, 5)[i]])
        want = regard.trace(alone(one), alone(one), alone(one), mask=seen)
        assert_close(t.out[i], want.out[0])
        assert_close(t[i].weights(), want.weights())


def test_one_head_needs_no_axis() -> None:
    x = [one[:, 0] for one in parts((3, 5), 1, 4)]
    nested = torch.nested.as_nested_tensor(x, layout=torch.jagged)
    t = regard.trace(nested, nested, nested, mask=masks.causal())
    for i, one in enumerate(x):
        want = regard.trace(one[None], one[None], one[None], mask=masks.causal())
        assert_close(t.out[i], want.out[0])
        assert_close(t.lse[i], want.lse[0])
        assert_close(t[i].weights(), want.weights())


def test_gradients_reach_every_sequence() -> None:
    x = [one.requires_grad_() for one in parts((3, 7, 1, 5), 2, 4)]
    slopes = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    options = {"mask": masks.causal(), "bias": biases.alibi(slopes)}
    nested = jagged(x)
    t = regard.trace(nested, nested, nested, **options)
    got = torch.autograd.grad(t.out.values().square().sum() + t.lse.values().sum(), [*x, slopes])
    total = torch.zeros((), dtype=torch.float64)
    for one in x:
        want = regard.trace(*(alone(one),) * 3, **options)
        total = total + want.out.square().sum() + want.lse.sum()
    for mine, theirs in zip(got, torch.autograd.grad(total, [*x, slopes]), strict=True):
        assert_close(mine, theirs)


def test_the_output_goes_on_with_its_input() -> None:
    """Both have the same ragged axis, so that a residual can be added."""
    x = jagged(parts((3, 5), 2, 4))
    assert (x + regard.attention(x, x, x)).shape == x.shape


def test_sequences_with_gaps_between_them() -> None:
    padded = torch.randn(2, 6, 2, 4, dtype=torch.float64)
    start, length = torch.tensor([0, 1]), torch.tensor([3, 4])
    x = torch.nested.narrow(padded, 1, start, length, layout=torch.jagged).transpose(1, 2)
    out = regard.attention(x, x, x, mask=masks.causal())
    for i, (s, n) in enumerate(zip(start, length, strict=True)):
        one = alone(padded[i, s : s + n])
        assert_close(out[i], regard.attention(one, one, one, mask=masks.causal())[0])


@pytest.mark.parametrize("heads", [2, None])
def test_gradients_of_sequences_with_gaps_between_them(heads: int | None) -> None:
    size = (9, 4) if heads is None else (9, heads, 4)
    tokens = torch.randn(size, dtype=torch.float64, requires_grad=True)
    starts, lengths = torch.tensor([0, 4, 9]), torch.tensor([3, 5])
    x = torch.nested.nested_tensor_from_jagged(tokens, starts, lengths)
    x = x if heads is None else x.transpose(1, 2)
    t = regard.trace(x, x, x, mask=masks.causal())
    (got,) = torch.autograd.grad(t.out.values().square().sum() + t.lse.values().sum(), tokens)
    total = torch.zeros((), dtype=torch.float64)
    for one in (tokens[:3], tokens[4:9]):
        one = one[None] if heads is None else alone(one)
        want = regard.trace(one, one, one, mask=masks.causal())
        total = total + want.out.square().sum() + want.lse.sum()
    assert_close(got, torch.autograd.grad(total, tokens)[0])
    assert not got[3].any()


def test_tokens_behind_the_last_sequence_are_refused() -> None:
    x = torch.randn(8, 2, 4)
    nested = torch.nested.nested_tensor_from_jagged(x, offsets=torch.tensor([0, 5]))
    nested = nested.transpose(1, 2)
    with pytest.raises(RegardError, match="the sequences do not make up the call"):
        regard.attention(nested, nested, nested)


def test_one_sequence_is_the_plain_call() -> None:
    (x,) = parts((5,), 2, 4)
    mask = masks.causal(offset=1)
    got = regard.attention(*(jagged([x]),) * 3, mask=mask)
    assert torch.equal(got[0], regard.attention(*(alone(x),) * 3, mask=mask)[0])


def test_dropout_drops() -> None:
    x = jagged(parts((30, 50), 2, 4))
    out = regard.attention(x, x, x, dropout=0.5, training=True)
    assert not torch.equal(out.values(), regard.attention(x, x, x).values())


def test_nothing_is_padded_to_the_longest() -> None:
    """A thousand short sequences and a long one: all pairs would be 10⁸ and more."""
    x = jagged(parts((2000, *[4] * 1000), 1, 4))
    plan = regard.plan(x, x, x, mask=masks.causal(), statistics=True)
    assert plan.flops_needed == 2 * 8 * (2000 * 2001 // 2 + 1000 * 10)
    assert plan.flops_executed < 2 * 8 * 2000 * 2000
    assert regard.trace(x, x, x, mask=masks.causal())[1].lse.shape == (1, 1, 4)


def test_a_watcher_sees_one_call() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return regard.attention(x, x, x, mask=masks.causal())

    model = torch.nn.Sequential(Layer())
    x = jagged(parts((3, 5), 2, 4))
    with regard.watch(model, keep="traces") as seen:
        out = model(x)
    assert out.is_nested
    trace = seen["0"].trace
    assert repr(trace.mask) == "packed(causal(), [3, 5], [3, 5])"
    own = regard.trace(x, x, x, mask=masks.causal())
    assert_close(trace.weights()[0, :, 3:, 3:], own[1].weights()[0])
    assert not trace.weights()[0, :, 3:, :3].any()


def test_a_trace_says_what_it_is_of() -> None:
    x = jagged(parts((3, 5), 2, 4))
    t = regard.trace(x, x, x, mask=masks.causal(), backend="tiled")
    assert repr(t) == (
        "JaggedTrace(2 sequences of 3 to 5 queries, heads 2, width 4, float64 on cpu, "
        "mask=causal(), by tiled)"
    )
    assert [one.lse.shape[-1] for one in t] == [3, 5]
    assert_close(t[-1].lse, t[1].lse)


def test_views_draw_one_sequence() -> None:
    from regard.view.atlas import Atlas, choose

    x = jagged(parts((3, 5), 2, 4))
    t = regard.trace(x, x, x, mask=masks.causal())
    assert t._repr_mimebundle_() == {"text/plain": repr(t)}
    assert t._display_() == repr(t)
    assert choose(t, batch=1, head=1).trace.inputs.shape == (1, 1, 5, 5)
    assert Atlas.of(t, batch=1).maps[0].shape == (2, 5, 5)


QUESTIONS = {
    "weights": lambda t: t.weights(),
    "logits": lambda t: t.logits(),
    "save": lambda t: t.save("one.regard"),
    "map": lambda t: t.map(3),
    "mass": lambda t: t.mass(0),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_what_has_no_length_in_common_is_asked_of_one_sequence(name: str) -> None:
    x = jagged(parts((3, 5), 2, 4))
    with pytest.raises(RegardError) as error:
        QUESTIONS[name](regard.trace(x, x, x))
    assert f"{name} speaks of places, and these sequences have different lengths" in str(
        error.value
    )
    assert f"trace[i].{name}(...)" in str(error.value)


def strided(*lengths: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2, n, 4) for n in lengths])


X = torch.ones(2, 2, 5, 4, dtype=torch.float64)
REFUSED: dict[str, tuple[Any, list[str]]] = {
    "strided": (
        lambda x: ((strided(3, 5),) * 3, {}),
        ["a nested tensor in the strided layout", "layout=torch.jagged"],
    ),
    "some nested": (lambda x: ((x, X, X), {}), ["q, k and v are nested or none is", "k dense"]),
    "heads inside": (
        lambda x: ((x.transpose(1, 2),) * 3, {}),
        ["[B, H, j, D]", "the ragged axis at 1", ".transpose(1, 2)"],
    ),
    "other lengths of values": (
        lambda x: ((x, x, jagged(parts((3, 4), 2, 4))), {}),
        ["each key needs its value", "k [3, 5], v [3, 4]"],
    ),
    "other numbers of sequences": (
        lambda x: ((x, *(jagged(parts((3, 5, 2), 2, 4)),) * 2), {}),
        ["different batch sizes", "q 2, k 3, v 3 sequences"],
    ),
    "a dense bias": (
        lambda x: ((x, x, x), {"bias": biases.dense(torch.zeros(5, 5).double())}),
        ["dense", "no length in common", "alibi(slopes) or relative(table)"],
    ),
    "a bias between different lengths": (
        lambda x: ((x, *(jagged(parts((4, 5), 2, 4)),) * 2), {"bias": biases.alibi([1.0, 1.0])}),
        ["aligned by one offset", "q [3, 5], k [4, 5]"],
    ),
    "an offset between different lengths": (
        lambda x: ((x, *(jagged(parts((4, 5), 2, 4)),) * 2), {"mask": masks.causal(offset=0)}),
        ["causal(offset=0)", "q [3, 5], k [4, 5]", "causal(), window(w), dilated(step), prefix(n)"],
    ),
    "documents": (
        lambda x: ((x, x, x), {"mask": masks.documents([0, 0, 1])}),
        ["one id per key", "5 keys"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("call", [regard.attention, regard.trace, regard.plan])
def test_what_is_refused(call: Any, name: str) -> None:
    make, words = REFUSED[name]
    args, options = make(jagged(parts((3, 5), 2, 4)))
    with pytest.raises(RegardError) as error:
        call(*args, **options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.compiled
def test_compiled_calls_run_between_graphs_or_are_refused() -> None:
    def call(x: Tensor) -> Tensor:
        return regard.attention(x, x, x, mask=masks.causal())

    x = jagged(parts((3, 5), 2, 4))
    with warnings.catch_warnings():
        # The compiler deprecates parts of itself while it works.
        warnings.simplefilter("ignore")
        got = torch.compile(call, backend="eager")(x)
        assert_close(got.values(), call(x).values())
        torch.compiler.reset()
        with pytest.raises(Exception, match="regard reads the lengths of nested tensors"):
            torch.compile(call, fullgraph=True, backend="eager")(x)


def test_a_packed_mask_is_a_value() -> None:
    mask = Packed(masks.causal(), torch.tensor([1, 2]), torch.tensor([2, 3]))
    assert decode(*encode([mask])) == [mask]
    assert mask == Packed(masks.causal(), torch.tensor([1, 2]), torch.tensor([2, 3]))
    assert mask.dense(3, 5)[0, 0].int().tolist() == [
        [1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 1, 1, 1],
    ]
    assert mask.count(3, 5) == 7


@pytest.mark.parametrize(
    "mask", [None, *(o["mask"] for o in EQUAL.values() if "mask" in o)], ids=repr
)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_tiles_of_a_packed_mask_agree_with_its_pairs(mask: Any, size: int) -> None:
    lengths = torch.tensor([3, 0, 6, 1, 4])
    packed = Packed(mask, lengths, lengths)
    dense, tiles = packed.dense(14), packed.tiles(14, size=size)
    for i, strip in enumerate(dense.split(size, -2)):
        for j, block in enumerate(strip.split(size, -1)):
            state = block.all((-1, -2)).long() + block.any((-1, -2)).long()
            assert torch.equal(tiles[..., i, j].long(), state)
    assert packed.count(14) == int(dense.sum())


@pytest.mark.parametrize("lengths", [[2, 2], [3, -1, 4]], ids=str)
def test_a_packed_mask_fits_its_call(lengths: list[int]) -> None:
    mask = Packed(None, torch.tensor(lengths), torch.tensor(lengths))
    with pytest.raises(RegardError, match="packed: the sequences do not make up the call"):
        mask.bind(Shape(1, 1, 6, 6), torch.device("cpu"))
