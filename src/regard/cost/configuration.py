"""A Configuration: the sizes of a decoder that its cost follows from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from regard.arguments import counted
from regard.cost.config_json import read
from regard.cost.units import MOST, width_of
from regard.errors import RegardError
from regard.values import whole


@dataclass(frozen=True)
class Configuration:
    """The sizes of a decoder-only transformer.

    >>> small = Configuration("small", width=512, heads=8, layers=6)
    >>> small.key_heads, small.head_width, small.feed_forward, small.parameters
    (8, 64, 2048, 18874368)
    """

    name: str
    width: int
    """Of the residual stream (Hugging Face: hidden_size)."""
    heads: int
    layers: int
    key_heads: int = 0
    """Fewer than heads is grouped-query attention. 0: as many as heads."""
    head_width: int = 0
    """0: width / heads."""
    feed_forward: int = 0
    """Its inner width. 0: four times the width."""
    gated: bool = False
    """Whether the feed-forward has three matrices (SwiGLU, GeGLU) instead of two."""
    experts: int = 1
    """Feed-forwards to choose from in each layer."""
    active_experts: int = 1
    """How many of them a token goes through."""
    vocabulary: int = 0
    """0: nothing is counted for it."""
    tied: bool = False
    """Whether input and output embeddings share one matrix."""
    windows: tuple[int | None, ...] = (None,)
    """How many keys a query sees, itself counted; None is all. Layers go through it in turns."""
    dtype: str = "bfloat16"
    trained_context: int | None = None
    """The longest context it was trained for."""

    def __post_init__(self) -> None:
        whole(f"{self.name}: width", self.width)
        whole(f"{self.name}: heads", self.heads)
        for name, value in (
            ("key_heads", self.key_heads or self.heads),
            ("head_width", self.head_width or self.width // max(self.heads, 1)),
            ("feed_forward", self.feed_forward or 4 * self.width),
            ("windows", tuple(self.windows) if isinstance(self.windows, Sequence) else ()),
        ):
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        sizes = ("width", "heads", "layers", "key_heads", "head_width", "feed_forward", "experts",
                 "active_experts")  # fmt: skip
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= MOST:
                raise RegardError(
                    f"{self.name}: {name} is a size", got=repr(value), accepted=f"1 to {MOST:,}"
                )
        if self.heads % self.key_heads:
            raise RegardError(
                f"{self.name}: {self.heads} query heads cannot share {self.key_heads} key heads",
                accepted="a number of key heads that divides the number of query heads",
            )
        if self.active_experts > self.experts:
            raise RegardError(
                f"{self.name}: more experts are active than there are",
                got=f"active_experts={self.active_experts} of experts={self.experts}",
            )
        if not self.windows or any(
            w is not None and whole("a window", w) < 1 for w in self.windows
        ):
            raise RegardError(
                f"{self.name}: windows says how many keys a query sees, itself counted",
                got=repr(self.windows),
                accepted="a tuple of whole numbers above 0, or None for all",
            )
        counted(f"{self.name}: vocabulary", self.vocabulary, least=0)
        if self.trained_context is not None:
            counted(f"{self.name}: trained_context", self.trained_context)
        width_of(self.dtype)

    @classmethod
    def from_json(cls, path: str | Path) -> Configuration:
        """From the `config.json` of a Hugging Face model, or the folder it lies in."""
        return cls(**read(Path(path)))

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return width_of(self.dtype)

    def layers_by_window(self) -> dict[int | None, int]:
        """How many layers have each window.

        >>> Configuration("a", 64, 2, 5, windows=(16, None)).layers_by_window()
        {16: 3, None: 2}
        """
        turns, rest = divmod(self.layers, len(self.windows))
        found = dict.fromkeys(self.windows, 0)
        for i, window in enumerate(self.windows):
            found[window] += turns + (i < rest)
        return {window: layers for window, layers in found.items() if layers}

    @property
    def attention_parameters(self) -> int:
        """The four projections of one layer."""
        return self.width * self.head_width * (2 * self.heads + 2 * self.key_heads)

    @property
    def expert_parameters(self) -> int:
        """One feed-forward."""
        return (3 if self.gated else 2) * self.width * self.feed_forward

    @property
    def parameters(self) -> int:
        """All matrices. (Norms, biases and learned positions are left out: below 1 %.)"""
        choice = self.width * self.experts if self.experts > 1 else 0
        layer = self.attention_parameters + self.experts * self.expert_parameters + choice
        return self.layers * layer + (1 if self.tied else 2) * self.vocabulary * self.width

    def parameters_read(self, tokens: int = 1) -> int:
        """What a step that decodes so many tokens reads at most: of the input embeddings
        only one row each, of the experts only those chosen."""
        experts = min(self.experts, tokens * self.active_experts)
        choice = self.width * self.experts if self.experts > 1 else 0
        layer = self.attention_parameters + experts * self.expert_parameters + choice
        return self.layers * layer + self.vocabulary * self.width

    def but(self, **changes: Any) -> Configuration:
        """A variant: the same with some sizes changed.

        >>> Configuration("a", 64, 4, 2).but(name="grouped", key_heads=1).key_heads
        1
        """
        unknown = set(changes) - {field.name for field in fields(self)}
        if unknown:
            raise RegardError(
                "a configuration has no such field",
                got=", ".join(sorted(unknown)),
                accepted=", ".join(field.name for field in fields(self)),
            )
        return replace(self, **changes)
