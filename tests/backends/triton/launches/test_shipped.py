"""Kernels that come compiled: used for exactly what they were compiled for, or not at all."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton

from regard import masks
from regard.backends.triton import arguments
from regard.backends.triton.forward import forward
from regard.backends.triton.launches import shipped
from regard.backends.triton.launches.binaries import Binary
from regard.backends.triton.launches.cuda_driver import Tiling
from regard.backends.triton.launches.launched import collected
from regard.backends.triton.pairs import INTERPRETED
from regard.backends.triton.prepared import prebuild
from regard.backends.triton.prepared.common_calls import call, launches, learn, rows
from regard.backends.triton.questions.key_mass import of_keys
from regard.backends.triton.questions.top_keys import top_keys
from regard.backends.triton.settings.tuning import looking_settings
from regard.inputs import AttentionInputs

ONE = Binary(b"code", "kernel", 4, 1024, ("*", "i32", "map"), (Tiling(3, 9, 2, (1, 1, 64, 64)),))
needs_launches = pytest.mark.skipif(
    INTERPRETED.value, reason="interpreted kernels are not launched"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder in the place of the one that comes along."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    shipped._index.cache_clear()
    yield tmp_path
    shipped._index.cache_clear()


def test_what_is_written_is_found_by_what_it_was_compiled_for(folder: Path) -> None:
    what = shipped.signature("kernel", [(torch.bfloat16, True), None, float], {"D": 64})
    shipped.write(shipped.place_of(90), {what: ONE}, "some compiler")
    assert shipped.find(90, what) == ONE
    assert shipped.find(90, what.replace("64", "128")) is None


def test_other_cards_are_not_given_it(folder: Path) -> None:
    shipped.write(shipped.place_of(90), {"kernel": ONE}, "some compiler")
    assert shipped.find(100, "kernel") is None


def test_what_was_made_of_other_sources_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped.write(shipped.place_of(90), {"kernel": ONE}, "some compiler")
    monkeypatch.setattr(shipped, "sources", lambda: "other")
    assert shipped.find(90, "kernel") is None


def test_every_source_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "one.py").write_text("a = 1")
    monkeypatch.setattr(shipped, "_SOURCES", tmp_path)
    before = shipped.sources.__wrapped__()
    (tmp_path / "deep" / "one.py").write_text("a = 2")
    assert shipped.sources.__wrapped__() != before


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 and then nothing", None])
def test_a_damaged_file_is_as_good_as_none(folder: Path, damage: bytes | None) -> None:
    path = shipped.place_of(90)
    shipped.write(path, {"kernel": ONE}, "some compiler")
    path.write_bytes(path.read_bytes()[:-40] if damage is None else damage)
    assert shipped.find(90, "kernel") is None


def test_the_same_kernels_give_the_same_file(folder: Path) -> None:
    shipped.write(folder / "a.zip", {"b": ONE, "a": ONE}, "some compiler")
    shipped.write(folder / "b.zip", {"a": ONE, "b": ONE}, "some compiler")
    assert (folder / "a.zip").read_bytes() == (folder / "b.zip").read_bytes()


@needs_launches
def test_common_calls_launch_nothing_else() -> None:
    """Lengths, heads and windows that nobody thought of when the kernels were compiled."""
    wanted = launches(90, prebuild.kinds())
    token = arguments.stands_for.set(90)
    try:
        for mask, n, groups in (
            (masks.causal(), 777, 16),
            (masks.causal(offset=0), 4096, 8),
            (masks.window(100), 1500, 16),
            (masks.causal() & masks.window(33), 40_000, 1),
            (None, 130, 4),
        ):
            x = call(torch.bfloat16, 128, n, mask=mask, groups=groups)
            with collected() as made:
                forward(x, statistics=True)
                forward(x, statistics=False)
            told = [kernel.signature_of(given, constants) for kernel, given, constants in made]
            assert [one for one in told if one not in wanted] == []
    finally:
        arguments.stands_for.reset(token)


@needs_launches
@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_training_launches_nothing_else(width: int, statistics: bool) -> None:
    """Of texts that cuDNN attends to, where no statistics are wanted, and of others."""
    wanted = launches(90, prebuild.kinds())
    calls = [
        partial(learn, call(torch.bfloat16, width, n, mask=mask, groups=groups, batch=batch),
                statistics=statistics)
        for n, batch in ((300, 1), (512, 64), (1024, 8), (1600, 2), (4096, 1))
        for groups in (16, 4)
        for mask in (None, masks.causal())
    ]  # fmt: skip
    made = launches(90, calls)
    assert {what.split()[0] for what in made} >= {"queries"}
    assert [what for what in made if what not in wanted] == []


COMPILED: dict[str, Callable[[AttentionInputs], object]] = {
    "forward_tiles": partial(forward, statistics=True),
    "forward_on_hopper": partial(forward, statistics=False),
    "_mass": lambda x: of_keys(x, looking_settings(x), None, torch.zeros(1, dtype=torch.int64)),
    "_top_keys_on_hopper": lambda x: top_keys(x, looking_settings(x), rows(x), 16),
}


@needs_launches
@pytest.mark.compiled
@pytest.mark.parametrize(
    ("name", "n", "mask"),
    [("forward_tiles", 256, masks.causal()), ("forward_on_hopper", 16384, None),
     ("_mass", 2048, masks.causal()), ("_top_keys_on_hopper", 2048, masks.causal())],
)  # fmt: skip
def test_a_compiled_kernel_takes_what_its_binary_says(
    name: str, n: int, mask: masks.Mask | None
) -> None:
    """Compiled for a card that is not there, and asked what it takes. (What is interpreted need not
    compile.)"""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton has no tool that reads binaries")
    wanted = launches(90, [partial(COMPILED[name], call(torch.bfloat16, 64, n, mask=mask))])
    built = prebuild.build(wanted, 90, jobs=2).values()
    assert name in {binary.name for binary in built}
    for binary in built:
        size = {"*": 8, "i64": 8, "map": 128}
        own = [size.get(kind, 4) for kind in binary.takes]
        # Behind them stand what Triton adds: addresses of scratch memory.
        assert _sizes(tool, binary) in [own, [*own, 8], [*own, 8, 8]]


def _sizes(tool: Path, binary: Binary) -> list[int]:
    """Sizes of a binary's parameters, in order."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.code)
        file.flush()
        told = subprocess.run(
            [tool, "-elf", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.findall(r"Ordinal\s*:\s*0x(\w+).*?Size\s*:\s*0x(\w+)", told, re.DOTALL)
    return [size for _, size in sorted((int(at, 16), int(size, 16)) for at, size in found)]
