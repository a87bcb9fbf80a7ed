"""Maps of words over pictures: against n×n code, and counts of what was drawn."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import interpret
from regard.errors import RegardError
from regard.interpret.word_maps.common_grid import resized
from regard.interpret.word_maps.components import labelled
from regard.interpret.word_maps.counts import counted
from regard.interpret.word_maps.prompt_words import asked_number, words_of

PROMPT = ["<s>", "three</w>", "red</w>", "cir", "cles</w>", "<e>", "<e>"]


class Painter(nn.Module):
    """Two layers of cross-attention, the second at half the resolution, and self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(16, 2, batch_first=True)
        self.fine, self.coarse = (regard.nn.MultiHeadAttention(16, 4) for _ in "fc")

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        x = x + self.own(x, x, x, need_weights=False)[0]
        x = x + self.fine(x, words)
        small = x.unflatten(1, (4, 2, 6, 2)).mean((2, 4)).flatten(1, 2)
        return x.mean(1) + self.coarse(small, words).mean(1)


def by_hand(attention: Any, x: Tensor, words: Tensor) -> Tensor:
    """The weights of a layer, [b, h, q, k], as the formula has them."""
    q, k = (
        project(t).unflatten(-1, (4, 4)).transpose(1, 2)
        for project, t in ((attention.q_proj, x), (attention.k_proj, words))
    )
    return (q @ k.mT / 2).softmax(-1)


def test_maps_are_the_columns_of_the_weights_averaged_on_one_grid() -> None:
    torch.manual_seed(0)
    model, words = Painter().eval(), torch.randn(2, 7, 16)
    xs = [torch.randn(2, 8 * 12, 16) for _ in range(3)]
    with torch.no_grad():
        plain = [model(x, words) for x in xs]
        with interpret.grounding(model, PROMPT, grid=(8, 12)) as look:
            watched = [model(x, words) for x in xs]
        expected = torch.zeros(2, 8, 12)
        for x in xs:
            x = x + model.own(x, x, x, need_weights=False)[0]
            fine = by_hand(model.fine, x, words)[1].mean(0)
            x = x + model.fine(x, words)
            small = x.unflatten(1, (4, 2, 6, 2)).mean((2, 4)).flatten(1, 2)
            coarse = by_hand(model.coarse, small, words)[1].mean(0)
            large = coarse.unflatten(0, (4, 6)).repeat_interleave(2, 0).repeat_interleave(2, 1)
            for n, places in enumerate(([2], [3, 4])):
                expected[n] += fine.unflatten(0, (8, 12))[..., places].sum(-1) / 6
                expected[n] += large[..., places].sum(-1) / 6
    found = look.found
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, watched, strict=True))
    assert found.words == ("three", "red", "circles")
    assert found.layers == ("fine", "coarse")
    assert found.steps == (0, 1, 2)
    assert torch.allclose(found.map("red")[0], expected[0], atol=1e-5)
    assert torch.allclose(found.map("circles")[0], expected[1], atol=1e-5)


def test_axes_that_are_kept_average_to_the_whole_and_subsets_are_theirs() -> None:
    torch.manual_seed(0)
    model, words = Painter().eval(), torch.randn(2, 7, 16)
    xs = [torch.randn(2, 8 * 12, 16) for _ in range(4)]
    keep = ["heads", "batch", "layers", "steps"]
    how: dict[str, Any] = {"grid": (8, 12), "layers": ["fine", "coarse"]}
    with (
        torch.no_grad(),
        regard.watch(model, keep="traces") as seen,
        interpret.grounding(model, PROMPT, "circles", keep=keep, **how) as look,
    ):
        for x in xs:
            model(x, words)
    every = look.found
    assert every.axes == ("batch", "steps", "layers", "heads")
    assert every.maps.shape == (1, 2, 4, 2, 4, 1, 8, 12)
    of = interpret.grounding(
        seen, PROMPT, "circles", batch=0, heads=[1, 3], steps=slice(1, 3), **how
    )
    part = every.maps[:, 0, 1:3][..., [1, 3], :, :, :].mean((1, 2, 3))
    assert torch.allclose(of.maps, part, atol=1e-6)
    one = every.at(batch=1, steps=-1, layers=0, heads=2)
    assert torch.equal(one.maps, every.maps[:, 1, 3, 0, 2])
    assert (one.layers, one.steps) == (("fine",), (3,))
    second = interpret.grounding(seen, PROMPT, "circles", passes=2, which=1, keep="steps", **how)
    assert second.steps == (0, 1)
    assert torch.allclose(second.at(steps=1).maps, every.maps[:, 1, 3].mean((1, 2)), atol=1e-6)


@pytest.mark.parametrize("text", ["first", "last"])
def test_words_and_a_film_in_one_sequence(text: Any) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = torch.randn(1, 7 + 3 * 2 * 4, 8)
    with torch.no_grad():
        plain, weights = model(x, x, x, average_attn_weights=False)
        with interpret.grounding(model, PROMPT, text=text, grid=(4, 8), frames=3) as look:
            out, _ = model(x, x, x, average_attn_weights=False)
    picture, first = (slice(7, None), 0) if text == "first" else (slice(24), 24)
    columns = weights[0, :, picture, [first + 3, first + 4]].sum(-1).mean(0)
    expected = columns.reshape(3, 2, 4).repeat_interleave(2, 1).repeat_interleave(2, 2)
    assert torch.equal(out, plain)
    assert torch.allclose(look.found.map("circles"), expected, atol=1e-6)
    assert look.found.grid == (3, 4, 8)


class Fused(nn.Module):
    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        x = x + nn.functional.scaled_dot_product_attention(x, x, x)
        return x + nn.functional.scaled_dot_product_attention(x, words, words)


def test_pytorch_s_outputs_are_kept_to_the_last_bit_and_only_what_fits_is_traced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, x, memory = Fused(), torch.randn(1, 2, 81, 16), torch.randn(1, 2, 7, 16)
    traced: list[tuple[int, int]] = []
    original = regard.calls.dispatch.trace
    from regard.watching.pytorch import attention_mode

    def note(q: Tensor, k: Tensor, *others: Any, **more: Any) -> Any:
        traced.append((q.shape[-2], k.shape[-2]))
        return original(q, k, *others, **more)

    monkeypatch.setattr(attention_mode.dispatch, "trace", note)
    with torch.no_grad():
        plain = model(x, memory)
        with interpret.grounding(model, PROMPT) as look:
            out = model(x, memory)
    assert torch.equal(plain, out)
    assert traced == [(81, 7)]
    assert look.found.layers == ("",)


@torch.no_grad()
def made(model: nn.Module, run: Callable[[], Any], *args: Any, **how: Any) -> Any:
    with interpret.grounding(model, *args, **how) as look:
        run()
    return look.found


def test_what_cannot_be_a_map_is_refused_after_the_run_not_in_it() -> None:
    model = Painter().eval()
    x, words = torch.randn(1, 96, 16), torch.randn(1, 7, 16)
    for how, says in (
        ({}, "the tokens of a layer are not those of such a picture"),
        ({"layers": "own"}, "does not attend from the picture to the words"),
        ({"grid": (8, 12), "passes": 2, "which": 2}, "passes= counts the forward passes"),
        ({"grid": (8, 12), "heads": 9}, "no such head"),
        ({"grid": (8, 12), "steps": 5}, "nothing was seen yet"),
    ):
        ran = []
        with pytest.raises(RegardError, match=says):
            made(model, lambda ran=ran: ran.append(model(x, words)), PROMPT, **how)
        assert ran or "passes" in how
    with pytest.raises(RegardError, match="96 queries over 7 keys"):
        made(model, lambda: model(x, words), [*PROMPT, "more"])
    square = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    y = torch.randn(1, 9, 8)
    with pytest.raises(RegardError, match="cannot be told from self-attention"):
        made(square, lambda: square(y, y, y, need_weights=False), [*PROMPT, "a", "b"])


@pytest.mark.parametrize("how", ["area", "bilinear"])
@pytest.mark.parametrize("size", [(4, 6), (8, 8), (5, 7), (64, 96)])
def test_resizing_keeps_the_mean_and_what_is_the_same_everywhere(how: Any, size: Any) -> None:
    torch.manual_seed(0)
    maps = torch.rand(3, 8, 12, dtype=torch.float64)
    made = resized(maps, size, how)
    assert torch.allclose(made.mean((1, 2)), maps.mean((1, 2)))
    assert torch.allclose(resized(torch.ones(8, 12), size, how), torch.ones(size))
    if how == "area" and size == (4, 6):
        assert torch.allclose(made, maps.unflatten(1, (4, 2)).unflatten(3, (6, 2)).mean((2, 4)))


def flooded(inside: Tensor, corners: bool) -> int:
    """How many regions there are, cell by cell."""
    left = {tuple(cell) for cell in inside.nonzero().tolist()}
    regions = 0
    while left:
        regions += 1
        queue = deque([left.pop()])
        while queue:
            cell = queue.popleft()
            near = [
                other
                for other in left
                if max(abs(a - b) for a, b in zip(cell, other, strict=True)) == 1
                and (corners or sum(abs(a - b) for a, b in zip(cell, other, strict=True)) == 1)
            ]
            left -= set(near)
            queue += near
    return regions


@pytest.mark.parametrize("connected", [4, 8])
def test_regions_are_those_of_a_flood(connected: Any) -> None:
    torch.manual_seed(0)
    grids = (
        torch.rand(6, 3, 9, 11) < torch.tensor([0.1, 0.3, 0.4, 0.5, 0.6, 1.0])[:, None, None, None]
    )
    spiral = torch.zeros(3, 9, 11, dtype=torch.bool)
    spiral[0, 0], spiral[0, :, 10], spiral[0, 8], spiral[0, 2:, 0], spiral[0, 2, :8] = (True,) * 5
    for grid in (*grids, spiral):
        labels = labelled(grid, connected)
        assert len(labels[labels > 0].unique()) == flooded(grid, connected == 8)
        assert torch.equal(labels > 0, grid)


def blobs(places: list[tuple[float, float]], side: int = 32, width: float = 1.6) -> Tensor:
    at = torch.arange(side, dtype=torch.float64)
    made = torch.zeros(side, side, dtype=torch.float64)
    for row, column in places:
        made += torch.exp(-((at[:, None] - row) ** 2 + (at[None] - column) ** 2) / (2 * width**2))
    return made


@pytest.mark.parametrize("n", range(1, 13))
def test_blobs_are_counted_with_noise_on_them(n: int) -> None:
    torch.manual_seed(n)
    places = [(4.0 + 8 * (i // 4), 4.0 + 8 * (i % 4)) for i in range(12)]
    map = blobs(places[:n]) + 0.12 * torch.rand(32, 32) + 0.4
    for by in ("components", "peaks"):
        found = counted(map[None], asked=n, by=by, distance=4)  # type: ignore[arg-type]
        assert found.found == n
        assert found.agrees
        assert found.stable is not None
        assert found.stable.count == n
        assert found.asked_span is not None
        assert found.asked_span.high - found.asked_span.low > 0.3
        spots = {(round((s.row - 4) / 8), round((s.column - 4) / 8)) for s in found.objects}
        assert spots == {(i // 4, i % 4) for i in range(n)}
    assert counted(map[None], asked=n + 1).agrees is False


def test_blobs_that_touch_come_apart_at_a_higher_threshold_and_by_their_peaks() -> None:
    map = blobs([(16, 11), (16, 16), (16, 21)])[None]
    low = counted(map, asked=3, threshold=0.3)
    assert low.found == 1
    assert low.asked_span is not None
    assert low.asked_span.low > 0.3
    assert counted(map, asked=3, threshold=low.asked_span.low).found == 3
    assert counted(map, threshold=0.3, by="peaks", distance=3).found == 3
    assert counted(map, threshold=0.3, by="peaks", distance=9).found == 1
    corners = torch.eye(4)[None]
    assert counted(corners, connected=4).found == 4
    assert counted(corners, connected=8).found == 1
    assert counted(corners, connected=4, smallest=2).found == 0


def test_objects_are_followed_through_frames_or_counted_in_each() -> None:
    film = torch.stack([blobs([(6, 6 + 2 * t), (20, 24 - 2 * t)]) for t in range(5)])
    film[4] = blobs([(6, 14)])
    each, together = counted(film), counted(film, frames="together")
    assert each.each_frame == (2, 2, 2, 2, 1)
    assert each.found == 2
    assert [spot.frame for spot in each.objects] == [0, 0, 1, 1, 2, 2, 3, 3, 4]
    assert together.found == 2
    film[2] = blobs([(6, 10)])
    assert counted(film, frames="together").found == 3
    assert counted(torch.ones(2, 4, 4)).found == 0


def test_words_of_prompts_and_the_numbers_they_ask_for() -> None:
    assert words_of(["<s>", "Ġtwo", "Ġcat", "s", ",", "Ġand", "Ġcat", "s", "[PAD]"]) == {
        "two": (1,), "cats": (2, 3), "and": (5,), "cats (2)": (6, 7),
    }  # fmt: skip
    said = ["a", "photo", "of", "twelve", "small", "brown", "dogs", "and", "4", "cats", "birds"]
    assert asked_number(said, "dogs") == 12
    assert asked_number(said, "cats") == 4
    assert asked_number(said, "photo") is None
    with pytest.raises(RegardError, match="words= names words of the prompt"):
        interpret.grounding(nn.Identity(), PROMPT, "squares")
    with pytest.raises(RegardError, match="0 to 6"):
        interpret.grounding(nn.Identity(), PROMPT, {"it": [7]})


def test_what_was_found_is_a_table_and_records() -> None:
    maps = torch.stack([torch.ones(1, 32, 32).double(), blobs([(8, 8), (24, 24)])[None]])
    found = interpret.Grounding(
        ("three", "circles"), maps, (), ("a",), (0,), ("three", "red", "circles")
    )
    assert repr(found).splitlines()[2].split()[:5] == ["circles", "0.031", "1.000", "3", "2"]
    assert "never" in repr(found)
    assert "<td" in found._repr_html_()
    first, second = found.records()
    assert (first["found"], first["asked"], first["stable"]) == (0, None, None)
    assert (second["found"], second["asked"], second["agrees"]) == (2, 3, False)
    assert math.isclose(second["share"], float(maps[1].mean()))
    assert second["objects"][0]["row"] in (8, 24)
    assert found.count("circles", asked=2).agrees
