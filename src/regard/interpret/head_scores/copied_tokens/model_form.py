"""Where in a model the parts are that heads write by, as a run of it shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.errors import RegardError
from regard.interpret.head_scores.device_answers import answers
from regard.interpret.interventions.outputs import Place
from regard.interpret.interventions.runs import Runner
from regard.interpret.metrics import logits_of
from regard.traces import Trace

NAMES = ("out_proj", "o_proj", "c_proj", "dense", "to_out", "wo", "out", "proj", "o")
FAR = 1e-3
"""What a sum may miss by, as a share of it, and still count as the one that was looked for."""


class Size(NamedTuple):
    """Of a layer."""

    heads: int
    width: int
    """Of what all heads give together."""


class Last(NamedTuple):
    """The paths of what makes logits of the stream."""

    norm: str | None
    matrix: str


@dataclass(frozen=True)
class Form:
    """What of a model could be made sure of. It holds paths, and nothing of the model itself."""

    sizes: dict[str, Size]
    """By the path of a layer, in the order of a run."""
    calls: tuple[Place, ...]
    last: Last | None
    projections: dict[str, str]
    """By the path of a layer, that of its output projection."""
    why: str = ""
    """Why there is no `last`."""


def form_of(runner: Runner, text: Any) -> Form:
    """The form of a model, as far as a run confirms it."""
    sizes, calls, parts = dict[str, Size](), list[Place](), _Parts(runner.model)

    def look(place: Place, trace: Trace) -> None:
        H, width = trace.inputs.shape.H, trace.inputs.v.shape[-1]
        sizes.setdefault(place[0], Size(H, H * width))
        calls.append(place)

    with _noted(parts) as notes:
        output = runner.run(text, look=look)
    try:
        logits = logits_of(output)
    except RegardError:
        why = "the model gives no logits of tokens"
        return Form(sizes, tuple(calls), None, {}, why)
    ends = parts.ends(notes, logits)
    first = next(ends, None)
    if first is None:
        return Form(sizes, tuple(calls), None, {}, _NO_END)
    # All of it is asked before any of it is waited for.
    layers = list(_projections(runner.model, parts, notes, sizes))
    told = answers([first.sure(), *(layer.sure for layer in layers)])
    found = first if told[0] else next((end for end in ends if bool(end.sure())), None)
    if found is None:
        return Form(sizes, tuple(calls), None, {}, _NO_END)
    sure = {layer.path: layer.matrix for layer, so in zip(layers, told[1:], strict=True) if so}
    return Form(sizes, tuple(calls), found.last, sure)


_NO_END = "the last linear map to logits of tokens was not found"


def likely_end(model: nn.Module) -> Last | None:
    """The last norm and the last linear map, in the order in which a model holds them. Most end
    with these."""
    parts = _Parts(model)
    if not parts.maps:
        return None
    return Last(next(reversed(parts.norms), None), next(reversed(parts.maps)))


def matrix_of(module: nn.Module) -> Float[Tensor, "out inner"]:
    """[out, in], however the module stores it."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach() if isinstance(module, (nn.Linear, nn.Embedding)) else weight.detach().T


@dataclass(eq=False)
class _Note:
    module: nn.Module
    given: Tensor
    gave: Tensor


class _End(NamedTuple):
    """What may be the last linear map: the stream before it, and the logits after it."""

    last: Last
    stream: Tensor
    matrix: Tensor
    logits: Tensor

    def sure(self) -> Bool[Tensor, ""]:
        # A bias of the last map is the same for every head.
        made = self.stream @ self.matrix.T.to(self.stream.dtype)
        return _near(made, self.logits, up_to_bias=True)


class _Layer(NamedTuple):
    """What may be the output projection of a layer, and whether it is, as the device has it."""

    path: str
    matrix: str
    sure: Bool[Tensor, ""]


class _Parts:
    """The modules of a model from which its form is read, by their paths."""

    def __init__(self, model: nn.Module) -> None:
        self.norms: dict[str, nn.Module] = {}
        self.maps: dict[str, nn.Module] = {}
        self.embeddings: dict[str, nn.Module] = {}
        for path, module in model.named_modules():
            if _is_map(module):
                self.maps[path] = module
            elif isinstance(module, nn.Embedding):
                self.embeddings[path] = module
            elif "Norm" in type(module).__name__ and not any(module.children()):
                self.norms[path] = module
        self._norms = {id(module): path for path, module in self.norms.items()}

    def norm(self, note: _Note) -> str | None:
        """The path of a norm; None for what is none."""
        return self._norms.get(id(note.module))

    def ends(self, notes: list[_Note], logits: Tensor) -> Iterator[_End]:
        """All that may be the last linear map, the likeliest first."""
        norms = [note for note in notes if self.norm(note) is not None]
        norm = self.norm(norms[-1]) if norms else None
        streams = [norms[-1].gave] if norms else [note.given for note in notes]
        for stream in reversed(streams):
            if stream.shape[:-1] != logits.shape[:-1]:
                continue
            for path, module in (*self.maps.items(), *self.embeddings.items()):
                matrix = matrix_of(module)
                if matrix.shape == (logits.shape[-1], stream.shape[-1]):
                    yield _End(Last(norm, path), stream, matrix, logits)


@contextmanager
def _noted(parts: _Parts) -> Iterator[list[_Note]]:
    """What norms and linear maps were given and gave, in the order of a run."""
    notes: list[_Note] = []

    def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(output, Tensor):
            notes.append(_Note(module, args[0].detach(), output.detach()))

    every = (*parts.norms.values(), *parts.maps.values())
    hooks = [module.register_forward_hook(note) for module in every]
    try:
        yield notes
    finally:
        for hook in hooks:
            hook.remove()


def _projections(
    model: nn.Module, parts: _Parts, notes: list[_Note], sizes: dict[str, Size]
) -> Iterator[_Layer]:
    """What may be the output projection of each layer."""
    norms = [i for i, note in enumerate(notes) if parts.norm(note) is not None]
    ran: dict[int, int] = {}
    for i, note in enumerate(notes):
        ran.setdefault(id(note.module), i)
    for path, size in sizes.items():
        found = output_projection(model.get_submodule(path), size.width)
        sure = None if found is None else _adds_up(notes, norms, ran.get(id(found[1])))
        if found is not None and sure is not None:
            yield _Layer(path, f"{path}.{found[0]}" if path else found[0], sure)


def output_projection(module: nn.Module, width: int) -> tuple[str, nn.Module] | None:
    """By name: what an attention module of such width may end with, and its path there."""
    inside = [(path, found) for path, found in module.named_modules() if _is_map(found)]
    for name in NAMES:
        for path, found in inside:
            if path.split(".")[0] == name and matrix_of(found).shape[1] == width:
                return path, found
    return None


def _adds_up(notes: list[_Note], norms: list[int], at: int | None) -> Bool[Tensor, ""] | None:
    """Whether what a map gave was added to the stream as it is: what the norm after it was given is
    what the norm before it was given, and this. Without norms nothing can be in between. `norms`
    are which of the notes are of such, and `at` is that of the map."""
    if not norms:
        return torch.tensor(True)
    # A module may run a map of its own without calling it: then its input is all there is.
    if at is None:
        return None
    wide = notes[at].gave.shape
    wider = [i for i in norms if notes[i].given.shape == wide]
    before, after = [i for i in wider if i < at], [i for i in wider if i > at]
    if not before or not after:
        return None
    return _near(notes[before[-1]].given + notes[at].gave, notes[after[0]].given)


def _near(one: Tensor, two: Tensor, *, up_to_bias: bool = False) -> Bool[Tensor, ""]:
    one, two = one.float(), two.float()
    if up_to_bias:
        one, two = one - one.mean(1, keepdim=True), two - two.mean(1, keepdim=True)
    missed: Tensor = (one - two).norm().double()
    allowed: Tensor = FAR * two.norm().double().clamp_min(1e-12)
    return missed <= allowed


def _is_map(module: nn.Module) -> bool:
    """Whether a module multiplies with its weight as it is: quantised ones have scales beside."""
    if not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D":
        return False
    weight = module.weight
    return isinstance(weight, Tensor) and weight.dtype in _MULTIPLIED


_MULTIPLIED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
