"""Values: taken apart and put together again, compared by content, closed to hostile text."""

from __future__ import annotations

from collections.abc import Callable

import jaxtyping
import pytest
import torch

import regard
from regard import RegardError, biases, masks, scores
from regard.backends.passes import Call
from regard.scores.comparison import Dot, Nearness, TanhSum
from regard.values import Value, decode, encode

TABLE = torch.tensor([[True, False, True], [False, False, True]])
W = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

VALUES = [
    masks.causal(),
    masks.causal(offset=-2),
    masks.window(3),
    masks.window(None, 2, offset=1),
    masks.prefix(4),
    masks.prefix(torch.tensor([1, 2])),
    masks.padding([3, 1]),
    masks.documents([0, 0, 1], offset=0),
    masks.global_tokens([0, 2], offset=1),
    masks.dilated(2, offset=3),
    masks.blocks(TABLE, 4),
    masks.keep(TABLE),
    masks.ignore(TABLE),
    ~(masks.causal() & (masks.padding([1, 2]) | masks.keep(TABLE))),
    scores.dot(),
    scores.scaled_dot(),
    scores.general(W),
    scores.additive(W, W, W[0]),
    scores.cosine(0.1),
    scores.cosine(torch.tensor([0.5, 2.0])),
    scores.distance(2.5),
    scores.distance(0.1, squared=False),
    biases.alibi([0.5, 0.25], offset=2),
    biases.relative(torch.ones(2, 5)),
    biases.dense(W),
    Dot(0.125),
    TanhSum(W[0]),
    Nearness(0.5, False),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_taken_apart_and_put_together(value):
    (again,) = decode(*encode([value]))
    assert type(again) is type(value)
    assert again == value
    assert hash(again) == hash(value)
    assert repr(again) == repr(value)


def test_several_values_keep_their_places():
    assert decode(*encode([None, *VALUES, None])) == [None, *VALUES, None]
    assert decode(*encode([])) == []


def test_the_text_holds_names_only():
    """Numbers and tensors travel beside the text, so that they can be symbolic."""
    found = encode([masks.window(12345) & masks.padding([678]), scores.cosine(0.12345)])
    assert all(number not in found.text for number in ("12345", "678"))
    assert 12345 in found.integers
    assert [t.tolist() for t in found.tensors] == [[678]]


def test_tensors_travel_as_they_are():
    weight = torch.ones(2, 2, requires_grad=True)
    (again,) = decode(*encode([scores.general(weight)]))
    assert again.tensors()[0] is weight


def test_what_cannot_be_taken_apart_is_refused(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(RegardError, match="a value holds a complex, which cannot be encoded"):
        encode([Dot(1j)])


HOSTILE = [
    "",
    "[",
    "nonsense",
    "null",
    "5",
    '"Causal"',
    '{"Causal": null}',
    "[1.5]",
    "[7]",
    "[NaN]",
    '["Causal"]',
    "[[]]",
    "[{}]",
    '[["Unknown", null]]',
    '[["os.system", "true"]]',
    '[["__class__", null]]',
    '[["RegardError", null]]',
    '[[["Causal", null]]]',
    '[["Causal"]]',
    '[["Causal", null, null]]',
    '[["Causal", 1.5]]',
    '[["Causal", "0"]]',
    '[["Causal", {"number": 0}]]',
    '[["Causal", {"integer": 1}]]',
    '[["Causal", {"integer": -1}]]',
    '[["Causal", {"integer": "0"}]]',
    '[["Causal", {"integer": 0.0}]]',
    '[["Causal", {"integer": 0, "tensor": 0}]]',
    '[["Keep", {"tensor": 1}]]',
    '[["Keep", {"tensor": -1}]]',
    '[["And", ["Causal", null]]]',
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_refused(text):
    honest = encode([masks.prefix(3) & masks.padding([2])])
    with pytest.raises(RegardError, match="a stored value cannot be read"):
        decode(*honest._replace(text=text))


def test_a_refusal_shows_what_was_read_but_not_all_of_it():
    honest = encode([])
    with pytest.raises(RegardError) as error:
        decode(*honest._replace(text='[["Unknown", "' + 1000 * "x" + '"]]'))
    assert "Unknown" in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_equal_values_have_equal_hashes(value):
    copy = value.map_tensors(torch.clone)
    assert copy == value
    assert hash(copy) == hash(value)
    assert value in {copy}


def test_values_differ_from_one_another_and_from_all_else():
    for i, value in enumerate(VALUES):
        assert value != repr(value)
        assert value is not None
        assert all(value != other for other in VALUES[i + 1 :] if type(value) is not type(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (masks.causal(), masks.causal(offset=0)),
        (masks.window(3), masks.window(4)),
        (masks.padding([3]), masks.padding([4])),
        (masks.padding([3]), masks.padding([3, 3])),
        (masks.blocks(TABLE, 4), masks.blocks(TABLE, 5)),
        (masks.keep(TABLE), masks.keep(~TABLE)),
        (scores.distance(1.0), scores.distance(1.0, squared=False)),
        (scores.cosine(0.1), scores.cosine(0.2)),
        (scores.general(W), scores.general(W + 1)),
        (biases.alibi([0.5]), biases.alibi([0.25])),
        (biases.alibi([0.5]), biases.alibi([0.5], offset=0)),
    ],
    ids=str,
)
def test_every_part_counts(one, other):
    assert one != other
    assert len({one, other}) == 2


def test_values_on_different_devices_differ():
    assert masks.padding([3]) != masks.padding([3]).to("meta")


def test_values_cannot_be_changed():
    for value in VALUES:
        for name in value.__match_args__:
            with pytest.raises(AttributeError):
                setattr(value, name, None)


def test_mapping_reaches_tensors_inside_values_inside_values():
    deep = ~(masks.causal() & (masks.padding([1, 2]) | masks.documents([0, 1, 1])))
    grown = deep.map_tensors(lambda t: t + 1)
    assert [t.tolist() for t in grown.tensors()] == [[2, 3], [1, 2, 2]]
    assert [t.tolist() for t in deep.tensors()] == [[1, 2], [0, 1, 1]]


def test_detach_cuts_from_autograd():
    weight = torch.ones(2, 2, requires_grad=True)
    score = scores.general(weight)
    assert score.tensors()[0].requires_grad
    assert not score.detach().tensors()[0].requires_grad


def test_what_operators_are_told_is_read_once_until_a_class_is_defined_anew():
    """As in a notebook, where a cell is run again."""
    text, integers, floats, _ = encode((Dot(1.0), masks.causal(offset=3), None))
    told = Call((text, integers, floats, None, 0.0))
    x = torch.zeros(1, 1, 2, 4)

    def read() -> masks.Mask | None:
        return told.inputs(x, x, x, None, None).mask

    first = read()
    assert first == masks.causal(offset=3)
    assert read() is first
    type("DefinedHere", (Value,), {})
    Value._kinds.pop("DefinedHere")
    assert read() is not first
    assert read() == first


def test_every_kind_has_its_own_name():
    """Text names kinds by class name alone, so no two may share one."""

    def below(kind: type[Value]) -> list[type[Value]]:
        found = [kind]
        for sub in kind.__subclasses__():
            found += below(sub)
        return found

    names = [kind.__name__ for kind in below(Value)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "text",
    [
        '[{"integer": 0}]',
        "[true]",
        '[["Mask"]]',
        '[["_Pair"]]',
        '[["And", null, null]]',
        '[["Keep", null]]',
        '[["Prefix", ["Causal", null]]]',
        '[["Not", ["DotScore"]]]',
        '[["Causal", {"integer": false}]]',
        "[" * 100_000,
        "[" + 5_000 * '["Not",' + '["Causal",null]' + 5_000 * "]" + "]",
    ],
    ids=lambda t: t[:30],
)
def test_hostile_text(text):
    honest = encode([masks.prefix(3) & masks.padding([2])])
    with pytest.raises(RegardError, match="a stored value cannot be read"):
        decode(*honest._replace(text=text))


def test_a_tensor_and_a_number_differ():
    assert masks.prefix(torch.tensor([3, 4])) != masks.prefix(3)
    assert masks.prefix(torch.tensor([3])) != masks.prefix(3)
    assert scores.cosine(torch.tensor([1.0, 2.0])) != scores.cosine(1.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.dilated(2, offset=1.5),  # type: ignore[arg-type]
        lambda: masks.causal(offset=1.5),  # type: ignore[arg-type]
    ],
    ids=["dilated", "causal"],
)
def test_places_are_whole_numbers(
    make: Callable[[], masks.Mask], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Wrong types reach regard's own checks even when the shape-checking hook is on.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    x = torch.zeros(1, 4, 2)
    with pytest.raises(RegardError, match="must be a whole number"):
        regard.attention(x, x, x, mask=make())
