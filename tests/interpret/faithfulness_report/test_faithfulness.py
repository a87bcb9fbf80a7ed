"""The report says of models that are built to be faithful, or not, that they are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from typer.testing import CliRunner

from regard import RegardError, cli, interpret
from regard.interpret.faithfulness_report.rank_correlation import (
    ranks,
    spearman,
    top_share,
)
from tests.interpret.constructed import Dense

close: Callable[..., None] = torch.testing.assert_close
VOCABULARY = 32


class TwoHeads(nn.Module):
    """The last token looks at others as they are loud, and reads what they are worth, or as all are
    alike. Loud and worth are of the token, and have nothing to do with each other."""

    def __init__(self, *, faithful: bool) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.loud = nn.Parameter(torch.linspace(-3, 3, VOCABULARY)[torch.randperm(32, generator=g)])
        worth = torch.linspace(0.1, 2, VOCABULARY)[torch.randperm(32, generator=g)]
        self.worth = nn.Parameter(torch.ones(32) if faithful else worth)
        self.faithful = faithful

    def forward(self, ids: Tensor) -> Tensor:
        loud, worth = self.loud[ids], self.worth[ids].clone()
        # The last token reads of itself as well, which is worth nothing.
        last = torch.arange(ids.shape[1]) == ids.shape[1] - 1
        loud, worth = torch.where(last, 2.0, loud), torch.where(last, 0.0, worth)
        zero = torch.zeros_like(worth)
        # The first head looks where it is loud; the second everywhere alike.
        k = torch.stack([loud, zero], 1)[..., None]
        v = torch.stack([worth, zero] if self.faithful else [zero, worth], 1)[..., None]
        out = F.scaled_dot_product_attention(torch.ones_like(k), k, v, is_causal=True, scale=1.0)
        logit = out.sum(1)
        return torch.cat([logit, torch.zeros(*ids.shape, VOCABULARY - 1)], -1)


def texts(many: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randperm(VOCABULARY, generator=g)[None, :16] for _ in range(many)]


def metric(output: Tensor) -> Tensor:
    return output[:, -1, 0]


@pytest.mark.parametrize("softmax", ["before", "after"])
@pytest.mark.parametrize("many", [1, 4])
def test_a_head_that_is_loud_about_what_is_not_used_is_unfaithful(many: int, softmax: Any) -> None:
    model = TwoHeads(faithful=False).eval()
    found = interpret.faithfulness(model, texts(many), metric, softmax=softmax)
    assert not found.points
    assert found["weights"].correlation.value < 0.4
    assert "do not point at what decided" in found.verdict
    assert "position alone gives" in found.verdict
    # What was read is told by gradients of what decided, after softmax exactly.
    if softmax == "after":
        close(found["gradients"].correlation.value, 1.0)


@pytest.mark.parametrize("softmax", ["before", "after"])
@pytest.mark.parametrize("many", [1, 4])
def test_a_head_whose_weights_decide_is_faithful(many: int, softmax: Any) -> None:
    model = TwoHeads(faithful=True).eval()
    found = interpret.faithfulness(model, texts(many), metric, softmax=softmax)
    assert found.points
    close(found["weights"].correlation.value, 1.0)
    assert found.verdict.startswith("Here attention weights point at what decided, beyond position")
    assert found["position"].correlation.value < 0.8
    assert found["weights"].beyond.low > 0
    shuffled = found["weights, shuffled"].correlation
    assert shuffled.low < 0 < shuffled.high < 0.9


class Nearest(TwoHeads):
    """Weights that decide, and are by position alone."""

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], dtype=torch.float32)
        self.loud.data, self.worth.data = torch.zeros(32), torch.ones(32)
        self.loud.data[ids[0]] = places / 4
        return super().forward(ids)


def test_what_position_gives_is_no_merit_of_weights() -> None:
    found = interpret.faithfulness(Nearest(faithful=True).eval(), texts(4), metric)
    close(found["weights"].correlation.value, 1.0)
    assert not found.points
    assert "no better than position" in found.verdict
    assert "nearer tokens first" in repr(found)


def test_where_nothing_decides_nothing_is_pointed_at() -> None:
    model = TwoHeads(faithful=True).eval()
    with torch.no_grad():
        model.worth.zero_()
    found = interpret.faithfulness(model, texts(1), metric)
    assert "nothing to point at" in found.verdict
    assert not found.points
    assert found.json()
    assert "nothing to point at" in repr(found)


def test_one_text_of_several_in_which_something_decides_has_no_verdict() -> None:
    def first(output: Tensor) -> Tensor:
        """The first place looks at itself alone: no edge to it is ever cut."""
        return output[:, 0, 0]

    model, given = TwoHeads(faithful=True).eval(), texts(2)
    found = interpret.faithfulness(model, given, [metric, first], softmax="after")
    assert found["weights"].correlation.value > 0.9
    assert found.verdict.startswith(
        "Here it cannot be told whether attention weights point at what decided: of 2 texts one "
        "alone has effects to rank (rank correlation "
    )
    assert "whether attention rollout points at" in found.verdict_of("rollout")
    assert not found.points
    assert "beyond position" in interpret.faithfulness(model, given[:1], metric).verdict


def test_a_verdict_on_few_texts_says_that_its_interval_is_too_narrow() -> None:
    model = TwoHeads(faithful=True).eval()
    few, enough, alone = (interpret.faithfulness(model, texts(n), metric) for n in (2, 10, 1))
    assert "interval 1.00 to 1.00, too narrow for 2 texts; position alone" in few.verdict
    assert "too narrow" not in enough.verdict + alone.verdict


def test_numbers_are_those_of_n_by_n() -> None:
    """Weights of the last row, its norms, and the effect of edges cut by hand."""
    torch.manual_seed(0)
    model, x = Dense().double().eval(), torch.randn(1, 8, 32, dtype=torch.float64)
    found = interpret.faithfulness(
        model, x, lambda o: o[:, -1].tanh().sum(-1), methods=["weights", "norms", "rollout"],
        output=lambda path, _: model.o[int(path[-1])],
    )  # fmt: skip
    (text,) = found.texts
    clean, had = model.dense(x)
    weights = torch.stack([layer["p"][0, :, -1] for layer in had]).mean((0, 1))
    close(text.scores["weights"], weights[:-1].detach())
    for j in range(7):

        def cut(
            i: int, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, j: int = j
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            allowed = allowed.clone()
            allowed[:, :, j + 1 :, j] = False
            return q, k, v, allowed

        changed = model.dense(x, change=cut)[0]
        want = changed[:, -1].tanh().sum() - clean[:, -1].tanh().sum()
        close(text.effect[j], want.detach())
    last = interpret.faithfulness(
        model, x, lambda o: o[:, -1].tanh().sum(-1), methods=["weights"], cuts="last"
    )
    assert last.texts[0].effect[0] != text.effect[0]
    left = interpret.faithfulness(model, x, lambda o: o[:, -1].tanh().sum(-1))
    assert [row.name for row in left.rows[:3]] == ["weights", "rollout", "gradients"]
    assert "left out: norms" in repr(left)


def test_rank_correlation() -> None:
    g = torch.Generator().manual_seed(0)
    x = torch.randint(5, (3, 20), generator=g).double()
    y = torch.randn(3, 20, generator=g).double()
    for row, other, found in zip(x, y, spearman(x, y), strict=True):
        mean_ranks = torch.tensor([(row < v).sum() + ((row == v).sum() + 1) / 2 for v in row])
        close(ranks(row), mean_ranks.double())
        both = torch.stack([ranks(row), ranks(other)])
        close(found, torch.corrcoef(both)[0, 1])
    assert math.isnan(spearman(x[0], torch.ones(20)))
    assert top_share(torch.tensor([5.0, 4, 3, 2, 1]), torch.tensor([3.0, 1, 0, 0, 0])) == 0.75


def test_intervals_hold_what_they_should() -> None:
    """Of many corpora whose true correlation is known, about 95 in 100 intervals hold it."""
    from regard.interpret.faithfulness_report.rank_correlation import over_texts

    g = torch.Generator().manual_seed(0)
    each = 0.3 + 0.2 * torch.randn(60, 30, generator=g).double()
    held = [i.low <= 0.3 <= i.high for i in over_texts(each, 0)]
    assert 0.85 < sum(held) / 60 <= 1
    alone = over_texts(each[:, :1], 0)[0]
    assert math.isnan(alone.low)


def test_reports(tmp_path: Path) -> None:
    model = TwoHeads(faithful=True).eval()
    words = ["<b>\x1b", *"bcdefghijklmnop"]
    found = interpret.faithfulness(model, texts(1), metric, words=words)
    page = found.page(tmp_path / "page.html").read_text("utf-8")
    assert "&lt;b&gt;" in page
    assert "\x1b" not in page
    assert "<script" not in page
    assert "http:" not in page.replace("http-equiv", "")
    assert page.count("<dt>") == 1 + len(found.texts[0].scores)
    told = json.loads(found.write(tmp_path / "numbers.json").read_text())
    assert told["verdict"] == found.verdict
    assert told["rows"][0]["correlation"] == 1.0
    assert len(told["tokens"]) == 15
    assert found.verdict in found._repr_html_()
    text = repr(found)
    assert "\x1b" not in text
    assert "methods that agree with each other prove nothing" in text
    assert "too narrow for so few" in repr(interpret.faithfulness(model, texts(2), metric))


def test_errors_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    model, x = TwoHeads(faithful=True).eval(), texts(1)
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: interpret.faithfulness(model, x, metric, methods=["magic"]), "'rollout'"),
        (lambda: interpret.faithfulness(model, x, metric, methods=[]), "none"),
        (lambda: interpret.faithfulness(model, x, metric, softmax="in"), "renormalises"),
        (lambda: interpret.faithfulness(model, x, metric, cuts="some"), '"token"'),
        (lambda: interpret.faithfulness(model, x, [metric, metric]), "2 metrics for 1 texts"),
        (lambda: interpret.faithfulness(model, x, metric, words=["a"]), "1 words for 16 tokens"),
        (lambda: interpret.faithfulness(model, [x[0][:, :3]], metric), "too few tokens"),
        (lambda: interpret.faithfulness(model, [torch.cat(x * 2)] * 2, metric), "a batch of 2"),
    ]
    for call, said in cases:
        with pytest.raises(RegardError) as error:
            call()
        assert said in str(error.value)
    # A tensor of several sequences is several texts.
    assert len(interpret.faithfulness(model, torch.cat(texts(3)), metric).texts) == 3


def _cut_to_nan(output: Tensor) -> Tensor:
    """NaN for cuts, each of which takes something away, and a number for the unchanged model."""
    found = output[:, -1, 0]
    clean = TwoHeads(faithful=True)(texts(1)[0])[:, -1, 0]
    return torch.where(found < clean - 1e-4, math.nan, found)


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (lambda output: output[:, -1, 0] * math.nan, "the metric of the unchanged model is nan"),
        (lambda output: output[:, -1, 0] + math.inf, "the metric of the unchanged model is inf"),
        (_cut_to_nan, "the effect of cutting token 0 is NaN"),
    ],
)
def test_what_is_no_number_is_not_ranked(odd: Any, said: str) -> None:
    model = TwoHeads(faithful=True).eval()
    with pytest.raises(RegardError, match=said):
        interpret.faithfulness(model, texts(1), odd, methods=["weights"])


@pytest.mark.parametrize("real", [[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
def test_padding_is_refused(real: list[int]) -> None:
    """It would be ranked as tokens that do nothing, or be the last place itself."""
    text = {"ids": torch.arange(6)[None], "attention_mask": torch.tensor([real])}
    with pytest.raises(RegardError, match="leaves out 1 of 6 tokens") as error:
        interpret.faithfulness(Masked(faithful=True).eval(), text, metric)
    assert "give each text by itself" in str(error.value)
    every = text | {"attention_mask": torch.ones(1, 6)}
    found = interpret.faithfulness(Masked(faithful=True).eval(), every, metric)
    assert len(found.texts[0].effect) == 5


class Masked(TwoHeads):
    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(ids)


def test_the_command(tmp_path: Path) -> None:
    lines, numbers = tmp_path / "texts.txt", tmp_path / "numbers.json"
    lines.write_text("Tom had a red ball.\n\nLily had a blue hat.\n")
    how = ["faithfulness", "--texts", str(lines), "--cuts", "last", "--device", "cpu"]
    done = CliRunner().invoke(cli.app, [*how, "-o", str(numbers)])
    assert done.exit_code == 0, done.output
    assert "attention weights" in done.stdout
    told = json.loads(numbers.read_text())
    assert told["texts"] == 2
    assert told["tokens"][1]["word"] == "Tom"
    for words, said in (
        (["a", "-o", str(tmp_path / "page.pdf")], ".html or .json"),
        (["a", "--texts", "b"], "leave out one of them"),
        (["a", "--model", "regard-king-james"], "no next token of its own"),
    ):
        wrong = CliRunner().invoke(cli.app, ["faithfulness", *words])
        assert wrong.exit_code == 2
        assert said in wrong.output


def test_the_folder_does_not_take_the_name_of_the_function() -> None:
    from regard.interpret import faithfulness_report

    assert interpret.faithfulness is faithfulness_report.faithfulness
