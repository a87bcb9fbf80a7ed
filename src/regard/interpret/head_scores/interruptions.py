"""Why a model's run is ended early, or its texts are read once more. None of these is an error."""

from __future__ import annotations


class Enough(Exception):  # noqa: N818
    """All layers that are asked about have run."""


class Leaks(Exception):  # noqa: N818
    """A row looks at padding: only texts of one length can be run together."""


class Doubts(Exception):  # noqa: N818
    """Logits are too large for float32, which was expected to do."""


class Misjudged(Exception):  # noqa: N818
    """A model's form is not what was guessed."""
