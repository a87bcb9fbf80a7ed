"""Devices by name, and this machine measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from regard import RegardError, cost
from regard.cost import this_machine


@pytest.mark.parametrize(
    ("given", "name"),
    [("H100 SXM", "H100 SXM"), ("h100", "H100 SXM"), ("rtx4090", "RTX 4090"), ("l4", "L4"),
     ("a100-80gb", "A100 80GB"), ("xeon 8480+", "Xeon 8480+"), ("L40S", "L40S")],
)  # fmt: skip
def test_names_are_forgiving(given: str, name: str) -> None:
    assert cost.device(given).name == name


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("B300", r"unknown device\n  got: .*'B300'\n  accepted: H200 SXM, H100 SXM"),
        ("", "unknown device"),
        ("SXM", "several devices have that in their name[^$]*accepted: H200 SXM, H100 SXM$"),
    ],
)
def test_names_that_fit_none_or_several_are_refused(given: str, says: str) -> None:
    with pytest.raises(RegardError, match=says):
        cost.device(given)


def test_published_peaks_are_plausible() -> None:
    for d in cost.DEVICES.values():
        assert d.rate("bfloat16") >= d.rate("float32") > 1e12
        assert 100e9 < d.bandwidth < 10e12
        assert 10 < d.ridge("bfloat16") < 500
    assert cost.device("H200").rates == cost.device("H100").rates


def test_what_has_no_rate_of_its_own_is_computed_in_float32_but_float64_is_not() -> None:
    epyc = cost.device("EPYC")
    assert epyc.rate("float16") == epyc.rate("float32")
    with pytest.raises(RegardError, match="no rate is known for float64 on EPYC 9654"):
        epyc.rate("float64")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(this_machine, "SECONDS", 0.01)
    monkeypatch.setitem(this_machine.SIDE, "cpu", 128)
    monkeypatch.setitem(this_machine.COPIED, "cpu", 1 << 20)
    return tmp_path


def test_this_machine_is_measured_kept_and_found(folder: Path) -> None:
    with pytest.raises(RegardError, match=r"not measured yet\n  do: .*regard doctor --measure"):
        cost.device("here")
    told: list[str] = []
    found = this_machine.measure("cpu", progress=told.append)
    assert told[-1] == "copies"
    assert len(told) == 4
    assert set(found.rates) == {"float32", "bfloat16", "float16"}
    assert all(1e6 < rate < 1e15 for rate in found.rates.values())
    assert 1e6 < found.bandwidth < 1e14
    assert this_machine.keep(found) == folder / "regard" / "here.json"
    assert cost.device("here") == found
    assert cost.model("gpt2", 64, device="here").time().seconds > 0


def test_twice_the_time_is_half_the_rate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "_best", lambda run, kind: 0.5)
    found = this_machine.measure("cpu")
    assert found.rates["float32"] == 2 * 128**3 / 0.5
    assert found.bandwidth == 2 * 2**20 / 0.5


def test_types_without_instructions_are_measured_on_small_matrices(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "SECONDS", 1.0)
    monkeypatch.setitem(this_machine.SIDE, "cpu", 1024)
    now, largest = [0.0], dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 0)

    def clock() -> float:
        now[0] += 1e-3
        return now[0]

    def product(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        largest[a.dtype] = max(largest[a.dtype], len(a))
        now[0] += 2 * len(a) ** 3 / (1e8 if a.dtype == torch.bfloat16 else 1e11)

    monkeypatch.setattr(this_machine.time, "perf_counter", clock)
    monkeypatch.setattr(torch, "mm", product)
    found = this_machine.measure("cpu")
    assert list(largest.values()) == [1024, 256, 1024]
    assert found.rates["bfloat16"] == pytest.approx(1e8, rel=0.01)
    assert now[0] < 20


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", json.dumps({"name": "x", "rates": {}, "bandwidth": 1, "memory": None}),
     json.dumps({"name": "x", "rates": {"float32": -1}, "bandwidth": 1, "memory": None})],
)  # fmt: skip
def test_a_damaged_file_asks_to_measure_again(folder: Path, content: str) -> None:
    path = folder / "regard" / "here.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(RegardError, match=r"cannot be read[\s\S]*measure again"):
        cost.device("here")


def test_a_folder_that_cannot_be_written_is_named(folder: Path) -> None:
    (folder / "regard").write_text("in the way")
    with pytest.raises(RegardError, match=r"cannot be kept[\s\S]*XDG_CACHE_HOME"):
        this_machine.keep(cost.device("L4"))


def test_a_file_that_cannot_be_replaced_is_named_and_nothing_is_left(folder: Path) -> None:
    (folder / "regard" / "here.json").mkdir(parents=True)
    with pytest.raises(
        RegardError, match=r"cannot be written[\s\S]*is a folder[\s\S]*XDG_CACHE_HOME"
    ):
        this_machine.keep(cost.device("L4"))
    assert [path.name for path in (folder / "regard").iterdir()] == ["here.json"]
