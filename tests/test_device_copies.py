"""Copies of small tensors for calls on a GPU (here for `meta`, which takes them as well)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from regard import device_copies, masks
from regard.calls.kinds import marked
from regard.values import Shape

META = torch.device("meta")


@pytest.fixture(autouse=True)
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device_copies, "AWAY", ("meta",))
    device_copies._copies.clear()
    yield
    device_copies._copies.clear()


def test_a_tensor_is_copied_once() -> None:
    ids = torch.arange(8)
    assert device_copies.moved(ids, META) is device_copies.moved(ids, META)
    assert device_copies.moved(ids.clone(), META) is not device_copies.moved(ids, META)


def test_what_was_written_to_it_is_seen() -> None:
    ids = torch.arange(8)
    before = device_copies.copy_of(ids, META)
    ids.numpy()[3] = 9
    after = device_copies.copy_of(ids, META)
    ids.numpy()[3] = 3
    again = device_copies.copy_of(ids, META)
    assert before is not None
    assert after is not None
    assert again is not None
    assert after.held.tolist() == [0, 1, 2, 9, 4, 5, 6, 7]
    assert len({before.number, after.number, again.number}) == 3


def test_other_tensors_in_the_same_memory_are_others() -> None:
    ids = torch.arange(8)
    assert device_copies.moved(ids[:4], META).shape == (4,)
    assert device_copies.moved(ids[::2], META).shape == (4,)
    assert device_copies.moved(ids[:4], META) is not device_copies.moved(ids[::2], META)


def test_what_learns_is_large_or_is_there_is_moved_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for tensor in (torch.ones(4, requires_grad=True), torch.ones(4, device="meta")):
        assert device_copies.copy_of(tensor, META) is None
    monkeypatch.setattr(device_copies, "SMALL", 31)
    assert device_copies.copy_of(torch.arange(4), META) is None
    assert device_copies.moved(torch.arange(4), META).device == META
    assert device_copies.copy_of(torch.ones(2), torch.device("cpu")) is None


def test_each_stream_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(8)
    here = device_copies.copy_of(ids, META)
    monkeypatch.setattr(device_copies, "stream_of", lambda _: 7)
    there = device_copies.copy_of(ids, META)
    assert here is not None
    assert there is not None
    assert here.there is not there.there
    assert here.number != there.number


def test_the_oldest_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_copies, "ROOM", 3)
    several = [torch.full((2,), i) for i in range(5)]
    first = [device_copies.moved(t, META) for t in several]
    assert len(device_copies._copies) == 3
    assert device_copies.moved(several[4], META) is first[4]
    assert device_copies.moved(several[0], META) is not first[0]


def test_copies_made_for_inference_tell_of_writing() -> None:
    ids = torch.arange(8)
    with torch.inference_mode():
        copy = device_copies.moved(ids, META)
    assert not copy.is_inference()
    assert copy._version == 0


@pytest.mark.parametrize(
    "mask",
    [
        masks.documents([0, 0, 1, 1]),
        masks.padding([3, 4]),
        masks.keep(torch.ones(4, 4, dtype=torch.bool)),
        masks.causal() & masks.documents(torch.tensor([0, 0, 1, 1])),
    ],
    ids=str,
)
def test_masks_of_a_cpu_are_known_by_their_copies(mask: masks.Mask) -> None:
    shape = Shape(2, 1, 4, 4)
    bound = mask.bind(shape, META).tensors()
    assert bound
    assert all(t.device == META for t in bound)
    again = mask.bind(shape, META).tensors()
    assert all(t.data_ptr() == u.data_ptr() and t._version == u._version for t, u in
               zip(bound, again, strict=True))  # fmt: skip
    mark = marked(mask, META)
    assert mark is not None
    assert mark == marked(mask, META)
    mask.tensors()[0].numpy().flat[0] ^= 1
    assert mark != marked(mask, META)
