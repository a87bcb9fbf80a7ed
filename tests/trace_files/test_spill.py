"""Traces that are too many for memory: warned of, and written to disk as they come."""

from __future__ import annotations

import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import regard
from regard import RegardError, RegardWarning
from regard.seen import memory
from regard.trace_files.tensor_file import KINDS
from tests.trace_files.test_store import assert_same
from tests.watching.test_watch import Model, Plain, x

X = x(2, 7, 16)


def model(count: int = 3, **how: Any) -> Model:
    torch.manual_seed(1)
    return Model(*(Plain(**how) for _ in range(count))).eval()


def test_spilled_traces_are_those_that_memory_would_have_held(tmp_path: Path) -> None:
    m, path = model(is_causal=True), tmp_path / "run.regard"
    with torch.no_grad():
        with regard.watch(m, keep="traces") as want:
            m(X), m(X[:1])
        with regard.watch(m, keep="traces", spill=path) as seen:
            m(X), m(X[:1])
    assert list(tmp_path.iterdir()) == [path]
    with regard.load(path) as again:
        for name, layer in want.items():
            assert seen[name].runs == again[name].runs == [0, 1]
            assert torch.equal(seen[name].entropy, layer.entropy)
            for i, trace in enumerate(layer.traces):
                assert_same(seen[name].traces[i], trace)
                assert_same(again[name].traces[i], trace)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_numbers_of_every_width_lie_where_they_may(dtype: torch.dtype, tmp_path: Path) -> None:
    """A mask of an odd number of bytes, then wider numbers."""
    odd = x(7, 7, seed=3) > -0.5
    m, path = model(attn_mask=odd).to(dtype), tmp_path / "run.regard"
    with torch.no_grad():
        with regard.watch(m, keep="traces") as want:
            m(X.to(dtype))
        with regard.watch(m, keep="traces", spill=path) as seen:
            m(X.to(dtype))
    for name, layer in want.items():
        assert_same(seen[name].trace, layer.trace)
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    del header["__metadata__"]
    for entry in header.values():
        width = KINDS[entry["dtype"]].itemsize
        assert entry["data_offsets"][0] % width == 0


def test_memory_is_released_and_shared_masks_are_written_once(tmp_path: Path) -> None:
    n = 300
    mask = x(n, n, seed=3) > -0.5
    held: list[Any] = []

    class Noting(Plain):
        def forward(self, t: Tensor) -> Tensor:
            q, k, v = self.qkv(t).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            q = q.clone()
            held.append(weakref.ref(q))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            return out.transpose(1, 2).flatten(2)

    m, path = Model(Noting(), Noting(), Noting()).eval(), tmp_path / "run.regard"
    with torch.no_grad(), regard.watch(m, keep="traces", spill=path) as seen:
        m(x(1, n, 16))
        gc.collect()
        assert [ref() for ref in held] == [None] * 3
        assert len(seen["layers.1"].traces) == 1
        with pytest.raises(RegardError, match="they are still being written"):
            _ = seen["layers.1"].trace
    masks = n * n
    assert masks < path.stat().st_size < 2 * masks + 3 * 4 * n * 16 * 4 + 20_000


def test_a_shared_mask_that_was_replaced_is_written_again(tmp_path: Path) -> None:
    m, path = model(1), tmp_path / "run.regard"
    with torch.no_grad(), regard.watch(m, keep="traces", spill=path) as seen:
        for seed in (3, 4):
            allowed = x(7, 7, seed=seed) > -0.5
            m.layers[0].how = {"attn_mask": allowed}
            m(X)
            del allowed
            m.layers[0].how = {}
    shown = [trace.weights() > 0 for trace in seen["layers.0"].traces]
    for seed, weights in zip((3, 4), shown, strict=True):
        assert torch.equal(weights[0, 0], x(7, 7, seed=seed) > -0.5)


def test_after_an_error_nothing_is_left_and_nothing_replaced(tmp_path: Path) -> None:
    m, path = model(), tmp_path / "run.regard"
    path.write_text("mine")
    seen: list[regard.seen.Seen] = []

    def run_and_fail() -> None:
        with torch.no_grad(), regard.watch(m, keep="traces", spill=path) as found:
            seen.append(found)
            m(X)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run_and_fail()
    assert [p.name for p in tmp_path.iterdir()] == ["run.regard"]
    assert path.read_text() == "mine"
    with pytest.raises(RegardError, match="ended with an error, and nothing was kept"):
        _ = seen[0]["layers.0"].trace
    linear = nn.Linear(16, 16)
    with (
        pytest.raises(RegardError, match="no attention was seen"),
        regard.watch(linear, keep="traces", spill=path),
    ):
        linear(X)
    assert [p.name for p in tmp_path.iterdir()] == ["run.regard"]
    assert path.read_text() == "mine"


def test_attach_and_detach_write_the_file_too(tmp_path: Path) -> None:
    m, path = model(), tmp_path / "run.regard"
    watch = regard.watch(m, keep="traces", spill=path)
    seen = watch.attach()
    m(X)
    assert not path.exists()
    watch.detach()
    watch.detach()
    with pytest.raises(RegardError, match="make a new one"):
        watch.attach()
    assert seen["layers.2"].trace.weights().shape == (2, 2, 7, 7)
    seen.save(tmp_path / "copy.regard", tokens=list("abcdefg"))
    with regard.load(tmp_path / "copy.regard") as copy:
        assert_same(copy["layers.2"].trace, seen["layers.2"].trace)


def test_what_was_forgotten_is_not_in_the_file(tmp_path: Path) -> None:
    m, path = model(1), tmp_path / "run.regard"
    with torch.no_grad(), regard.watch(m, keep="traces", spill=path) as seen:
        m(X)
        seen.clear()
        m(X[:1])
    assert seen["layers.0"].trace.inputs.shape.B == 1


@pytest.mark.parametrize("where", ["none/run.regard", "."])
def test_a_path_that_cannot_be_written_is_refused_before_the_model_runs(
    where: str, tmp_path: Path
) -> None:
    watch = regard.watch(model(), keep="traces", spill=tmp_path / where)
    with pytest.raises(RegardError, match="traces cannot be written to disk"):
        watch.attach()
    assert list(tmp_path.iterdir()) == []
    assert not any(m._forward_hooks for m in watch.model.modules())


def test_a_full_disk_ends_the_run_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("regard.trace_files.spill.pieces", full)
    m = model()
    with (
        pytest.raises(RegardError, match="No space left on device"),
        torch.no_grad(),
        regard.watch(m, keep="traces", spill=tmp_path / "run.regard"),
    ):
        m(X)
    assert list(tmp_path.iterdir()) == []


def test_spilling_is_for_traces() -> None:
    with pytest.raises(RegardError, match='add keep="traces"'):
        regard.watch(model(), spill="run.regard")


def test_memory_is_warned_of_after_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model(4)
    with torch.no_grad(), regard.watch(m, keep="traces", layers=["layers.0"]) as seen:
        m(X)
    one = sum(memory.held_by(seen["layers.0"].trace).values())
    calls = []

    def left(device: torch.device) -> int:
        calls.append(device)
        return left.bytes

    monkeypatch.setattr(memory, "free", left)
    # Four layers hold 4 of the 1 + 6.9 that there were: more than half.
    left.bytes = int(6.9 * one)
    warned = pytest.warns(RegardWarning, match=r"for each of 4 layers.*spill=")
    with warned, torch.no_grad(), regard.watch(m, keep="traces"):
        m(X)
        m(X)
    assert len(calls) == 1, "once is enough"
    left.bytes = int(7.1 * one)
    with torch.no_grad(), regard.watch(m, keep="traces"):
        m(X)
    left.bytes = int(3.1 * one)
    with torch.no_grad(), regard.watch(m, keep="traces", layers=["*.1", "*.2"]):
        m(X)


def test_memory_that_grows_over_runs_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    m, room = model(1), [10**6]
    monkeypatch.setattr(memory, "free", lambda device: room[0])
    monkeypatch.setattr(memory, "MOMENT", 0)
    watch = regard.watch(m, keep="traces")
    watch.attach()
    with torch.no_grad():
        m(X)
        room[0] = 1000
        with pytest.warns(RegardWarning, match="1000 bytes is free on cpu"):
            m(X)
    watch.detach()


@pytest.mark.parametrize("clear", [False, True])
def test_what_is_free_is_asked_once_in_a_moment(
    clear: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    m, now, asked = model(2), [100.0], list[float]()

    def free(device: torch.device) -> int:
        asked.append(now[0])
        return 10**6

    monkeypatch.setattr(memory, "free", free)
    monkeypatch.setattr(memory, "monotonic", lambda: now[0])
    watch = regard.watch(m, keep="traces")
    watch.attach()
    with torch.no_grad():
        for now[0] in (100.0, 100.3, 100.9, 101.2, 102.1, 102.3):
            m(X)
            if clear:
                watch.seen.clear()
        assert asked == [100.0, 101.2, 102.3]
        # So much is never held without asking.
        monkeypatch.setattr(memory, "MOMENT", math.inf)
        monkeypatch.setattr(memory, "SHARE", math.inf)
        asked.clear()
        while not asked:
            m(X)
        held = sum(
            sum(memory.held_by(t).values()) for one in watch.seen.values() for t in one.traces
        )
        assert held <= 2 * 10**6 / 16
    watch.detach()


def test_traces_that_were_cleared_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    m = model()
    with torch.no_grad(), regard.watch(m, keep="traces") as seen:
        m(X)
    one = sum(sum(memory.held_by(layer.trace).values()) for layer in seen.values())
    monkeypatch.setattr(memory, "free", lambda device: 4 * one)
    watch = regard.watch(m, keep="traces")
    watch.attach()

    def runs(*, clear: bool) -> None:
        for _ in range(12):
            m(X)
            if clear:
                watch.seen.clear()

    with torch.no_grad():
        # All runs together would hold more than there is. (A warning is an error here.)
        runs(clear=True)
        with pytest.warns(RegardWarning, match="traces hold"):
            runs(clear=False)
    watch.detach()


def test_what_is_free_is_known_here() -> None:
    left = memory.free(torch.device("cpu"))
    assert left is not None
    assert left > 1 << 20
    assert memory.free(torch.device("meta")) is None
