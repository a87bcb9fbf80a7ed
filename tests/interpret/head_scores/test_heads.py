"""Scores of heads are what theory says of constructed models, and what n×n attention gives."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as Joined
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import regard
from regard import RegardError, interpret, masks, models
from regard.interpret.head_scores.copied_tokens.copying_score import Unembedding, unembedding_of
from regard.interpret.head_scores.copied_tokens.model_form import Last
from regard.interpret.head_scores.pairs import weight_blocks
from regard.interpret.head_scores.pairs.pair_sums import NEAR, call_sums
from regard.interpret.head_scores.tables.head_table import Column, HeadRow, OwnScores, Score
from regard.interpret.head_scores.texts import probes
from regard.interpret.head_scores.texts.sides import Side, Sides
from regard.models import CausalConfig, CausalModel, TranslatorConfig, TranslatorModel
from tests.interpret.constructed import (
    SHARP,
    TOKEN,
    Constructed,
    Head,
    Layer,
    V,
    induction,
    looks_at,
    previous_token,
)

close: Callable[..., None] = torch.testing.assert_close
QUICK: dict[str, Any] = {"random": False, "probes": False}


def same_token() -> Head:
    """Looks at earlier copies of its token, and a little less at itself."""
    head = Head()
    with torch.no_grad():
        head.q[TOKEN, :V] = SHARP * torch.eye(V)
        head.k[TOKEN, :V] = torch.eye(V)
    return head


def said_twice(seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    words = torch.randperm(8, generator=g)[None, :6]
    return torch.cat([words, words], 1)[:, :-1]


def test_constructed_heads_have_the_scores_of_their_kind() -> None:
    model = Constructed(
        Layer(previous_token(), looks_at(0), same_token()), Layer(looks_at(3), induction(), Head())
    ).eval()
    found = interpret.heads(model, [said_twice(seed) for seed in range(4)], seed=1)
    assert found.best("previous").what == "layer 0 head 0"
    assert found.at(0, 0)["previous"] == pytest.approx(1, abs=1e-4)
    assert found.at(0, 0).offset == 1
    assert found.at(0, 0)["next"] != found.at(0, 0)["next"]  # no row may see it
    assert found.at(0, 1)["first"] == pytest.approx(1, abs=1e-4)
    # Of two copies of a token the earlier gets half, the token itself the other.
    assert found.at(0, 2)["duplicate"] == pytest.approx(0.5, abs=1e-4)
    # The first token has only itself before it, and so passes for what followed it, too: of five
    # rows one looks half at that.
    assert found.at(1, 1)["induction"] == pytest.approx(0.9, abs=1e-4)
    assert found.at(1, 1)["probe induction"] == pytest.approx(0.9, abs=1e-4)
    # Nothing at all: alike on everything.
    blank = found.at(1, 2)
    assert blank["entropy"] == pytest.approx(1, abs=1e-5)
    n = 11
    assert blank["first"] == pytest.approx(sum(1 / q for q in range(1, n + 1)) / n, abs=1e-5)
    assert found.badges() == (
        ("previous", "first", "duplicate"),
        (found.at(1, 0).badge, "induction", "broad"),
    )
    assert found.at(0, 0).scores["previous"].low == pytest.approx(1, abs=1e-4)
    assert found.at(0, 0).scores["previous"].random < 0.5
    assert any("copying" in note for note in found.notes)  # its output projections are no modules


def copier(sign: float) -> CausalModel:
    """One wide head that looks at all tokens and writes each as it is read, or the opposite."""
    torch.manual_seed(0)
    width = 32
    model = CausalModel(CausalConfig(vocabulary=24, d_model=width, layers=1, heads=1)).eval()
    attention: Any = model.blocks[0].attention
    with torch.no_grad():
        model.embedding.weight.copy_(torch.eye(24, width))
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight.zero_()
        attention.v_proj.weight.copy_(torch.eye(width))
        attention.out_proj.weight.copy_(sign * torch.eye(width))
    return model


@pytest.mark.parametrize(
    ("sign", "name", "other"), [(1, "copying", "suppression"), (-1, "suppression", "copying")]
)
def test_a_head_that_writes_what_it_reads_copies_and_its_opposite_suppresses(
    sign: float, name: str, other: str
) -> None:
    ids = torch.randint(24, (3, 9), generator=torch.Generator().manual_seed(2))
    found = interpret.heads(copier(sign), ids, **QUICK)[0]
    assert found[name] == pytest.approx(1)
    assert found[other] == 0
    # One of 24 logits is 1, the others 0, in standard deviations.
    assert found["own logit"] == pytest.approx(sign * math.sqrt(23), rel=1e-3)


class Short(nn.Module):
    """A model without norms, by parts: embedding, attention, a map of the stream, logits."""

    def __init__(self, read: int, written: int, narrow: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.attn = nn.Embedding(read, 16), regard.nn.MultiHeadAttention(16, 2)
        self.narrow = nn.Linear(16, narrow) if narrow < 16 else nn.Identity()
        self.logits = nn.Linear(narrow, written)
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.logits(self.narrow(x + self.attn(x, mask=masks.causal())))


def test_tokens_without_a_logit_are_neither_copied_nor_suppressed() -> None:
    wide, ids = Short(24, 24), torch.tensor([[23, 1, 22, 3, 1, 2]])
    short = Short(24, 20)
    short.load_state_dict(wide.state_dict() | {
        "logits.weight": wide.logits.weight[:20], "logits.bias": wide.logits.bias[:20]
    })  # fmt: skip
    seen: list[Tensor] = []
    usual = Unembedding.own_logit

    def noted(*of: Any) -> Tensor:
        seen.append(usual(*of))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Unembedding, "own_logit", noted)
        found = interpret.heads(short, ids, **QUICK)
    (stands,) = seen
    read_only = (ids >= 20)[:, None].expand_as(stands)
    assert bool((stands[read_only] == 0).all())
    assert bool((stands[~read_only] != 0).all())
    assert not math.isnan(found[0]["copying"])


def test_projections_that_are_not_as_wide_as_the_logits_take_are_none() -> None:
    found = interpret.heads(Short(20, 20, narrow=8), torch.tensor([[1, 2, 3, 1, 2]]), **QUICK)
    assert "copying" not in found[0].scores
    assert any("no output projection" in note for note in found.notes)


def norms() -> list[Any]:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
    from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    given = [
        (nn.LayerNorm, 0, True),
        (nn.RMSNorm, 0, False),
        (LlamaRMSNorm, 0, False),
        (GemmaRMSNorm, 1, False),
        (Gemma3nRMSNorm, 0, False),
        (Qwen3NextRMSNorm, 1, False),
        (NemotronLayerNorm1P, 1, True),
        (T5LayerNorm, 0, False),
        (OlmoLayerNorm, None, True),
    ]
    return [pytest.param(*one, id=one[0].__name__) for one in given]


@pytest.mark.parametrize(("kind", "more", "centres"), norms())
@pytest.mark.parametrize("width", [8, 9])
def test_what_the_last_norm_does_to_a_direction(
    kind: Any, more: float | None, centres: bool, width: int
) -> None:
    torch.manual_seed(0)
    norm, end = kind(width), nn.Linear(width, 20)
    gain = torch.ones(width)
    if more is not None:
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.normal_()
        gain = norm.weight.detach() + more
    norm.register_forward_hook(lambda *_: pytest.fail("the model's own hooks are not run"))
    of = unembedding_of(nn.ModuleDict({"norm": norm, "end": end}), Last("norm", "end"))
    assert of is not None
    found = of.tokens
    want = end.weight.detach() * gain
    want = want - want.mean(1, keepdim=True) * centres
    close(found / found.norm(), want / want.norm(), atol=1e-5, rtol=1e-4)


class NormOfTwo(nn.Module):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate


class Gated(Short):
    """A model whose last norm takes more than the stream."""

    def __init__(self) -> None:
        super().__init__(20, 20)
        self.norm, self.first_norm = NormOfTwo(), nn.LayerNorm(16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first_norm(self.embedding(ids))
        x = x + self.attn(x, mask=masks.causal())
        return self.logits(self.norm(x, torch.ones(16)))


def test_a_norm_that_takes_more_than_the_stream_is_not_seen_through() -> None:
    found = interpret.heads(Gated(), torch.tensor([[1, 2, 3, 1, 2]]), **QUICK)
    assert "copying" not in found[0].scores
    assert "copying and suppression are not measured: the last norm takes more" in found.notes[0]


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class QuantisedLinear(nn.Linear):
    """Its weight has a scale beside it, as libraries for quantised models store them."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__(like.in_features, like.out_features, bias=False)
        self.scale = like.weight.detach().abs().amax(1, keepdim=True) / 127
        small = (like.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(small, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight * self.scale).T


@pytest.mark.parametrize(
    ("path", "why", "scored"),
    [
        ("model.layers.1.self_attn.o_proj", "no output projection that adds", [True, False]),
        ("lm_head", "the last linear map to logits", [False, False]),
    ],
)
def test_weights_with_a_scale_beside_them_are_not_read(
    path: str, why: str, scored: list[bool]
) -> None:
    model = llama()
    model.set_submodule(path, QuantisedLinear(model.get_submodule(path)))
    found = interpret.heads(model, torch.randint(40, (2, 9)), **QUICK)
    assert any(why in note for note in found.notes)
    copying = [found.at(layer, 0).scores.get("copying") for layer in range(2)]
    assert [c is not None and not math.isnan(c.value) for c in copying] == scored


def test_copying_is_what_the_written_logits_say() -> None:
    model = llama()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 2)
    ids = torch.randint(40, (2, 9))
    found = interpret.heads(model, ids, **QUICK)
    assert not any("copying" in note for note in found.notes)
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        model(ids)
    for layer, (path, one) in enumerate(seen.items()):
        w, v = one.trace.weights(), one.trace.inputs.v.repeat_interleave(2, 1)
        out = model.get_submodule(path).o_proj.weight.unflatten(1, (4, 6))
        for h in range(4):
            written = v[:, h] @ out[:, h].T * model.model.norm.weight
            logits = written @ model.lm_head.weight.T
            z = (logits - logits.mean(-1, keepdim=True)) / logits.std(
                -1, keepdim=True, correction=0
            )
            own = z.gather(-1, ids[..., None])[..., 0].detach()
            given = w[:, h].sum(1)
            share = float((given * (own > 2)).sum() / given.sum())
            assert found.at(layer, h)["copying"] == pytest.approx(share, abs=1e-5)
            mean = float((given * own).sum() / given.sum())
            assert found.at(layer, h)["own logit"] == pytest.approx(mean, abs=1e-4)


def dense_scores(w: Tensor, seen: Tensor, ids: Tensor, sep: list[int], rare: list[int]) -> Any:
    """Every score of one head's weights [n, n], pair by pair."""
    n, total = len(ids), Counter[str]()
    count: Counter[str] = Counter()
    for q in range(n):
        if not bool(seen[q].any()):
            continue
        marks = {
            "previous": [k for k in range(n) if k == q - 1],
            "next": [k for k in range(n) if k == q + 1],
            "duplicate": [k for k in range(q) if ids[k] == ids[q]],
            "induction": [k for k in range(1, q) if ids[k - 1] == ids[q]],
        }
        for name, keys in marks.items():
            open_keys = [k for k in keys if seen[q, k]]
            total[name] += float(w[q, open_keys].sum())
            count[name] += bool(open_keys)
        always = {
            "first": float(w[q, 0]),
            "separator": sum(float(w[q, k]) for k in range(1, n) if int(ids[k]) in sep),
            "nearby": sum(float(w[q, k]) for k in range(n) if abs(q - k) <= NEAR),
            "distance": sum(float(w[q, k]) * abs(q - k) for k in range(n)),
        }
        total.update(always)
        count.update(dict.fromkeys(always, 1))
        is_rare = [k for k in range(1, n) if int(ids[k]) in rare]
        total["rare"] += float(w[q, is_rare].sum())
        count["rare"] += len(is_rare) / n
        p = w[q][w[q] > 0]
        total["entropy"] += float(-(p * p.log()).sum())
        count["entropy"] += math.log(int(seen[q].sum()))
    return total, count


class Reads(nn.Module):
    """Grouped heads over tokens, under any mask."""

    def __init__(self, mask: masks.Mask | None) -> None:
        super().__init__()
        self.embed, self.mask = nn.Embedding(12, 16), mask
        self.attention = regard.nn.MultiHeadAttention(16, 4, kv_heads=2)
        with torch.no_grad():
            self.attention.q_proj.weight.mul_(4)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.attention(self.embed(ids), mask=self.mask)
        return out


MASKS = {
    "causal": masks.causal(),
    "window": masks.causal() & masks.window(5),
    "both ways": None,
    "apart": masks.keep(torch.rand(1, 4, 15, 15, generator=torch.Generator().manual_seed(1)) > 0.3),
}


@pytest.mark.parametrize("pairs", [1 << 22, 700])
@pytest.mark.parametrize("name", MASKS)
def test_scores_are_those_of_every_pair_of_n_by_n(
    name: str, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(weight_blocks.PAIRS, "cpu", pairs)
    torch.manual_seed(3)
    model = Reads(MASKS[name]).eval()
    lengths = [15, 15, 15] if name == "apart" else [15, 9, 12]
    texts = [torch.randint(12, (1, n)) for n in lengths]
    found = interpret.heads(model, texts, separators=[3, 4], **QUICK)
    counts = Counter(t for text in texts for t in text[0].tolist())
    upto = max(
        (
            c
            for c in counts.values()
            if sum(d for d in counts.values() if d <= c) <= 0.1 * sum(lengths)
        ),
        default=1,
    )
    rare = [t for t, c in counts.items() if c <= upto]
    totals = [(Counter[str](), Counter[str]()) for _ in range(4)]
    for text in texts:
        with torch.no_grad(), regard.watch(model, keep="traces") as seen:
            model(text)
        trace = seen["attention"].trace
        allowed = trace.logits()[0] > -math.inf
        for h in range(4):
            one = dense_scores(trace.weights()[0, h], allowed[h], text[0], [3, 4], rare)
            for into, more in zip(totals[h], one, strict=True):
                into.update(more)
    for h in range(4):
        row, (total, count) = found.at(0, h), totals[h]
        for score in total:
            expected = total[score] / count[score] if count[score] else math.nan
            assert row[score] == pytest.approx(expected, abs=1e-5, nan_ok=True), score


def test_padding_is_seen_to_change_nothing_or_is_not_used() -> None:
    torch.manual_seed(0)
    bert = BertModel(BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=20, max_position_embeddings=32,
    )).eval()  # fmt: skip
    texts = [torch.randint(30, (1, n)) for n in (7, 12, 9, 12)]
    for model in (bert, Reads(None).eval(), Reads(masks.causal()).eval()):
        texts = [text % 12 for text in texts]
        together = interpret.heads(model, texts, separators=[1], **QUICK)
        alone = [interpret.heads(model, [text], separators=[1], **QUICK) for text in texts]
        rows = [text.shape[1] for text in texts]
        for i, row in enumerate(together):
            for name in ("first", "entropy", "distance", "separator"):
                each = [one[i][name] for one in alone]
                if name != "entropy":
                    mean = sum(e * r for e, r in zip(each, rows, strict=True)) / sum(rows)
                    assert row[name] == pytest.approx(mean, abs=1e-5)
                assert min(each) - 1e-6 <= row[name] <= max(each) + 1e-6


@pytest.mark.parametrize("written", [7, 5])
def test_a_model_of_two_texts_is_scored_for_what_makes_sense(written: int) -> None:
    torch.manual_seed(0)
    model = TranslatorModel(TranslatorConfig(vocabulary=9, d_model=16, layers=1, heads=2)).eval()
    source, target = torch.randint(9, (1, 7)), torch.randint(9, (1, written))
    found = interpret.heads(model, [(source, target)], **QUICK)
    assert found.paths == ("encoder.0.attention", "decoder.0.own", "decoder.0.memory")
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        model(source, target)
    w = seen["decoder.0.memory"].trace.weights()[0]
    for h in range(2):
        row = found.at(2, h)
        same = target[0][:, None] == source[0]
        rows = same.any(1)
        assert row["duplicate"] == pytest.approx(float((w[h] * same).sum() / rows.sum()), abs=1e-5)
        assert row["first"] == pytest.approx(float(w[h, :, 0].mean()), abs=1e-5)
        assert math.isnan(row["previous"])  # places of two texts do not compare
        assert math.isnan(row["distance"])
        assert not math.isnan(found.at(0, h)["next"])


def test_random_weights_on_random_tokens_are_near_uniform() -> None:
    torch.manual_seed(0)
    model = CausalModel(CausalConfig(vocabulary=64, d_model=32, layers=2, heads=4)).eval()
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.q_proj.weight, std=0.02)
    texts = [torch.randint(64, (1, 40)) for _ in range(12)]
    found = interpret.heads(model, texts, separators=[0])
    n = 40
    for row in found:
        assert row["previous"] == pytest.approx(
            sum(1 / (q + 1) for q in range(1, n)) / (n - 1), abs=0.01
        )
        assert row["distance"] == pytest.approx((n - 1) / 4, rel=0.1)
        assert row["entropy"] > 0.99
        assert row["copying"] < 0.1
        assert row.scores["previous"].random == pytest.approx(row["previous"], abs=0.02)
        assert row.scores["duplicate"].low < row["duplicate"] < row.scores["duplicate"].high
    assert {word for layer in found.badges() for word in layer} == {"broad"}


@pytest.fixture(scope="module")
def small() -> Any:
    return models.load("regard-small", device="cpu")


TIRED = "The animal didn't cross the street because it was too tired."


def test_the_small_model_links_it_to_animal(small: Any) -> None:
    found = interpret.heads(small, [TIRED], links=[("it", "animal")], **QUICK).links
    seen = small.run(TIRED)
    tokens = small.read(TIRED)
    it, animal = tokens.index(" it"), tokens.index(" animal")
    for row in found:
        w = seen[row.path].trace.weights(heads=[row.head])[0, 0]
        assert row.share == pytest.approx(float(w[it, animal]), abs=1e-6)
        diagonal = w.diagonal(animal - it)
        assert row.usual == pytest.approx(float(diagonal.mean()), abs=1e-6)
        assert row.uniform == pytest.approx(1 / (it + 1))
        others = torch.cat([w[it, :animal], w[it, animal + 1 : it + 1]])
        z = (row.share - others.mean()) / others.std(correction=0)
        assert row.z == pytest.approx(float(z), rel=1e-4)
        assert row.p == pytest.approx((1 + int((others >= row.share).sum())) / (it + 1))
    best = {(row.layer, row.head): row for row in found}[7, 1]
    assert 0.35 < best.share < 0.5
    assert found.index(best) < 3
    assert found[0].share >= found[1].share
    assert "never below" in found.notes[-1]


def test_links_of_many_texts_are_corrected_for_the_heads_that_were_tried(small: Any) -> None:
    names = ["animal", "dog", "horse", "girl", "teacher", "cat", "bear", "boy"]
    texts = [TIRED.replace("animal", name) for name in names]
    at = small.read(TIRED).index(" it")
    found = interpret.heads(small, texts, links=[(at, 2)], layers="blocks.7.*", **QUICK).links
    best = found[0]
    assert best.texts == 8
    assert best.head == 1
    assert best.p < 1e-3 < 0.05
    assert best.p <= best.p_corrected <= 8 * best.p
    assert any(row.p_corrected > 0.5 for row in found)


def test_words_of_a_link_are_found_or_it_is_said(small: Any) -> None:
    said = "It saw it, and then it went."
    found = interpret.heads(small, [said, "Nothing here."], links=[(("it", 2), "saw")], **QUICK)
    tokens = small.read(said)
    places = [i for i, token in enumerate(tokens) if token == " it"]
    w = small.run(said)[found.links[0].path].trace.weights(heads=[found.links[0].head])
    assert found.links[0].share == pytest.approx(
        float(w[0, 0, places[1], tokens.index(" saw")]), abs=1e-6
    )
    assert found.links.notes[0] == "it (2) → saw: not in 1 of 2 texts, which are left out"
    twice = interpret.heads(small, said, links=[("it", "saw")], **QUICK).links
    assert "more than once" in twice.notes[0]
    with pytest.raises(RegardError, match="do not stand in any text together"):
        interpret.heads(small, said, links=[("it", "whale")], **QUICK)
    with pytest.raises(RegardError, match="tokens without their spelling"):
        interpret.heads(small.model, small.ids(said), links=[("it", "saw")], **QUICK)


def test_heads_follow_a_parse_or_not() -> None:
    model = Constructed(Layer(previous_token(), looks_at(0))).eval()
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    # All depend on the token before, but for the last, on the first.
    parse = [None, 0, 1, 2, 0]
    found = interpret.heads(model, ids, parses=[(parse, ["root", "a", "a", "b", "b"])], **QUICK)
    row = found.syntax.of()[0]
    assert (row.layer, row.head, row.offset, row.arcs) == (0, 0, 1, 4)
    assert row.hits == 0.75 == row.baseline
    assert row.weight == pytest.approx(0.75, abs=1e-4)
    by = {(r.relation, r.head): r for r in found.syntax if r.towards == "head"}
    assert (by["a", 0].hits, by["b", 0].hits, by["b", 1].hits) == (1.0, 0.5, 0.5)
    # Later tokens cannot be seen: no dependent is looked at.
    assert not [r for r in found.syntax if r.towards == "dependent"]
    with pytest.raises(RegardError, match="does not fit"):
        interpret.heads(model, ids, parses=[[0, 1]], **QUICK)


def test_scores_of_a_head_are_a_mapping_of_its_own() -> None:
    layer = {
        "first": Column([0.5, 0.25], [0.4, 0.2], [0.6, 0.3], 0.1, 0.2),
        "previous": Column([0.1, math.nan], [math.nan] * 2, [math.nan] * 2, math.nan, math.nan),
    }
    one, other = (HeadRow(0, head, "a", OwnScores(layer, head)) for head in range(2))
    assert one.scores["first"] == Score(0.5, 0.4, 0.6, 0.1, 0.2)
    assert (other["first"], one["previous"]) == (0.25, 0.1)
    assert list(one.scores) == ["first", "previous"]
    assert "rare" not in one.scores
    assert math.isnan(one["rare"])
    assert one == HeadRow(0, 0, "a", dict(one.scores))
    assert one != other
    copied = pickle.loads(pickle.dumps(one))
    assert repr(copied) == repr(one) == repr(HeadRow(0, 0, "a", dict(one.scores)))
    with pytest.raises(KeyError):
        one.scores["rare"]


def test_the_table_prints_sorts_and_is_plain_data(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "PERIOD", 20)
    found = interpret.heads(
        small, ["Lily saw a dog. The dog saw Lily.", "Tom ran."], layers="blocks.[45].*"
    )
    assert found.best("probe induction").what == "layer 0 head 5"
    assert found.badges()[0][5] == "induction"
    assert found.sorted("first")[0]["first"] == max(row["first"] for row in found)
    lines = repr(found).splitlines()
    assert lines[0].split()[:2] == ["head", "badge"]
    assert lines[-1] == "2 texts"
    assert "random weights" in lines[17]
    assert found._repr_html_().count("<tr>") == 18
    record = found.records()[5]
    assert record["badge"] == "induction"
    assert set(record["scores"]["first"]) == {"value", "low", "high", "random"}
    assert found.grid("first")[1][3] == found.at(1, 3)["first"]
    assert found[2:4].rows == found.rows[2:4]
    with pytest.raises(RegardError, match="unknown score"):
        found.sorted("attention")
    with pytest.raises(RegardError, match="no such head"):
        found.at(2, 0)


def test_badges_of_one_text_come_from_its_traces(small: Any) -> None:
    said = torch.randint(10, 2000, (1, 30), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([torch.zeros(1, 1, dtype=torch.long), said, said], 1)
    with torch.no_grad(), regard.watch(small.model, keep="traces") as seen:
        small.model(ids)
    found = interpret.badges(seen, [f"w{i}" for i in ids[0].tolist()])
    assert found["blocks.4.attention"][5] == "induction"
    assert found["blocks.1.attention"][7] == "previous"
    assert "induction" not in interpret.badges(seen)["blocks.4.attention"]


@pytest.mark.parametrize("empty", [(1, 0), (0, 4)])
def test_empty_texts_are_named(empty: tuple[int, int]) -> None:
    nothing = torch.zeros(empty, dtype=torch.long)
    model = CausalModel(CausalConfig(vocabulary=9, d_model=8, layers=1, heads=1)).eval()
    for texts in (
        [torch.ones(1, 3).long(), nothing],
        [nothing.float()[..., None].expand(*empty, 8)],
    ):
        with pytest.raises(RegardError, match=f"texts {len(texts) - 1} of {len(texts)}, from 0"):
            interpret.heads(model, texts)


def test_what_cannot_be_scored_is_said() -> None:
    model = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval()
    found = interpret.heads(model, [torch.randn(1, 6, 16) for _ in range(3)])
    assert [row.what for row in found] == ["layer 0 head 0", "layer 0 head 1"]
    assert not math.isnan(found[0]["next"])
    assert math.isnan(found[0]["duplicate"])
    said = " ".join(found.notes)
    for what in ("logits of tokens", "no tokens", "separators", "repeated tokens"):
        assert what in said
    with pytest.raises(RegardError, match="not known of any head"):
        found.best("duplicate")
    with pytest.raises(RegardError, match="training mode"):
        interpret.heads(model.train(), torch.randn(1, 6, 16))
    with pytest.raises(RegardError, match="strings"):
        interpret.heads(model.eval(), ["text"])


def test_the_sweep_holds_few_weights_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 600
    x = torch.randn(1, 2, n, 4)
    trace = regard.trace(x, x, x, mask=masks.causal())
    most = []
    weights = type(trace.second_pass).weights

    def counted(self: Any, *args: Any) -> Tensor:
        found = weights(self, *args)
        most.append(found.numel())
        return found

    monkeypatch.setattr(type(trace.second_pass), "weights", counted)
    monkeypatch.setitem(weight_blocks.PAIRS, "cpu", 2 * 50 * n)
    side = Side(torch.ones(1, n, dtype=torch.bool), torch.randint(9, (1, n)))
    sums = call_sums(trace, Sides(side, side, True))
    assert max(most) <= 2 * 50 * n
    # Keys that no row of a block may see are not computed.
    assert sum(most) < 0.6 * 2 * n * n
    close(sums.received.float(), trace.received(), atol=1e-4, rtol=1e-4)
    close(sums.scores["first"][0].float(), trace.mass(0).sum(-1), atol=1e-4, rtol=1e-4)


def test_scores_under_autocast_are_those_of_its_calls() -> None:
    """Attention is computed in half precision there. What is added up of it is not."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 60, 8).bfloat16()
    trace = regard.trace(x, x, x, mask=masks.causal())
    side = Side.of_tokens(torch.randint(5, (1, 60)))
    unembedding, projection = Unembedding(torch.randn(20, 16)), torch.randn(16, 16)

    def both() -> tuple[Any, Tensor]:
        sums = call_sums(trace, Sides(side, side, True))
        given = trace.inputs, trace.second_pass, projection, side.ids
        return sums, unembedding.own_logit(*given)

    want, stands = both()
    with torch.autocast("cpu", torch.bfloat16):
        found, near = both()
    for name, (total, _) in want.scores.items():
        close(found.scores[name][0], total, msg=name)
    close(near, stands)


def test_softmax_of_sinks_is_still_a_share() -> None:
    """A learned sink takes some of every row: what is left is no longer 1."""
    x = torch.zeros(1, 1, 4, 4)
    trace = regard.trace(x, x, x, mask=masks.causal(), sink=torch.zeros(1))
    side = Side.of_places(1, 4, x.device)
    sums = call_sums(trace, Sides(side, side, True))
    total = float(sums.received.sum())
    assert total == pytest.approx(sum(q / (q + 1) for q in range(1, 5)))
    assert F.relu(sums.scores["first"][0]).max() <= sums.rows.max()


def test_padding_that_is_hidden_by_a_bias_is_no_place_before() -> None:
    """Bloom hides padding in the table of its position biases, not in a mask."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=2)
    model = BloomForCausalLM(config).eval()
    long, short = (torch.randint(3, 40, (1, n)) for n in (9, 6))
    padded = {
        "input_ids": torch.cat([long, F.pad(short, (3, 0), value=int(short[0, 4]))]),
        "attention_mask": torch.tensor([[1] * 9, [0] * 3 + [1] * 6]),
    }
    alone, together = (
        interpret.heads(model, texts, probes=False, random=False).records()
        for texts in ([long, short], [padded])
    )
    for one, other in zip(alone, together, strict=True):
        for name in ("previous", "duplicate", "induction", "nearby", "first", "entropy"):
            want, found = (row["scores"][name]["value"] for row in (one, other))
            torch.testing.assert_close(found, want, atol=1e-5, rtol=0, equal_nan=True)


class FloatMask(nn.Module):
    """Causal by a mask of numbers that are added."""

    def __init__(self, hides: float, padded: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.padded = padded
        self.known, self.qkv, self.hides = nn.Embedding(64, 32), nn.Linear(32, 96), hides

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(self.known(ids)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mask = torch.full((ids.shape[1], ids.shape[1]), self.hides).triu(1)
        # As if the text were padded on the left: two rows see nothing at all.
        mask[:, : self.padded] = self.hides
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("hides", [torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("padded", [0, 2])
def test_what_a_finite_mask_hides_is_not_open(hides: float, padded: int) -> None:
    ids = torch.randint(3, 64, (1, 12), generator=torch.Generator().manual_seed(0))
    given: dict[str, Any] = {
        "links": [(5, 2)], "parses": [[None, 0, 1, 5, 3, 4, 7, 6, 9, 8, 11, 10]],
    }  # fmt: skip
    want, found = (
        interpret.heads(FloatMask(value, padded).eval(), [ids], probes=False, random=False, **given)
        for value in (-math.inf, hides)
    )
    assert str(found) == str(want)
    for one, other in zip(found.links, want.links, strict=True):
        assert one.head == other.head
        for name in ("share", "usual", "uniform", "z", "p"):
            assert getattr(one, name) == pytest.approx(getattr(other, name), abs=1e-4)
    assert [str(row) for row in found.syntax] == [str(row) for row in want.syntax]
    assert math.isnan(found.at(0, 0)["next"])
    for name in ("entropy", "previous", "duplicate", "distance", "nearby", "first"):
        assert found.at(0, 0)[name] == pytest.approx(want.at(0, 0)[name], abs=1e-5)


def test_words_whose_characters_are_several_tokens_are_found(small: Any) -> None:
    text = "שלום עולם, it saw the animal."
    tokens = [str(token) for token in small.run(text).tokens]
    comma = tokens.index(",")
    found = interpret.heads(small, text, links=[("עולם", "שלום")], probes=False, random=False).links
    by_place = (list(range(10, comma)), list(range(1, 9)))
    want = interpret.heads(small, text, links=[by_place], probes=False, random=False).links
    assert found[0].share == pytest.approx(want[0].share)
    assert found[0].share > 0


def test_words_are_found_where_a_vocabulary_leaves_spaces_out(tmp_path: Path) -> None:
    """WordPiece marks the pieces that go on a word, and writes no space before one."""
    words = "[PAD] [UNK] [CLS] the ani ##mal ran as it was ##n ' t tired ."
    vocabulary = {word: i for i, word in enumerate(words.split())}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = BertPreTokenizer(), Joined()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]").save_pretrained(tmp_path)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    reader = models.load(str(tmp_path), device="cpu")
    text = "the animal ran as it wasn't tired."
    assert reader.read(text)[1:3] == ["ani", "##mal"]
    by_place = {("it", "animal"): ([5], [1, 2]), ("tired", "wasn"): ([10], [6, 7])}
    for link, places in by_place.items():
        found, want = (
            interpret.heads(reader, text, links=[asked], **QUICK).links for asked in (link, places)
        )
        assert [row.share for row in found] == [row.share for row in want]
