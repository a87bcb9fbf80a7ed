"""Tiles against the exact weights."""

from __future__ import annotations

import json
import struct

import pytest
import torch

import regard
from regard import masks
from regard.seen import Layer, Seen
from regard.view.atlas import Atlas, Map, tiles
from regard.view.atlas.tiles import CancelledError, decoded, halves, levels, tile


def a_map(
    q: int = 700, k: int | None = None, mask: masks.Mask | None = None, heads: int = 2
) -> Map:
    torch.manual_seed(q)
    queries = torch.randn(1, heads, q, 8) * 2
    keys = torch.randn(1, heads, k or q, 8)
    return Atlas.of(regard.trace(queries, keys, keys, mask=mask))[0]


def exact(of: Map, head: int) -> torch.Tensor:
    return of.traces[0].weights(heads=[head])[0, 0]


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() & masks.window(37)])
@pytest.mark.parametrize(("q", "k"), [(700, 700), (1, 300), (513, 257), (63, 1000)])
def test_every_tile_pools_the_exact_weights(q: int, k: int, mask: masks.Mask | None) -> None:
    of = a_map(q, k, mask)
    p = exact(of, 1)
    for level in range(levels(q, k) + 1):
        cell = 1 << level
        for row in range(-(-q // (256 * cell))):
            for column in range(-(-k // (256 * cell))):
                found = decoded(tile(of, 1, level, row, column))
                part = p[
                    row * 256 * cell : (row + 1) * 256 * cell,
                    column * 256 * cell : (column + 1) * 256 * cell,
                ]
                assert found.read == 0
                for r, c in ((0, 0), (-1, -1), (found.mean.shape[0] // 2, 0)):
                    r, c = r % found.mean.shape[0], c % found.mean.shape[1]
                    inside = part[r * cell : (r + 1) * cell, c * cell : (c + 1) * cell]
                    near = {"rtol": 0.03 if level else 1e-3, "atol": part.max().item() * 1e-6}
                    torch.testing.assert_close(found.mean[r, c], inside.mean(), **near)
                    torch.testing.assert_close(found.most[r, c], inside.max(), **near)


def test_the_mean_of_all_cells_is_that_of_the_map() -> None:
    of = a_map(700, mask=masks.causal())
    mean, _ = tiles.pooled(of, 0, range(700), range(700), 4)
    torch.testing.assert_close(mean.sum() * 16, torch.tensor(700.0))


def test_a_draft_says_how_many_rows_it_read_and_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    of = a_map(2048, mask=masks.causal())
    truth = decoded(tile(of, 0, 3, 0, 0))
    assert truth.read == 0
    monkeypatch.setattr(tiles, "PAIRS", 1 << 20)
    draft = decoded(tile(of, 0, 3, 0, 0))
    assert draft.read == 2
    assert (draft.most <= 1.06 * truth.most).all()
    assert draft.mean.mean() == pytest.approx(truth.mean.mean().item(), rel=0.1)
    again = decoded(tile(of, 0, 3, 0, 0, exact=True))
    assert again.read == 0
    assert torch.equal(again.mean, truth.mean)


def test_a_draft_of_a_tile_reads_few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    of = a_map(1024)
    asked = 0
    weights = of.weights

    def counted(head: int, queries: range, keys: range, *rest: object) -> torch.Tensor:
        nonlocal asked
        asked += len(queries) * len(keys)
        return weights(head, queries, keys, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(of, "weights", counted)
    monkeypatch.setattr(tiles, "PAIRS", 1 << 19)
    assert decoded(tile(of, 0, 2, 0, 0)).read == 2
    assert asked == 1 << 19


def test_what_the_mask_hides_is_not_computed() -> None:
    of = a_map(1024, mask=masks.causal() & masks.window(10))
    assert of.span(range(512, 520), range(1024)) == range(496, 528)
    assert not of.span(range(0, 8), range(512, 1024))
    assert len(tile(of, 0, 0, 0, 3)) == tiles.HEADER.size


def test_a_tile_can_be_cancelled_between_bands() -> None:
    of = a_map(1024)
    told: list[float] = []

    def go(done: float) -> bool:
        told.append(done)
        return len(told) < 2

    old = tiles.CHUNK
    tiles.CHUNK = 1 << 16
    try:
        with pytest.raises(CancelledError):
            tile(of, 0, 2, 0, 0, exact=True, go=go)
    finally:
        tiles.CHUNK = old
    assert len(told) == 2
    assert 0 < told[1] < 1


def test_values_are_weighed_by_their_length() -> None:
    torch.manual_seed(0)
    q, v = torch.randn(1, 1, 40, 8), torch.randn(1, 1, 40, 8)
    t = regard.trace(q, q, v)
    of = Atlas.of(t)[0]
    length = v[0, 0].norm(dim=-1)
    expected = t.weights()[0, 0] * (length / length.mean())
    found = decoded(tile(of, 0, 0, 0, 0, quantity="value")).mean
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_the_steps_of_generating_are_one_map() -> None:
    torch.manual_seed(0)
    k = torch.randn(1, 2, 9, 4)
    parts = [(0, 6), (6, 7), (7, 8), (8, 9)]
    layer = regard.seen.Layer("attn")
    for step, (start, stop) in enumerate(parts):
        t = regard.trace(k[:, :, start:stop], k[:, :, :stop], k[:, :, :stop], mask=masks.causal())
        layer.take(t, step, step, keep=True)
    seen = regard.seen.Seen("toy")
    seen._layers["attn"] = layer
    of = Atlas.of(seen, tokens=list("abcdefghi"))[0]
    assert of.shape == (2, 9, 9)
    assert of.describe()["starts"] == [0, 6, 7, 8]
    whole = regard.trace(k, k, k, mask=masks.causal())
    found = decoded(tile(of, 1, 0, 0, 0)).mean
    torch.testing.assert_close(found, whole.weights()[0, 1], rtol=1e-3, atol=1e-6)
    assert of.visible.tolist() == [*range(1, 10)]
    torch.testing.assert_close(of.largest(1), whole.weights()[0, 1].amax(-1))
    again = Atlas.of(whole)[0].statistics()
    joined = of.statistics()
    for name in again:
        torch.testing.assert_close(
            torch.tensor(joined[name]), torch.tensor(again[name]), rtol=1e-3, atol=1e-4
        )


def test_statistics_are_means_of_exact_weights() -> None:
    of = a_map(300, mask=masks.causal())
    found = of.statistics()
    for head in range(2):
        p = exact(of, head)
        for name, mean in (
            ("first", p[:, 0].mean()),
            ("self", p.diagonal().mean()),
            ("previous", p.diagonal(-1).sum() / 300),
        ):
            assert found[name][head] == pytest.approx(mean.item(), abs=2e-5)
    assert "self" not in a_map(30, 70).statistics()


def test_the_index_is_json_and_knows_tokens() -> None:
    x = torch.randn(1, 4, 3, 8)
    t = regard.trace(x, x[:, :2], x[:, :2])
    index = Atlas.of(t, tokens=["<script>", "\x00", "é"]).index()
    again = json.loads(json.dumps(index))
    (one,) = again["maps"]
    assert (one["heads"], one["keyHeads"], one["queryText"], one["keyText"]) == (4, 2, 0, 0)
    assert again["texts"] == [["<script>", "\x00", "é"]]


def test_rows_that_see_nothing_and_numbers_out_of_range_are_drawn() -> None:
    k = torch.randn(1, 1, 300, 4)
    t = regard.trace(k, k, k, mask=masks.padding(torch.tensor([0])))
    of = Atlas.of(t)[0]
    assert not decoded(tile(of, 0, 0, 0, 0)).mean.any()
    assert not decoded(tile(of, 0, 1, 0, 0)).mean.any()
    assert of.largest(0).tolist() == [0.0] * 300


def test_in_sixteen_bits_only_zero_is_zero() -> None:
    values = torch.tensor([0.0, 1e-30, 1e-9, 2.0**-24, 3e-4, 1.0])
    half = halves(values)
    assert half.dtype == torch.float16
    assert half.tolist()[:4] == [0.0, 2.0**-24, 2.0**-24, 2.0**-24]
    torch.testing.assert_close(half[4:].float(), values[4:], rtol=5e-4, atol=0)


def test_codes_keep_five_percent_over_six_decades() -> None:
    values = torch.logspace(-6, 0, 256 * 256).view(256, 256)
    found = decoded(tiles.encoded(values, values, 0))
    torch.testing.assert_close(found.mean, values, rtol=0.03, atol=0)


def test_the_header_is_as_documented() -> None:
    data = tiles.encoded(torch.full((2, 3), 0.5), torch.full((2, 3), 1.0), 7)
    kind, _, rows, columns, read, low, high = struct.unpack_from("<BBHHHff", data)
    assert (kind, rows, columns, read) == (2, 2, 3, 7)
    assert (low, high) == pytest.approx((-0.6931472, 0.0))
    assert len(data) == 16 + 2 * 6


@pytest.mark.parametrize("place", [(0, 9, 0, 0), (0, 0, 5, 0), (0, 0, 0, -1), (7, 0, 0, 0)])
def test_tiles_that_are_not_there_are_refused(place: tuple[int, int, int, int]) -> None:
    with pytest.raises(regard.RegardError, match=r"there is no such (tile|head)"):
        tile(a_map(300), *place)


def test_what_cannot_be_looked_at_is_refused() -> None:
    with pytest.raises(regard.RegardError, match="this cannot be looked at"):
        Atlas.of({"weights": 3})  # type: ignore[arg-type]
    with pytest.raises(regard.RegardError, match="no attention was seen"):
        Atlas.of(regard.seen.Seen())
    x = torch.zeros(4, 2)
    with pytest.raises(regard.RegardError, match="tokens are one text for each place"):
        Atlas.of(regard.trace(x, x, x), tokens=["a"])
    with pytest.raises(regard.RegardError, match="unknown quantity"):
        tile(a_map(30), 0, 0, 0, 0, quantity="magic")


def test_the_strongest_keys_of_steps_that_are_not_joined() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 2, 6, 4).unbind()
    layer = Layer("attn")
    for step, (start, stop) in enumerate(((0, 2), (2, 6))):
        t = regard.trace(q[:, :, start:stop], k[:, :, :stop], k[:, :, :stop])
        layer.take(t, 0, step, keep=True)
    found = Seen("Toy")
    found._layers["attn"] = layer
    (of,) = Atlas.of(found).maps
    assert len(of.calls) == 2
    for head in range(2):
        values, keys = of.top(head, 3)
        p = of.weights(head, range(6), range(6))
        torch.testing.assert_close(values, p.topk(3).values)
        sure = values > 0
        torch.testing.assert_close(p.gather(1, keys)[sure], values[sure])
        assert (values[:2, 2] == 0).all()
