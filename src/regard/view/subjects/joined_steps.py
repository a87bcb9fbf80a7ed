"""The steps of a text, joined while it is written."""

from __future__ import annotations

from regard.seen import Seen, joined


class JoinedSteps:
    """Joins the steps of a text while it is written, so that its keys are held once.

    Call it after each run of the model. `starts` tells the first query of each step that was
    joined, by the path of the layer.
    """

    def __init__(self, seen: Seen) -> None:
        self.seen = seen
        self.starts: dict[str, list[int]] = {}

    def __call__(self) -> None:
        for path, layer in self.seen.items():
            # A layer that could not be joined once has more traces than these.
            whole = joined(layer.traces[:]) if len(layer.traces) == 2 else None
            if whole is not None:
                before = layer.traces[0].inputs.shape.Q
                self.starts.setdefault(path, [0]).append(before)
                layer.traces = [whole]
                del layer.runs[1:], layer.steps[1:]
