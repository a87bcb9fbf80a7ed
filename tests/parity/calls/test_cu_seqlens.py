"""Tokens with cu_seqlens on every backend, held to the formula in float64 for each sequence."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.backends.tiled import tiles
from tests.parity import cases
from tests.parity.agreement import Named, assert_as_exact, errors
from tests.parity.test_flex import MISSING

LENGTHS = (3, 19, 0, 1, 14)
KEYS = (4, 19, 2, 9, 33)
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.causal() & masks.window(4)},
    "alibi": {"bias": biases.alibi([0.3, 0.7, 0.1, 0.5])},
    "softcap": {"mask": masks.causal(), "softcap": 1.5},
    "sink": {"mask": masks.causal(), "sink": True},
}
ALIKE = [(name, LENGTHS) for name in OPTIONS]
APART = [(name, KEYS) for name in OPTIONS if name != "alibi"]
each = pytest.mark.parametrize(("name", "keys"), ALIKE + APART, ids=str)


def ends(lengths: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def draw(keys: tuple[int, ...], dtype: torch.dtype, seed: int, device: str = "cpu") -> list[Tensor]:
    """q, k, v and a sink; as wide as PyTorch's kernels want them."""
    source = torch.Generator().manual_seed(seed)
    shapes = [(sum(LENGTHS), 4, 8), (sum(keys), 2, 8), (sum(keys), 2, 8), (4,)]
    drawn = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in shapes]
    return [t.to(torch.float32).to(device, dtype).requires_grad_() for t in drawn]


def named(answers: list[Tensor], learned: list[Tensor], *, gradients: bool) -> Named:
    names = ["out", "lse", "entropy"]
    found = dict(zip(names, answers, strict=False))
    if gradients:
        source = torch.Generator().manual_seed(7)
        pulls = [torch.randn(t.shape, generator=source, dtype=torch.float64).to(t) for t in answers]
        given = torch.autograd.grad(answers, learned, pulls, allow_unused=True)
        for i, (t, grad) in enumerate(zip(learned, given, strict=True)):
            found[f"gradient {i}"] = torch.zeros_like(t) if grad is None else grad
    return {name: t.detach().cpu() for name, t in found.items()}


def alone(name: str, keys: tuple[int, ...], dtype: torch.dtype, seed: int, n: int) -> Named:
    """The formula for one sequence after the other, in a precision."""
    learned = draw(keys, dtype, seed)
    options = OPTIONS[name] | ({"sink": learned[3]} if "sink" in OPTIONS[name] else {})
    q, k, v = learned[:3]
    found: list[list[Tensor]] = []
    for cut in zip(q.split(LENGTHS), k.split(keys), v.split(keys), strict=True):
        t = regard.trace(*(x.transpose(0, 1)[None] for x in cut), **options, backend="reference")
        found.append([x[0].transpose(0, 1) for x in (t.out, t.lse, t.entropy)[:n]])
    answers = [torch.cat(parts) for parts in zip(*found, strict=True)]
    return named(answers, learned, gradients=True)


def check(
    name: str,
    keys: tuple[int, ...],
    backend: str,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    observes = backend not in ("sdpa", "flex")
    gradients = backend != "flex"
    learned = draw(keys, dtype, 0, device)
    options = OPTIONS[name] | ({"sink": learned[3]} if "sink" in OPTIONS[name] else {})
    options |= {"backend": backend, "cu_seqlens": (ends(LENGTHS, device), ends(keys, device))}
    if keys == LENGTHS:
        options["cu_seqlens"] = ends(LENGTHS, device)
    if "bias" in options:
        options["bias"] = options["bias"].to(device)
    if not gradients:
        learned = [t.detach() for t in learned]
    if observes:
        t = regard.trace(*learned[:3], **options)
        answers = [t.out, t.lse, t.entropy]
        assert torch.equal(t.out, regard.attention(*learned[:3], **options))
    else:
        answers = [regard.attention(*learned[:3], **options)]
    got = named(answers, learned, gradients=gradients)
    assert got["out"].shape == (sum(LENGTHS), 4, 8)
    truth = alone(name, keys, torch.float64, 0, len(answers))
    plain = []
    for seed in range(3):
        exact = alone(name, keys, torch.float64, seed, len(answers))
        rough = alone(name, keys, torch.float32, seed, len(answers))
        plain.append(errors({n: rough[n] for n in got}, {n: exact[n] for n in got}))
    assert_as_exact(got, {n: truth[n] for n in got}, plain)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that hold several sequences, and sequences that go through several tiles."""
    monkeypatch.setattr(tiles, "KEY_TILE", 8)
    monkeypatch.setattr(tiles, "LITTLE", 0)
    monkeypatch.setattr(tiles, "LITTLE_IN_TILES", 0)
    for where in ("tiles.tile_size", "forward.tile_size", "plan.fused_size"):
        size = tiles.TileSize(2, 14, 16)
        monkeypatch.setattr(f"regard.backends.tiled.{where}", lambda x, size=size: size)


@pytest.mark.usefixtures("small_tiles")
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tiled(name: str, keys: tuple[int, ...], dtype: torch.dtype) -> None:
    check(name, keys, "tiled", dtype)


@pytest.mark.parametrize(("name", "keys"), [("causal", KEYS), ("alibi", LENGTHS)], ids=str)
def test_reference(name: str, keys: tuple[int, ...]) -> None:
    check(name, keys, "reference")


@pytest.mark.parametrize(
    ("name", "keys"),
    [(n, keys) for n in ("nothing", "causal", "window") for keys in (LENGTHS, KEYS)],
    ids=str,
)
def test_by_pytorch(name: str, keys: tuple[int, ...]) -> None:
    check(name, keys, "sdpa")


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("name", "keys"), [("sink", LENGTHS), ("alibi", LENGTHS), ("window", KEYS)], ids=str
)
def test_kernels(name: str, keys: tuple[int, ...]) -> None:
    check(name, keys, "triton", device=cases.DEVICE)


@pytest.mark.interpreted
def test_kernels_in_inference_mode() -> None:
    """And afterwards with gradients, by what was not made for inference."""
    q, k, v, _ = draw(LENGTHS, torch.float32, 0, cases.DEVICE)
    cu_seqlens = ends(LENGTHS, cases.DEVICE)
    options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "mask": masks.causal()}
    with torch.inference_mode():
        found = regard.attention(q, k, v, **options, backend="triton")
    learned = regard.attention(q, k, v, **options, backend="triton")
    torch.testing.assert_close(found, learned.detach())
    learned.sum().backward()
    assert q.grad is not None


@pytest.mark.compiled
@pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING))
@pytest.mark.parametrize(("name", "keys"), [("causal", LENGTHS), ("window", KEYS)], ids=str)
def test_by_flex_attention(name: str, keys: tuple[int, ...]) -> None:
    with warnings.catch_warnings():
        # The compiler deprecates parts of itself while it works.
        warnings.simplefilter("ignore")
        check(name, keys, "flex")
