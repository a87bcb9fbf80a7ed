"""Word alignments: the error rate by hand, links of planted weights, and a translator watched."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import RegardError, interpret
from regard.models.translator import TranslatorConfig, TranslatorModel


def test_the_error_rate_of_examples_by_hand() -> None:
    rate = interpret.alignment_error_rate
    sure, possible = [(0, 0), (1, 1), (2, 3)], [(2, 2), (3, 3)]
    assert rate(sure, sure, possible) == 0
    assert rate([], sure) == 1
    # A = 4 links: two sure, one possible, one wrong. 1 - (2 + 3) / (4 + 3).
    assert rate([(0, 0), (1, 1), (2, 2), (5, 5)], sure, possible) == pytest.approx(2 / 7)
    # A possible link costs nothing, one that is not given as possible does.
    assert rate([*sure, (3, 3)], sure, possible) == 0
    assert rate([*sure, (3, 3)], sure) == pytest.approx(1 - 6 / 7)
    # Without possible links: one less the F-measure of precision 1/2 and recall 1/3.
    assert rate([(0, 0), (9, 9)], sure) == pytest.approx(1 - 2 * (1 / 2 * 1 / 3) / (1 / 2 + 1 / 3))
    with pytest.raises(RegardError, match="nothing to compare"):
        rate([], [])


def test_links_of_each_way() -> None:
    weights = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]])
    assert interpret.word_links(weights, way="target") == {(0, 0), (1, 0), (2, 2)}
    assert interpret.word_links(weights, way="source") == {(0, 0), (1, 1), (2, 2)}
    assert interpret.word_links(weights) == {(0, 0), (2, 2)}
    assert interpret.word_links(weights, at_least=0.75) == {(2, 2)}


@pytest.mark.parametrize("generated", [False, True])
def test_a_translator_s_links_are_those_of_its_weights(generated: bool) -> None:
    torch.manual_seed(3)
    model = TranslatorModel(TranslatorConfig(vocabulary=50, d_model=16, layers=2, heads=2)).eval()
    for block in model.decoder:  # untrained weights are nearly uniform
        block.memory.q_proj.weight.data *= 40
    source, target = torch.tensor([[7, 3, 9, 12, 30, 0]]), torch.tensor([[0, 5, 8, 6, 11]])
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        if generated:
            read, memory = model.read(source), model.memory()
            for step in target.split(1, 1):
                model(None, step, encoder_outputs=read, past_key_values=memory)
        else:
            model(source, target)
    sources, targets = [[0], [1, 2], [3], [4]], [[1], [2, 3], [4]]
    found = {
        way: interpret.word_alignment(
            seen, targets, sources, [(0, 1), (1, 0)], layers="decoder.*.memory", way=way
        )
        for way in ("target", "both")
    }
    parts = []
    for layer, head in ((0, 1), (1, 0)):
        kept = seen[f"decoder.{layer}.memory"].traces
        parts.append(torch.cat([trace.weights()[0, head] for trace in kept]))
    rows = torch.stack(parts).mean(0)
    expected = torch.tensor([
        [sum(float(rows[t - 1, s]) for t in word for s in other) / len(word) for other in sources]
        for word in targets
    ])  # fmt: skip
    assert found["target"] == {(t, int(row.argmax())) for t, row in enumerate(expected)}
    by_source = {(int(column.argmax()), s) for s, column in enumerate(expected.T)}
    assert found["both"] == found["target"] & by_source
    with pytest.raises(RegardError, match="predicted by no row"):
        interpret.word_alignment(seen, [[0]], sources, layers="decoder.*.memory")
