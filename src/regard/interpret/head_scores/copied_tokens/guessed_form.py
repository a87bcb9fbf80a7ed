"""A guess of a model's form, made before a GPU reads long texts.

To find the form takes a short run of the model, in which the GPU waits for Python. So the texts are
read first, with a guess; the short run checks it while the GPU is still busy with them. If the
guess was wrong, they are read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from regard.interpret.head_scores.copied_tokens.copying_score import Unembedding, unembedding_of
from regard.interpret.head_scores.copied_tokens.model_form import (
    Form,
    Last,
    likely_end,
    matrix_of,
    output_projection,
)
from regard.interpret.head_scores.texts.text_batches import Texts
from regard.interpret.interventions.outputs import Place

LONG = 2048
"""Tokens from which on a GPU is busy for longer than a short run takes."""


class Guess:
    """Takes the place of `Writing`, for one run."""

    def __init__(self, model: nn.Module, last: Last, unembedding: Unembedding) -> None:
        self.model, self.last, self.unembedding = model, last, unembedding
        self.calls: list[Place] = []
        self.projections: dict[str, str | None] = {}
        self._last_of: dict[type[nn.Module], str] = {}
        """For each class of attention module, the path of the last one in the order of the model's
        modules: it is expected to run last."""

    def holds(self, form: Form) -> bool:
        """Whether all that was guessed is true."""
        return (
            form.last == self.last
            and form.calls == tuple(self.calls)
            and all(form.projections.get(path) == at for path, at in self.projections.items())
        )

    def wants(self, path: str) -> bool:
        return True

    def is_last(self, place: Place) -> bool:
        self.calls.append(place)
        kind = type(self.model.get_submodule(place[0]))
        if kind not in self._last_of:
            alike = (path for path, module in self.model.named_modules() if type(module) is kind)
            *_, self._last_of[kind] = alike
        return place[0] == self._last_of[kind]

    def projection(self, path: str, width: int) -> Float[Tensor, "d inner"] | None:
        found = output_projection(self.model.get_submodule(path), width)
        matrix = None if found is None else matrix_of(found[1])
        if found is None or matrix is None or not self.unembedding.takes(matrix):
            self.projections[path] = None
            return None
        self.projections[path] = f"{path}.{found[0]}" if path else found[0]
        return matrix


def guess_of(texts: Texts, layers: str | Sequence[str]) -> Guess | None:
    """The likely form of a model, if all its layers are asked about and a GPU is busy for long with
    each text."""
    asked = layers == "*" and all(map(_takes_a_card_long, texts.calls)) and texts.counts()
    last = likely_end(texts.model) if asked else None
    if last is None:
        return None
    # An index past the matrix would be an error on the GPU, after which it computes nothing more.
    many, width = matrix_of(texts.model.get_submodule(last.matrix)).shape
    gain = None
    if last.norm is not None:
        gain = getattr(texts.model.get_submodule(last.norm), "weight", None)
    fits = gain is None or gain.shape == (width,)
    unembedding = None
    if fits and max(texts.counts()) < many:
        unembedding = unembedding_of(texts.model, last)
    return None if unembedding is None else Guess(texts.model, last, unembedding)


def _takes_a_card_long(call: Any) -> bool:
    return isinstance(call, Tensor) and call.is_cuda and call.ndim == 2 and call.shape[1] >= LONG
