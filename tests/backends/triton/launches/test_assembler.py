"""Which assembler makes a kernel's binary."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from triton import knobs
from triton.runtime import driver

from regard.backends.triton.arguments import stands_for
from regard.backends.triton.launches import assembler
from regard.backends.triton.launches.launched import Launched
from regard.backends.triton.refusals import why_not
from regard.inputs import check

Install = Callable[[str, str | None], None]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Stand on a card of this compute capability."""

    def stand(capability: int) -> None:
        card = SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=capability))
        monkeypatch.setattr(driver, "_active", card)

    return stand


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Assemblers of these versions, for Hopper and for later cards."""

    def tool(name: str, version: str) -> str:
        path = tmp_path / f"{name}-{version}"
        path.write_text(
            f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'"
        )
        path.chmod(0o755)
        return str(path)

    def put(own: str, later: str | None) -> None:
        monkeypatch.setenv("TRITON_PTXAS_PATH", tool("ptxas", own))
        found = later and SimpleNamespace(path=tool("later", later), version=later)
        monkeypatch.setattr(type(knobs.nvidia), "ptxas_blackwell", found, raising=False)

    return put


def taken() -> str:
    return Path(knobs.nvidia.ptxas.path).name


def test_a_later_assembler_takes_the_place_of_a_faulty_one(
    on: Callable[[int], None], install: Install
) -> None:
    on(90)
    install("12.8", "12.9")
    environment = dict(os.environ)
    with assembler.without_faults() as options:
        assert options
        assert taken() == "later-12.9"
        with assembler.without_faults():
            assert taken() == "later-12.9"
        assert taken() == "later-12.9"
        assert os.environ == environment
    assert taken() == "ptxas-12.8"


def test_binaries_of_the_faulty_one_are_not_found_again(
    on: Callable[[int], None], install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton keeps binaries by what a kernel is compiled with."""
    given: list[dict[str, Any]] = []

    def warmup(*_: Any, **how: Any) -> None:
        given.append(how)

    kernel = SimpleNamespace(fn=lambda: None, warmup=warmup)
    for capability in (80, 90):
        on(capability)
        install("12.8", "12.9")
        Launched(kernel).compiled((), {"D": 24})
    plain, other = given
    assert other != plain
    assert {**plain, **other} == other


def test_it_is_put_back_after_an_error(on: Callable[[int], None], install: Install) -> None:
    on(90)
    install("12.8", "12.9")
    with pytest.raises(ZeroDivisionError), assembler.without_faults():
        1 / 0  # noqa: B018
    assert taken() == "ptxas-12.8"


def test_what_was_set_by_hand_is_put_back(
    on: Callable[[int], None], install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(90)
    install("12.8", "12.9")
    monkeypatch.setitem(vars(knobs.nvidia), "ptxas", os.environ["TRITON_PTXAS_PATH"])
    with assembler.without_faults():
        assert taken() == "later-12.9"
    assert vars(knobs.nvidia)["ptxas"] == os.environ["TRITON_PTXAS_PATH"]


def test_threads_that_compile_side_by_side_all_have_it(
    on: Callable[[int], None], install: Install
) -> None:
    on(90)
    install("12.8", "12.9")

    def compiled(_: int) -> bool:
        with assembler.without_faults():
            return {taken() for _ in range(50)} == {"later-12.9"}

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(compiled, range(200)))
    assert taken() == "ptxas-12.8"


@pytest.mark.parametrize(
    ("capability", "own", "later"),
    [(90, "12.9", "12.9"), (90, "13.0", None), (89, "12.8", "12.9"), (90, "12.8", "12.8")],
)
def test_nothing_is_changed_where_that_would_not_help(
    capability: int, own: str, later: str | None, on: Callable[[int], None], install: Install
) -> None:
    on(capability)
    install(own, later)
    with assembler.without_faults() as options:
        assert not options
        assert taken() == f"ptxas-{own}"


@pytest.mark.parametrize(
    ("capability", "own", "later", "values", "dtype", "refused"),
    [
        (90, "12.8", None, 10, torch.bfloat16, True),
        (90, "12.8", "12.8", 10, torch.float16, True),
        (90, "12.8", "12.9", 10, torch.bfloat16, False),
        (90, "12.9", None, 10, torch.bfloat16, False),
        (90, "12.8", None, 16, torch.bfloat16, False),
        (90, "12.8", None, 10, torch.float32, False),
        (80, "12.8", None, 10, torch.bfloat16, False),
    ],
)
def test_without_another_what_may_be_spoilt_is_refused(
    capability: int,
    own: str,
    later: str | None,
    values: int,
    dtype: torch.dtype,
    refused: bool,
    install: Install,
) -> None:
    install(own, later)
    q, k = (torch.empty(1, 2, 37, 24, dtype=dtype, device="meta") for _ in range(2))
    v = torch.empty(1, 2, 37, values, dtype=dtype, device="meta")
    x = check(
        q, k, v, mask=None, score=None, bias=None, softcap=None, sink=None, scale=None, dropout=0.0,
        training=False,
    )  # fmt: skip
    assembler.is_faulty.cache_clear()
    token = stands_for.set(capability)
    try:
        assert any("ptxas" in reason for reason in why_not(x)) == refused
    finally:
        stands_for.reset(token)
        assembler.is_faulty.cache_clear()
