"""Where the picture and the words are in an attention call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from regard.arguments import described
from regard.errors import RegardError
from regard.values import whole

Text = Literal["keys", "first", "last"]
ASPECT = 1.2
"""By how much the sides of a layer's grid may differ from those of the common one, as a factor:
layers that halve an odd side round."""


@dataclass(frozen=True)
class Layout:
    """A prompt of so many tokens, and a picture or a film, as a model's layers see them."""

    tokens: int
    text: Text = "keys"
    """The words are all there is among the keys (cross-attention); or they are in one sequence with
    the picture, before it or after it."""
    grid: tuple[int, int] | None = None
    """Rows and columns of the common grid; None for the finest seen, of a square picture."""
    frames: int = 1

    def __post_init__(self) -> None:
        if self.text not in ("keys", "first", "last"):
            raise RegardError(
                "text= says where the words are",
                got=repr(self.text),
                accepted='"keys": keys of cross-attention; "first" or "last": they are '
                "before or after the picture, in one sequence with it",
            )
        sides = (1, 1) if self.grid is None else self.grid
        if not isinstance(sides, Sequence) or isinstance(sides, str) or len(sides) != 2:
            raise RegardError(
                "grid= counts rows and columns of the picture",
                got=described(sides),
                accepted="(64, 96)",
            )
        for name, count in (("frames", self.frames), ("rows", sides[0]), ("columns", sides[1])):
            whole(f"grounding: {name}", count)
        if self.frames < 1 or (self.grid is not None and min(self.grid) < 1):
            raise RegardError(
                "grid= counts rows and columns of the picture, frames= its frames",
                got=f"grid={self.grid}, frames={self.frames}",
                accepted="1 or more of each",
            )

    def fits(self, Q: int, K: int) -> bool:
        """Whether a call may be one of the picture over the words."""
        if self.text == "keys":
            return self.tokens == K
        return Q == K and self.tokens < Q

    def check(self, path: str, Q: int, K: int, *, named: bool) -> None:
        """Say so if a call cannot be, or cannot be known to be, one of the picture over the words.

        A layer that the caller has named is believed."""
        if not self.fits(Q, K):
            joint = "as many keys as queries, and more than the prompt has tokens"
            raise RegardError(
                "a layer that was named does not attend from the picture to the words",
                got=f"{path!r}: {Q} queries, {K} keys; the prompt has {self.tokens} tokens",
                accepted=f"{self.tokens} keys" if self.text == "keys" else joint,
                do="name other layers in layers=, give all tokens that the model was given (marks "
                "and padding too), or say text= if words and picture are one sequence",
            )
        if self.text == "keys" and Q == K and not named:
            raise RegardError(
                "cross-attention cannot be told from self-attention by its size",
                got=f"{path!r}: {Q} queries and {K} keys, as many as the prompt has tokens",
                do="name the layers of cross-attention: layers='*.attn2'",
            )

    def picture(self, Q: int) -> range:
        """The queries that are the picture."""
        if self.text == "keys":
            return range(Q)
        return range(self.tokens, Q) if self.text == "first" else range(Q - self.tokens)

    def first_word(self, K: int) -> int:
        """The key of the prompt's first token."""
        return K - self.tokens if self.text == "last" else 0

    def shape(self, path: str, many: int) -> tuple[int, int, int]:
        """Frames, rows and columns of so many tokens of the picture.

        >>> Layout(77, grid=(64, 96)).shape("mid", 16 * 24)
        (1, 16, 24)
        """
        each, left = divmod(many, self.frames)
        wide = 1.0 if self.grid is None else self.grid[1] / self.grid[0]
        pairs = [(each // w, w) for w in range(1, each + 1) if each % w == 0]
        best = min(pairs, key=lambda pair: abs(math.log(pair[1] / pair[0] / wide)), default=(0, 0))
        apart = math.exp(abs(math.log(best[1] / best[0] / wide))) if best[0] else math.inf
        if left or apart > (1.0 if self.grid is None else ASPECT):
            given = "a square picture" if self.grid is None else f"grid={self.grid}"
            raise RegardError(
                "the tokens of a layer are not those of such a picture",
                got=f"{path!r}: {many} tokens, for {given} and frames={self.frames}",
                accepted="frames × rows × columns, the rows and columns in the proportion of grid=",
                do="say grid=(rows, columns) and frames= as the model sees them (a video model may "
                "see fewer frames than it shows), or text= if words are among the tokens",
            )
        return self.frames, *best
