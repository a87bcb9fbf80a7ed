"""What each head of a model does: on texts, on repeated tokens, and with random weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.arguments import flag, refuse_no_list
from regard.errors import RegardError
from regard.interpret.head_scores.copied_tokens.copying_score import writing_of
from regard.interpret.head_scores.copied_tokens.guessed_form import guess_of
from regard.interpret.head_scores.links.link_scores import links_of
from regard.interpret.head_scores.links.link_table import Links
from regard.interpret.head_scores.random_weights import FEW, shuffled
from regard.interpret.head_scores.survey import Kinds, Progress, Survey
from regard.interpret.head_scores.syntax.arcs import Arc, arcs_of
from regard.interpret.head_scores.tables.head_table import Column, HeadRow, HeadScores, OwnScores
from regard.interpret.head_scores.tables.score_names import SCORES
from regard.interpret.head_scores.tally import Tally
from regard.interpret.head_scores.texts.probes import repeats
from regard.interpret.head_scores.texts.text_batches import Texts
from regard.interpret.interventions.runs import Runner
from regard.values import whole


def heads(
    model: Any,
    texts: Any,
    *,
    links: Sequence[Any] = (),
    parses: Sequence[Any] | None = None,
    probes: bool = True,
    random: bool = True,
    separators: Sequence[int] | None = None,
    layers: str | Sequence[str] = "*",
    progress: Progress | None = None,
    seed: int = 0,
) -> HeadScores:
    """What each head of a model does, as scores with plain names.

    `model` is one opened by `regard.models.load`, with `texts` that are strings; or any module that
    `regard.watch` sees, with what it is called with: tensors of tokens, dictionaries of arguments.
    Texts of like length are run together, one layer is looked at after the other, and no n×n is
    built.

    - `links`: pairs such as ("it", "animal"): which heads look from the one at the other,
      in `.links`.
    - `parses`: for each text the place of every token's syntactic head, or (heads, labels): which
      heads follow them, in `.syntax`.
    - `probes`: also let the model read random tokens, repeated once.
    - `random`: also score a copy whose weights are in random order, on 32 texts at most.
    - `separators`: tokens that divide texts; punctuation and special tokens, where a tokenizer
      tells.

    >>> import torch
    >>> from regard.models import CausalConfig, CausalModel
    >>> model = CausalModel(CausalConfig(vocabulary=50, d_model=16, layers=2, heads=2)).eval()
    >>> found = heads(model, [torch.randint(50, (1, 12)) for _ in range(4)])
    >>> len(found), found.best("previous").what.startswith("layer")
    (4, True)
    """
    flag("probes", probes)
    flag("random", random)
    whole("seed", seed)
    refuse_no_list("links", links, 'pairs: [("it", "animal")]')
    if parses is not None:
        refuse_no_list("parses", parses, "for each text the place of the head of every token")
    given = Texts(model, texts)
    if not given.calls:
        raise RegardError("there are no texts", got="none", accepted="one or more")
    notes: list[str] = []
    runner = Runner(given.model)
    guess = guess_of(given, layers)
    form = cache(lambda: writing_of(runner, given.sample, layers))
    if guess is None:
        form()
    # First: a word that no text contains is found at once.
    linked = links_of(given, links, layers, seed) if len(links) else Links(())
    kinds = Kinds(_separators(given, separators, notes), given.rare() if given.counts() else None)
    if not given.counts():
        notes.append("the texts are no tokens: scores of tokens are not measured")
    arcs: dict[int, list[Arc]] = {}
    for arc in arcs_of(parses, given) if parses is not None else ():
        arcs.setdefault(arc.text, []).append(arc)
    longest = getattr(given.reader, "longest", None)
    said = repeats(given, longest, seed) if probes else None
    if probes and said is None:
        notes.append("repeated tokens are not tried: the model is not called with one text alone")
    total = given.count + (min(FEW, len(given.calls)) if random else 0)
    sweep = Survey(given, kinds, form, guess, arcs, progress, total)
    found = sweep.tally()
    sizes, chosen = form().sizes, list(form().sizes)
    if form().why:
        notes.insert(0, f"copying and suppression are not measured: {form().why}")
    probe = sweep.probed(said)
    other_found = other_probe = Tally(1)
    if random:
        other, why = shuffled(given.model, seed)
        if other is None:
            notes.append(f"there is no comparison with random weights: {why}")
        else:
            other_found, other_probe = sweep.of(other, said)
    rows = []
    columns = _columns(found, other_found, seed), _columns(probe, other_probe, seed)
    offsets = found.strongest_offsets()
    for layer, path in enumerate(chosen):
        mine = columns[0].get(path, {}) | columns[1].get(path, {})
        mine = {name: mine[name] for name in SCORES if name in mine}
        strongest = offsets.get(path)
        for head in range(sizes[path].heads):
            offset = None if strongest is None else strongest[head]
            rows.append(HeadRow(layer, head, path, OwnScores(mine, head), offset))
    return HeadScores(
        tuple(rows), tuple(chosen), given.count, linked, sweep.arc_sums.table(), tuple(notes)
    )


def _separators(
    texts: Texts, given: Sequence[int] | None, notes: list[str]
) -> Int[Tensor, "v"] | None:
    if given is not None:
        return torch.as_tensor(list(given), dtype=torch.long)
    found = texts.separators() if texts.counts() else None
    if found is None:
        notes.append("separators are not known: give their tokens as separators=")
    return found


def _columns(found: Tally, other: Tally, seed: int) -> dict[str, dict[str, Column]]:
    """By layer and name, the scores of all heads, beside those with random weights."""
    usual = other.estimates(seed)
    columns: dict[str, dict[str, Column]] = {}
    for path, mine in found.estimates(seed).items():
        theirs = usual.get(path, {})
        columns[path] = {}
        for name, estimates in mine.items():
            known = theirs[name].value if name in theirs else ()
            known = [value for value in known if not math.isnan(value)]
            mean = math.fsum(known) / len(known) if known else math.nan
            columns[path][name] = Column(*estimates, mean, max(known, default=math.nan))
    return columns
