"""Word times: the path against plain dynamic time warping, the whole against transformers' own."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import RegardError, Trace, interpret
from regard.interpret.alignment import comparable, warped
from regard.seen import Seen
from tests.interpret.conftest import numbers

transformers = pytest.importorskip("transformers")

HEADS = [(0, 1), (0, 3), (1, 2)]
PROMPT = 2


def plainly_warped(gain: Tensor) -> list[int]:
    """Dynamic time warping as the textbooks have it, pair by pair."""
    Q, K = gain.shape
    best: dict[tuple[int, int], tuple[float, tuple[int, int] | None]] = {}
    for q in range(Q):
        for k in range(K):
            before = [(q - 1, k), (q, k - 1), (q - 1, k - 1)]
            known = [(best[pair][0], pair) for pair in before if pair in best]
            most, pair = max(known) if known else (0.0, None)
            best[q, k] = most + float(gain[q, k]), pair
    begins, at = [0] * Q, (Q - 1, K - 1)
    while at is not None:
        begins[at[0]] = at[1]
        at = best[at][1]  # type: ignore[assignment]
    return begins


@pytest.mark.parametrize(("Q", "K"), [(1, 1), (1, 9), (9, 1), (5, 5), (7, 40), (40, 7), (11, 111)])
@pytest.mark.parametrize("seed", range(4))
def test_the_path_is_that_of_plain_dynamic_time_warping(Q: int, K: int, seed: int) -> None:
    gain = numbers(Q, K, seed=seed)
    assert warped(gain) == plainly_warped(gain.double())


@pytest.mark.parametrize("seed", range(5))
def test_a_planted_alignment_is_found(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    begins = [0, *(1 + torch.randperm(59, generator=generator)[:9]).sort().values.tolist()]
    spoken = torch.zeros(60, dtype=torch.int64)
    spoken[begins[1:]] = 1
    keys = torch.eye(10)[spoken.cumsum(0)] + 0.1 * numbers(60, 10, seed=seed)
    assert begins == begun(30 * torch.eye(10), keys, smooth=1)


def begun(q: Tensor, k: Tensor, smooth: int) -> list[int]:
    """Where the tokens of one head begin, in frames."""
    seen = Seen()
    seen.layer("encoder_attn").take(
        regard.trace(q[None, None], k[None, None], k[None, None]), 0, keep=True
    )
    times = interpret.token_times(
        seen, len(q), [(0, 0)], layers="*", prompt=1, smooth=smooth, seconds=1.0
    )
    assert times[:-1, 1].tolist() == times[1:, 0].tolist()
    assert times[-1, 1] == len(k)
    return [int(t) for t in times[:, 0]]


def test_frames_that_every_row_looks_at_count_for_nothing() -> None:
    weights = torch.full((1, 3, 5), 0.1)
    weights[..., 2] = 0.6
    assert (comparable(weights, 1) == 0).all()


@pytest.fixture(scope="module")
def whisper() -> tuple[Any, dict[str, Tensor]]:
    """A small model that nobody trained, and a sentence for it to read."""
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
        max_source_positions=60, max_target_positions=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    kind = transformers.WhisperForConditionalGeneration
    model = kind._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.copy_(0.4 * torch.randn(p.shape, generator=generator))
    ids = torch.randint(3, 64, (2, PROMPT + 12), generator=generator)
    return model, {"input_features": numbers(2, 8, 120), "decoder_input_ids": ids}


def read(model: Any, given: dict[str, Tensor], **how: Any) -> Seen:
    with torch.no_grad(), regard.watch(model, keep="traces", **how) as seen:
        model(**given)
    return seen


def reread(model: Any, given: dict[str, Tensor]) -> Seen:
    """The same text, token by token, as if it were generated."""
    sound = {"input_features": given["input_features"]}
    ids, past = given["decoder_input_ids"], None
    with torch.no_grad(), regard.watch(model, keep="traces") as seen:
        for some in ids.split([PROMPT, *[1] * (ids.shape[1] - PROMPT)], dim=1):
            past = model(**sound, decoder_input_ids=some, past_key_values=past).past_key_values
            sound = (
                {"encoder_outputs": model.get_encoder()(**sound)}
                if "input_features" in sound
                else sound
            )
    return seen


@pytest.mark.parametrize("frames", [60, 41])
@pytest.mark.parametrize("batch", [0, 1])
def test_times_are_those_of_transformers(whisper: Any, frames: int, batch: int) -> None:
    model, given = whisper
    with torch.no_grad():
        eager = model(**given, output_attentions=True)
    # transformers drops the rows of num_input_ids tokens; the row that predicts the first token
    # that is said is the last of the prompt.
    want = model._extract_token_timestamps(
        transformers.generation.GenerateEncoderDecoderOutput(
            sequences=given["decoder_input_ids"], cross_attentions=(eager.cross_attentions,)
        ),
        HEADS,
        num_frames=2 * frames,
        num_input_ids=PROMPT - 1,
    )[batch, PROMPT - 1 :]
    got = interpret.token_times(
        read(model, given), 12, HEADS, prompt=PROMPT, frames=frames, batch=batch
    )
    torch.testing.assert_close(got[:, 0].float(), want[:12])
    torch.testing.assert_close(got[:, 1].float(), want[1:13])


def test_generating_gives_the_times_of_reading(whisper: Any) -> None:
    model, given = whisper
    once = interpret.token_times(read(model, given), 12, HEADS, prompt=PROMPT, batch=1)
    steps = interpret.token_times(reread(model, given), 12, HEADS, batch=1)
    assert torch.equal(once, steps)


def test_a_file_gives_the_times_of_the_run(whisper: Any, tmp_path: Path) -> None:
    model, given = whisper
    seen = read(model, given)
    seen.save(tmp_path / "run.safetensors")
    with regard.load(tmp_path / "run.safetensors") as kept:
        again = interpret.token_times(kept, 12, HEADS, prompt=PROMPT)
    assert torch.equal(again, interpret.token_times(seen, 12, HEADS, prompt=PROMPT))


def test_without_a_row_for_the_end_the_last_token_lasts_to_the_end(whisper: Any) -> None:
    model, given = whisper
    times = interpret.token_times(read(model, given), 13, HEADS, prompt=PROMPT, seconds=1.0)
    assert times[-1, 1] == 60


def test_only_what_is_needed_is_computed(whisper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = whisper
    seen, asked = read(model, given), []
    plain = Trace.weights

    def noted(self: Trace, *args: Any, **how: Any) -> Tensor:
        found = plain(self, *args, **how)
        asked.append(found.shape)
        return found

    monkeypatch.setattr(Trace, "weights", noted)
    interpret.token_times(seen, 5, HEADS, prompt=PROMPT, frames=31)
    assert asked == [(1, 2, 6, 31), (1, 1, 6, 31)]


def test_words_are_made_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def times(seen: Any, tokens: int, heads: Any, **how: Any) -> Tensor:
        at = torch.arange(tokens + 1.0)
        return torch.stack([at[:-1], at[1:]], 1)

    monkeypatch.setattr("regard.interpret.alignment.token_times", times)

    def spoken(*tokens: str) -> list[interpret.Word]:
        return interpret.word_times({}, tokens, [(0, 0)])

    assert spoken(" No", " mat", "ter", ",", " go", ".") == [
        ("No", 0, 1),
        ("matter,", 1, 3),
        ("go.", 4, 5),
    ]
    assert (
        spoken("ĠNo", "Ġmat", "ter")
        == spoken("▁No", "▁mat", "ter")
        == [("No", 0, 1), ("matter", 1, 3)]
    )
    assert spoken("No", "\u2019", "s", " 4", "2") == [("No\u2019s", 0, 3), ("42", 3, 5)]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"layers": "*.cross"}, r"(?s)no layer that was .*'\*.cross'.*accepted: +model"),
    "no head": ({"heads": []}, "no head was chosen"),
    "a head": ({"heads": [(0, 9)]}, r"\(layer 0, head 9\)\n.*0: 4, 1: 4"),
    "a layer": ({"heads": [(2, 0)]}, r"\(layer 2, head 0\)"),
    "tokens": ({"tokens": 40}, r"(?s)rows 1 to 40.*0 to 13.*prompt= and the tokens"),
    "no tokens": ({"tokens": 0}, "there must be a token"),
    "prompt": ({"prompt": 0}, "prompt= counts the tokens before"),
    "frames": ({"frames": 61}, "frames= counts .*\n.*61\n.*1 to 60"),
    "smooth": ({"smooth": 4}, r"(?s)median filter.*4, with 60 frames.*an odd number"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_done_is_refused(whisper: Any, kind: str) -> None:
    change, text = WRONG[kind]
    ask = {"tokens": 12, "heads": HEADS, "prompt": PROMPT} | change
    with pytest.raises(RegardError, match=text):
        interpret.token_times(read(*whisper), **ask)


def test_statistics_are_not_enough(whisper: Any) -> None:
    model, given = whisper
    with torch.no_grad(), regard.watch(model) as seen:
        model(**given)
    with pytest.raises(RegardError, match=r'(?s)has no traces.*keep="traces"'):
        interpret.token_times(seen, 12, HEADS, prompt=PROMPT)


def test_times_never_go_back(whisper: Any) -> None:
    times = interpret.token_times(read(*whisper), 12, HEADS, prompt=PROMPT)
    assert all(a <= b for a, b in pairwise(times.flatten().tolist()))
    assert math.isclose(float(times[0, 0]), 0)
