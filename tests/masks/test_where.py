"""Masks made of functions: what they are taken for, and that they mean what the function says."""

from __future__ import annotations

import gc
import linecache
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import regard
from regard import RegardError, biases, masks
from regard.masks.algebra import Mask, pairs
from regard.masks.where import LOOKED_INTO, BoundWhere
from regard.values import Shape, decode, encode

CPU = torch.device("cpu")
N = 12
IDS = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2, 2, 0, 0, 3])
ROWS = torch.stack([IDS, torch.arange(N) // 5])
LENGTHS = torch.tensor([4, 9])
TABLE = torch.rand(2, 3, N, N, generator=torch.Generator().manual_seed(3)) > 0.4
WEIGHTS = torch.linspace(-1, 1, N)
TWO = torch.tensor(2)
HALF = torch.tensor(0.5)
SMALL = torch.arange(N, dtype=torch.uint8)
SIGNED = 10 * torch.arange(N, dtype=torch.int8)
LARGE = torch.tensor(200)

Function = Callable[..., Tensor]

# What a function is, and what it is taken for; None where it is asked about each pair.
FUNCTIONS: dict[str, tuple[Function, str | None]] = {
    "causal": (lambda b, h, q, k: q >= k, "causal(offset=0)"),
    "causal, turned": (lambda b, h, q, k: k - q <= 0, "causal(offset=0)"),
    "moved": (lambda b, h, q, k: q + 2 >= k, "causal(offset=2)"),
    "moved by a tensor": (lambda b, h, q, k: q + TWO >= k, "causal(offset=2)"),
    "doubled": (lambda b, h, q, k: 2 * q >= 2 * k, "causal(offset=0)"),
    "window": (lambda b, h, q, k: (q - k).abs() <= 2, "window(0, 4, offset=-2)"),
    "both": (
        lambda b, h, q, k: (q >= k) & (q - k < 3), "causal(offset=0) & window(0, None, offset=-2)",
    ),
    "future": (lambda b, h, q, k: ~(q >= k), "~causal(offset=0)"),
    "logical": (
        lambda b, h, q, k: torch.logical_not(torch.logical_or(q < k, k == 3)),
        "~(~where | ~prefix)",
    ),
    "documents": (lambda b, h, q, k: IDS[q] == IDS[k], "documents(<int64 [1, 12]>, offset=0)"),
    "documents of each": (
        lambda b, h, q, k: ROWS[b, q] == ROWS[b, k], "documents(<int64 [2, 12]>, offset=0)",
    ),
    "chunks": (lambda b, h, q, k: q // 4 == k // 4, "documents(<int64 [1, 12]>, offset=0)"),
    "padding": (lambda b, h, q, k: k < LENGTHS[b], "prefix([4, 9])"),
    "first keys": (lambda b, h, q, k: (k < 5) | (q >= k), "prefix([5]) | causal(offset=0)"),
    "some keys": (lambda b, h, q, k: IDS[k] == 1, "keep(<bool [1, 1, 1, 12]>)"),
    "some queries": (lambda b, h, q, k: q > 5, "keep(<bool [1, 1, 12, 1]>)"),
    "keys of heads": (lambda b, h, q, k: k % 3 == h, "keep(<bool [1, 3, 1, 12]>)"),
    "everything": (lambda b, h, q, k: q - k < 100, "window(None, None, offset=0)"),
    "nothing": (lambda b, h, q, k: q - k > 100, "~window(None, None, offset=0)"),
    "always": (lambda b, h, q, k: True, "keep([[[[True]]]])"),
    "one batch entry": (lambda b, h, q, k: b == 1, "keep([[[[False]]], [[[True]]]])"),
    "every third": (lambda b, h, q, k: (q - k) % 3 == 0, None),
    "products": (lambda b, h, q, k: (q * k + b) % 3 != h, None),
    "a table": (lambda b, h, q, k: TABLE[b, h, q, k], None),
    "numbers": (lambda b, h, q, k: WEIGHTS[q] + WEIGHTS[k] > HALF, None),
    "rounded": (lambda b, h, q, k: q.to(torch.int8) >= k, None),
    "a fraction": (lambda b, h, q, k: q + 0.5 >= k, None),
    "a choice": (lambda b, h, q, k: torch.where(q < 4, k <= q, k % 2 == 0), None),
    "a row of a table": (lambda b, h, q, k: (TABLE[b, 0, q] & TABLE[b, 1, k]).any(), None),
    "whole numbers, both": (lambda b, h, q, k: torch.logical_and(q % 4, k % 3), None),
    "whole numbers, either": (lambda b, h, q, k: torch.logical_or(q, k), None),
    "whole numbers of distance": (lambda b, h, q, k: torch.logical_not((q - k) % 3), None),
    "no whole number": (lambda b, h, q, k: torch.logical_not(k), "prefix([1])"),
    "bits": (lambda b, h, q, k: torch.logical_not(q & k), None),
    "fractions": (lambda b, h, q, k: torch.logical_and(WEIGHTS[q] - WEIGHTS[3], q >= k), None),
    "less than nothing": (lambda b, h, q, k: SMALL[k] - TWO >= 0, "keep(<bool [1, 1, 1, 12]>)"),
    "less than a byte": (lambda b, h, q, k: SIGNED[k] < LARGE, "prefix([12])"),
    "more than a byte": (lambda b, h, q, k: SIGNED[k] + LARGE > 18 * q, None),
    "one number made": (
        lambda b, h, q, k: SMALL[k] - torch.full((), 2) >= 0, "keep(<bool [1, 1, 1, 12]>)",
    ),
    "stacked": (lambda b, h, q, k: torch.stack([q, k, q]).sum() % 2 == 0, None),
}  # fmt: skip


@cache
def mask_of(name: str) -> Mask:
    """Made once: to follow a function takes longer than to ask its mask."""
    return masks.where(FUNCTIONS[name][0])


@cache
def by_hand(function: Function, shape: Shape) -> Tensor:
    """Every pair, asked about by itself."""
    B, H, Q, K = shape
    table = torch.zeros(shape, dtype=torch.bool)
    for b in range(B):
        for h in range(H):
            for q in range(Q):
                for k in range(K):
                    table[b, h, q, k] = function(*map(torch.tensor, (b, h, q, k)))
    return table


def written(mask: Mask, shape: Shape) -> Tensor:
    found = pairs(mask.bind(shape, CPU), torch.arange(shape.Q), torch.arange(shape.K))
    return found.expand(shape)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_means_what_it_says(name: str) -> None:
    function, taken_for = FUNCTIONS[name]
    shape = Shape(2, 3, N, N)
    mask = masks.where(function)
    assert torch.equal(written(mask, shape), by_hand(function, shape))
    bound = mask.bind(shape, CPU)
    assert bound.is_local() == (taken_for is None)
    if taken_for is not None and "where" not in taken_for:
        assert repr(bound) == taken_for


@pytest.mark.parametrize(
    "name", ["moved", "window", "padding", "products", "every third", "stacked"]
)
@pytest.mark.parametrize(("Q", "K"), [(1, 9), (5, 11), (11, 5), (0, 3), (3, 0)], ids=str)
def test_queries_and_keys_are_counted_from_0(name: str, Q: int, K: int) -> None:
    function, _ = FUNCTIONS[name]
    shape = Shape(2, 3, Q, K)
    assert torch.equal(written(mask_of(name), shape), by_hand(function, shape))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("size", [1, 3, 5, 16])
def test_tiles_and_counts_agree_with_pairs(name: str, size: int) -> None:
    mask = mask_of(name)
    dense, tiles = mask.dense(N), mask.tiles(N, size=size)
    for i, strip in enumerate(dense.split(size, -2)):
        for j, block in enumerate(strip.split(size, -1)):
            state = block.all((-1, -2)).long() + block.any((-1, -2)).long()
            assert torch.equal(tiles[..., i, j].long(), state)
    assert mask.count(N) == int(dense.sum())


def test_large_tiles_are_not_looked_into() -> None:
    mask = masks.where(lambda b, h, q, k: (q * k) % 2 == 0)
    side = int(LOOKED_INTO**0.5) + 1
    assert mask.count(2 * side) == 4 * side * side - side * side
    assert mask.tiles(2 * side, size=side).unique().tolist() == [1]


def test_nothing_grows_with_the_pairs_where_the_outline_is_known() -> None:
    near = masks.where(lambda b, h, q, k: (q >= k) & (q - k < 1024))
    assert near.count(1_000_000) == (masks.causal() & masks.window(1023)).count(1_000_000)


@pytest.mark.parametrize("name", ["both", "documents of each", "padding", "products", "a table"])
@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa"])
def test_calls(name: str, backend: str) -> None:
    function, _ = FUNCTIONS[name]
    source = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2, 3, N, 8, generator=source, dtype=torch.float64)
    mask = masks.where(function)
    table = masks.keep(by_hand(function, Shape(2, 3, N, N)))
    got = regard.attention(q, k, v, mask=mask, backend=backend)
    want = regard.trace(q, k, v, mask=table, backend="reference")
    assert_close(got, want.out)
    if backend != "sdpa":
        t = regard.trace(q, k, v, mask=mask, backend=backend)
        assert_close(t.weights(), want.weights())
        assert_close(t.received(), want.received())
        assert_close(t.map(4), want.map(4))
        assert_close(t[1, 1:].lse, want[1, 1:].lse)


def test_masks_of_functions_combine() -> None:
    odd = masks.where(lambda b, h, q, k: (q * k) % 2 == 1)
    shape = Shape(1, 1, N, N)
    assert torch.equal(
        written(~odd & masks.causal() | masks.prefix(1), shape),
        ~written(odd, shape) & written(masks.causal(), shape) | written(masks.prefix(1), shape),
    )
    assert repr(odd & masks.causal()) == "where(<lambda>) & causal()"


def test_masks_of_one_function_are_equal() -> None:
    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q - k < 3

    assert masks.where(near) == masks.where(near)
    assert hash(masks.where(near)) == hash(masks.where(near))
    assert masks.where(near) != masks.where(lambda *at: near(*at))
    assert repr(masks.where(near)) == "where(near)"
    assert masks.where(near).to("cpu") == masks.where(near)


def test_a_function_is_read_once() -> None:
    """A mask is a value: what its function captures may change, the mask does not."""
    reach = {"left": 2}
    mask = masks.where(lambda b, h, q, k: (q - k <= reach["left"]) & (q >= k))
    before = mask.dense(N)
    reach["left"] = 5
    assert torch.equal(mask.dense(N), before)


def test_tensors_stay_shared() -> None:
    lengths = torch.tensor([2])
    mask = masks.where(lambda b, h, q, k: k < lengths[b])
    assert mask.dense(4)[0, 0, 0].tolist() == [True, True, False, False]
    lengths[0] = 3
    assert mask.dense(4)[0, 0, 0].tolist() == [True, True, True, False]


def test_what_a_mask_comes_to_is_found_out_once() -> None:
    mask = masks.where(FUNCTIONS["documents"][0])
    shape = Shape(2, 3, N, N)
    assert mask.bind(shape, CPU) is mask.bind(shape, CPU)
    for n in range(20):
        mask.bind(Shape(1, 1, n % N, n % N), CPU)
    assert torch.equal(written(mask, shape), by_hand(FUNCTIONS["documents"][0], shape))


def test_objects_and_partial_functions_are_functions() -> None:
    class Near:
        def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q - k).abs() < 2

        def method(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return self(b, h, q, k)

    def within(n: int, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() < n

    want = masks.window(1, 1).dense(N)
    for function in (Near(), Near().method, partial(within, 2)):
        assert torch.equal(masks.where(function).dense(N), want)


def test_masks_of_flex_attention_are_functions() -> None:
    from torch.nn.attention.flex_attention import and_masks, noop_mask

    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    mask = masks.where(and_masks(causal, lambda b, h, q, k: q - k <= 4))
    assert torch.equal(mask.dense(N), (masks.causal() & masks.window(4)).dense(N))
    assert masks.where(noop_mask).dense(N).all()


REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "no function": (lambda: masks.where(TABLE), ["takes a function", "Tensor", "masks.keep(t)"]),
    "a mask": (lambda: masks.where(masks.causal()), ["takes a function", "Causal"]),
    "numbers": (
        lambda: masks.where(lambda b, h, q, k: q - k),
        ["says True or False", "torch.int64 from where(<lambda>)", "biases.pairwise(f)"],
    ),
    "an if": (
        lambda: masks.where(lambda b, h, q, k: k < 3 if q > 2 else k > 3),
        ["the function cannot be read", "from <lambda>", "no `if` on them", "torch.where"],
    ),
    "two arguments": (
        lambda: masks.where(lambda q, k: q > k),
        ["cannot be read", "TypeError", "batch entry, head, query, key"],
    ),
    "a row": (
        lambda: masks.where(lambda b, h, q, k: TABLE[b, h, q]),
        ["more than one number for a pair", "1 axes from <lambda>", "a tensor without axes"],
    ),
    "a bias of booleans": (
        lambda: biases.pairwise(lambda b, h, q, k: q > k),
        ["gives a number to add", "torch.bool", "masks.where(f)"],
    ),
    "a bias of no function": (lambda: biases.pairwise(WEIGHTS), ["pairwise takes a function"]),
}


@pytest.mark.usefixtures("without_hook")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(RegardError) as error:
        make()
    for word in words:
        assert word in str(error.value)


def test_functions_are_not_written_down() -> None:
    mask = masks.where(FUNCTIONS["products"][0])
    bound = mask.bind(Shape(2, 3, N, N), CPU)
    for value in (mask, bound, bound & masks.causal()):
        assert value.is_local()
        with pytest.raises(RegardError, match="made of a function cannot be written down"):
            encode([value])
    spelled = encode([bound], here=True)
    assert decode(*spelled, here=True) == [bound]
    with pytest.raises(RegardError, match="a stored value cannot be read"):
        decode(*spelled)


def test_functions_that_are_gone_are_not_found() -> None:
    mask = masks.where(lambda b, h, q, k: (q * k) % 2 == 0)
    spelled = encode([mask.bind(Shape(1, 1, 3, 3), CPU)], here=True)
    del mask
    gc.collect()
    with pytest.raises(RegardError, match="a stored value cannot be read"):
        decode(*spelled, here=True)


def test_nothing_stays_of_masks_and_biases_that_are_made_at_each_step() -> None:
    def step(i: int) -> int:
        mask = masks.where(lambda b, h, q, k: (q - i >= k) | (q * k > IDS[i]))
        bias = biases.pairwise(lambda b, h, q, k: (q - k) * float(i))
        regard.trace(*torch.randn(3, 1, 1, N, 8), mask=mask, bias=bias)
        gc.collect()
        return len(linecache.cache)

    assert len({step(i) for i in range(1, 6)}) == 1


class Layer(torch.nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return regard.attention(x, x, x, **self.options)


@pytest.mark.parametrize("name", ["both", "products", "every third"])
def test_files_hold_tables(name: str, tmp_path: Any) -> None:
    mask = masks.causal() & masks.where(FUNCTIONS[name][0])
    model = torch.nn.Sequential(Layer(mask=mask))
    with regard.watch(model, keep="traces") as seen:
        model(torch.randn(2, 3, N, 8))
    seen.save(tmp_path / "x")
    with regard.load(tmp_path / "x") as again:
        assert_close(again["0"].trace.weights(), seen["0"].trace.weights())
        assert not again["0"].trace.mask.is_local()


def test_files_hold_no_large_tables(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.trace_files.records.LARGEST_TABLE", 2 * 3 * N * N - 1)
    model = torch.nn.Sequential(Layer(mask=masks.where(FUNCTIONS["products"][0])))
    with regard.watch(model, keep="traces") as seen:
        model(torch.randn(2, 3, N, 8))
    with pytest.raises(RegardError, match="files hold no code, and as a table it is too large"):
        seen.save(tmp_path / "x")


def test_files_hold_no_functions_as_biases(tmp_path: Any) -> None:
    model = torch.nn.Sequential(Layer(bias=biases.pairwise(lambda b, h, q, k: -(q - k).abs())))
    with regard.watch(model, keep="traces") as seen:
        model(torch.randn(2, 3, N, 8))
    with pytest.raises(RegardError, match="a bias made of a function cannot be written to a file"):
        seen.save(tmp_path / "x")


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["both", "products"])
def test_compiled_calls_read_the_function_between_graphs(name: str) -> None:
    mask = masks.where(FUNCTIONS[name][0])

    def call(x: Tensor) -> Tensor:
        return regard.attention(x, x, x, mask=mask, backend="tiled")

    def anew(x: Tensor) -> Tensor:
        mask = masks.where(FUNCTIONS[name][0])
        return regard.attention(x, x, x, mask=mask, backend="tiled")

    x = torch.randn(2, 3, N, 8)
    want = call(x)
    for function in (call, anew):
        assert_close(torch.compile(function, backend="eager")(x), want)
        torch.compiler.reset()
        with pytest.raises(Exception, match="regard reads functions of places before it runs them"):
            torch.compile(function, fullgraph=True, backend="eager")(x)


def test_a_bound_mask_of_a_function_is_chosen_from() -> None:
    function, _ = FUNCTIONS["products"]
    bound = masks.where(function).bind(Shape(2, 3, N, N), CPU)
    assert isinstance(bound, BoundWhere)
    part = bound.select(torch.tensor([1]), torch.tensor([2, 0]))
    got = pairs(part, torch.arange(N), torch.arange(N))
    assert torch.equal(got, by_hand(function, Shape(2, 3, N, N))[[1]][:, [2, 0]])


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_a_bias_of_a_function(backend: str) -> None:
    table = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    shift = torch.randn(2, dtype=torch.float64, requires_grad=True)
    source = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 2, 3, N, 8, generator=source, dtype=torch.float64)

    def added(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return table[h, (q - k).clamp(-2, 2) + 2] * (q % 3) + torch.exp(shift[b]) * k / 7

    b, h, i, j = torch.meshgrid(*map(torch.arange, (2, 3, N, N)), indexing="ij")
    options: dict[str, Any] = {"mask": masks.causal(), "softcap": 3.0}
    got = regard.trace(q, k, v, bias=biases.pairwise(added), backend=backend, **options)
    want = regard.trace(
        q, k, v, bias=biases.dense(added(b, h, i, j)), backend="reference", **options
    )
    for name in ("out", "lse", "entropy"):
        assert_close(getattr(got, name), getattr(want, name))
    assert_close(got.weights(), want.weights())
    assert_close(got[1, [2, 0]].weights(), want[1, [2, 0]].weights())
    pull = [t.out.square().sum() + (t.lse * t.entropy).sum() for t in (got, want)]
    for mine, theirs in zip(*(torch.autograd.grad(p, [table, shift]) for p in pull), strict=True):
        assert_close(mine, theirs)


def test_a_number_that_a_bias_captures_is_of_its_own_type() -> None:
    """Beside tensors with axes PyTorch lets a number without axes have no say in the type of a
    result: the products of this bias would be those of bfloat16."""
    slopes, unit = torch.tensor([1 / 3], dtype=torch.bfloat16), torch.ones((), requires_grad=True)

    def added(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return slopes[h] * unit * (q - k)

    x = torch.zeros(1, 1, 300, 4)
    found = regard.trace(x, x, x, bias=biases.pairwise(added)).logits(queries=[299])
    wanted = slopes.float() * (299 - torch.arange(300))
    assert_close(found[0, 0, 0], wanted)
    (gradient,) = torch.autograd.grad(found.sum(), unit)
    assert_close(gradient, wanted.sum())


def test_a_bias_of_a_function_is_a_value() -> None:
    def near(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return -(q - k).abs()

    assert biases.pairwise(near) == biases.pairwise(near)
    assert repr(biases.pairwise(near)) == "pairwise(near)"
    x = torch.randn(1, 2, N, 4)
    want = regard.attention(x, x, x, bias=biases.alibi([1.0, 1.0]))
    assert_close(regard.attention(x, x, x, bias=biases.pairwise(near)), want)


def test_who_cannot_add_what_a_function_says() -> None:
    x = torch.randn(1, 2, N, 4)
    bias = biases.pairwise(lambda b, h, q, k: -(q - k).abs())
    plan = regard.plan(x, x, x, bias=bias)
    assert "it would write the bias out as an n×n tensor" in plan.refusals["sdpa"]
    assert "it has no kernel for a bias made of a function" in plan.refusals["triton"]
    with pytest.raises(RegardError, match="it has no kernel for a bias made of a function"):
        regard.attention(x, x, x, bias=bias, backend="triton")


@pytest.mark.parametrize("through", ["PyTorch", "NumPy", ".data"])
def test_a_function_sees_what_is_written_to_the_tensors_it_holds(through: str) -> None:
    ids = torch.tensor([0, 0, 1, 1])
    mask = masks.where(lambda b, h, q, k: ids[q] == ids[k])
    others = torch.tensor([0, 1, 1, 0])
    assert_close(mask.dense(4)[0, 0], ids[:, None] == ids)
    match through:
        case "PyTorch":
            ids.copy_(others)
        case "NumPy":
            ids.numpy()[:] = others.numpy()
        case _:
            ids.data.copy_(others)
    assert_close(mask.dense(4)[0, 0], others[:, None] == others)


def test_what_a_function_comes_to_is_remembered() -> None:
    ids = torch.tensor([0, 0, 1, 1])
    mask = masks.where(lambda b, h, q, k: ids[q] == ids[k])
    shape = Shape(1, 1, 4, 4)
    assert mask.bind(shape, CPU) is mask.bind(shape, CPU)


def _in_inference_mode(call: Callable[[Tensor], Tensor], q: Tensor) -> None:
    with torch.inference_mode():
        call(q)


def _of_fake_tensors(call: Callable[[Tensor], Tensor], q: Tensor) -> None:
    with FakeTensorMode() as mode:
        call(mode.from_tensor(q))


def _recorded_of_fake_tensors(call: Callable[[Tensor], Tensor], q: Tensor) -> None:
    make_fx(call, tracing_mode="fake")(q)


@pytest.mark.parametrize(
    "before", [_in_inference_mode, _of_fake_tensors, _recorded_of_fake_tensors]
)
def test_what_a_function_comes_to_elsewhere_is_not_for_other_calls(
    before: Callable[[Callable[[Tensor], Tensor], Tensor], None],
) -> None:
    """As in a model that is evaluated, or looked at without numbers, before it is trained."""
    mask = masks.where(lambda b, h, q, k: (q * k + b) % 3 != h % 2)
    b, h, place = torch.arange(2).view(2, 1, 1, 1), torch.arange(2).view(2, 1, 1), torch.arange(9)
    allowed = (place[:, None] * place + b) % 3 != h % 2
    q = torch.randn(2, 2, 9, 4)
    before(lambda q: regard.attention(q, q, q, mask=mask, softcap=2.0), q)
    learned = q.clone().requires_grad_()
    received = regard.trace(learned, learned, learned, mask=mask, softcap=2.0).received()
    received.square().sum().backward()
    logits = (2 * torch.tanh(q @ q.mT / 2 / 2)).masked_fill(~allowed, -math.inf)
    assert_close(received.detach(), logits.softmax(-1).nan_to_num(0.0).sum(-2))
    assert learned.grad is not None
    assert learned.grad.isfinite().all()
