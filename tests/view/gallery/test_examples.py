"""The gallery: what each example says is true of the weights that it opens."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from regard import models
from regard.errors import RegardError
from regard.view.atlas import Atlas
from regard.view.gallery import EXAMPLES, Example, example, opened
from regard.view.gallery.scene import GRID, PATCH, SHARP, drawn
from regard.view.subjects import Spelling, vectors, words

SHORT = [one for one in EXAMPLES if one.name != "long"]
DOCS = Path(__file__).parents[3] / "docs" / "tour.md"
reader = cache(models.load)


def quoted(says: str) -> Iterator[str]:
    yield from re.findall("‘([^’]*)’", says)


def by_hand(of: Example, atlas: Atlas) -> torch.Tensor:
    """The weights of the query that is looked at, from q, k and the mask alone."""
    m = atlas[of.map]
    t = m.traces[m.calls[0]]
    x = t.inputs
    group = x.q.shape[1] // x.k.shape[1]
    q, k = x.q[0, of.head, of.query].double(), x.k[0, of.head // group].double()
    logits = (k @ q) * x.comparison.scale  # type: ignore[attr-defined]
    places = torch.arange(len(k))
    if of.model == "regard-small":
        logits = logits.masked_fill(places > of.query, -math.inf)
    elif of.model != "regard-king-james":
        logits = logits.masked_fill(places == of.query, -math.inf)
    return logits.softmax(-1)


@pytest.mark.parametrize("of", SHORT, ids=lambda of: of.name)
def test_what_it_says_is_true(of: Example) -> None:
    atlas, told = opened(of, reader)
    assert atlas.model == told.model == of.model
    m = atlas[of.map]
    p = by_hand(of, atlas)
    assert round(100 * float(p[list(of.keys)].sum())) == of.share
    says = of.told()["says"].replace("\xa0", " ")
    assert f"{of.share} %" in says
    # Every word that it quotes is in the text, those of the pair among them.
    names = {word.strip() for word in (*(m.queries or ()), *(m.keys or ()))}
    for word in quoted(says):
        assert word in names or word in of.text.replace(".", " ").split() or word == "queen", word
    if of.view != "picture" and of.keys[0]:
        assert str((m.keys or ())[of.keys[0]]).strip(' ."') in says
    if of.name not in ("other-word", "patches"):
        rest = p.clone()
        rest[list(of.keys)] = 0
        most = p[list(of.keys)].max()
        assert of.name == "name" or float(rest.max()) < float(most), "it looks elsewhere more"


def test_what_the_long_text_says_is_true() -> None:
    of = example("long")
    spelt = words(of.text)
    assert spelt == of.text.split()
    assert 9_500 < len(spelt) < 10_500
    kinds = sorted(set(spelt))
    x = vectors(kinds).double()
    own = spelt[of.query]
    assert own == "seventy"
    scores = x @ x[kinds.index(own)] / math.sqrt(x.shape[-1]) / Spelling().temperature
    exps = torch.stack([scores[kinds.index(word)] for word in spelt]).exp()
    exps[of.query] = 0
    assert {spelt[key] for key in of.keys} == {own}
    assert len(of.keys) == spelt.count(own) - 1 == 179
    assert round(100 * float(exps[list(of.keys)].sum() / exps.sum())) == of.share
    assert "1,860" in of.says
    assert of.text.endswith("one thousand eight hundred and sixty")


def test_patches_are_compared_by_their_colours() -> None:
    of = example("patches")
    atlas, _ = opened(of, reader)
    picture = drawn()
    side = range(0, GRID * PATCH, PATCH)
    cut = [picture[:, y : y + PATCH, x : x + PATCH] for y in side for x in side]
    colours = torch.stack([patch.mean((1, 2)) for patch in cut])
    x = colours - colours.mean(0)
    x = x / x.norm(dim=-1, keepdim=True)
    logits = SHARP * x @ x[of.query]
    logits[of.query] = -math.inf
    row = atlas[0].weights(0, [of.query], range(GRID * GRID))[0]
    torch.testing.assert_close(row, logits.softmax(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["it", "name"])
def test_what_a_head_does_in_general_is_what_the_docs_compute(name: str) -> None:
    of = example(name)
    usual = re.findall(r"(\d+) %", of.says.replace("{share} %", ""))
    assert len(usual) == 1
    told = f"({of.map}, {of.head}, '{of.share}%, {usual[0]}% at that distance in general')"
    assert told in DOCS.read_text("utf-8")


def test_there_are_a_dozen_and_their_names_differ() -> None:
    assert len({one.name for one in EXAMPLES}) == len(EXAMPLES) >= 12
    with pytest.raises(RegardError, match="there is no such example"):
        example("nothing")
