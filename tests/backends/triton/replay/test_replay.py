"""Launches made again: with the addresses of the tensors at hand, and nothing of others."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import regard
from regard import biases, masks
from regard.backends import inference_operators
from regard.backends.contract import Rows, Tabled
from regard.backends.inference_operators import _taken_apart
from regard.backends.passes import Passes, Pull, taken_apart
from regard.backends.triton.forward import Memory
from regard.backends.triton.launches import launched as launching
from regard.backends.triton.launches.launched import Directly, Launched, One
from regard.backends.triton.operators import _passes, repeated
from regard.backends.triton.pairs import INTERPRETED
from regard.backends.triton.replay import passes, steps
from regard.backends.triton.replay.passes import RepeatedBackward, RepeatedForward, _few_tensors
from regard.backends.triton.replay.steps import Address, Fresh, Map, Step
from regard.backends.triton.replay.steps import made as made_anew
from regard.backends.triton.replay.steps import steps_of as replay_steps
from regard.backends.triton.settings.tuning import BY_CUDNN
from regard.inputs import AttentionInputs, check

pytestmark = pytest.mark.skipif(INTERPRETED.value, reason="interpreted kernels are not launched")


CARDS = itertools.count(100)
Made = list[tuple[str, list[Any]]]


class Told(NamedTuple):
    """A binary, as far as it is looked at."""

    takes: tuple[str, ...]
    tilings: tuple[Any, ...] = ()


class Loaded:
    """A kernel that remembers what it was launched with."""

    def __init__(self, name: str, takes: tuple[str, ...], made: Made) -> None:
        self.name, self.binary, self.made = name, Told(takes), made

    def __call__(self, grid: Any, stream: int, values: list[Any]) -> None:
        self.made.append((self.name, list(values)))

    def holding(self, values: list[Any], addresses: list[int]) -> tuple[Loaded, list[Any], Any]:
        return self, values, addresses


def kinds(arguments: tuple[Any, ...], are_strides: Iterator[bool]) -> Iterator[str]:
    for argument, is_stride in zip(arguments, are_strides, strict=False):
        if isinstance(argument, tuple):
            yield from kinds(argument, iter(launching._strides_of(type(argument))))
        elif isinstance(argument, Tensor):
            yield "*"
        elif isinstance(argument, float):
            yield "fp32"
        elif isinstance(argument, int) and not (is_stride and argument == 1):
            yield "i32"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """All launches, by name, with what they took."""
    found: Made = []

    def loaded(compiled: Any, names: tuple[str, ...], one: One) -> Directly:
        takes = tuple(kinds(one.arguments, iter(launching._strides_of(tuple))))
        return Directly(Loaded(compiled, takes, found))  # type: ignore[arg-type]

    class NoDevice:
        def __init__(self, device: int) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *how: object) -> None: ...

    def compiled(self: Launched, arguments: Any, constants: Any) -> str:
        return str(self.kernel.fn.__name__)

    monkeypatch.setattr(launching, "_loaded", loaded)
    monkeypatch.setattr(Launched, "compiled", compiled)
    monkeypatch.setattr(Launched, "_shipped", lambda *_: None)
    monkeypatch.setattr(launching, "current_stream", lambda: 0)
    monkeypatch.setattr(steps, "current_stream", lambda: 0)
    # A card of its own, of which nothing is remembered.
    card = next(CARDS)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: card)
    monkeypatch.setattr(torch.cuda, "device", NoDevice)
    return found


def tensors(seed: int, n: int = 200) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    # Rows of a width that the copy engine cannot read, so that kernels take addresses alone.
    return [torch.randn(2, 4, n, 36, generator=generator).bfloat16() for _ in range(3)]


def inputs(q: Tensor, k: Tensor, v: Tensor, mask: masks.Mask | None) -> AttentionInputs:
    return check(
        q, k, v, mask=mask, score=None, bias=None, softcap=None, sink=None, scale=None,
        dropout=0.0, training=False,
    )  # fmt: skip


MASKS = {"none": None, "causal": masks.causal(), "tiles": masks.dilated(3)}


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "few tensors"])
@pytest.mark.parametrize("alike", [False, True], ids=["three tensors", "one for all"])
@pytest.mark.parametrize("statistics", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_a_forward_pass(made: Made, mask: str, statistics: bool, alike: bool, keeps: bool) -> None:
    first, second = tensors(0), tensors(1)
    first = first[:1] * 3 if alike else first
    x = inputs(*first, MASKS[mask])
    repeated = RepeatedForward(_passes, x.beside_tensors(), statistics, keeps=keeps)

    def run(given: list[Tensor]) -> list[Tensor]:
        if not statistics and not keeps:
            return [*given, repeated.output(*given)]
        rows, kept = repeated(*given)
        return [*given, *rows, kept]

    theirs = run(first)
    before = list(made)
    made.clear()
    ours = run(second)
    assert [name for name, _ in made] == [name for name, _ in before]
    for (_, old), (_, new) in zip(before, made, strict=True):
        for was, now in zip(old, new, strict=True):
            places = [i for i, t in enumerate(theirs) if t.numel() and t.data_ptr() == was]
            if places:
                assert now in [ours[i].data_ptr() for i in places]
    # Each tensor is where the first one of its name was.
    _, values = made[0]
    assert values[:1] == [second[0].data_ptr()]
    assert {t.data_ptr() for t in second} <= set(values)
    assert {t.data_ptr() for t in first}.isdisjoint(values)


@pytest.mark.parametrize("queries", [1, 7])
def test_in_few_tensors_nothing_overlaps(made: Made, queries: int) -> None:
    """All that a pass writes, where its memory is that of three tensors."""
    q, k, v = tensors(0, n=4096)
    x = inputs(q[:, :, :queries], k, v, masks.causal())
    repeated = RepeatedForward(_passes, x.beside_tensors(), True, keeps=False)
    rows, _ = repeated(x.q, x.k, x.v)
    apart = repeated.passes.forward(x, statistics=True)[0]
    assert type(rows) is type(apart)
    made.clear()
    again, scratch = repeated(x.q, x.k, x.v)
    assert isinstance(again, Tabled)
    assert [t.shape for t in again] == [t.shape for t in apart]
    assert [t.dtype for t in again] == [t.dtype for t in apart]
    assert all(t.data_ptr() % 16 == 0 for t in again)
    taken = {value for _, values in made for value in values}
    parts = [*again, *again.table[3:]]
    assert {t.data_ptr() for t in parts} <= taken
    ends = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in [*parts, scratch])
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


@pytest.mark.parametrize("queries", [1, 7, 200])
def test_an_output_alone_takes_two_tensors(
    made: Made, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It, and one for all else that the kernels write."""
    q, k, v = tensors(0, n=4096)
    x = inputs(q[:, :, :queries], k, v, masks.causal())
    repeated = RepeatedForward(_passes, x.beside_tensors(), False, keeps=False)
    want = repeated.output(x.q, x.k, x.v)
    assert repeated.replay is not None
    fresh, steps_again = repeated.replay
    parts = [part for part in fresh if part is not None and part.nothing is None]
    assert len(parts) == 2
    size = math.prod(parts[1].shape) * parts[1].dtype.itemsize
    places = {(a.tensor, a.offset) for step in steps_again for a in step.addresses if a.tensor > 3}
    assert len({tensor for tensor, _ in places}) == 1 < len(places)
    assert all(offset < size for _, offset in places)
    made.clear()
    out = repeated.output(x.q, x.k, x.v)
    assert (out.shape, out.stride(), out.dtype) == (want.shape, want.stride(), want.dtype)
    assert out.data_ptr() in made[0][1]


def test_scratch_memory_has_a_place_for_each() -> None:
    rows = (1, 3, 5)
    parts = {
        "out": torch.empty(*rows, 8), "lse": torch.empty(rows), "norm": torch.empty(2, *rows),
        "largest": torch.empty(rows), "entropy": torch.empty(rows), "first": torch.empty(rows),
        "marks": torch.empty(7, dtype=torch.int8), "mixed": torch.empty(4, *rows, 8),
        "sums": torch.empty(3, 4, *rows),
    }  # fmt: skip
    fresh = [Fresh.like(parts[name]) for name in Memory._fields]
    addresses = [Address(i, 3 + i, 0) for i in range(len(fresh))]
    step = Step(None, (1, 1, 1), [0] * len(fresh), addresses, [], [])  # type: ignore[arg-type]
    left, (again,) = _few_tensors([*fresh], [step], passes._SCRATCH, statistics=True)
    memory = dict(zip(Memory._fields, made_anew(left, torch.device("cpu")), strict=True))
    assert {name for name, t in memory.items() if t is not None} == {"out", "largest", "norm"}
    names = [*Memory._fields]
    ends: dict[str, list[tuple[int, int]]] = {"out": [], "largest": [], "norm": []}
    for name, (_, tensor, offset) in zip(names, again.addresses, strict=True):
        assert offset % 16 == 0
        ends[names[tensor - 3]].append((offset, offset + parts[name].nbytes))
    assert [len(found) for found in ends.values()] == [1, 4, 4]
    for name, found in ends.items():
        whole = memory[name]
        assert whole is not None
        found.sort()
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(found))
        assert found[-1][1] <= whole.untyped_storage().nbytes()


def test_tensors_with_maps_of_their_own_stay_apart(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a tensor map, made anew for each launch, is of a whole tensor."""
    x = inputs(*tensors(0), masks.causal())
    for name, few in (("v", True), ("lse", False), ("norm", False)):
        at = ("q", "k", "v", *Memory._fields).index(name)
        described = Map(0, at, 0, (), ())

        def steps(*args: Any, described: Map = described) -> list[Step] | None:
            found = replay_steps(*args)
            return found and [step._replace(maps=[described]) for step in found]

        monkeypatch.setattr(passes, "steps_of", steps)
        monkeypatch.setattr(passes, "launch_again", lambda *_: None)
        repeated = RepeatedForward(_passes, x.beside_tensors(), True, keeps=False)
        repeated(x.q, x.k, x.v)
        again, _ = repeated(x.q, x.k, x.v)
        assert isinstance(again, Tabled) == few, name


def with_more(seed: int, **options: Any) -> AttentionInputs:
    every: dict[str, Any] = dict.fromkeys(("mask", "score", "bias", "softcap", "sink", "scale"))
    return check(*tensors(seed), **every | {"dropout": 0.0, "training": True} | options)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("statistics", [False, True])
def test_each_call_drops_by_a_seed_of_its_own(made: Made, statistics: bool, learns: bool) -> None:
    """One that is drawn as for a call that is looked at anew, and is that of its gradients, too."""
    x = with_more(0, dropout=0.25, mask=masks.causal())
    q, k, v = (t.requires_grad_(learns) for t in (x.q, x.k, x.v))
    again = repeated(x, statistics=statistics)
    found = []
    for number in (5, 5, 6, 7):
        torch.manual_seed(number)
        seed = int(torch.randint(2**31, ()))
        torch.manual_seed(number)
        made.clear()
        rows = again(q, k, v)
        found.append((seed, rows.out if isinstance(rows, Rows) else rows, list(made)))
    given = int(torch.tensor(12345))
    made.clear()
    again(q, k, v, torch.tensor(given))
    found.append((given, None, list(made)))
    for seed, out, launches in found[::-1]:
        made.clear()
        if learns and out is not None:
            out.backward(torch.ones_like(out))
            assert {"keys_and_values", "queries"} <= {name for name, _ in made}
        for name, values in [*launches, *made]:
            if name not in ("row_shift", "rounded"):
                assert values.count(seed) == 1, name
    assert len({tuple(name for name, _ in launches) for _, _, launches in found}) == 1


@pytest.mark.parametrize("learns", [False, True])
def test_a_sink_and_a_bias_stay_where_they_are(made: Made, learns: bool) -> None:
    """All else is elsewhere in each call."""
    sink, slopes = torch.zeros(4), torch.ones(4)
    x = with_more(0, sink=sink, bias=biases.alibi(slopes), mask=masks.causal())
    x.q.requires_grad_(learns)
    again = repeated(x, statistics=True)
    launches = []
    for seed in range(3):
        q, k, v = (t.requires_grad_(learns) for t in tensors(seed))
        made.clear()
        rows = again(q, k, v)
        assert isinstance(rows, Rows)
        if learns:
            rows.out.sum().backward()
        launches.append([(name, set(values)) for name, values in made])
        here = {t.data_ptr() for t in (q, k, v)}
        assert here & set(itertools.chain(*(values for _, values in made)))
        del rows
    for (name, first), *others in zip(*launches, strict=True):
        same = first.intersection(*(values for _, values in others))
        if name in ("forward_tiles", "keys_and_values", "queries", "mend"):
            assert {slopes.data_ptr()} <= same, name
        if name == "forward_tiles":
            assert {sink.data_ptr()} <= same


def test_launches_with_a_sink_and_a_bias_are_repeated_and_hold_them(made: Made) -> None:
    sink, slopes = torch.zeros(4), torch.ones(4)
    x = with_more(0, sink=sink, bias=biases.alibi(slopes), mask=masks.causal())
    attend, pull = RepeatedForward(_passes, x.beside_tensors(), True), RepeatedBackward(_passes)
    rows, kept = attend(x.q, x.k, x.v)
    pull(x, rows, kept, Pull(tensors(10)[0], None, None))
    (backward,) = pull.known.values()
    for known in (attend.replay, None if backward is None else backward[1:]):
        assert known is not None
        assert all(any(t is slopes for t in step.held) for step in known[1] if step.held)
        assert any(step.held for step in known[1])


def test_tensors_that_are_made_for_a_launch_are_not_taken_for_ones_that_stay(made: Made) -> None:
    slopes = torch.ones(8)[::2]
    x = with_more(0, bias=biases.alibi(slopes))
    attend = RepeatedForward(_passes, x.beside_tensors(), True)
    for _ in range(2):
        attend(x.q, x.k, x.v)
    assert attend.replay is None


class Mark:
    """Something that can be referred to weakly."""


@pytest.mark.parametrize("statistics", [True, False])
def test_nothing_of_a_call_that_learns_is_held(made: Made, statistics: bool) -> None:
    """Its graph goes with its output, and with that its tensors."""
    q, k, v = (t.requires_grad_() for t in tensors(0))
    again = repeated(inputs(q, k, v, masks.causal()), statistics=statistics)
    for _ in range(2):
        found = again(q, k, v)
        node = (found.out if isinstance(found, Rows) else found).grad_fn
        assert node is not None
        mark = Mark()
        node.metadata["mark"], held = mark, weakref.ref(mark)
        del found, node, mark
        assert held() is None


def test_other_memory_for_each(made: Made) -> None:
    x = inputs(*tensors(0), masks.causal())
    repeated = RepeatedForward(_passes, x.beside_tensors(), True)
    found = [repeated(*tensors(seed)) for seed in range(3)]
    places = [t.data_ptr() for rows, kept in found for t in (*rows, kept)]
    assert len(set(places)) == len(places)


def test_copies_are_made_anew(made: Made) -> None:
    """Of tensors that kernels cannot read where they are: nothing is remembered of such a copy."""
    crosswise = [t.mT.contiguous().mT for t in tensors(0)]
    x = inputs(*crosswise, None)
    repeated = RepeatedForward(_passes, x.beside_tensors(), True)
    for _ in range(3):
        repeated(*crosswise)
    assert repeated.replay is None


@pytest.mark.parametrize("keeps", [False, True])
def test_what_mends_an_output_of_cudnn_takes_no_memory(
    made: Made, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a backward pass that may be ours wants the numbers of its rows."""

    def attend(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), torch.empty(*q.shape[:3], 1)

    monkeypatch.setattr("regard.backends.cudnn_plans.attend", attend)
    x = inputs(*tensors(0), masks.causal())
    run = RepeatedForward(_passes, x.beside_tensors(), False, keeps=keeps, how=BY_CUDNN)
    run(x.q, x.k, x.v)
    made.clear()
    q, k, v = tensors(1)
    if keeps:
        rows, norm = run(q, k, v)
        assert norm.shape == (2, *rows.lse.shape)
        here = {t.data_ptr() for t in (q, k, v, rows.out, rows.lse, norm)}
    else:
        monkeypatch.setattr(passes, "made", None)
        out = run.output(q, k, v)
        here = {t.data_ptr() for t in (q, k, v, out)}
    ((name, values),) = made
    assert name == "mend"
    assert here <= set(values)


@pytest.mark.parametrize("mask", MASKS)
def test_a_backward_pass(made: Made, mask: str) -> None:
    pull = RepeatedBackward(_passes)
    found = []
    for seed in (0, 1):
        x = inputs(*tensors(seed), MASKS[mask])
        rows, kept = RepeatedForward(_passes, x.beside_tensors(), True)(x.q, x.k, x.v)
        made.clear()
        g = tensors(seed + 10)[0]
        given = pull(x, rows, kept, Pull(g, None, None))
        found.append((list(made), [x.q, x.k, x.v, rows.out, kept, g, *given]))
    (before, theirs), (after, ours) = found
    assert [name for name, _ in after] == [name for name, _ in before]
    assert {"keys_and_values", "queries"} <= {name for name, _ in after}
    taken = {value for _, values in after for value in values}
    assert {t.data_ptr() for t in ours} <= taken
    assert {t.data_ptr() for t in theirs}.isdisjoint(taken)


def test_gradients_of_more_go_the_long_way(made: Made) -> None:
    pull = RepeatedBackward(_passes)
    x = inputs(*tensors(0), None)
    rows, kept = RepeatedForward(_passes, x.beside_tensors(), True)(x.q, x.k, x.v)
    pull(x, rows, kept, Pull(torch.ones_like(rows.out), torch.ones_like(rows.lse), None))
    assert not pull.known


def operated(x: AttentionInputs, *, statistics: bool = True) -> tuple[Tensor, ...]:
    """A call as compiled programs make it."""
    call, (q, k, v, sink, seed, *own) = taken_apart(x)
    found: tuple[Tensor, ...] = torch.ops.regard.triton(
        q, k, v, sink, seed, own, *call.told, statistics, False
    )
    return found


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Passes that are decided anew."""
    found: list[str] = []

    def counted(name: str) -> Any:
        whole = getattr(Passes, name)

        def run(*given: Any, **how: Any) -> Any:
            found.append(name)
            return whole(*given, **how)

        return run

    for name in ("forward", "backward"):
        monkeypatch.setattr(Passes, name, counted(name))
    return found


@pytest.mark.parametrize("statistics", [True, False])
def test_an_operator_replays_what_is_all_in_numbers(
    made: Made, long_ways: list[str], statistics: bool
) -> None:
    for seed in range(3):
        x = inputs(*tensors(seed, 168 + 8 * statistics), masks.causal())
        found = operated(x, statistics=statistics)
        launched = {value for _, values in made for value in values}
        made.clear()
        mine = [x.q, x.k, x.v, *(t for t in found if t.numel())]
        assert {t.data_ptr() for t in mine} <= launched
        assert len(mine) == (8 if statistics else 6)
    assert not long_ways


def test_an_operator_replays_gradients(made: Made, long_ways: list[str]) -> None:
    for seed in range(3):
        q, k, v = (t.requires_grad_() for t in tensors(seed, 184))
        out, *_ = operated(inputs(q, k, v, masks.causal()))
        made.clear()
        given = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        launched = {value for _, values in made for value in values}
        assert {t.data_ptr() for t in (q, k, v, out, *given)} <= launched
    assert not long_ways


OTHERS: dict[str, Callable[[AttentionInputs], AttentionInputs]] = {
    "a sink": lambda x: replace(x, sink=torch.zeros(4)),
    "dropout": lambda x: replace(x, dropout=0.1, seed=torch.tensor(1)),
    "a bias": lambda x: replace(x, bias=regard.biases.alibi(torch.ones(4))),
    "lengths": lambda x: replace(x, mask=masks.prefix(7).bind(x.shape, x.q.device)),
    "lists": lambda x: replace(x, mask=masks.dilated(3).bind(x.shape, x.q.device)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_an_operator_decides_about_more_than_numbers_each_time(
    made: Made, long_ways: list[str], other: str
) -> None:
    for seed in range(2):
        operated(OTHERS[other](inputs(*tensors(seed), None)))
    assert long_ways == ["forward"] * 2


def test_what_an_operator_gives_is_its_own(made: Made) -> None:
    """Where nobody asked for statistics too: autograd writes on what stands in their place."""
    found = [operated(inputs(*tensors(seed), None), statistics=False) for seed in range(3)]
    for _, _, largest, entropy, _ in found:
        assert not largest.numel()
        assert not entropy.numel()
    assert len({t.untyped_storage()._cdata for some in found for t in some}) == 15


@pytest.mark.parametrize("statistics", [True, False])
def test_outputs_of_the_operator_for_what_learns_nothing_share_no_memory(
    made: Made, statistics: bool
) -> None:
    """Statistics are one tensor, in which each begins where kernels find it; PyTorch refuses, or
    warns of, tensors that share memory."""
    for seed in range(3):
        q, k, v = tensors(seed, 199)
        call, _ = taken_apart(inputs(q, k, v, masks.causal()))
        out, *more = torch.ops.regard.triton_inference(q, k, v, *call.told[:4], statistics)
        taken = {value for _, values in made for value in values}
        made.clear()
        assert {t.data_ptr() for t in (q, k, v, out)} <= taken
        assert len(more) == statistics
        for row in _taken_apart(more[0], *out.shape[:3]) if statistics and seed else ():
            assert row.data_ptr() in taken
            assert row.data_ptr() % 16 == 0


def test_a_call_on_another_card_goes_the_long_way(
    made: Made, long_ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches are made on the card that is current, which the long way sees to."""
    monkeypatch.setattr(inference_operators, "kind_of", lambda *told: None)
    q, k, v = tensors(0, 201)
    call, _ = taken_apart(inputs(q, k, v, masks.causal()))
    for count in (1, 2):
        torch.ops.regard.triton_inference(q, k, v, *call.told[:4], True)
        assert long_ways == ["forward"] * count
