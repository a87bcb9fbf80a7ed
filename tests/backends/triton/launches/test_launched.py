"""Launches: compiled for what changes a kernel's code and for nothing else, and with every
parameter in its place."""

from __future__ import annotations

import struct
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton.language as tl

from regard.backends.triton.launches import cuda_driver
from regard.backends.triton.launches import launched as launching
from regard.backends.triton.launches.binaries import MAP, Binary, MapOf, layout
from regard.backends.triton.launches.binaries import Loaded as OnCard
from regard.backends.triton.launches.cuda_driver import Parameter, Tiling
from regard.backends.triton.launches.launched import Directly, Launched, One, recorded, together
from regard.errors import RegardError
from tests.test_progress import Heard


class Two(NamedTuple):
    ptr: Any
    row: Any


class Kernel:
    """A kernel that remembers for what Triton compiled it."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []

    @staticmethod
    def fn(pair: Any, scale: Any, n: Any, SIDE: Any, FLAG: Any) -> None: ...

    def warmup(self, *arguments: Any, grid: Any, **constants: Any) -> int:
        self.compiled.append(arguments)
        return len(self.compiled)


class Told(NamedTuple):
    """A binary, as far as it is looked at."""

    tilings: tuple[Any, ...] = ()


class Loaded:
    """A kernel on a card, and what it is launched with."""

    def __init__(self, compiled: int, launches: list[tuple[Any, ...]]) -> None:
        self.compiled, self.launches, self.binary = compiled, launches, Told()

    def __call__(self, grid: Any, stream: int, values: list[Any]) -> None:
        self.launches.append((self.compiled, grid, values))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """All that is launched: which kernel, on which grid, with which parameters."""
    found: list[tuple[Any, ...]] = []

    def loaded(compiled: int, names: tuple[str, ...], one: One) -> Directly:
        return Directly(Loaded(compiled, found))  # type: ignore[arg-type]

    class NoDevice:
        def __init__(self, device: int) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *how: object) -> None: ...

    monkeypatch.setattr(launching, "_loaded", loaded)
    monkeypatch.setattr(launching, "current_stream", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", NoDevice)
    return found


def launch(
    launched: Launched, t: Tensor, row: Any = 16, scale: float = 0.5, n: Any = 7,
    flag: bool = False,
) -> None:  # fmt: skip
    launched[3, 2](Two(t, row), scale, n, FLAG=flag, SIDE=64, num_warps=4)


def test_all_a_kernel_takes_comes_in_order(launches: list[tuple[Any, ...]]) -> None:
    t = torch.zeros(4)
    launch(Launched(Kernel()), t, n=1, scale=0.25)
    assert launches == [(1, (3, 2, 1), [t.data_ptr(), 16, 0.25, 1])]


@pytest.mark.parametrize(
    "other",
    [{"n": 8}, {"n": 1}, {"n": 16}, {"n": -5}, {"row": 32}, {"row": 0}, {"scale": 2.0},
     {"t": torch.ones(9)}],
    ids=str,
)  # fmt: skip
def test_no_number_compiles_anew(launches: list[tuple[Any, ...]], other: dict[str, Any]) -> None:
    kernel = Kernel()
    launched = Launched(kernel)
    launch(launched, torch.zeros(4))
    launch(launched, **({"t": torch.zeros(4)} | other))
    assert len(kernel.compiled) == 1
    assert [one[0] for one in launches] == [1, 1]
    pair, _, n = kernel.compiled[0]
    assert (pair.row, n) == (16, 7)


@pytest.mark.parametrize(
    "other",
    [{"row": 17}, {"row": 1}, {"row": None}, {"row": 1 << 40}, {"n": 1 << 40},
     {"n": tl.constexpr(7)}, {"flag": True}, {"t": torch.zeros(4, dtype=torch.float16)},
     {"t": torch.zeros(5)[1:]}],
    ids=str,
)  # fmt: skip
def test_what_changes_the_code_does(launches: list[tuple[Any, ...]], other: dict[str, Any]) -> None:
    kernel = Kernel()
    launched = Launched(kernel)
    launch(launched, torch.zeros(4))
    launch(launched, **({"t": torch.zeros(4)} | other))
    assert len(kernel.compiled) == 2
    assert [one[0] for one in launches] == [1, 2]


def test_a_long_number_stays_long_for_the_compiler(launches: list[tuple[Any, ...]]) -> None:
    kernel = Kernel()
    launch(Launched(kernel), torch.zeros(4), row=1 << 40, n=(1 << 40) + 1)
    ((pair, _, n),) = kernel.compiled
    assert pair.row > 2**31
    assert pair.row % 16 == 0
    assert n > 2**31
    assert n % 16


def test_another_card_has_its_own(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Kernel()
    launched = Launched(kernel)
    launch(launched, torch.zeros(4))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(launched, torch.zeros(4))
    assert len(kernel.compiled) == 2


def test_kernels_are_launched_in_order_once_all_are_compiled(
    launches: list[tuple[Any, ...]],
) -> None:
    one, two = Launched(Kernel()), Launched(Kernel())
    launch(two, torch.zeros(4))
    launches.clear()
    with together():
        launch(one, torch.zeros(4), n=1)
        # It is compiled, but comes after one that is not.
        launch(two, torch.zeros(4), n=2)
        assert launches == []
    assert [values[-1] for _, _, values in launches] == [1, 2]


def test_what_fails_to_compile_says_so_and_launches_nothing(
    launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ValueError("no such instruction")

    kernel = Kernel()
    monkeypatch.setattr(kernel, "warmup", broken)
    with pytest.raises(ValueError, match="no such instruction"), together():
        launch(Launched(kernel), torch.zeros(4))
    assert launches == []
    launch(Launched(Kernel()), torch.zeros(4))
    assert len(launches) == 1


def test_launches_are_recorded_where_that_is_asked_for(launches: list[tuple[Any, ...]]) -> None:
    launched = Launched(Kernel())
    with recorded() as found:
        launch(launched, torch.zeros(4))
    launch(launched, torch.zeros(4))
    assert [one.grid for _, one in found] == [(3, 2, 1)]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_compilation_is_told_to_people_alone(
    terminal: bool, launches: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Future[int]):
        def result(self, timeout: float | None = None) -> int:
            import time

            time.sleep(0.2)
            return 1

    class Compilers:
        def submit(self, *_: Any) -> Late:
            return Late()

    monkeypatch.setattr(launching, "SLOW", 0.05)
    monkeypatch.setattr(launching, "_compilers", Compilers)
    heard = Heard(monkeypatch, terminal=terminal)
    launch(Launched(Kernel()), torch.zeros(4))
    assert heard.text().count("regard: compiling the kernel fn") == terminal


def test_parameters_are_written_where_the_binary_has_them() -> None:
    given = [Parameter(0, 8), Parameter(8, 4), Parameter(64, 128), Parameter(192, 4),
             Parameter(200, 8), Parameter(208, 8)]  # fmt: skip
    form = layout(["*", "i32", MAP, "fp32"], given)
    assert form is not None
    written = form.pack(5, -7, b"m" * 128, 0.5)
    assert len(written) == 216
    assert written[:12] == struct.pack("<Qi", 5, -7)
    assert written[64:192] == b"m" * 128
    assert written[192:196] == struct.pack("<f", 0.5)
    assert written[196:] == bytes(20)


def test_what_stays_is_packed_once() -> None:
    """And addresses are written where they were, also that at the beginning of a tensor map."""
    given = [Parameter(0, 8), Parameter(8, 4), Parameter(16, 8), Parameter(64, 128),
             Parameter(192, 4), Parameter(200, 8)]  # fmt: skip
    takes = ("*", "i32", "*", MAP, "fp32")
    form = layout(takes, given)
    assert form is not None
    offsets = tuple(place.offset for place in given)
    loaded = OnCard(Binary(b"", "kernel", 4, 0, takes, ()), 1, form, offsets)
    described = (77).to_bytes(8, "little") + b"m" * 120
    held, values, places = loaded.holding([5, -7, 6, described, 0.5], [0, 2, 3])
    for place, address in zip(places, (1 << 40, 3, 1 << 47), strict=True):
        values[place] = address
    there = (1 << 47).to_bytes(8, "little") + b"m" * 120
    assert held.form.pack(*values) == form.pack(1 << 40, -7, 3, there, 0.5)
    assert (held.function, held.threads) == (loaded.function, loaded.threads)


@pytest.mark.parametrize(
    "given",
    [[Parameter(0, 8)],
     [Parameter(0, 8), Parameter(8, 8)],
     [Parameter(0, 8), Parameter(8, 4), Parameter(16, 4)],
     [Parameter(0, 8), Parameter(4, 4)],
     [Parameter(0, 8), Parameter(8, 4), *(Parameter(16 + 8 * i, 8) for i in range(3))]],
    ids=["too few", "another size", "more that is no address", "one in another", "too many"],
)  # fmt: skip
def test_a_binary_that_takes_something_else_is_refused(given: list[Parameter]) -> None:
    assert layout(["*", "i32"], given) is None


TILING = Tiling(3, 9, 2, (1, 1, 64, 64))


@pytest.mark.parametrize("kind", ["address in front", "address behind", "no such address"])
def test_maps_of_tensors_alike_differ_by_their_address(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where they do not, or the driver looks at addresses, each is made by the driver."""
    asked = []

    def tensor_map(address: int, tiling: Tiling, shape: Any, strides: Any) -> bytes:
        asked.append(address)
        told, rest = address.to_bytes(8, "little"), repr((tiling, shape, strides)).encode()
        if kind == "no such address" and address != 4096:
            raise RegardError("CUDA could not describe a tensor to a kernel")
        return rest + told if kind == "address behind" else told + rest

    monkeypatch.setattr(cuda_driver, "tensor_map", tensor_map)
    shape, strides = (1, 2, 64, 64), (8192, 4096, 64, 1)
    alike = MapOf(TILING, shape, strides)
    asked.clear()
    for _ in range(2):
        assert alike.at(4096) == tensor_map(4096, TILING, shape, strides)
    assert len(asked) == (2 if kind == "address in front" else 4)
