"""Launches that are remembered: with what Triton compiled for the same arguments, and no other."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl

from regard.backends.triton import launching
from regard.backends.triton.launching import Launched


class Two(NamedTuple):
    ptr: Any
    stride: Any


class Compiled:
    """What Triton gives back from a launch: it can be launched itself."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launches.append((grid, *args))


class Kernel:
    """A kernel that counts how often Triton is asked."""

    def __init__(self) -> None:
        self.asked: list[Compiled] = []

    @staticmethod
    def fn(pair: Any, scale: Any, n: Any, SIDE: Any, FLAG: Any) -> None: ...

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **constants: Any) -> Compiled:
            self.asked.append(Compiled())
            return self.asked[-1]

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def launch(
    launched: Launched, t: torch.Tensor, stride: Any = 16, scale: float = 0.5, n: Any = 7,
    flag: bool = False,
) -> None:  # fmt: skip
    launched[3, 2](Two(t, stride), scale, n, FLAG=flag, SIDE=64, num_warps=4)


def test_the_same_again_goes_past_triton_with_every_argument_in_its_place(kernel: Kernel) -> None:
    launched, t, u = Launched(kernel), torch.zeros(4), torch.ones(4)
    launch(launched, t)
    launch(launched, u, scale=0.25)
    (compiled,) = kernel.asked
    assert compiled.launches == [((3, 2, 1), Two(u, 16), 0.25, 7, 64, False)]


@pytest.mark.parametrize(
    "other",
    [
        {"stride": 17},
        {"stride": 1},
        {"stride": None},
        {"n": 8},
        {"n": tl.constexpr(7)},
        {"flag": True},
        {"t": torch.zeros(4, dtype=torch.float16)},
        {"t": torch.zeros(5)[1:]},
    ],
    ids=str,
)
def test_what_triton_may_compile_for_is_asked_anew(kernel: Kernel, other: dict[str, Any]) -> None:
    launched = Launched(kernel)
    launch(launched, torch.zeros(4))
    launch(launched, **({"t": torch.zeros(4)} | other))
    assert len(kernel.asked) == 2
    assert not kernel.asked[0].launches


def test_another_card_has_its_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launched(kernel)
    launch(launched, torch.zeros(4))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(launched, torch.zeros(4))
    assert len(kernel.asked) == 2


def test_no_more_is_remembered_than_there_is_room(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "ROOM", 2)
    launched = Launched(kernel)
    for n in (2, 3, 4, 2):
        launch(launched, torch.zeros(4), n=n)
    assert len(kernel.asked) == 4
    launch(launched, torch.zeros(4), n=2)
    assert len(kernel.asked) == 4
