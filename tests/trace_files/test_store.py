"""Trace files: what comes back, what is shared, what is read when, and what is refused."""

from __future__ import annotations

import gc
import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import regard
from regard import RegardError, Trace, biases, masks, scores
from regard.seen import Seen, Statistics
from regard.trace_files import store, tensor_file
from regard.values import Value

B, H, G, Q, K, D = 2, 4, 2, 5, 6, 4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def qkv(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((B, H, Q, D), (B, G, K, D), (B, G, K, 3))
    return [numbers(*s, seed=i).to(dtype) for i, s in enumerate(shapes)]


def put(seen: Seen, path: str, trace: Trace, *, keep: bool = True) -> None:
    layer = seen.layer(path)
    layer.calls = 1
    if trace.inputs.shape.Q and trace.lse.device.type == "cpu":
        layer.statistics = Statistics.of(trace)
    if keep:
        layer.traces, layer.runs = [trace], [0]


def seen_of(*traces: Trace, keep: bool = True) -> Seen:
    seen = Seen("Model")
    for i, trace in enumerate(traces):
        put(seen, f"layers.{i}", trace.detach(), keep=keep)
    return seen


def answers(t: Trace) -> list[Tensor]:
    """Everything a trace can be asked."""
    x = t.inputs
    found = [x.q, x.k, x.v, t.out, t.lse, t.max_logit, t.entropy, t.mean_logit, t.received()]
    found += [*t.top(3), t.weights(), t.mass([0, 2]), t.map((2, 3))]
    found += [t.map(3, (0, x.shape.Q), (1, 4), pool="max")]
    return found + [s for s in (x.sink, x.seed) if s is not None]


def assert_same(a: Trace, b: Trace) -> None:
    assert repr(a) == repr(b)
    for mine, other in zip(answers(a), answers(b), strict=True):
        assert mine.dtype == other.dtype
        assert mine.shape == other.shape
        # Bit for bit, NaN and all.
        assert bits(mine) == bits(other)
    x, y = a.inputs, b.inputs
    assert (x.comparison, x.mask, x.bias, a.mask) == (y.comparison, y.mask, y.bias, b.mask)
    assert (x.softcap, x.dropout, x.rank) == (y.softcap, y.dropout, y.rank)
    assert type(a.second_pass) is type(b.second_pass)


def bits(t: Tensor) -> bytes:
    return bytes(t.contiguous().flatten().view(torch.uint8).tolist())


@pytest.fixture
def _without_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong tensors reach regard's own checks even when the shape-checking hook is on."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


KEEP = numbers(B, 1, Q, K) > -1
MASKS: dict[str, masks.Mask | None] = {
    "none": None,
    "causal": masks.causal(),
    "aligned": masks.causal(offset=0) & masks.window(3, None, offset=0),
    "padding": masks.causal() & masks.padding([4, 6]),
    "prefix": masks.causal() | masks.prefix(2),
    "prefixes": masks.prefix(torch.tensor([1, 3], dtype=torch.int32)),
    "documents": masks.documents([0, 0, 1, 1, 1, 2]) & ~masks.window(0),
    "global": masks.window(1, 1) | masks.global_tokens([0, 3]),
    "dilated": masks.dilated(2),
    "blocks": masks.blocks(torch.tensor([[True, False], [True, True]]), 3),
    "keep": masks.keep(KEEP),
    "expanded": masks.ignore(~KEEP.expand(B, H, Q, K)),
    "two axes": masks.keep(KEEP[0, 0]),
    "keys": masks.keep(KEEP[0, 0, 0]),
    "nothing": masks.prefix(0),
}
CALLS: dict[str, dict[str, Any]] = {
    **{f"mask {name}": {"mask": mask} for name, mask in MASKS.items()},
    "alibi": {"bias": biases.alibi(biases.slopes(H))},
    "relative": {"bias": biases.relative(numbers(H, 5)), "mask": masks.causal()},
    "dense": {"bias": biases.dense(numbers(1, H, Q, K))},
    "half bias": {"bias": biases.dense(numbers(Q, K).bfloat16())},
    "dot": {"score": scores.dot()},
    "scale": {"scale": 2},
    "general": {"score": scores.general(numbers(D, D))},
    "additive": {"score": scores.additive(numbers(D, 3), numbers(D, 3, seed=1), numbers(H, 3))},
    "cosine": {"score": scores.cosine(0.1)},
    "cosines": {"score": scores.cosine(numbers(H).exp())},
    "distance": {"score": scores.distance(0.7)},
    "far": {"score": scores.distance(0.7, squared=False)},
    "softcap": {"softcap": 30},
    "sink": {"sink": numbers(H)},
    "dropout": {"dropout": 0.25, "training": True},
    "reference": {"backend": "reference", "mask": masks.causal()},
}


@pytest.mark.parametrize("call", CALLS)
def test_every_call_comes_back(call: str, tmp_path: Path) -> None:
    trace = regard.trace(*qkv(), **CALLS[call])
    seen_of(trace).save(tmp_path / "x")
    with regard.load(tmp_path / "x") as again:
        assert_same(trace.detach(), again["layers.0"].trace)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_types_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    trace = regard.trace(*qkv(dtype), mask=masks.causal())
    seen_of(trace).save(tmp_path / "x")
    with regard.load(tmp_path / "x") as again:
        assert again["layers.0"].trace.inputs.q.dtype == dtype
        assert_same(trace, again["layers.0"].trace)


LAYOUTS: dict[str, Callable[[], list[Tensor]]] = {
    "two axes": lambda: [t[0, 0] for t in qkv()],
    "three axes": lambda: [t[:, 0] for t in qkv()],
    "transposed": lambda: [numbers(B, n, H, D).transpose(1, 2) for n in (Q, K, K)],
    "one projection": lambda: list(numbers(B, Q, 3, H, D).permute(2, 0, 3, 1, 4)),
    "expanded": lambda: [numbers(1, 1, n, D).expand(B, H, n, D) for n in (Q, K, K)],
    "one tensor": lambda: [numbers(B, H, Q, D)] * 3,
    "one query": lambda: [numbers(B, H, 1, D), numbers(B, H, K, D), numbers(B, H, K, 1)],
    "no query": lambda: [numbers(B, H, 0, D), numbers(B, H, K, D), numbers(B, H, K, D)],
    "backwards": lambda: [t.flip(2).transpose(2, 3) for t in [numbers(B, H, D, D)] * 3],
    "broken": lambda: [torch.full((B, H, Q, D), math.nan), *qkv()[1:]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_come_back(layout: str, tmp_path: Path) -> None:
    trace = regard.trace(*LAYOUTS[layout](), backend="tiled")
    seen = Seen()
    put(seen, "", trace)
    seen.save(tmp_path / "x")
    with regard.load(tmp_path / "x") as again:
        got = again[""].trace
        assert_same(trace, got)
        if layout != "expanded":
            q = trace.inputs.q
            order = sorted(range(4), key=lambda a: -q.stride(a) if q.shape[a] > 1 else 0)
            held = [a for a in order if q.shape[a] > 1]
            steps = [got.inputs.q.stride(a) for a in held]
            assert steps == sorted(steps, reverse=True)


def test_part_of_a_trace_comes_back(tmp_path: Path) -> None:
    mask = masks.keep(KEEP.expand(B, H, Q, K)) & masks.padding([4, 6])
    part = regard.trace(*qkv(), mask=mask)[1, [3, 0]]
    seen_of(part).save(tmp_path / "x")
    with regard.load(tmp_path / "x") as again:
        assert_same(part, again["layers.0"].trace)


def model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 8, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()


HIDDEN = torch.rand(2, 7, 7, generator=torch.Generator().manual_seed(0)) < 0.2


def watched(keep: Any = "traces", runs: int = 2) -> Seen:
    m = model()
    with torch.no_grad(), regard.watch(m, keep=keep) as seen:
        for i in range(runs):
            m(numbers(2, 7, 16, seed=i), mask=HIDDEN.repeat_interleave(4, 0))
    return seen


def same_statistics(a: Seen, b: Seen) -> None:
    assert list(a) == list(b)
    assert repr(a) == repr(b)
    for path in a:
        assert repr(a[path]) == repr(b[path])
        assert a[path].calls == b[path].calls
        for mine, other in zip(vars(a[path].statistics).values(),
                               vars(b[path].statistics).values(), strict=True):  # fmt: skip
            assert torch.equal(mine, other)


def test_a_watched_model_comes_back(tmp_path: Path) -> None:
    seen = watched()
    seen.save(tmp_path / "x")
    with regard.load(tmp_path / "x") as again:
        assert isinstance(again, Seen)
        same_statistics(seen, again)
        assert again.model == "TransformerEncoder"
        assert again.version == regard.__version__
        assert again.tokens is None
        for path in seen:
            assert len(again[path].traces) == 2
            for mine, other in zip(seen[path].traces, again[path].traces, strict=True):
                assert_same(mine, other)
            assert len(again[path].traces[:]) == 2
            assert_same(seen[path].traces[-1], again[path].traces[-1])
            with pytest.raises(IndexError):
                again[path].traces[2]
        with pytest.raises(RegardError, match="2 traces of 2 calls"):
            _ = again["layers.0.self_attn"].trace
        # And once more, from file to file, over itself.
        again.save(tmp_path / "x", tokens=["a", "b"])
        with regard.load(tmp_path / "x") as third:
            same_statistics(seen, third)
            assert third.tokens == ["a", "b"]
            assert_same(seen["layers.1.self_attn"].traces[0], third["layers.1.self_attn"].traces[0])
    assert os.listdir(tmp_path) == ["x"]


def test_one_trace_comes_back(tmp_path: Path) -> None:
    q, k, v = (t.requires_grad_() for t in torch.randn(3, 2, 4, 9, 8))
    t = regard.trace(q, k, v, mask=masks.causal(), sink=torch.randn(4), softcap=5.0)
    t.save(tmp_path / "one.regard")
    with regard.load(tmp_path / "one.regard") as file:
        again = file.trace
        assert file[""].calls == 1
    assert repr(again) == repr(t)
    assert not again.out.requires_grad
    for name in ("out", "lse", "max_logit", "entropy"):
        assert torch.equal(getattr(again, name), getattr(t, name))
    assert torch.equal(again.weights(), t.weights())
    assert torch.equal(again.map(4), t.map(4))


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_a_trace_of_no_queries_comes_back(backend: str, tmp_path: Path) -> None:
    q, k, v = qkv()
    regard.trace(q[:, :, :0], k, v, backend=backend).save(tmp_path / "x")
    with regard.load(tmp_path / "x") as file:
        assert file.trace.weights().shape == (B, H, 0, K)
        assert torch.equal(file.trace.received(), torch.zeros(B, H, K))


def test_several_layers_are_not_one_trace() -> None:
    seen = Seen()
    with pytest.raises(RegardError, match="what was seen is not one trace\n  got:      0 layers"):
        _ = seen.trace
    x = torch.randn(1, 1, 3, 2)
    for path in ("a", "b"):
        seen.layer(path).take(regard.trace(x, x, x), 0, keep=True)
    with pytest.raises(RegardError, match="got:      2 layers\n  do:       choose a layer"):
        _ = seen.trace


def test_statistics_alone(tmp_path: Path) -> None:
    seen = watched("statistics")
    seen.save(tmp_path / "x")
    with regard.load(tmp_path / "x") as again:
        same_statistics(seen, again)
        with pytest.raises(RegardError, match="0 traces of 2 calls"):
            _ = again["layers.0.self_attn"].trace
    Seen().save(tmp_path / "y")
    assert len(regard.load(tmp_path / "y")) == 0


@pytest.mark.parametrize(
    "tokens",
    [["The", " cat", "\n", "é", "\ud83d"], [["a"], [], ["b", "c"]], [], ("a", "b")],
    ids=ascii,
)
def test_tokens_come_back(tokens: Any, tmp_path: Path) -> None:
    seen = seen_of(regard.trace(*qkv()))
    seen.save(tmp_path / "x", tokens=tokens)
    with regard.load(tmp_path / "x") as again:
        assert again.tokens == list(tokens)
        again.save(tmp_path / "y")
    with regard.load(tmp_path / "y") as third:
        assert third.tokens == list(tokens)


@pytest.mark.usefixtures("_without_hook")
@pytest.mark.parametrize(
    "tokens", ["cat", [1, 2], [["a"], "b"], [[["a"]]], 5, [None], {"a": 1}], ids=ascii
)
def test_other_tokens_are_refused(tokens: Any, tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="tokens= are the texts of a sequence") as error:
        watched(runs=1).save(tmp_path / "x", tokens=tokens)
    assert "one such list per sequence" in str(error.value)
    assert os.listdir(tmp_path) == []


def test_what_shares_memory_is_written_once(tmp_path: Path) -> None:
    n = 64
    table = torch.rand(1, 1, n, n) > 0.3
    x = numbers(1, 8, n, 4)
    given = (table, table[0, 0], table.expand(1, 8, n, n))
    seen_of(*(regard.trace(x, x, x, mask=masks.keep(t)) for t in given)).save(tmp_path / "x")
    with regard.load(tmp_path / "x") as again:
        stored = again._source.stored
        assert [name for name, (kind, _) in stored.items() if kind == "BOOL"] == [
            "layers.0/0/value 0"
        ]
        assert [name for name in stored if name[-2:] in ("/q", "/k", "/v")] == ["layers.0/0/q"]
        for i, t in enumerate(given):
            kept = again[f"layers.{i}"].trace.mask
            assert kept == masks.keep(t)


def test_nothing_is_read_before_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched().save(tmp_path / "x")
    read: list[str] = []
    own = tensor_file.Source.read

    def noted(self: Any, place: Any, check: str) -> Tensor:
        read.append(place.name)
        return own(self, place, check)

    monkeypatch.setattr(tensor_file.Source, "read", noted)
    again = regard.load(tmp_path / "x")
    paths = list(again)
    assert read == [f"{path}/statistics" for path in paths]
    repr(again)
    assert repr(again[paths[1]]).endswith("2 traces)")
    assert len(read) == 3
    first = again[paths[1]].traces[0]
    assert all(name.startswith((f"{paths[1]}/0/", f"{paths[0]}/0/value")) for name in read[3:])
    assert again[paths[1]].traces[0] is first
    # Only the layer that was asked last is held.
    _ = again[paths[2]].traces[0]
    assert again[paths[1]].traces[0] is not first
    assert_same(again[paths[1]].traces[0], first)


def mappings(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def handles(path: Path) -> int:
    found = 0
    for handle in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += handle.readlink() == path
    return found


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux")
def test_closing_lets_go_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    seen = watched()
    seen.save(path)
    assert handles(path) == 0
    again = regard.load(path)
    kept = again["layers.0.self_attn"].traces[0]
    assert (handles(path), mappings(path)) == (1, 0)
    again.close()
    again.close()
    assert handles(path) == 0
    assert_same(seen["layers.0.self_attn"].traces[0], kept)
    same_statistics(seen, again)
    with pytest.raises(RegardError, match="was closed"):
        again["layers.0.self_attn"].traces[0]
    again = regard.load(path)
    del again
    gc.collect()
    assert handles(path) == 0


@pytest.mark.usefixtures("_without_hook")
@pytest.mark.parametrize("damage", ["cut", "emptied", "overwritten", "gone"])
def test_a_file_that_others_write_to_ends_nobody(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    seen = watched()
    seen.save(path)
    last = "layers.2.self_attn"
    with regard.load(path) as again:
        kept = again[last].traces[0]
        _ = again["layers.0.self_attn"].traces[0]
        size = path.stat().st_size
        if damage in ("cut", "emptied"):
            os.truncate(path, size // 2 if damage == "cut" else 0)
        elif damage == "overwritten":
            with path.open("r+b") as file:
                file.seek(size // 2)
                file.write(b"\xff" * (size - size // 2))
        else:
            path.unlink()
        # What was read is whole.
        assert_same(kept, seen[last].traces[0])
        if damage == "gone":
            assert_same(again[last].traces[0], kept)
            return
        del kept
        gc.collect()
        with pytest.raises(
            RegardError, match=r"cut short after it was opened|not what was written"
        ):
            again[last].traces[0]


@pytest.mark.usefixtures("_without_hook")
def test_what_is_read_twice_is_there_once(tmp_path: Path) -> None:
    table = torch.rand(1, 1, 32, 32) > 0.3
    x = numbers(1, 2, 32, 4)
    trace = regard.trace(x, x, x, mask=masks.keep(table))
    seen_of(trace, trace).save(tmp_path / "x")
    with regard.load(tmp_path / "x") as again:
        one, two = (again[f"layers.{i}"].trace for i in range(2))
        assert one.inputs.q.data_ptr() == two.inputs.q.data_ptr() == one.inputs.k.data_ptr()
        again.save(tmp_path / "y")
    assert (tmp_path / "y").stat().st_size == (tmp_path / "x").stat().st_size


def test_loading_leaves_autocast_and_random_numbers_alone(tmp_path: Path) -> None:
    trace = regard.trace(*qkv(), dropout=0.5, training=True)
    seen_of(trace).save(tmp_path / "x")
    before = torch.random.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16), regard.load(tmp_path / "x") as again:
        got = again["layers.0"].trace
        assert got.inputs.q.dtype == torch.float32
    assert_same(trace, got)
    assert torch.equal(before, torch.random.get_rng_state())


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "PIECE", 100)
    told: list[tuple[int, int]] = []
    seen = watched()
    seen.save(tmp_path / "x", progress=lambda *how: told.append(how))
    done = [n for n, _ in told]
    assert done == sorted(done)
    assert done[0] == 0
    assert {total for _, total in told} == {done[-1]}
    assert done[-1] < (tmp_path / "x").stat().st_size
    with regard.load(tmp_path / "x") as again:
        assert_same(seen["layers.2.self_attn"].traces[1], again["layers.2.self_attn"].traces[1])


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_half_a_file_is_never_left(error: Any, tmp_path: Path) -> None:
    seen_of(regard.trace(*qkv())).save(tmp_path / "x")
    whole = (tmp_path / "x").read_bytes()

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise error

    with pytest.raises((KeyboardInterrupt, RegardError)) as raised:
        watched().save(tmp_path / "x", progress=stop)
    if isinstance(error, OSError):
        assert "nothing was written or replaced" in str(raised.value)
        assert "No space left" in str(raised.value)
    assert os.listdir(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == whole


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    seen = seen_of(regard.trace(*qkv()))
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "no" / "x", tmp_path / "file" / "x"):
        with pytest.raises(RegardError, match="the file cannot be written"):
            seen.save(path)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o400])
def test_a_link_stays_a_link_and_the_mode_is_what_it_was(mode: int, tmp_path: Path) -> None:
    (tmp_path / "real").touch()
    (tmp_path / "real").chmod(mode)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    seen_of(regard.trace(*qkv())).save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == mode
    with regard.load(tmp_path / "link") as again:
        assert list(again) == ["layers.0"]


def test_new_files_are_for_their_owner_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[int] = []
    own = tensor_file.Draft.write

    def noted(self: Any, file: Any, *args: Any) -> None:
        modes.append(stat.S_IMODE(os.fstat(file.fileno()).st_mode))
        own(self, file, *args)

    monkeypatch.setattr(tensor_file.Draft, "write", noted)
    before = os.umask(0)
    try:
        seen_of(regard.trace(*qkv())).save(tmp_path / "new")
        seen_of(regard.trace(*qkv())).save(tmp_path / "new")
    finally:
        os.umask(before)
    # While it is written as well.
    assert modes == [0o600, 0o600]
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o600


def test_a_circle_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with pytest.raises(RegardError, match="the file cannot be written"):
        seen_of(regard.trace(*qkv())).save(tmp_path / "a")
    with pytest.raises(RegardError, match="symbolic links"):
        regard.load(tmp_path / "a")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RegardError, match="there is no such file"):
        regard.load(tmp_path / "pipe")


def test_the_folder_is_on_disk_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = os.fsync, Path.replace

    def synced(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        sync(handle)

    def renamed(self: Path, to: Path) -> Path:
        done.append("renamed")
        return rename(self, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    seen_of(regard.trace(*qkv())).save(tmp_path / "x")
    assert done == ["file", "renamed", "folder"]


@pytest.mark.usefixtures("_without_hook")
def test_layers_without_statistics_say_so(tmp_path: Path) -> None:
    seen_of(regard.trace(*qkv()), regard.trace(*qkv())).save(tmp_path / "x")
    path = changed(tmp_path / "x", tmp_path / "y", ("layers", 0, "statistics"), None)
    with regard.load(path) as again:
        assert repr(again).splitlines()[1].split() == ["layers.0", "1", "4", *"-----"]
        assert again["layers.0"].heads == H
        assert "1 traces" in repr(again["layers.0"])
        with pytest.raises(RegardError, match=r"'layers\.0' has no statistics"):
            _ = again["layers.0"].entropy


@pytest.mark.usefixtures("_without_hook")
@pytest.mark.parametrize("empty", ["keys", "heads", "batch"])
def test_lengths_that_nothing_in_the_file_holds_are_refused(empty: str, tmp_path: Path) -> None:
    long = 1 << 28
    shapes = {
        "keys": ((1, 1, 2, 0), (1, 1, long, 0)),
        "heads": ((1, long, 0, 4), (1, long, 0, 4)),
        "batch": ((long, 1, 0, 4), (long, 1, 0, 4)),
    }[empty]
    small = tuple(torch.zeros([min(n, 5) for n in shape]) for shape in shapes)
    trace = regard.trace(small[0], small[1], small[1])
    seen_of(trace, keep=True).save(tmp_path / "x")

    def longer(shape: list[int]) -> list[int]:
        return [long if n == 5 else n for n in shape]

    raw = (tmp_path / "x").read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8 : 8 + size])
    about = json.loads(head["__metadata__"]["regard"])
    for name, tensor in head.items():
        if name != "__metadata__" and not math.prod(tensor["shape"]):
            tensor["shape"] = longer(tensor["shape"])
            about["tensors"][name][1] = tensor["shape"]
    for layer in about["layers"]:
        layer["statistics"] = None
        for record in layer["traces"]:
            for node in record.values():
                if isinstance(node, list) and len(node) == 3 and isinstance(node[1], list):
                    node[1] = longer(node[1])
    text = json.dumps(about)
    head["__metadata__"] = {"regard": text, "check": f"{zlib.crc32(text.encode()):08x}"}
    new = json.dumps(head).encode()
    (tmp_path / "y").write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + size :])
    assert (tmp_path / "y").stat().st_size < 8000
    with pytest.raises(RegardError, match=r"claims too much|not described as one|too large"):
        regard.load(tmp_path / "y")


@pytest.mark.usefixtures("_without_hook")
def test_what_cannot_be_stored_is_said_when_saving(tmp_path: Path) -> None:
    trace = regard.trace(*qkv())
    without_data = seen_of(trace.to("meta"))
    with pytest.raises(RegardError, match="cannot be written to a file"):
        without_data.save(tmp_path / "x")
    deep: masks.Mask = masks.causal()
    for _ in range(220):
        deep = ~deep
    nested = seen_of(replace(trace, mask=deep))
    with pytest.raises(RegardError, match="could not be read again, so nothing was written"):
        nested.save(tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_the_header_is_what_safetensors_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trace = regard.trace(*qkv(torch.bfloat16))
    seen_of(trace).save(tmp_path / "x")
    tensors = load_file(tmp_path / "x")
    assert torch.equal(tensors["layers.0/0/q"], trace.inputs.q)
    size = struct.unpack("<Q", (tmp_path / "x").read_bytes()[:8])[0]
    assert (size + 8) % 64 == 0


# What is refused


SMALL = {
    "mask": masks.causal() & masks.padding([4, 6]) | masks.global_tokens([0]),
    "bias": biases.relative(numbers(H, 5)),
    "sink": numbers(H),
    "softcap": 20.0,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with one of everything."""
    path = tmp_path_factory.mktemp("small") / "x"
    plain = regard.trace(*(t[:1, :2, :3] for t in qkv()), score=scores.distance(0.5))
    seen_of(regard.trace(*qkv(), **SMALL), plain).save(path, tokens=["a", "b"])
    return path


def everything(path: Path) -> tuple[Any, ...]:
    """All that a file holds, to be compared."""
    with regard.load(path) as seen:
        held: list[Any] = [seen.model, seen.version, seen.tokens, repr(seen), list(seen)]
        for layer in seen.values():
            held += [layer.calls, *(bits(t) for t in vars(layer.statistics).values())]
            for t in layer.traces:
                x = t.inputs
                held += [repr(t), repr((x.comparison, x.mask, x.bias, x.softcap, x.rank))]
                held += [(a.dtype, a.shape, bits(a)) for a in [*x.tensors(), *t.rows]]
                held += [bits(t.weights()), bits(t.received()), bits(t.map(2))]
        return tuple(held)


def rewritten(path: Path, to: Path, change: Callable[[Any], Any]) -> Path:
    """The same file with another description, its checksum right."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8 : 8 + size])
    text = change(head["__metadata__"]["regard"])
    head["__metadata__"] = {"regard": text, "check": f"{zlib.crc32(text.encode()):08x}"}
    new = json.dumps(head).encode()
    new += b" " * (-len(new) % 8)
    to.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + size :])
    return to


def changed(path: Path, to: Path, keys: tuple[Any, ...], value: Any) -> Path:
    def change(text: str) -> str:
        about = json.loads(text)
        at = about
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = value(at[keys[-1]]) if callable(value) else value
        return json.dumps(about)

    return rewritten(path, to, change)


TRACE = ("layers", 0, "traces", 0)
SPELLED = '[["Dot",{"float":0}],%s,null,null]'
CLAIMS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "no version": (("version",), None),
    "version is a text": (("version",), "1"),
    "version is true": (("version",), True),
    "version zero": (("version",), 0),
    "a model of numbers": (("model",), 5),
    "tokens of numbers": (("tokens",), [1]),
    "deep tokens": (("tokens",), [[[["a"]]]]),
    "layers of nothing": (("layers",), [None]),
    "layers are a record": (("layers",), {}),
    "no layer's path": (("layers", 0, "path"), None),
    "a layer twice": (("layers", 1, "path"), "layers.0"),
    "calls below traces": (("layers", 0, "calls"), 0),
    "huge calls": (("layers", 0, "calls"), 10**30),
    "runs of another number": (("layers", 0, "runs"), [0, 1]),
    "runs before the first": (("layers", 0, "runs"), [-1]),
    "statistics elsewhere": (("layers", 0, "statistics", 0), "layers.0/0/q"),
    "statistics of five": (("layers", 0, "statistics"), ["layers.0/0/sink", [H], [0]]),
    "statistics of nothing": (("layers", 0, "statistics"), []),
    "a missing tensor": ((*TRACE, "q", 0), "layers.9/0/q"),
    "a tensor left out": (("tensors",), lambda t: dict(list(t.items())[1:])),
    "a tensor too many": (("tensors",), lambda t: t | {"more": ["F32", [1], "00000000"]}),
    "another type": (("tensors", "layers.0/0/q", 0), "I32"),
    "an unknown type": (("tensors", "layers.0/0/q", 0), "C64"),
    "another shape": (("tensors", "layers.0/0/q", 1), [B * H * Q * D]),
    "another checksum": (("tensors", "layers.0/0/q", 2), "00000000"),
    "no checksum": (("tensors", "layers.0/0/q", 2), None),
    "q of another shape": ((*TRACE, "q", 1), [B, H, D, Q]),
    "q of a huge shape": ((*TRACE, "q", 1), [10**9] * 7),
    "q of a negative shape": ((*TRACE, "q", 1), [-B, H, Q, D]),
    "q of many axes": ((*TRACE, "q", 1), [1] * 50),
    "q without an axis": ((*TRACE, "q", 2), [0, 1, 2]),
    "q with an axis twice": ((*TRACE, "q", 2), [0, 1, 2, 2]),
    "q with an axis outside": ((*TRACE, "q", 2), [0, 1, 2, 4]),
    "q transposed": ((*TRACE, "q"), ["layers.0/0/q", [B, Q, H, D], [0, 2, 1, 3]]),
    "q repeats itself": ((*TRACE, "q"), ["layers.0/0/sink", [10**6, H, Q, D], [1]]),
    "k is q": ((*TRACE, "k"), ["layers.0/0/q", [B, H, Q, D], [0, 1, 2, 3]]),
    "v is lse": ((*TRACE, "v"), ["layers.0/0/lse", [B, H, Q], [0, 1, 2]]),
    "lse is out": ((*TRACE, "lse"), ["layers.0/0/out", [B, H, Q, 3], [0, 1, 2, 3]]),
    "out is q": ((*TRACE, "out"), ["layers.0/0/q", [B, H, Q, D], [0, 1, 2, 3]]),
    "no out": ((*TRACE, "out"), None),
    "sink of rows": ((*TRACE, "sink"), ["layers.0/0/lse", [B, H, Q], [0, 1, 2]]),
    "a seed of fractions": ((*TRACE, "seed"), ["layers.0/0/sink", [H], [0]]),
    "softcap zero": ((*TRACE, "softcap"), 0.0),
    "softcap infinite": ((*TRACE, "softcap"), math.inf),
    "softcap huge": ((*TRACE, "softcap"), 10**400),
    "dropout one": ((*TRACE, "dropout"), 1.0),
    "dropout missing": ((*TRACE, "dropout"), None),
    "rank five": ((*TRACE, "rank"), 5),
    "rank true": ((*TRACE, "rank"), True),
    "another backend": ((*TRACE, "backend"), "os.system"),
    "a list as backend": ((*TRACE, "backend"), ["tiled"]),
    "a part too many": (TRACE, lambda t: t | {"more": 1}),
    "a part too few": (TRACE, lambda t: {k: v for k, v in t.items() if k != "rank"}),
    "no record": (TRACE, [1, 2]),
    "huge integers": ((*TRACE, "integers"), lambda i: [10**30, *i[1:]]),
    "integers that are none": ((*TRACE, "integers"), lambda i: [1.5, *i[1:]]),
    "true for an integer": ((*TRACE, "integers"), lambda i: [True, *i[1:]]),
    "too few integers": ((*TRACE, "integers"), []),
    "floats that are none": ((*TRACE, "floats"), ["0.5"]),
    "an infinite scale": ((*TRACE, "floats"), [math.inf]),
    "tensors of nothing": ((*TRACE, "tensors"), [None]),
    "too few tensors": ((*TRACE, "tensors"), []),
    "other tensors": ((*TRACE, "tensors"), lambda t: [t[-1]] * len(t)),
    "no values": ((*TRACE, "values"), "[]"),
    "values that are no JSON": ((*TRACE, "values"), "[["),
    "values that nest": ((*TRACE, "values"), SPELLED % ('["Not",' * 150 + "null" + "]" * 150)),
    "values that nest too deep": (
        (*TRACE, "values"),
        SPELLED % ('["Not",' * 400 + '["Causal",null]' + "]" * 400),
    ),
    "a long text": ((*TRACE, "values"), "[" + "null," * 10**6 + "null]"),
    "no comparison": ((*TRACE, "values"), "[null,null,null,null]"),
    "a mask that is a bias": ((*TRACE, "values"), SPELLED % '["Dense",{"tensor":0}]'),
    "a mask that is a score": ((*TRACE, "values"), SPELLED % '["Dot",{"float":0}]'),
    "a mask that is a tensor": ((*TRACE, "values"), SPELLED % '{"tensor":0}'),
    "a mask of floats": ((*TRACE, "values"), SPELLED % '["Keep",{"tensor":1}]'),
    "documents too short": ((*TRACE, "values"), SPELLED % '["Documents",{"tensor":0},null]'),
    "a base class": ((*TRACE, "values"), SPELLED % '["Mask"]'),
    "an unknown class": ((*TRACE, "values"), SPELLED % '["Popen","ls"]'),
}  # fmt: skip


@pytest.mark.usefixtures("_without_hook")
@pytest.mark.parametrize("claim", CLAIMS)
def test_false_claims_are_refused(claim: str, small: Path, tmp_path: Path) -> None:
    path = changed(small, tmp_path / "x", *CLAIMS[claim])
    before = path.read_bytes()
    with pytest.raises(RegardError) as error:
        everything(path)
    text = str(error.value)
    assert str(path) in text
    assert "a file that Seen.save wrote, whole and unchanged" in text
    assert "do:" in text
    assert len(text) < 1500
    assert path.read_bytes() == before


LATER = ["other tensors", "no comparison", "no values", "documents too short"]


@pytest.mark.usefixtures("_without_hook")
@pytest.mark.parametrize("claim", LATER)
def test_claims_of_calls_past_the_first_kinds_are_refused_when_they_are_read(
    claim: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MANY", 0)
    path = changed(small, tmp_path / "x", *CLAIMS[claim])
    with regard.load(path) as seen, pytest.raises(RegardError, match="call 0 of") as error:
        _ = seen["layers.0"].traces[0]
    assert f"{path} cannot be read as a trace file" in str(error.value)


def test_the_claims_are_false_for_one_reason(small: Path, tmp_path: Path) -> None:
    path = rewritten(small, tmp_path / "x", lambda text: json.dumps(json.loads(text)))
    assert everything(path) == everything(small)


TEXTS = {
    "nothing": "",
    "no record": "[1, 2]",
    "a number": "7",
    "not a number": "NaN",
    "half": '{"version": 1, "layers": [',
    "deep": "[" * 100_000,
    "deep records": '{"version":' * 100_000,
    "deep layers": '{"version":1,"regard":"","model":"","tokens":null,"tensors":{},"layers":'
    + "[" * 900 + "]" * 900 + "}",
    "deep and true tokens": '{"version":1,"regard":"","model":"","layers":[],"tensors":{},"tokens":'
    + "[" * 900 + "]" * 900 + "}",
    "a long number": '{"version":' + "9" * 10_000 + "}",
}  # fmt: skip


@pytest.mark.parametrize("kind", TEXTS)
def test_broken_descriptions_are_refused(kind: str, small: Path, tmp_path: Path) -> None:
    path = rewritten(small, tmp_path / "x", lambda _: TEXTS[kind])
    with pytest.raises(RegardError, match="cannot be read as a trace file"):
        regard.load(path)


def test_a_later_format_is_named(small: Path, tmp_path: Path) -> None:
    path = changed(small, tmp_path / "x", ("version",), 2)
    with pytest.raises(RegardError) as error:
        regard.load(path)
    assert str(error.value) == (
        f"{path} has a later format than this regard reads\n"
        f"  got:      version 2, written by regard '{regard.__version__}'\n"
        "  accepted: version 1\n"
        "  do:       install a newer regard: pip install --upgrade regard"
    )


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2)}, tmp_path / "weights", {"format": "pt"})
    save_file({"a": torch.ones(2)}, tmp_path / "bare")
    torch.save({"a": torch.ones(2)}, tmp_path / "pickle")
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello, reader of files that are not what they seem")
    (tmp_path / "long").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    for name in os.listdir(tmp_path):
        with pytest.raises(RegardError, match="cannot be read as a trace file"):
            regard.load(tmp_path / name)
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RegardError, match="there is no such file"):
            regard.load(path)
    with pytest.raises(RegardError, match="a safetensors file without traces"):
        regard.load(tmp_path / "weights")


@pytest.fixture
def whole(small: Path) -> tuple[Any, ...]:
    return everything(small)


def load_or_refuse(path: Path, want: tuple[Any, ...]) -> bool:
    try:
        assert everything(path) == want
    except RegardError:
        return False
    return True


many = settings(max_examples=50, suppress_health_check=list(HealthCheck))


@pytest.mark.usefixtures("_without_hook")
@many
@given(st.data())
def test_flipped_bytes_are_noticed(
    small: Path, whole: tuple[Any, ...], data: st.DataObject
) -> None:
    raw = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= data.draw(st.integers(1, 255))
    path = small.with_name("flipped")
    path.write_bytes(raw)
    load_or_refuse(path, whole)


@pytest.mark.usefixtures("_without_hook")
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(cut=st.integers(0, 1 << 16), more=st.binary(max_size=16))
@example(cut=0, more=b"")
@example(cut=1, more=b"")
def test_cut_and_grown_files_are_refused(
    small: Path, whole: tuple[Any, ...], cut: int, more: bytes
) -> None:
    raw = small.read_bytes()
    path = small.with_name("cut")
    path.write_bytes(raw[: max(len(raw) - cut, 0)] + more)
    assert load_or_refuse(path, whole) == (cut == 0 and not more)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


def paths(node: Any) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node)
    found = []
    for key, inner in items:
        found.append((key,))
        if isinstance(inner, (dict, list)):
            found += [(key, *rest) for rest in paths(inner)]
    return found


@pytest.mark.usefixtures("_without_hook")
@many
@given(st.data())
def test_any_other_description_loads_or_is_refused(small: Path, data: st.DataObject) -> None:
    """With its checksum right: nothing but a RegardError escapes, on loading or on asking."""
    raw = small.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    places = paths(json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["regard"]))
    at = data.draw(st.sampled_from(places))
    path = changed(small, small.with_name("other"), at, data.draw(JSON))
    with suppress(RegardError):
        everything(path)


def spelled(kinds: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Values of some kinds, made of any numbers, tensors and masks."""
    places = st.dictionaries(
        st.sampled_from(["integer", "tensor", "float"]), st.integers(0, 4), min_size=1, max_size=1
    )
    leaves = places | places | st.none() | st.booleans()

    def made(names: tuple[str, ...], inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        def parts(name: str) -> st.SearchStrategy[Any]:
            return st.tuples(st.just(name), *[inner] * len(Value._kinds[name].__match_args__))

        return st.sampled_from(names).flatmap(parts)

    return made(kinds, st.recursive(leaves, lambda inner: made(MASK_KINDS, inner), max_leaves=3))


MASK_KINDS = ("And", "Or", "Not", "Causal", "Window", "Prefix", "Padding", "Documents", "Dilated",
              "GlobalTokens", "BoundGlobalTokens", "Blocks", "Keep")  # fmt: skip
A_MASK = st.none() | spelled(MASK_KINDS)
A_BIAS = st.none() | spelled(("Alibi", "Relative", "Dense"))
A_COMPARISON = spelled(("Dot", "TanhSum", "Nearness"))
INTEGERS = st.integers(-3, 8) | st.sampled_from([-(1 << 62), 1 << 62])


@pytest.mark.usefixtures("_without_hook")
@many
@given(
    values=st.tuples(A_COMPARISON | st.just(["Dot", {"float": 0}]), A_MASK, A_BIAS, A_MASK),
    integers=st.lists(INTEGERS, min_size=5, max_size=5),
)
def test_any_other_values_load_or_are_refused(
    small: Path, values: tuple[Any, ...], integers: list[int]
) -> None:
    def change(record: Any) -> Any:
        more = {"values": json.dumps(values), "integers": integers}
        more |= {"floats": record["floats"] * 5, "tensors": (record["tensors"] * 3)[:5]}
        return record | more

    path = changed(small, small.with_name("values"), TRACE, change)
    with suppress(RegardError):
        everything(path)
