"""Maps of words added up call by call: sums are held, not traces."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import RegardError
from regard.interpret.word_maps.columns import word_shares
from regard.interpret.word_maps.common_grid import Resize, resized
from regard.interpret.word_maps.layout import Layout
from regard.interpret.word_maps.maps import AXES, Axis, Grounding
from regard.traces import Trace

Steps = int | slice | Collection[int] | None


@dataclass
class _Sum:
    """What the calls of a layer gave, and how many there were."""

    total: Float[Tensor, "words b h frames height width"]
    calls: int = 1


@dataclass
class MapSums:
    """The maps of words, growing call by call.

    Of each call the columns of the words are added up over what is not kept: heads at once, steps
    as they come. Layers stay apart until the end, at the resolution that each has.
    """

    layout: Layout
    words: Mapping[str, tuple[int, ...]]
    prompt: tuple[str, ...]
    keep: tuple[Axis, ...] = ()
    heads: Sequence[int] | None = None
    steps: Steps = None
    passes: int = 1
    which: int = 0
    batch: int = -1
    resize: Resize = "area"
    named: bool = False
    """Whether the caller has named the layers."""
    sums: dict[int, dict[str, _Sum]] = field(default_factory=dict)
    """By step, all under 0 where steps are not kept, and by the path of the layer."""
    seen_steps: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        wrong = [axis for axis in self.keep if axis not in AXES]
        if wrong:
            raise RegardError(
                "keep= names axes that are not averaged over",
                got=", ".join(map(repr, wrong)),
                accepted=", ".join(map(repr, AXES)),
            )
        if self.passes < 1 or not 0 <= self.which < self.passes:
            raise RegardError(
                "passes= counts the forward passes of a step, which= is the one to look at",
                got=f"passes={self.passes}, which={self.which}",
                accepted="1 pass or more, and one of them from 0",
            )

    def wanted(self, run: int) -> bool:
        """Whether a run of the model is of a step, and a pass of it, to look at."""
        step, turn = divmod(run, self.passes)
        if turn != self.which or self.steps is None:
            return turn == self.which
        if isinstance(self.steps, slice):
            start, stop, stride = self.steps.indices(step + 1)
            return step in range(start, stop, stride)
        return step in ((self.steps,) if isinstance(self.steps, int) else self.steps)

    def add(self, path: str, run: int, trace: Trace) -> None:
        """A call of a layer."""
        if not self.wanted(run):
            return
        shape, layout = trace.inputs.shape, self.layout
        layout.check(path, shape.Q, shape.K, named=self.named)
        picture, first = layout.picture(shape.Q), layout.first_word(shape.K)
        grid = layout.shape(path, len(picture))
        found = word_shares(
            trace,
            picture,
            [[first + place for place in places] for places in self.words.values()],
            heads=self.heads,
            batch=None if "batch" in self.keep else self.batch,
        )
        if "heads" not in self.keep:
            found = found.mean(2, keepdim=True)
        found = found.unflatten(-1, grid)
        step = run // self.passes
        self.seen_steps.add(step)
        of = self.sums.setdefault(step if "steps" in self.keep else 0, {})
        before = of.get(path)
        if before is None:
            of[path] = _Sum(found)
        elif before.total.shape != found.shape:
            raise RegardError(
                "a layer saw pictures of different sizes",
                got=f"{path!r}: {list(before.total.shape[1:])} and {list(found.shape[1:])}",
                do="look at one picture at a time",
            )
        else:
            of[path] = _Sum(before.total + found, before.calls + 1)

    def grounding(self) -> Grounding:
        """The maps of what was seen so far."""
        if not self.sums:
            raise RegardError(
                "nothing was seen yet",
                got=f"steps={self.steps}",
                do="run the model inside the with, for as many steps as were chosen",
            )
        paths = list(dict.fromkeys(path for of in self.sums.values() for path in of))
        grid = self.layout.grid or self._finest()
        by_step = [self._layers(self.sums[step], paths, grid) for step in sorted(self.sums)]
        whole = torch.stack(by_step, 2)  # words, b, steps, layers, h, frames, rows, columns
        for place, axis in enumerate(AXES, start=1):
            if axis not in self.keep:
                whole = whole.mean(place, keepdim=True)
        dropped = [place for place, axis in enumerate(AXES, start=1) if axis not in self.keep]
        maps = whole.squeeze(dropped).cpu() if dropped else whole.cpu()
        return Grounding(
            tuple(self.words),
            maps,
            tuple(axis for axis in AXES if axis in self.keep),
            tuple(paths),
            tuple(sorted(self.seen_steps)),
            self.prompt,
        )

    def _finest(self) -> tuple[int, int]:
        sizes = {tuple(s.total.shape[-2:]) for of in self.sums.values() for s in of.values()}
        height, width = max(sizes)
        return height, width

    def _layers(
        self, of: Mapping[str, _Sum], paths: Sequence[str], grid: tuple[int, int]
    ) -> Float[Tensor, "words b layers h frames rows columns"]:
        missing = [path for path in paths if path not in of]
        if missing:
            raise RegardError(
                "some layers were not called at every step",
                got=", ".join(map(repr, missing[:4])),
                do="name the layers that are in layers=, or leave 'steps' out of keep=",
            )
        means = [resized(of[p].total / of[p].calls, grid, self.resize) for p in paths]
        shapes = {tuple(mean.shape) for mean in means}
        if len(shapes) > 1:
            counts = sorted({(shape[2], shape[3]) for shape in shapes})
            raise RegardError(
                "the layers have different numbers of heads, or of frames",
                got=" and ".join(f"{h} heads, {f} frames" for h, f in counts),
                do="name layers of one kind in layers=, or leave 'heads' out of keep=",
            )
        return torch.stack(means, 2)
