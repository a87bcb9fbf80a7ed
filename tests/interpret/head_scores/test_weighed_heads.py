"""Scores of heads whose sums the forward pass tells, and of models whose form is guessed first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import masks
from regard.backends.contract import SecondPass, Weighed
from regard.backends.exactness import taken_as_told, widened
from regard.backends.questions.matching_keys import MatchingKeys
from regard.backends.tiled import Tiled
from regard.backends.tiled.second_pass import TiledPass
from regard.calls import watchers
from regard.inputs import AttentionInputs, check
from regard.interpret import heads
from regard.interpret.head_scores import survey
from regard.interpret.head_scores.copied_tokens import guessed_form, model_form
from regard.interpret.head_scores.copied_tokens.copying_score import Unembedding
from regard.interpret.head_scores.pairs import asked_totals
from regard.interpret.head_scores.pairs.key_columns import MOST, can_be_weighed
from regard.interpret.head_scores.pairs.pair_sums import call_sums
from regard.interpret.head_scores.tables.head_table import HeadScores
from regard.interpret.head_scores.texts import probes, text_batches
from regard.interpret.head_scores.texts.sides import Side, Sides
from regard.models import CausalConfig, CausalModel
from regard.nn import MultiHeadAttention
from regard.traces import Trace

ASKED: Counter[str] = Counter()


class WeighingPass(TiledPass):
    """Answers as kernels give them, from whole weights."""

    def mixes_columns(self, inputs: AttentionInputs) -> bool:
        return True

    def weighed(self, inputs: AttentionInputs, columns: Tensor) -> Weighed:
        ASKED["weighed"] += 1
        rows = Tiled().observe(inputs)
        found = Weighed(*rows)
        received = TiledPass().received(inputs, rows.lse)
        found.columns = torch.einsum("bhk,bhkc->bhc", received.double(), columns.double())
        return found

    def received(self, inputs: AttentionInputs, lse: Tensor) -> Tensor:
        ASKED["received"] += 1
        return super().received(inputs, lse)

    def offset_sums(self, inputs: AttentionInputs, lse: Tensor, reach: int) -> Tensor:
        w = self._all(inputs, lse)
        found = [w.diagonal(-offset, -2, -1).sum(-1) for offset in range(-reach, reach + 1)]
        return torch.stack(found, -1)

    def matching_mass(
        self, inputs: AttentionInputs, lse: Tensor, matches: MatchingKeys
    ) -> tuple[Tensor, Tensor]:
        mass = torch.zeros(inputs.shape[:3])
        met = torch.zeros(inputs.shape.B, inputs.shape.Q, dtype=torch.bool)
        w = self._all(inputs, lse)
        for b in range(inputs.shape.B):
            for row, begin, end in zip(
                matches.rows[b], matches.begins[b], matches.ends[b], strict=True
            ):
                keys = matches.keys[b, begin:end].long()
                mass[b, :, row] = w[b, :, row, keys].sum(-1)
                met[b, row] = bool((keys < row).any())
        return mass, met

    def _all(self, inputs: AttentionInputs, lse: Tensor) -> Tensor:
        every = torch.arange(inputs.shape.Q)
        return self.weights(inputs, lse, every, every)


@pytest.fixture
def weighing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend on this machine that answers as one on a card does."""
    from regard.calls import remembered

    ASKED.clear()
    monkeypatch.setattr(Tiled, "questions", lambda self: WeighingPass())
    monkeypatch.setattr(remembered, "KNOWN", {})
    monkeypatch.setattr(remembered, "RECENT", {False: (), True: ()})


def causal(seed: int = 0, **more: Any) -> CausalModel:
    torch.manual_seed(seed)
    return CausalModel(CausalConfig(vocabulary=20, d_model=16, layers=2, heads=2, **more)).eval()


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def texts(n: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(20, (1, n), generator=generator) for _ in range(3)]


def same(one: HeadScores, other: HeadScores) -> None:
    assert one.notes == other.notes
    for a, b in zip(one.rows, other.rows, strict=True):
        assert a.scores.keys() == b.scores.keys()
        assert a.offset == b.offset
        for name, score in a.scores.items():
            want = b.scores[name]
            for field in ("value", "low", "high", "random"):
                x, y = getattr(score, field), getattr(want, field)
                close = math.isclose(x, y, rel_tol=1e-4, abs_tol=1e-5)
                assert close or (math.isnan(x) and math.isnan(y)), (name, field, x, y)


def test_the_forward_pass_tells_what_keys_received(weighing: None, monkeypatch: Any) -> None:
    model = causal()
    found = heads(model, texts(), separators=[3, 4])
    assert ASKED["weighed"] > 0
    # The first call of a kind is made ready, and asked in the usual way.
    assert ASKED["received"] < ASKED["weighed"]
    assert "copying" in found.rows[0].scores
    monkeypatch.setattr(WeighingPass, "weighed", lambda *_: None)
    same(found, heads(model, texts(), separators=[3, 4]))
    monkeypatch.undo()
    same(found, heads(model, texts(), separators=[3, 4]))


def test_columns_are_made_for_backends_that_mix_them(monkeypatch: Any) -> None:
    made = Counter[str]()
    for where, name in ((survey, "beside"), (Unembedding, "own_logit")):
        usual = getattr(where, name)

        def counted(*of: Any, usual: Any = usual, name: str = name) -> Any:
            made[name] += 1
            return usual(*of)

        monkeypatch.setattr(where, name, counted)
    model = causal()
    for _ in range(2):
        heads(model, texts(), probes=False, random=False)
    assert made == {"own_logit": 2 * 2}


def test_texts_of_unlike_length_are_not_weighed(weighing: None, monkeypatch: Any) -> None:
    model, given = causal(), [torch.arange(9)[None], torch.arange(12)[None] % 7]
    found = heads(model, given, probes=False, random=False)
    monkeypatch.undo()
    same(found, heads(model, given, probes=False, random=False))


def test_large_logits_are_asked_about_in_float64(weighing: None, monkeypatch: Any) -> None:
    model = causal()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q" in name.split(".")[-2] or "query" in name:
                weight.mul_(1e4)
    heads(model, texts(), probes=False, random=False)
    weighed, received = ASKED["weighed"], ASKED["received"]
    found = heads(model, texts(), probes=False, random=False)
    # They are read in hope once, and again.
    assert ASKED["received"] - received >= 2 > 0
    assert ASKED["weighed"] > weighed
    monkeypatch.undo()
    same(found, heads(model, texts(), probes=False, random=False))


class Runs:
    """How often a model ran whole texts, and how often a short one that shows its form."""

    def __init__(self, model: nn.Module) -> None:
        self.tokens: list[int] = []
        model.register_forward_pre_hook(lambda _, args: self.tokens.append(args[0].shape[-1]))


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch) -> list[guessed_form.Guess]:
    """As on a card that is busy for long with every text. The guesses that were made."""
    made: list[guessed_form.Guess] = []
    start = guessed_form.Guess.__init__

    def note(self: guessed_form.Guess, *of: Any) -> None:
        start(self, *of)
        made.append(self)

    monkeypatch.setattr(guessed_form, "_takes_a_card_long", lambda call: True)
    monkeypatch.setattr(guessed_form.Guess, "__init__", note)
    return made


def once(model: nn.Module) -> HeadScores:
    return heads(model, texts()[:1], probes=False, random=False)


def test_a_right_guess(guessing: list[guessed_form.Guess], monkeypatch: Any) -> None:
    model = llama()
    runs = Runs(model)
    found = once(model)
    assert len(guessing) == 1
    # The text, and then the run that shows the form.
    assert len(runs.tokens) == 2
    assert len(guessing[0].calls) == 2
    assert None not in guessing[0].projections.values()
    monkeypatch.undo()
    same(found, once(model))
    assert "copying" in found.rows[0].scores


class WithMore(nn.Module):
    """A model that holds another linear map behind its last one, and does not use it."""

    def __init__(self, width: int = 16, tokens: int = 20) -> None:
        super().__init__()
        self.inner = llama()
        self.unused_norm = nn.LayerNorm(width)
        self.unused = nn.Linear(width, tokens)
        self.eval()

    def forward(self, ids: Tensor) -> Any:
        return self.inner(ids)


@pytest.mark.parametrize("width", [16, 8])
def test_a_wrong_guess_is_made_good(
    guessing: list[guessed_form.Guess], width: int, monkeypatch: Any
) -> None:
    model = WithMore(width)
    runs = Runs(model)
    found = once(model)
    assert len(guessing) == 1
    # The text, the run that shows the form, and the text again.
    assert len(runs.tokens) == 3
    monkeypatch.undo()
    same(found, once(model))


def test_a_projection_whose_output_is_changed_is_none(
    guessing: list[guessed_form.Guess], monkeypatch: Any
) -> None:
    model = llama()
    layer = model.model.layers[1].self_attn
    layer.register_forward_hook(lambda _, given, out: (out[0] * 0.5, *out[1:]))
    found = once(model)
    assert len(guessing) == 1
    assert "copying" not in found.rows[2].scores
    assert "copying" in found.rows[0].scores
    monkeypatch.undo()
    same(found, once(model))


def test_matrices_that_do_not_fit_the_norm_are_no_guess(
    guessing: list[guessed_form.Guess],
) -> None:
    model = WithMore()
    model.unused = nn.Linear(8, 20)
    once(model)
    assert not guessing


def test_no_token_is_looked_up_that_a_matrix_does_not_have(
    guessing: list[guessed_form.Guess],
) -> None:
    once(WithMore(tokens=5))
    assert not guessing


def test_layers_that_run_in_another_order_are_no_fault(
    guessing: list[guessed_form.Guess], monkeypatch: Any
) -> None:
    model = llama()
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    shown = list(blocks)

    def backwards() -> Iterator[nn.Module]:
        return iter(shown[::-1])

    monkeypatch.setattr(blocks, "__class__", type("Backwards", (nn.ModuleList,), {
        "__iter__": lambda self: backwards()
    }))  # fmt: skip
    found = once(model)
    assert len(guessing) == 1
    assert len(guessing[0].calls) == 1
    monkeypatch.setattr(guessed_form, "_takes_a_card_long", lambda call: False)
    same(found, once(model))


def test_what_ends_most_models() -> None:
    assert model_form.likely_end(nn.Identity()) is None
    assert model_form.likely_end(llama()) == ("model.norm", "lm_head")


def sized(q: Tensor, k: Tensor, scale: float | None = None) -> AttentionInputs:
    return check(
        q, k, k, mask=masks.causal(), score=None, bias=None, softcap=None, sink=None, scale=scale,
        dropout=0.0, training=False,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 40.0, 60.0, 200.0])
@pytest.mark.parametrize("scale", [None, 0.01])
def test_hope_is_for_the_calls_that_float32_tells(
    size: float, dtype: torch.dtype, scale: float | None
) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(1, 2, 7, 16).to(dtype) * size / 4 for _ in range(2))
    x = sized(q, k, scale)
    told = taken_as_told(x)
    assert told is not None
    lse = torch.zeros(1, 2, 7)
    assert bool(told[1]) == (widened(x, lse) is None)
    # Whoever is asked by it takes it for sure.
    assert widened(told[0], lse) is None


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_there_is_no_hope_beside_what_is_no_number(spoilt: float) -> None:
    q = torch.ones(1, 1, 4, 8)
    q[0, 0, 2, 3] = spoilt
    told = taken_as_told(sized(q, torch.ones(1, 1, 4, 8)))
    assert told is not None
    assert not bool(told[1])


def test_places_that_two_halves_do_not_tell_are_not_weighed() -> None:
    for n, so in ((MOST, True), (MOST + 1, False)):
        x = torch.empty(1, 1, n, 8, device="meta")
        side = Side(torch.ones(1, n, dtype=torch.bool), whole=True)
        assert can_be_weighed(sized(x, x), Sides(side, side, True)) == so
    for dtype in (torch.float16, torch.bfloat16):
        places = torch.arange(MOST + 1).float()
        half = places.to(dtype)
        assert torch.equal(half.float() + (places - half.float()).to(dtype).float(), places)


def test_columns_are_of_whoever_alone_wants_some() -> None:
    x = sized(torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8))
    columns = torch.ones(1, 1, 4, 1)

    def see(trace: Trace) -> None: ...
    def see_too(trace: Trace) -> None: ...

    def wants(call: AttentionInputs, asks: SecondPass) -> Tensor:
        assert not watchers.watched()
        return columns

    try:
        watchers.begin(see)
        assert not watchers.weighs()
        assert watchers.columns_for(x, TiledPass()) is None
        watchers.begin(see_too, columns=wants)
        assert watchers.weighs()
        assert watchers.columns_for(x, TiledPass()) is columns
        watchers.begin(see, columns=wants)
        assert watchers.columns_for(x, TiledPass()) is None
    finally:
        watchers.end(see)
        watchers.end(see_too)


def test_one_call_that_float32_does_not_tell_is_enough_for_doubt(
    weighing: None, monkeypatch: Any
) -> None:
    model = causal()
    attention: Any = model.blocks[1].attention
    with torch.no_grad():
        attention.q_proj.weight.mul_(1e6)
    heads(model, texts(), probes=False, random=False)
    ASKED.clear()
    found = heads(model, texts(), probes=False, random=False)
    # In hope the forward pass tells both layers; then both are asked.
    assert ASKED == {"weighed": 2, "received": 2}
    monkeypatch.undo()
    same(found, heads(model, texts(), probes=False, random=False))


def test_probes_in_doubt_are_read_again_by_themselves(weighing: None, monkeypatch: Any) -> None:
    told, asked = asked_totals.taken_as_told, Counter[str]()

    def doubted(x: AttentionInputs) -> Any:
        given = told(x)
        if x.shape.B != probes.SEQUENCES or given is None:
            return given
        asked["probes"] += 1
        # What would be answered of other queries.
        return replace(given[0], q=-given[0].q), torch.tensor(False)

    monkeypatch.setattr(asked_totals, "taken_as_told", doubted)
    found = heads(causal(), texts(), random=False)
    assert asked["probes"] == 2
    assert "probe induction" in found.rows[0].scores
    monkeypatch.undo()
    same(found, heads(causal(), texts(), random=False))


def test_what_was_counted_by_a_wrong_guess_is_forgotten(
    guessing: list[guessed_form.Guess], monkeypatch: Any
) -> None:
    model, parses, seen = WithMore(), [[None, *range(23)]], list[tuple[int, int]]()

    def asked() -> HeadScores:
        more: dict[str, Any] = {"probes": False, "random": False, "parses": parses}
        return heads(model, texts()[:1], **more, progress=lambda *of: seen.append(of))

    found = asked()
    assert len(guessing) == 1
    assert seen == [(1, 1)]
    assert {row.arcs for row in found.syntax} == {23}
    monkeypatch.undo()
    assert list(found.syntax) == list(asked().syntax)


class LeakyText(nn.Module):
    """Looks both ways, and takes no mask: shorter texts cannot be filled up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.attn = nn.Embedding(9, 8), MultiHeadAttention(8, 2)
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.attn(self.embedding(ids))
        return out


def test_progress_begins_anew_with_the_reading(monkeypatch: Any) -> None:
    # The first two are run together, and so are the last two, of which one is filled up.
    monkeypatch.setattr(text_batches, "TOKENS", 12)
    given = [torch.arange(n)[None] for n in (2, 2, 2, 2, 2, 2, 5, 6)]
    seen: list[int] = []
    more: dict[str, Any] = {"probes": False, "random": False}
    heads(LeakyText(), given, **more, progress=lambda done, _: seen.append(done))
    assert seen == [6, 6, 7, 8]


def test_copying_is_a_share_of_what_sinks_leave() -> None:
    """Of two keys with the same value all that is looked at is copied, whatever a sink takes."""
    x = torch.ones(1, 1, 3, 4)
    shares = []
    for sink in (None, torch.full((1,), 5.0)):
        trace = regard.trace(x, x, x, mask=masks.causal(), sink=sink)
        side = Side.of_tokens(torch.tensor([[1, 2, 3]]))
        sums = call_sums(trace, Sides(side, side, True))
        assert sums.received is not None
        on = sums.on_keys(torch.ones(1, 1, 3))
        kinds = survey.Kinds(None, None)
        of: Any = survey.Survey.__new__(survey.Survey)
        of.kinds = kinds
        total, by = of._of_tokens(sums, Sides(side, side, True), {"copying": on})["copying"]
        shares.append(float((total / by).item()))
    assert shares == pytest.approx([1.0, 1.0])
