"""When each word was said: dynamic time warping over the cross-attention of chosen heads.

The method is that of OpenAI's Whisper: some heads of the decoder look at the sound of the token
they are about to write. Their weights, made comparable and smoothed, are the gain of a path through
tokens and frames that never goes back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from regard.arguments import described, is_number, refuse_no_list
from regard.errors import RegardError
from regard.interpret.rows import Heads, Run, choose, together
from regard.seen import Layer
from regard.values import whole

# How tokenizers write the space before a word: as it is, byte by byte, and SentencePiece's.
SPACES = (" ", "Ġ", "▁")


class Word(NamedTuple):
    """A word, and when it starts and ends in the audio, in seconds."""

    text: str
    start: float
    end: float


def word_times(
    seen: Mapping[str, Layer],
    tokens: Sequence[str],
    heads: Heads,
    *,
    layers: str | Sequence[str] = "*.encoder_attn",
    prompt: int | None = None,
    frames: int | None = None,
    smooth: int = 7,
    seconds: float = 0.02,
    batch: int = 0,
) -> list[Word]:
    """When each word was spoken, from the cross-attention of a model that was watched.

    `tokens` are the texts of the tokens, without the prompt and the mark of the end; a word begins
    at each that begins with a space. Everything else is as in `token_times`. Marks such as a comma
    belong to the word before them, but do not make it last longer.

    >>> import torch, regard
    >>> from regard.seen import Seen
    >>> said = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3])           # ten frames, four sounds
    >>> q, k = 9 * torch.eye(4)[None, None], torch.eye(4)[said][None, None]
    >>> seen = Seen()
    >>> seen.layer("decoder.encoder_attn").take(regard.trace(q, k, k), 0, keep=True)
    >>> word_times(seen, [" at", "tend", "!"], [(0, 0)], prompt=1, smooth=1)
    [Word(text='attend!', start=0.0, end=0.1)]
    """
    refuse_no_list("tokens", tokens, 'the texts of tokens: [" at", "tend"]')
    if not all(isinstance(token, str) for token in tokens):
        raise RegardError("tokens= are texts", got=f"{tokens!r:.80}", accepted='[" at", "tend"]')
    times = token_times(
        seen, len(tokens), heads, layers=layers, prompt=prompt, frames=frames, smooth=smooth,
        seconds=seconds, batch=batch,
    ).tolist()  # fmt: skip
    words: list[Word] = []
    for token, (start, end) in zip(tokens, times, strict=True):
        text = token.lstrip("".join(SPACES))
        if not words or token.startswith(SPACES):
            words.append(Word(text, start, end))
        else:
            before = words[-1]
            spoken = any(sign.isalnum() for sign in text)
            words[-1] = Word(before.text + text, before.start, end if spoken else before.end)
    return words


def token_times(
    seen: Mapping[str, Layer],
    tokens: int,
    heads: Heads,
    *,
    layers: str | Sequence[str] = "*.encoder_attn",
    prompt: int | None = None,
    frames: int | None = None,
    smooth: int = 7,
    seconds: float = 0.02,
    batch: int = 0,
) -> Float[Tensor, "tokens 2"]:
    """When each token was spoken: its start and end, in seconds.

    `seen` is one run over one piece of sound: either generating without beams, or reading the
    finished text at once. `heads` are pairs (layer, head), the layers counted among those whose
    path matches `layers`; for Whisper they are `generation_config.alignment_heads`. `prompt` is how
    many tokens come before the first that was spoken (by default those of the first call, which is
    right after generating), `frames` how many frames hold sound and are `seconds` long, `smooth`
    the width of the median filter over frames, in frames.

    Only the weights of these heads, rows and frames are computed.
    """
    if whole("tokens", tokens) < 1:
        raise RegardError("there must be a token to time", got=str(tokens), accepted="1 or more")
    if not (is_number(seconds) and 0 < seconds < math.inf):
        raise RegardError(
            "seconds= is how long a frame lasts",
            got=described(seconds),
            accepted="a number above 0",
        )
    matrices = []
    for path, which in choose(seen, layers, heads).items():
        run = Run(seen[path])
        frames = _frames(frames, run.keys[0])
        # The row after the last token looks for more to write: it takes the silence at the end. A
        # run that was cut short does not have it.
        start = run.prompt(prompt) - 1
        stop = start + tokens
        rows = range(start, stop + 1 if run.ends[-1] > stop else stop)
        matrices.append(run.weights(rows, keys=range(frames), heads=which, batch=batch))
    gain = comparable(together(matrices), smooth).mean(0)
    begins = torch.tensor([*warped(gain), gain.shape[1]], dtype=torch.float64) * seconds
    return torch.stack([begins[:tokens], begins[1 : tokens + 1]], dim=1)


def _frames(given: int | None, K: int) -> int:
    frames = K if given is None else whole("frames", given)
    if not 1 <= frames <= K:
        raise RegardError(
            "frames= counts the frames that hold sound", got=str(frames), accepted=f"1 to {K}"
        )
    return frames


def comparable(weights: Float[Tensor, "h q k"], smooth: int) -> Float[Tensor, "h q k"]:
    """Weights by how unusual they are among the rows of a frame, smoothed over frames.

    Frames that every row looks at, such as silence, would outweigh all others otherwise."""
    if whole("smooth", smooth) % 2 != 1 or not 0 < smooth < 2 * weights.shape[-1]:
        raise RegardError(
            "smooth= is the width of a median filter over frames",
            got=f"{smooth}, with {weights.shape[-1]} frames",
            accepted="an odd number, less than twice the frames",
        )
    deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, correction=0)
    unusual = (weights - mean) / deviation.clamp_min(torch.finfo(weights.dtype).tiny)
    side = smooth // 2
    return pad(unusual, (side, side), mode="reflect").unfold(-1, smooth, 1).median(-1).values


def warped(gain: Float[Tensor, "q k"]) -> list[int]:
    """The key at which each row begins, on the path of largest gain from the first pair to the last
    that steps to the next row, to the next key, or to both.

    In one row a path gains a difference of running sums, so where it is best entered is a running
    maximum: best[q, k] = sums[q, k] + max over j <= k of (before[q, j] - sums[q, j - 1]), where
    before[q, j] is the better of best[q - 1, j] and best[q - 1, j - 1].

    >>> warped(torch.tensor([[3.0, 2.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 4.0]]))
    [0, 2, 3]
    """
    gain = gain.cpu().double()
    sums = gain.cumsum(-1)
    best, entered = [sums[0]], [torch.zeros_like(sums[0], dtype=torch.int64)]
    for row in range(1, len(gain)):
        before = torch.maximum(best[-1], pad(best[-1], (1, -1), value=-torch.inf))
        lead, entry = (before - sums[row] + gain[row]).cummax(-1)
        best.append(sums[row] + lead)
        entered.append(entry)
    begins, at = [0] * len(gain), gain.shape[1] - 1
    for row in range(len(gain) - 1, 0, -1):
        at = begins[row] = int(entered[row][at])
        if at and best[row - 1][at - 1] >= best[row - 1][at]:
            at -= 1
    return begins
