"""What a front end may ask of the model that read the text: what it says, what if, and go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from regard.cancellation import stoppable
from regard.errors import RegardError
from regard.view.atlas import Atlas, CancelledError
from regard.view.web.atlas_queries import JSON, sometimes

if TYPE_CHECKING:
    from regard.view.predictions import Predictor

Asked = Mapping[str, str]
LINES = "application/x-ndjson"
"""One JSON object a line, as they come."""


class PredictionAnswers:
    """Answers questions about what a model says of one text.

    `opened` gives the model and its text, which may take a while the first time.
    """

    def __init__(self, atlas: Atlas, opened: Callable[[], Predictor]) -> None:
        self.atlas, self._opened = atlas, opened
        self._said: dict[int, Any] = {}

    def answer(
        self, name: str, asked: Asked, go: Callable[[], bool] = lambda: True
    ) -> tuple[str, bytes | Iterator[bytes]]:
        """The kind and the bytes of an answer, or its lines while they come. `go` says whether it
        is still wanted."""
        check = sometimes(go)
        try:
            with stoppable(check):
                check()
                found = self.QUESTIONS[name](self, self._opened(), asked)
        except KeyError as error:
            raise RegardError(f"{name} was asked without {error}") from None
        except RegardError:
            raise
        except ValueError as error:
            raise RegardError(f"{name} has an argument that cannot be read: {error}") from None
        if isinstance(found, dict):
            return JSON, json.dumps(found).encode()
        return LINES, _lines(found, check)

    def _prediction(self, predictor: Predictor, asked: Asked) -> dict[str, Any]:
        from regard.view.predictions import prediction

        at = int(asked["at"])
        changes = self._changes(predictor, asked, at) if asked.get("off") else None
        return prediction(predictor, at, changes, self._said)

    def _contributions(self, predictor: Predictor, asked: Asked) -> dict[str, Any]:
        from regard.view.predictions import contributions

        return contributions(predictor, self.atlas, int(asked["at"]), int(asked["token"]))

    def _continuation(self, predictor: Predictor, asked: Asked) -> Iterator[dict[str, Any]]:
        from regard.view.predictions import continued

        at = int(asked["at"])
        written = continued(
            predictor,
            at,
            int(asked["tokens"]),
            temperature=float(asked.get("temperature", "0")),
            seed=int(asked.get("seed", "0")),
            changes=self._changes(predictor, asked, at),
        )
        return (each._asdict() for each in written)

    def _changes(self, predictor: Predictor, asked: Asked, at: int) -> list[Any]:
        from regard.view.predictions import interventions, switches

        off = switches(asked.get("off", ""))
        return interventions(self.atlas, off, at + 1, written=predictor.source.numel() > 0)

    QUESTIONS: ClassVar[dict[str, Callable[[Any, Any, Asked], Any]]] = {
        "prediction": _prediction,
        "contributions": _contributions,
        "continuation": _continuation,
    }


def _lines(found: Iterator[dict[str, Any]], check: Callable[[], None]) -> Iterator[bytes]:
    """Each as a line; the last is the error, if one ended the stream."""
    while True:
        try:
            with stoppable(check):
                check()
                line = next(found, None)
        except CancelledError:
            return
        except RegardError as error:
            line, found = {"error": str(error)}, iter(())
        if line is None:
            return
        yield json.dumps(line).encode() + b"\n"
