"""What the terminal shows: exact text, equal widths, and nothing that was not meant."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from rich.cells import cell_len

import regard
from regard import masks
from regard.traces import Trace
from regard.view import heat_map, shaded
from regard.view.atlas import clean, figures
from regard.view.terminal.colours import colour, luminance
from regard.view.terminal.map_layout import CAP
from tests.view.text_drawings import bare, coloured, drawn, seen_model

WORDS = ["to", "be", "or", "not"]
WIDE = ["漢字", "🙂", "read", "naïve", "👍🏽", "한국어のながいことば"]


def sample(n: int, mask: masks.Mask | None = None, width: int = 8) -> Trace:
    x = torch.randn(n, width, generator=torch.Generator().manual_seed(n))
    return regard.trace(x, x, x, mask=mask)


def known() -> Trace:
    """Weights that can be computed by hand: every visible key but the query's own weighs alike."""
    x = torch.eye(4)
    return regard.trace(x, x, x, mask=masks.causal(), scale=2.0)


def map_lines(text: str) -> list[str]:
    """The lines of the map itself: those above the legend."""
    lines = text.splitlines()
    legend = next(i for i, line in enumerate(lines) if line.startswith(("weight 0", "rows look")))
    return lines[:legend]


def test_plain_map_is_exactly_this() -> None:
    # e² = 7.389: row 2 is 1 : 7.389, row 3 is 1 : 1 : 7.389, row 4 is 1 : 1 : 1 : 7.389.
    assert drawn(heat_map(known(), WORDS)).splitlines() == [
        "                   n                         ",
        "          t  b  o  o                         ",
        "          o  e  r  t   entropy  strongest    ",
        "to       100              0.00  to       100%",
        "be        12 88           0.37  be        88%",
        "or        11 11 79        0.67  or        79%",
        "not       10 10 10 71     0.92  not       71%",
        "                                             ",
        "received  33 27 22 18                        ",
        "                                             ",
        "rows look at columns; percent (. below 0.5); blank: masked",
        "entropy in nats (all alike: 1.39); received: share of all weight (most: 33%)",
    ]


def test_shaded_is_exactly_this() -> None:
    assert drawn(shaded(known(), WORDS, query=2)).splitlines() == [
        "  to   be   or  not ",
        "  11   11   79      ",
    ]
    assert drawn(shaded(known(), WORDS, query=-2)) == drawn(shaded(known(), WORDS, query=2))


def test_numbers_are_the_weights() -> None:
    t = sample(12)
    rows = map_lines(drawn(heat_map(t, [f"t{i}" for i in range(12)]), width=120))[-15:-3]
    for row, weights in zip(rows, t.weights().tolist(), strict=True):
        shown = row[9 : 9 + 36]
        cells = [shown[i : i + 3].strip() for i in range(0, 36, 3)]
        assert cells == ["." if w < 0.005 else f"{100 * w:.0f}" for w in weights]


def test_entropy_strongest_and_received_come_from_the_trace() -> None:
    t = sample(7, masks.causal())
    names = [f"token{i}" for i in range(7)]
    lines = map_lines(drawn(heat_map(t, names), width=120))
    top = t.top(1)
    for row in range(7):
        entropy, name, share = lines[-10 + row].split()[-3:]
        assert entropy == f"{t.entropy[row]:.2f}"
        assert name == names[int(top.indices[row])]
        assert share == f"{top.values[row].item():.0%}"
    parts = (t.received() / t.received().sum()).tolist()
    assert lines[-2].split() == ["received", *(f"{100 * part:.0f}" for part in parts)]


def test_rows_without_keys_and_without_preference_say_so() -> None:
    x = torch.zeros(3, 2)
    lines = drawn(heat_map(regard.trace(x, x, x, mask=masks.causal() & ~masks.window(0)), "abc"))
    assert "sees nothing" in lines
    assert re.search(r"b +100 +0.00  a +100%", lines)
    assert re.search(r"c +50 50 +0.69  all alike 50%", lines)


@pytest.mark.parametrize("width", [120, 80, 50, 40, 30, 24])
@pytest.mark.parametrize("draw", [drawn, coloured])
def test_every_line_has_equal_cells_whatever_the_tokens(width: int, draw: object) -> None:
    assert callable(draw)
    names = WIDE * 2
    lines = map_lines(bare(draw(heat_map(sample(len(names)), names), width)))
    widths = {cell_len(line) for line in lines}
    assert len(widths) == 1
    assert widths.pop() <= width


@pytest.mark.parametrize("width", [120, 50, 30, 12, 5, 1])
@pytest.mark.parametrize("n", [1, 5, 40, 100])
@pytest.mark.parametrize("draw", [drawn, coloured])
def test_nothing_is_wider_than_the_console(width: int, n: int, draw: object) -> None:
    assert callable(draw)
    t, names = sample(n), [WIDE[i % len(WIDE)] for i in range(n)]
    for thing in (heat_map(t, names), shaded(t, names, query=0)):
        assert max(cell_len(line) for line in bare(draw(thing, width)).splitlines()) <= max(
            width, 1
        )


def test_narrow_consoles_drop_columns_one_after_another() -> None:
    thing = heat_map(sample(9), [f"word{i}" for i in range(9)])
    wide, middle, narrow = (drawn(thing, width) for width in (80, 45, 30))
    assert "strongest" in wide
    assert "entropy" in wide
    assert "strongest" not in middle
    assert "entropy" in middle
    assert "percent" in middle
    assert "entropy" not in narrow
    assert "percent" not in narrow
    assert "weight 0 .:-=+*#%@ " in narrow


def test_long_tokens_are_cut_with_an_ellipsis() -> None:
    names = ["antidisestablishmentarianism", "b"]
    assert "antidisestabl~" in drawn(heat_map(sample(2), names))
    text = bare(coloured(heat_map(sample(2), names)))
    assert "antidisestabl…" in text
    assert "⋮" in text
    assert "establishm" not in text


def test_wide_characters_in_columns_one_cell_wide_give_way_to_numbers() -> None:
    text = drawn(heat_map(sample(20), ["漢"] * 20), width=30)
    assert "12 漢" in text
    assert any(line.strip() == "1" * 10 + "2" for line in text.splitlines())


def test_markup_is_text() -> None:
    names = ["[red]", "[/]", "[bold on blue]x", ":smile:"]
    for text in (
        drawn(heat_map(sample(4), names)),
        bare(coloured(heat_map(sample(4), names))),
        drawn(shaded(sample(4), names, query=0)),
    ):
        for name in ("[red]", "[/]", "[bold on blu", ":smile:"):
            assert name in text


def test_no_control_character_reaches_the_terminal() -> None:
    names = ["\x1b[31mred", "a\nb\r", "\x07bell", "\u202eright", "\x9b2J", "\ud800", "\x00", "\t"]
    t = sample(len(names))
    for thing in (heat_map(t, names, queries=names), shaded(t, names, query=3)):
        text = drawn(thing, width=120)
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text)
        assert "\\x1b[31mred" in text
        assert "a\\nb\\r" in text
        left = re.sub(r"\x1b\[[0-9;]*m", "", coloured(thing, width=120))
        assert "\x1b" not in left


def test_without_colour_everything_but_the_tokens_is_ascii() -> None:
    t = sample(5, masks.causal())
    for width in (80, 50, 20):
        for options in (
            {},
            {"force_terminal": True, "color_system": "truecolor", "no_color": True},
            {"force_terminal": True, "color_system": "standard"},
        ):
            text = drawn(heat_map(t, ["longlonglonglonglong", *"abcd"]), width, **options)
            assert text.isascii()
            assert "\x1b" not in text


def test_no_color_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    thing = heat_map(known(), WORDS)
    monkeypatch.delenv("NO_COLOR", raising=False)
    settings = {"color_system": "truecolor", "force_terminal": True}
    assert "\x1b[" in drawn(thing, **settings)
    monkeypatch.setenv("NO_COLOR", "1")
    assert drawn(thing, **settings) == drawn(thing)


def test_plain_is_obeyed_where_there_is_colour() -> None:
    assert coloured(heat_map(known(), WORDS, plain=True)) == drawn(heat_map(known(), WORDS))
    assert coloured(shaded(known(), WORDS, 1, plain=True)) == drawn(shaded(known(), WORDS, 1))


def test_the_strongest_weight_has_the_brightest_colour_and_hidden_cells_have_none() -> None:
    lines = map_lines(coloured(heat_map(known(), WORDS)))
    first = next(line for line in lines if line.startswith("to"))
    brightest = ";".join(map(str, colour(1.0)))
    assert first.count("48;2;") == 1
    assert f"48;2;{brightest}m100" in first


def test_colours_rise_in_lightness_and_carry_readable_ink() -> None:
    light = [luminance(colour(step / 100)) for step in range(101)]
    assert all(a < b for a, b in pairwise(light))
    for shade in light:
        ink = 0.0 if shade > 0.179 else 1.0
        high, low = max(shade, ink), min(shade, ink)
        assert (high + 0.05) / (low + 0.05) > 4.5


def test_long_texts_are_pooled_and_say_so() -> None:
    n = CAP + 40
    t = sample(n, masks.causal())
    text = drawn(heat_map(t, ["w"] * n), width=80)
    assert "a cell is the largest of up to 4 x 4 weights" in text
    lines = map_lines(text)
    rows = [line for line in lines if re.match(r"\d+-\d+ ", line)]
    starts = [int(line.split("-")[0]) for line in rows]
    stops = [int(line.split()[0].split("-")[1]) for line in rows]
    assert starts == [1, *(stop + 1 for stop in stops[:-1])]
    assert stops[-1] == n
    assert "weights" not in drawn(heat_map(sample(CAP), ["w"] * CAP), width=200)


def test_a_long_text_never_builds_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 3000
    t = sample(n, masks.causal())
    monkeypatch.setattr(Trace, "weights", lambda *_, **__: pytest.fail("built n×n"))
    assert "largest of up to" in drawn(heat_map(t, ["w"] * n))


def test_shaded_shows_the_strongest_of_a_long_text() -> None:
    n = 500
    x = torch.eye(n)
    t = regard.trace(x[[250]], x, x, scale=20.0)
    assert drawn(shaded(t, [f"w{i}" for i in range(n)], query=0)).splitlines() == [
        " ...  w248  w249  w250  w251  w252  ... ",
        "        .     .    100    .     .       ",
    ]


def test_batch_and_head_choose() -> None:
    q = torch.randn(2, 4, 5, 8, generator=torch.Generator().manual_seed(0))
    k = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(1))
    t = regard.trace(q, k, k)
    alone = regard.trace(q[1, 3], k[1, 1], k[1, 1])
    names = list("abcde")
    assert drawn(heat_map(t, names, batch=1, head=3)) == drawn(heat_map(alone, names))
    assert drawn(shaded(t, names, 2, batch=1, head=3)) == drawn(shaded(alone, names, 2))
    assert drawn(heat_map(t, names)) != drawn(heat_map(alone, names))


def test_fewer_queries_than_keys_are_the_last_of_them() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    whole = regard.trace(x, x, x, mask=masks.causal())
    end = regard.trace(x[4:], x, x, mask=masks.causal())
    names = list("abcdef")
    rows = map_lines(drawn(heat_map(whole, names)))
    assert map_lines(drawn(heat_map(end, names)))[1:3] == rows[5:7]


def test_not_a_number_is_shown_as_unknown() -> None:
    x = torch.ones(2, 2)
    x[1] = float("nan")
    t = regard.trace(x, torch.ones(2, 2), torch.ones(2, 2))
    for draw in (drawn, coloured):
        assert re.search(r"b +\? +\? ", bare(draw(heat_map(t, "ab"))))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda t: heat_map(t, ["one"]), "tokens name each key\n  got:      1 tokens"),
        (lambda t: shaded(t, ["one"], 0), "tokens name each key"),
        (lambda t: heat_map(t, WORDS, queries=["x"]), "queries= names each query"),
        (lambda t: shaded(t, WORDS, 4), "queries: index out of range"),
        (lambda t: heat_map(t, WORDS, head=1), "there is no such head\n  got:      1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call: object, text: str) -> None:
    assert callable(call)
    with pytest.raises(regard.RegardError, match=re.escape(text)):
        call(known())


def test_more_queries_than_keys_need_names() -> None:
    x = torch.randn(3, 4)
    t = regard.trace(x, x[:2], x[:2])
    with pytest.raises(regard.RegardError, match="pass queries="):
        heat_map(t, "ab")
    assert "strongest" in drawn(heat_map(t, "ab", queries="xyz"))


def test_nothing_to_draw_is_refused() -> None:
    x = torch.zeros(0, 4)
    with pytest.raises(regard.RegardError, match="nothing to draw"):
        heat_map(regard.trace(x, x, x), [])


def cells(text: str, keys: int, rows: int) -> list[list[str]]:
    """The cells of a map in plain text, read back by their columns."""
    lines = map_lines(text)
    first = next(i for i, line in enumerate(lines) if "entropy" in line) + 1
    return [
        [line[9 + 3 * i : 12 + 3 * i].strip() for i in range(keys)]
        for line in lines[first : first + rows]
    ]


def in_percent(weights: torch.Tensor, *, causal: bool = True) -> list[list[str]]:
    return [
        [
            "" if causal and key > query else "." if w < 0.005 else f"{100 * w:.0f}"
            for key, w in enumerate(row)
        ]
        for query, row in enumerate(weights.tolist())
    ]


@pytest.mark.parametrize("layer", [1, "1", "layers.1", "*.1", -2])
def test_a_head_of_a_model_is_chosen_by_layer_and_number(layer: int | str) -> None:
    seen = seen_model(6)
    shown = cells(drawn(heat_map(seen, layer=layer, head=2), 100), 6, 6)
    weights = seen["layers.1"].trace.weights()[0]
    assert shown == in_percent(weights[2])
    assert shown != in_percent(weights[1])


def test_the_mean_over_heads_is_the_mean_of_their_weights() -> None:
    seen = seen_model(6)
    text = drawn(heat_map(seen, layer=2, head="mean"), 100)
    weights = seen["layers.2"].trace.weights()[0].mean(0)
    assert cells(text, 6, 6) == in_percent(weights)
    strongest = [line.split()[-2:] for line in map_lines(text) if line.rstrip().endswith("%")]
    for row, (name, share) in enumerate(strongest):
        assert name == str(int(weights[row].argmax()) + 1)
        assert share == f"{weights[row].max().item():.0%}"


def test_tokens_are_those_the_model_read() -> None:
    seen = seen_model(4)
    seen.tokens = [" To", "be", " or", " not"]
    assert drawn(heat_map(seen)) == drawn(heat_map(seen, ["To", "be", "or", "not"]))
    seen.tokens = [["x"] * 4]
    assert drawn(heat_map(seen)) == drawn(heat_map(seen, ["x"] * 4))
    seen.tokens = ["too", "few"]
    assert drawn(heat_map(seen)) == drawn(heat_map(seen, ["1", "2", "3", "4"]))


def test_calls_of_a_layer_are_told_apart() -> None:
    seen = seen_model(4, calls=2)
    seen.tokens = [*WORDS, "written", "later"]
    with pytest.raises(regard.RegardError, match=r"'layers\.0' was called 2 times"):
        heat_map(seen)
    assert drawn(heat_map(seen, call=1)) == drawn(heat_map(seen["layers.0"].traces[1], WORDS))


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ({"layer": 3}, "no such layer was seen\n  got:      3\n  accepted: 0 to 2, or one of"),
        ({"layer": "nowhere"}, "no such layer was seen\n  got:      'nowhere'"),
        ({"layer": "layers.*"}, "more than one layer has such a path"),
        ({"head": 4}, "there is no such head\n  got:      4\n  accepted: 0 to 3, or 'mean'"),
        ({"call": 1}, "was called 1 times\n  got:      call=1\n  accepted: a call from 0 to 0"),
        ({"tokens": ["one"]}, "tokens name each key"),
    ],
)
def test_what_was_not_seen_is_not_drawn(chosen: dict[str, object], text: str) -> None:
    with pytest.raises(regard.RegardError, match=re.escape(text)):
        heat_map(seen_model(3), **chosen)  # type: ignore[arg-type]


def test_statistics_alone_cannot_be_drawn_as_weights() -> None:
    with pytest.raises(regard.RegardError, match="no traces, only statistics"):
        heat_map(seen_model(3, keep="statistics"))


@pytest.mark.parametrize("head", [1, "mean"])
def test_who_looks_at_a_token_is_a_column_of_the_weights(head: int | str) -> None:
    seen = seen_model(5)
    weights = seen["layers.0"].trace.weights()[0]
    column = (weights.mean(0) if head == "mean" else weights[1])[:, 2].tolist()
    names, numbers = drawn(shaded(seen, key=2, head=head)).splitlines()  # type: ignore[arg-type]
    assert names.split() == ["1", "2", "3", "4", "5"]
    assert numbers.split() == ["." if w < 0.005 else f"{100 * w:.0f}" for w in column[2:]]
    assert drawn(shaded(seen, key=-3, head=head)) == drawn(shaded(seen, key=2, head=head))  # type: ignore[arg-type]


def test_who_looks_in_decoding_stands_under_its_own_token() -> None:
    x = torch.eye(4)
    t = regard.trace(x[2:], x, x, mask=masks.causal(), scale=2.0)
    assert drawn(shaded(t, WORDS, key=2)).splitlines() == [
        "  to   be   or  not ",
        "            79   10 ",
    ]


def test_a_text_is_shaded_by_one_query_or_one_key() -> None:
    for wrong in ({}, {"query": 0, "key": 0}):
        with pytest.raises(regard.RegardError, match="one of query= and key="):
            shaded(known(), WORDS, **wrong)


def test_pooled_rows_say_what_they_hold() -> None:
    words = [f"w{i}" for i in range(100)]
    wide = drawn(heat_map(sample(100), words), width=100)
    assert re.search(r"^1-\d +w0 w1", wide, re.MULTILINE)
    narrow = drawn(heat_map(sample(100), words), width=50)
    assert "w0" not in narrow
    seen = seen_model(100)
    pooled = drawn(heat_map(seen, layer=1, head="mean"), width=100)
    assert "weights, mean of the heads" in pooled


def test_a_pooled_map_of_all_heads_is_the_mean_of_their_maps() -> None:
    seen = seen_model(100)
    trace = seen["layers.1"].trace
    shown = figures(trace, 10, 10)
    torch.testing.assert_close(torch.tensor(shown.weights), trace.map(10, pool="max")[0].mean(0))


def test_words_from_right_to_left_keep_their_columns() -> None:
    words = ["שלום", "עולם", "مرحبا", "read"]
    for thing in (heat_map(sample(4), words), shaded(sample(4), words, query=0)):
        for line in drawn(thing).splitlines():
            for run in re.findall("[\u0590-\u06ff]+.?", line):
                assert run[-1] == "\u200e", "the line goes on from left to right after each word"
    lines = map_lines(drawn(heat_map(sample(4), words)))
    assert len({cell_len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" word", "word"),
        (" ", "␣"),
        ("\u3000", "␣"),
        ("\n", "\\n"),
        ("\u0301x", "◌\u0301x"),
        ("\ufeff", "\\ufeff"),
        ("\u2066x\u2069", "\\u2066x\\u2069"),
        ("\u200d", ""),
        ("", ""),
    ],
)
def test_labels(token: str, shown: str) -> None:
    assert clean(token) == shown
