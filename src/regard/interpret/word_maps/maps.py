"""Where the words of a prompt are in a picture: their maps, and what is counted in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from regard.display import table_html, table_text
from regard.errors import RegardError
from regard.interpret.word_maps.components import Connected
from regard.interpret.word_maps.counts import By, Counted, Frames, counted
from regard.interpret.word_maps.prompt_words import asked_number
from regard.visible import visible

Axis = Literal["batch", "steps", "layers", "heads"]
AXES: tuple[Axis, ...] = ("batch", "steps", "layers", "heads")


@dataclass(frozen=True, eq=False, repr=False)
class Grounding:
    """The maps of words over a picture, or over the frames of a film. Prints as a table.

    A cell is the share of its attention that falls on the word: the mean over what is not in
    `axes`.
    """

    words: tuple[str, ...]
    maps: Float[Tensor, "words *kept frames rows columns"]
    axes: tuple[Axis, ...]
    """The axes that were kept, in the order that they have in `maps`."""
    layers: tuple[str, ...]
    """The paths of the layers that the maps are of."""
    steps: tuple[int, ...]
    prompt: tuple[str, ...] = ()
    """All words of the prompt, in their order: numbers that are asked for are read from them."""

    @property
    def grid(self) -> tuple[int, int, int]:
        """Frames, rows and columns."""
        frames, rows, columns = self.maps.shape[-3:]
        return frames, rows, columns

    def map(self, word: str) -> Float[Tensor, "frames rows columns"]:
        """The map of a word, the mean over axes that were kept."""
        found = self.maps[self._place(word)]
        return found.flatten(0, -4).mean(0) if self.axes else found

    def at(self, **places: int) -> Grounding:
        """One place of axes that were kept: `at(steps=3)` is the fourth step that was looked at."""
        maps, axes = self.maps, list(self.axes)
        layers, steps = self.layers, self.steps
        for name, place in places.items():
            if name not in axes:
                raise RegardError(
                    "this axis was not kept", got=name, accepted=", ".join(axes) or "none",
                    do=f"ask for it: grounding(..., keep=[{name!r}])",
                )  # fmt: skip
            dim = 1 + axes.index(name)
            many = maps.shape[dim]
            if not -many <= place < many:
                raise RegardError(
                    f"there is no such place along {name}",
                    got=str(place),
                    accepted=f"{-many} to {many - 1}",
                )
            maps = maps.select(dim, place)
            axes.pop(dim - 1)
            layers = (layers[place],) if name == "layers" else layers
            steps = (steps[place],) if name == "steps" else steps
        return replace(self, maps=maps, axes=tuple(axes), layers=layers, steps=steps)

    def asked(self, word: str) -> int | None:
        """How many of a thing the prompt asks for, if it does."""
        return asked_number(self.prompt, word) if word in self.prompt else None

    def count(
        self,
        word: str,
        *,
        asked: int | None = None,
        threshold: float = 0.5,
        by: By = "components",
        connected: Connected = 8,
        distance: float = 2.0,
        smallest: int = 1,
        frames: Frames = "each",
    ) -> Counted:
        """How many objects the map of a word shows, beside how many were asked for: by the prompt,
        or as `asked` says.

        Thresholds are between the lowest value of the map (0) and its highest (1), in all frames.
        By "components" an object is a connected region above the threshold, of at least `smallest`
        cells; by "peaks" it is a cell above it that is higher than all around it, `distance` cells
        or more from any higher one. `connected` counts the neighbours of a cell, 4 or 8 (over
        frames 6 or 26). Frames are counted "each" for itself, or a region goes through them
        "together".
        """
        return counted(
            self.map(word), word=word, asked=self.asked(word) if asked is None else asked,
            threshold=threshold, by=by, connected=connected, distance=distance, smallest=smallest,
            frames=frames,
        )  # fmt: skip

    def records(self) -> list[dict[str, Any]]:
        """A row for each word as plain values, for JSON or a data frame."""
        return [
            {"share": float(self.map(word).mean()), "contrast": self._contrast(word)}
            | self.count(word).record()
            for word in self.words
        ]

    def _contrast(self, word: str) -> float:
        """How much higher the map is at its highest than on average."""
        map = self.map(word)
        return float(map.max() / map.mean()) if map.mean() else 1.0

    def _place(self, word: str) -> int:
        if word not in self.words:
            raise RegardError(
                "this word has no map", got=repr(word), accepted=", ".join(map(repr, self.words))
            )
        return self.words.index(word)

    def _table(self) -> list[list[str]]:
        rows = [["word", "share", "highest", "asked", "found", "most stable", "asked found at"]]
        for word in self.words:
            map, count = self.map(word), self.count(word)
            stable, held = count.stable, count.asked_span
            never = "" if count.asked is None else "never"
            rows.append([
                visible(word), f"{float(map.mean()):.3f}", f"{float(map.max()):.3f}",
                "" if count.asked is None else str(count.asked), str(count.found),
                "–" if stable is None else f"{stable.count} at {stable}",
                never if held is None else str(held),
            ])  # fmt: skip
        return rows

    def _notes(self) -> list[str]:
        frames, rows, columns = self.grid
        size = f"{frames} frames of {rows} × {columns}" if frames > 1 else f"{rows} × {columns}"
        kept = f"; {' and '.join(self.axes)} kept apart" if self.axes else ""
        of = f"{len(self.layers)} layers, {len(self.steps)} steps"
        return [
            f"maps of {size} cells, {of}{kept}",
            "share: mean of the map; found: regions above half of its height",
        ]

    def __repr__(self) -> str:
        return table_text(self._table(), self._notes())

    def _repr_html_(self) -> str:
        """The same as the last line of a notebook's cell."""
        return table_html(self._table(), header=True, numbers=True, notes=self._notes())
