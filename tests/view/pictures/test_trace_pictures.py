"""Pictures: what their parts hold, and that files are whole, the same twice and readable."""

from __future__ import annotations

import base64
import errno
import io
import math
import os
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import regard
from regard import masks
from regard.traces import Trace
from regard.view.atlas import HeadFigures, head_figures
from tests.view.text_drawings import seen_model

pytest.importorskip("matplotlib")

from matplotlib.colors import LogNorm, Normalize, to_hex
from matplotlib.patches import Circle, PathPatch

from regard.view import picture
from regard.view.pictures import fonts
from regard.view.pictures.theme import DARK, LIGHT, LONGEST
from regard.view.terminal.colours import luminance
from tests.fresh_process import FreshProcesses

WORDS = ["to", "be", "or", "not"]
HOSTILE = [
    "漢字", "שלום", "مرحبا", "🙂", "नमस्ते", "$x^2$", "a_b", "\x1b[31m", "\n",
    "</text>&\"'", "\u0301", "", "antidisestablishmentarianism", "\ud800", "\u202eback", "\\alpha",
]  # fmt: skip


def known() -> Trace:
    x = torch.eye(4)
    return regard.trace(x, x, x, mask=masks.causal(), scale=2.0)


def labels(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def written(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def test_a_heat_map_holds_the_weights_where_the_mask_allows_them() -> None:
    figure = picture.heat_map(known(), WORDS)
    axes, bar = figure.axes
    (mesh,) = axes.collections
    weights = known().weights()
    shown = torch.tensor(mesh.get_array().filled(math.nan))
    hidden = torch.ones(4, 4).triu(1).bool()
    assert bool(shown[hidden].isnan().all())
    torch.testing.assert_close(shown[~hidden], weights[~hidden])
    assert isinstance(mesh.norm, Normalize)
    assert (mesh.norm.vmin, mesh.norm.vmax) == (0, pytest.approx(weights.max().item()))
    assert labels(axes.xaxis) == labels(axes.yaxis) == WORDS
    assert axes.get_ylim() == (4, 0), "the first query stands at the top"
    assert axes.get_title("left") == "head 0"
    assert bar.get_ylabel() == "weight"


def test_heads_and_layers_are_chosen_as_in_the_terminal() -> None:
    seen = seen_model(5)
    weights = seen["layers.1"].trace.weights()[0]
    for head, want in ((2, weights[2]), ("mean", weights.mean(0))):
        figure = picture.heat_map(seen, layer=1, head=head)  # type: ignore[arg-type]
        shown = torch.tensor(figure.axes[0].collections[0].get_array().filled(0.0))
        torch.testing.assert_close(shown, want)
    assert figure.axes[0].get_title("left") == "Layers · layer 1, mean of 4 heads"
    assert picture.heat_map(seen, title="mine").axes[0].get_title("left") == "mine"
    with pytest.raises(regard.RegardError, match="there is no such head"):
        picture.heat_map(seen, head=9)


def test_queries_that_are_other_tokens_have_their_names() -> None:
    x = torch.randn(3, 4)
    figure = picture.heat_map(regard.trace(x, x[:2], x[:2]), ["a", "b"], queries=["x", "y", "z"])
    assert labels(figure.axes[0].yaxis) == ["x", "y", "z"]
    assert labels(figure.axes[0].xaxis) == ["a", "b"]


def test_a_long_text_is_pooled_on_a_logarithmic_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    t = regard.trace(x, x, x, mask=masks.causal())
    monkeypatch.setattr(Trace, "weights", lambda *_, **__: pytest.fail("built n×n"))
    figure = picture.heat_map(t, ["w"] * 300, cells=50)
    (image,) = figure.axes[0].images
    pooled = t.map(50, pool="max")
    shown = torch.tensor(image.get_array().filled(0.0))
    torch.testing.assert_close(shown, pooled)
    assert isinstance(image.norm, LogNorm)
    assert image.norm.vmax == pytest.approx(pooled.max().item())
    assert image.get_extent() == [1, 301, 301, 1]
    assert figure.axes[1].get_ylabel() == "largest of 6 × 6 weights"
    assert figure.axes[1].get_yticklabels()[0].get_text().startswith("≤ ")
    with pytest.raises(regard.RegardError, match="cells counts cells"):
        picture.heat_map(t, cells=0)


def test_the_grid_of_heads_holds_their_numbers() -> None:
    seen = seen_model(7)
    found = head_figures(seen)
    figure = picture.head_grid(seen)
    panels = figure.axes[:3]
    titles = [axes.get_title("left") for axes in panels]
    assert titles == ["entropy", "on the first token", "distance in tokens"]
    for axes, name in zip(panels, ("entropy", "sink", "distance"), strict=True):
        (mesh,) = axes.collections
        assert mesh.get_array().tolist() == [list(row) for row in found.of(name)]  # type: ignore[arg-type]
        assert axes.get_ylim() == (3, 0)
        assert labels(axes.xaxis) == ["0", "1", "2", "3"]
    assert [axes.collections[0].norm.vmax for axes in panels[:2]] == [1.0, 1.0]
    assert panels[2].collections[0].norm.vmax == max(max(row) for row in found.distance)


def test_the_grid_leaves_out_what_is_not_known() -> None:
    figure = picture.head_grid(seen_model(5, keep="statistics"), title="run")
    titles = [axes.get_title("left") for axes in figure.axes[:3]]
    assert titles == ["entropy", "on the first token", "largest logit"]
    assert figure.axes[0].collections[0].norm.vmax != 1.0, "nats are scaled to the most there is"
    ragged = HeadFigures(("a", "b"), ((0.5,), (0.2, 1)), ((0.5,), (0.2, 1)), ((1,), (2, 3)))
    cells = picture.head_grid(ragged).axes[0].collections[0].get_array()
    assert cells.mask.tolist() == [[False, True], [False, False]]


def test_entropy_by_layer_has_a_dot_for_each_head_and_a_line_of_means() -> None:
    seen = seen_model(7)
    found = head_figures(seen)
    axes = picture.entropy_by_layer(seen).axes[0]
    (dots,), (line,) = axes.collections, axes.lines
    points = [(i, value) for i, row in enumerate(found.entropy) for value in row]
    assert [tuple(point) for point in dots.get_offsets().tolist()] == points
    assert line.get_ydata() == pytest.approx([sum(row) / 4 for row in found.entropy])
    assert axes.get_ylim()[0] == 0
    nats = picture.entropy_by_layer(seen_model(7, keep="statistics")).axes[0]
    assert nats.get_ylabel() == "entropy in nats"


def widths(figure: Any) -> list[float]:
    return [p.get_linewidth() for p in figure.axes[0].patches if isinstance(p, PathPatch)]


def test_the_arcs_of_a_token_are_its_row_and_its_column() -> None:
    weights = known().weights()
    figure = picture.arcs(known(), WORDS, token=2, threshold=0.0)
    texts = written(figure)
    assert texts[:4] == WORDS
    row = [f"{100 * w:.0f}" for w in weights[2, :3].tolist()]
    column = [f"{100 * w:.0f}" for w in weights[2:, 2].tolist()]
    assert texts[4:9] == [*row, *column]
    assert len(widths(figure)) == 3, "two keys besides itself, and one later query"
    at = {text.get_text(): text.get_position()[0] for text in figure.axes[0].texts[:4]}
    for text, word in zip(figure.axes[0].texts[4:9], ["to", "be", "or", "or", "not"], strict=True):
        assert text.get_position()[0] == at[word]
    above = [text.get_position()[1] > 0 for text in figure.axes[0].texts[4:9]]
    assert above == [True, True, True, False, False]
    assert figure.axes[0].texts[2].get_fontweight() == "bold"
    assert texts[9:] == ["head 0", "looks at, in percent", "is looked at by, in percent"]


def test_arcs_below_the_threshold_are_left_out() -> None:
    t = known()
    count = sum(w >= 0.5 for row in t.weights().tolist() for w in row)
    figure = picture.arcs(t, WORDS, threshold=0.5)
    discs = [p for p in figure.axes[0].patches if isinstance(p, Circle)]
    assert len(discs) + len(widths(figure)) == count == 4
    assert not widths(figure)
    every = picture.arcs(t, WORDS, threshold=0.0)
    assert len(widths(every)) == 6


def test_arcs_that_look_ahead_stand_below() -> None:
    x = torch.eye(3)
    t = regard.trace(x, x, x)
    arcs = [p for p in picture.arcs(t, list("abc")).axes[0].patches if isinstance(p, PathPatch)]
    sides = [p.get_path().vertices[:, 1].mean() > 0 for p in arcs]
    assert sorted(sides) == [False] * 3 + [True] * 3


def test_heavier_arcs_are_thicker() -> None:
    q = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    k = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    t = regard.trace(q[:1], k, k, mask=None)
    figure = picture.arcs(t, ["a", "b"], token=1, threshold=0.0)
    weights = t.weights().flatten().tolist()
    assert widths(figure) == [pytest.approx(max(0.4, 4 * weights[0]))]


def test_arcs_of_a_long_text_show_what_matters_to_the_token() -> None:
    n = 500
    x = torch.eye(n) * 20
    x[400] = x[10]
    t = regard.trace(x, x, x, mask=masks.causal(), scale=1.0)
    figure = picture.arcs(t, [f"w{i}" for i in range(n)], token=400)
    shown = written(figure)
    near = [[f"w{place + step}" for step in range(-2, 3)] for place in (10, 400)]
    assert shown[:13] == ["…", *near[0], "…", *near[1], "…"]
    assert "50" in shown
    with pytest.raises(regard.RegardError, match="choose a token, or draw a heat map"):
        picture.arcs(t)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"token": 4}, "there is no such token\n  got:      4\n  accepted: 0 to 3"),
        ({"threshold": 2.0}, "threshold is a weight"),
        ({"tokens": ["a"]}, "tokens name each key"),
    ],
)
def test_arcs_that_cannot_be_drawn_are_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(regard.RegardError, match=re.escape(text)):
        picture.arcs(known(), **{"tokens": WORDS, **wrong})


def test_arcs_need_one_text() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(regard.RegardError, match="one text that looks at itself"):
        picture.arcs(regard.trace(x, x[:2], x[:2]))


def every_picture() -> dict[str, Any]:
    """One figure of each kind, over tokens that try to break it."""
    x = torch.randn(len(HOSTILE), 8, generator=torch.Generator().manual_seed(0))
    t = regard.trace(x, x, x, mask=masks.causal())
    # A font of 65,000 characters takes a PDF seconds: it is asked for once.
    light = ["", *HOSTILE[1:]]
    long = regard.trace(*torch.randn(3, 90, 8, generator=torch.Generator().manual_seed(1)))
    seen = seen_model(6)
    return {
        "map": picture.heat_map(t, HOSTILE, title="[漢字] $x$"),
        "dark": picture.heat_map(t, light, dark=True),
        "long": picture.heat_map(long),
        "arcs": picture.arcs(t, light, token=5),
        "all arcs": picture.arcs(t, light, threshold=0.3),
        "heads": picture.head_grid(seen, title="heads of $x$"),
        "entropy": picture.entropy_by_layer(seen, title="$x$", dark=True),
    }


@pytest.fixture(scope="module")
def twice() -> tuple[dict[str, Any], dict[str, Any]]:
    return every_picture(), every_picture()


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_files_are_whole_and_the_same_twice(
    kind: str, twice: tuple[dict[str, Any], dict[str, Any]], tmp_path: Path
) -> None:
    for name, figure in twice[0].items():
        picture.save(figure, tmp_path / f"{name}.{kind}")
    for name, figure in twice[1].items():
        again = tmp_path / f"{name} again.{kind}"
        picture.save(figure, again)
        data = again.read_bytes()
        assert data == (tmp_path / f"{name}.{kind}").read_bytes(), name
        begins, ends = {
            "png": (b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"),
            "svg": (b"<?xml", b"</svg>\n"),
            "pdf": (b"%PDF-1.", b"%%EOF\n"),
        }[kind]
        assert data.startswith(begins)
        assert data.endswith(ends)
        assert b"2026" not in data[:2000]
        if kind == "svg":
            ElementTree.fromstring(data)


def test_text_stays_text_in_vector_files(tmp_path: Path) -> None:
    names = ["שלום", "<b>", "$x^2$", "read"]
    picture.save(picture.heat_map(known(), names), tmp_path / "map.svg")
    root = ElementTree.parse(tmp_path / "map.svg").getroot()
    found = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for name in names:
        assert found.count(name) == 2, "once for its row, once for its column"


def test_fonts_are_in_the_file(tmp_path: Path) -> None:
    from fontTools.ttLib import TTFont

    figure = picture.heat_map(seen_model(5), title="Zürich ≤ 5 🙂")
    for kind in ("svg", "pdf"):
        picture.save(figure, tmp_path / f"map.{kind}")
    assert b"/FontFile2" in (tmp_path / "map.pdf").read_bytes()
    text = (tmp_path / "map.svg").read_text("utf-8")
    root = ElementTree.fromstring(text)
    said = set("".join(e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")))
    packed = re.findall("font-family:'([^']*)';src:url\\(data:font/ttf;base64,([^)]*)\\)", text)
    assert packed[0][0] == "DejaVu Sans"
    written = {
        chr(sign)
        for _, data in packed
        for sign in TTFont(io.BytesIO(base64.b64decode(data))).getBestCmap()
    }
    assert set("Zürich≤5") <= said <= written
    assert len(text) < 120_000, "only the glyphs that are used"


@pytest.mark.parametrize(("kind", "width"), [("heads", 180.0), ("map", 85.0)])
def test_files_are_as_wide_as_asked(kind: str, width: float, tmp_path: Path) -> None:
    figure = (
        picture.head_grid(seen_model(5)) if kind == "heads" else picture.heat_map(known(), WORDS)
    )
    picture.save(figure, tmp_path / "p.png", width=width)
    data = (tmp_path / "p.png").read_bytes()
    assert int.from_bytes(data[16:20]) == pytest.approx(width / 25.4 * 300, abs=1.5)
    # Nothing is cut off at the sides, and little room is left.
    assert width - 12 < figure.get_tightbbox().width * 25.4 <= width + 0.1
    picture.save(figure, tmp_path / "p.svg", width=width)
    root = ElementTree.parse(tmp_path / "p.svg").getroot()
    assert float(str(root.get("width"))[:-2]) == pytest.approx(width / 25.4 * 72, abs=0.1)
    with pytest.raises(regard.RegardError, match="in millimetres"):
        picture.save(figure, tmp_path / "p.png", width=3)


def test_the_model_stands_in_the_caption() -> None:
    seen = seen_model(5)
    assert picture.heat_map(seen, head=1).axes[0].get_title("left") == "Layers · layer 0, head 1"
    assert str(picture.head_grid(seen).get_suptitle()) == "Layers"
    assert picture.entropy_by_layer(seen).axes[0].get_title("left") == "Layers"
    assert "Layers · layer 0, head 1" in written(picture.arcs(seen, head=1))
    assert picture.heat_map(seen, title="").axes[0].get_title("left") == ""


def test_labels_are_cut_and_never_formulas() -> None:
    x = torch.randn(len(HOSTILE), 8)
    figure = picture.heat_map(regard.trace(x, x, x), HOSTILE)
    shown = labels(figure.axes[0].xaxis)
    assert max(map(len, shown)) <= LONGEST
    assert "antidisestablis…" in shown
    assert "\\x1b[31m" in shown
    assert "$x^2$" in shown
    assert not any(label.get_parse_math() for label in figure.axes[0].get_xticklabels())


def test_what_no_font_can_write_is_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_installed", lambda: ())
    families, missing = fonts.families(["a漢"])
    assert families == ["DejaVu Sans"]
    assert missing == {"漢"}
    figure = picture.heat_map(known(), ["漢", "b", "c", "d"])
    assert labels(figure.axes[0].xaxis)[0] == "\\u6f22"


def test_fonts_are_looked_for_only_where_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "_installed", lambda: pytest.fail("looked through all fonts"))
    assert fonts.families(["Ελληνικά, русский, עברית"]) == (["DejaVu Sans"], set())


@pytest.mark.parametrize("ink", [LIGHT, DARK])
def test_colours_differ_in_lightness_and_words_stand_out(ink: Any) -> None:
    def light(colour: Any) -> float:
        text = to_hex(colour)
        return luminance((int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)))

    shades = [light(ink.weights(step / 50)) for step in range(51)]
    assert shades == sorted(shades, reverse=not ink.dark)
    for colour in (ink.text, ink.faint, ink.back, ink.ahead):
        high, low = sorted((light(colour), light(ink.page)), reverse=True)
        assert (high + 0.05) / (low + 0.05) > (4.5 if colour in (ink.text, ink.faint) else 3)


def test_dark_pages_are_dark(tmp_path: Path) -> None:
    for dark, page in ((True, DARK.page), (False, LIGHT.page)):
        assert to_hex(picture.heat_map(known(), dark=dark).get_facecolor()) == page


@pytest.mark.parametrize("name", ["map.jpg", "map", "map.svg.gz"])
def test_other_formats_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(regard.RegardError, match=re.escape(f"got:      '{name}'")):
        picture.save(picture.heat_map(known()), tmp_path / name)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(regard.RegardError, match="cannot be written"):
        picture.save(picture.heat_map(known()), tmp_path / "nowhere" / "map.png")


def test_a_full_disk_leaves_the_picture_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "map.png"
    picture.save(picture.heat_map(known()), path)
    before = path.read_bytes()
    figure = picture.heat_map(known())

    def full(to: Path, data: bytes) -> int:
        with to.open("wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(regard.RegardError, match="No space left"):
        picture.save(figure, path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["map.png"]


def test_without_matplotlib_the_reason_is_said(fresh: FreshProcesses) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import regard.view\n"
        "try:\n    import regard.view.picture\n"
        "except regard.RegardError as error:\n    print(error)"
    )
    assert "pip install 'regard[picture]'" in fresh(code).out
