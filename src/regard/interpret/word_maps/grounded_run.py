"""Maps of words from what was seen of a model that generates pictures, or while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TypedDict, Unpack, overload

from torch import nn

from regard.arguments import counted, refuse_no_list
from regard.errors import RegardError
from regard.interpret.word_maps.common_grid import Resize
from regard.interpret.word_maps.layout import Layout, Text
from regard.interpret.word_maps.map_sums import MapSums, Steps
from regard.interpret.word_maps.maps import Axis, Grounding
from regard.interpret.word_maps.prompt_words import Places, chosen_words, words_of
from regard.seen import Layer
from regard.values import whole
from regard.watching.choices import Layers, matches, numbers, patterns
from regard.watching.observer import Observer


class GroundedRun:
    """Adds up the maps of words while a model generates a picture inside a `with`."""

    def __init__(self, model: nn.Module, sums: MapSums, layers: Layers) -> None:
        self._sums = sums
        self._onlooker = Observer(model, sums.add, sums.layout.fits, layers)
        tokens = sums.layout.tokens
        joint = f"as many keys as queries, and more than the {tokens} tokens of the prompt"
        self._onlooker.accepted = (
            f"keys: the {tokens} tokens of the prompt" if sums.layout.text == "keys" else joint
        )
        self._onlooker.mend = (
            "give all tokens that the model was given, padding and marks too; say text='first' or "
            "'last' if words and picture are one sequence; name layers="
        )

    def __enter__(self) -> GroundedRun:
        self._onlooker.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._onlooker.__exit__(kind, error, where)

    @property
    def found(self) -> Grounding:
        """The maps of what was seen so far; all of it, after the `with`."""
        return self._sums.grounding()


Words = Mapping[str, Places] | Sequence[str] | str | None


class How(TypedDict, total=False):
    """The other arguments of `grounding`."""

    layers: Layers
    heads: int | Sequence[int] | None
    steps: Steps
    keep: Axis | Sequence[Axis]
    text: Text
    grid: tuple[int, int] | None
    frames: int
    batch: int
    passes: int
    which: int
    resize: Resize


@overload
def grounding(
    what: nn.Module, tokens: Sequence[str], words: Words = ..., **how: Unpack[How]
) -> GroundedRun: ...
@overload
def grounding(
    what: Mapping[str, Layer], tokens: Sequence[str], words: Words = ..., **how: Unpack[How]
) -> Grounding: ...
def grounding(
    what: nn.Module | Mapping[str, Layer],
    tokens: Sequence[str],
    words: Words = None,
    *,
    layers: Layers = None,
    heads: int | Sequence[int] | None = None,
    steps: Steps = None,
    keep: Axis | Sequence[Axis] = (),
    text: Text = "keys",
    grid: tuple[int, int] | None = None,
    frames: int = 1,
    batch: int = -1,
    passes: int = 1,
    which: int = 0,
    resize: Resize = "area",
) -> GroundedRun | Grounding:
    """Where the words of a prompt are in the picture, or the film, that a model makes of it.

    The tokens of the picture are queries, those of the prompt keys, so a word's column of attention
    weights is a map of the picture. Of a model the maps are made while it runs, in a `with`, and
    are its `found` afterwards; of what was seen with `keep="traces"` they are given at once.

    `tokens` are those of the prompt as the model is given them, with marks and padding. `words` are
    some of its words by name, all by default, or places among the tokens by any name. `layers`,
    `heads` and `steps` choose what is looked at; layers of different resolution are brought to one
    `grid` (rows, columns), the finest by default. All of it is averaged, but for the axes in
    `keep`: "batch", "steps", "layers", "heads".

    `text` says where words are: the "keys" of cross-attention, or "first" or "last" in one sequence
    with the picture (Flux and CogVideoX, or Stable Diffusion 3). A film has `frames`. With guidance
    a model sees the prompt last in its `batch`; or it runs in several `passes` a step, of which
    `which` has the prompt.

    Outputs stay as they are: to the last bit, where a model calls PyTorch's attention.

    >>> import regard, torch
    >>> from regard import interpret
    >>> model = regard.nn.DecoderBlock(16, 2)
    >>> with interpret.grounding(model, ["two", "red", "cats"], "cats", layers="memory") as look:
    ...     y = model(torch.randn(1, 36, 16), torch.randn(1, 3, 16))
    >>> look.found.map("cats").shape, look.found.count("cats").asked
    (torch.Size([1, 6, 6]), 2)
    """
    if isinstance(tokens, str):
        raise RegardError(
            "tokens= are those of the prompt, one by one", got=repr(tokens),
            do="tokenizer.convert_ids_to_tokens(ids)",
        )  # fmt: skip
    refuse_no_list("tokens", tokens, '["<s>", " a", " cat"]')
    batch, which = whole("batch", batch), whole("which", which)
    counted("passes", passes)
    chosen = numbers(heads)
    sums = MapSums(
        Layout(len(tokens), text, grid, frames),
        chosen_words(tokens, words),
        tuple(words_of(tokens)),
        (keep,) if isinstance(keep, str) else tuple(keep),
        chosen,
        steps,
        passes,
        which,
        batch,
        resize,
        named=layers is not None,
    )
    if isinstance(what, nn.Module):
        return GroundedRun(what, sums, layers)
    if not isinstance(what, Mapping):
        raise RegardError(
            "grounding looks at a model, or at what was seen of one",
            got=type(what).__name__,
            accepted="a torch.nn.Module (of a pipeline: its unet or transformer), or what "
            "watch(model, keep='traces') saw",
        )
    _add_seen(sums, what, patterns(layers))
    return sums.grounding()


def _add_seen(sums: MapSums, seen: Mapping[str, Layer], named: tuple[str, ...] | None) -> None:
    for path, layer in seen.items():
        if not matches(path, named):
            continue
        if not len(layer.traces) and layer.calls:
            raise RegardError(
                f"{path!r} has no traces", do='keep them: watch(model, keep="traces")'
            )
        for trace, run in zip(layer.traces, layer.runs, strict=True):
            shape = trace.inputs.shape
            if named is not None or sums.layout.fits(shape.Q, shape.K):
                sums.add(path, run, trace)
