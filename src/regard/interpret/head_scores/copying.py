"""Whether what a head writes raises the token that it looks at: read from the weights of a model
whose form allows it.

A head that looks at a token writes W_O v. Straight to the prediction, past all other layers, that
adds W_U N W_O v to the logits, where N is what the last norm does to a direction, up to its scale.
How the token's own logit stands among those of all tokens, in standard deviations, depends neither
on that scale nor on how loud the head is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import RegardError
from regard.interpret.interventions.runs import Runner
from regard.interpret.metrics import logits_of
from regard.interpret.rows import matching
from regard.traces import Trace

NAMES = ("out_proj", "o_proj", "c_proj", "dense", "to_out", "wo", "out", "proj", "o")
CLEAR = 2.0
"""Standard deviations from which on a token counts as raised or lowered."""
FAR = 1e-3
"""What a sum may miss by, as a share of it, and still count as the one that was looked for."""


@dataclass(frozen=True, eq=False)
class Unembedding:
    """The last linear map, from directions of the residual stream to the logits of tokens."""

    tokens: Float[Tensor, "v d"]
    """For each token, what a direction of the stream is multiplied with; the norm is in it."""

    def own_logit(
        self, trace: Trace, projection: Float[Tensor, "d inner"], ids: Int[Tensor, "b k"]
    ) -> Float[Tensor, "b h k"]:
        """The logit of each key's own token among all tokens, in standard deviations, that each
        head writes where it looks at that key."""
        x = trace.inputs
        # On a card a model of half precision is read in such: one product is as large as a layer's.
        half = projection.is_cuda and projection.dtype in (torch.bfloat16, torch.float16)
        dtype = torch.bfloat16 if half else self.tokens.dtype
        projection, v = projection.to(dtype), x.v.to(dtype)
        B, K, width = x.shape.B, x.shape.K, v.shape[-1]
        groups = x.shape.H // x.group
        # Axes are b, k, key heads, heads of a group, width, as far as there are such.
        out = projection.reshape(-1, x.shape.H, width).transpose(0, 1)
        seen = (self._covariance.to(dtype) @ projection).reshape(-1, x.shape.H, width)
        spread = (seen.permute(1, 2, 0) @ out).view(groups, x.group, width, width)
        bent = v @ spread.transpose(1, 2).reshape(groups, width, -1)
        bent = bent.transpose(1, 2).reshape(B, K, groups, x.group, width)
        v = v.transpose(1, 2)[:, :, :, None]
        deviation = (bent * v).sum(-1, dtype=self.tokens.dtype).clamp_min(0).sqrt()
        own = (self.tokens[ids] - self._mean).to(dtype) @ projection
        raised = (own.view_as(bent) * v).sum(-1, dtype=self.tokens.dtype)
        # A head that writes nothing, or the same for every token, raises none.
        stands = torch.where(deviation > 0, raised / deviation, 0.0)
        return stands.flatten(2).transpose(1, 2)

    @cached_property
    def _mean(self) -> Float[Tensor, "d"]:
        return self.tokens.mean(0)

    @cached_property
    def _covariance(self) -> Float[Tensor, "d d"]:
        centred = self.tokens - self._mean
        return centred.T @ centred / len(centred)


class Size(NamedTuple):
    """Of a layer."""

    heads: int
    width: int
    """Of what all heads give together."""


@dataclass(frozen=True, eq=False)
class Writing:
    """What of a model's form could be made sure of: its layers, the unembedding, and each layer's
    output projection; or why not."""

    sizes: dict[str, Size]
    last: tuple[str, int]
    """The last call of these layers in a run."""
    unembedding: Unembedding | None
    projections: dict[str, Float[Tensor, "d inner"]]
    why: str = ""
    """What was not found; nothing if all was."""


def writing_of(runner: Runner, text: Any, layers: str | Sequence[str] = "*") -> Writing:
    """What can be said of a model's form, by a run that shows whether it is so."""
    model, sizes, calls = runner.model, dict[str, Size](), list[tuple[str, int]]()

    def look(place: tuple[str, int], trace: Trace) -> None:
        H, width = trace.inputs.shape.H, trace.inputs.v.shape[-1]
        sizes.setdefault(place[0], Size(H, H * width))
        calls.append(place)

    with _noted(model) as notes:
        output = runner.run(text, look=look)
    sizes = {path: sizes[path] for path in matching(sizes, layers)}
    last = [place for place in calls if place[0] in sizes][-1]
    try:
        logits = logits_of(output)
    except RegardError:
        return Writing(sizes, last, None, {}, "the model gives no logits of tokens")
    unembedding = _unembedding(model, notes, logits)
    if unembedding is None:
        return Writing(
            sizes, last, None, {}, "the last linear map to logits of tokens was not found"
        )
    found: dict[str, Tensor] = {}
    norms = [i for i, note in enumerate(notes) if _is_norm(note.module)]
    for path, size in sizes.items():
        module = _projection(model.get_submodule(path), size.width)
        if module is not None and _adds_up(notes, norms, module):
            found[path] = _matrix(module)
    missing = [path for path in sizes if path not in found]
    why = ""
    if missing:
        why = (
            "no output projection that adds to the residual stream was found in "
            + ", ".join(missing[:3])
            + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        )
    return Writing(sizes, last, unembedding, found, why)


@dataclass(eq=False)
class _Note:
    module: nn.Module
    given: Tensor
    gave: Tensor


@contextmanager
def _noted(model: nn.Module) -> Iterator[list[_Note]]:
    """What norms and linear maps were given and gave, in the order of a run."""
    notes: list[_Note] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            notes.append(_Note(module, args[0].detach(), output.detach()))

    hooks = [m.register_forward_hook(note) for m in model.modules() if _is_norm(m) or _is_map(m)]
    try:
        yield notes
    finally:
        for hook in hooks:
            hook.remove()


def _unembedding(model: nn.Module, notes: list[_Note], logits: Tensor) -> Unembedding | None:
    norms = [note for note in notes if _is_norm(note.module)]
    last = norms[-1] if norms else None
    matrices = [_matrix(m) for m in model.modules() if _is_map(m)]
    matrices += [m.weight.detach() for m in model.modules() if isinstance(m, nn.Embedding)]
    vocabulary = logits.shape[-1]
    streams = [last.gave] if last is not None else [n.given for n in notes if _is_map(n.module)]
    for stream in reversed(streams):
        for matrix in matrices:
            fits = matrix.shape == (vocabulary, stream.shape[-1])
            # A bias of the last map is the same for every head.
            if fits and _near(stream @ matrix.T.to(stream.dtype), logits, up_to_bias=True):
                return _normed(None if last is None else last.module, matrix.float())
    return None


def _normed(norm: nn.Module | None, matrix: Float[Tensor, "v d"]) -> Unembedding:
    gain = getattr(norm, "weight", None)
    if isinstance(gain, Tensor):
        offset = 1.0 if norm is not None and "Gemma" in type(norm).__name__ else 0.0
        matrix = matrix * (gain.detach().float() + offset)
    if norm is not None and "RMS" not in type(norm).__name__:
        # A layer norm takes the mean off every direction.
        matrix = matrix - matrix.mean(1, keepdim=True)
    return Unembedding(matrix)


def _projection(module: nn.Module, width: int) -> nn.Module | None:
    inside: dict[str, nn.Module] = dict(module.named_modules())
    for name in NAMES:
        for path, found in inside.items():
            if path.split(".")[0] == name and _is_map(found) and _matrix(found).shape[1] == width:
                return found
    return None


def _adds_up(notes: list[_Note], norms: list[int], module: nn.Module) -> bool:
    """Whether what a map gave was added to the stream as it is: what the norm after it was given is
    what the norm before it was given, and this. Without norms nothing can be in between. `norms`
    are which of the notes are of such."""
    if not norms:
        return True
    # A module may run a map of its own without calling it: then its input is all there is.
    at = next((i for i, note in enumerate(notes) if note.module is module), None)
    if at is None:
        return False
    wide = notes[at].gave.shape
    wider = [i for i in norms if notes[i].given.shape == wide]
    before, after = [i for i in wider if i < at], [i for i in wider if i > at]
    if not before or not after:
        return False
    return _near(notes[before[-1]].given + notes[at].gave, notes[after[0]].given)


def _near(one: Tensor, two: Tensor, *, up_to_bias: bool = False) -> bool:
    if one.shape != two.shape:
        return False
    one, two = one.float(), two.float()
    if up_to_bias:
        one, two = one - one.mean(1, keepdim=True), two - two.mean(1, keepdim=True)
    scale = float(two.norm())
    return float((one - two).norm()) <= FAR * max(scale, 1e-12)


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__ and not any(module.children())


def _is_map(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _matrix(module: nn.Module) -> Float[Tensor, "out inner"]:
    """[out, in], whichever way it is kept."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach() if isinstance(module, nn.Linear) else weight.detach().T
