"""The session of the app: the atlas that it shows, and the models that read other texts."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.cancellation import telling
from regard.errors import RegardError
from regard.models.installed import MODELS
from regard.models.named_models import load, own_names
from regard.models.readers import Reader
from regard.view.atlas import Atlas
from regard.view.subjects import (
    SPELLING,
    Spelling,
    Tell,
    TextInfo,
    check_words,
    run,
    spelled,
    words,
)
from regard.view.web.atlas_queries import Answers
from regard.view.web.background_work import Work
from regard.view.web.prediction_queries import PredictionAnswers

if TYPE_CHECKING:
    from regard.view.predictions import Predictor

PATIENCE = 5.0
"""Seconds that closing waits for a step of the work, at most: a model may be being loaded."""
WORDS = 50_000
"""Words that are compared by their spelling, at most: each takes 12 kB, each pair some time."""
SHOWN = 20_000
"""A text of so many characters is shown to be changed; a longer one is not."""


KEPT = 4
"""The most texts that are kept, so that other windows can keep showing theirs."""
ROWS = 1 << 18
"""Queries of all layers together, of texts that are kept beside the one that was read last."""


class Edition(NamedTuple):
    """What is shown. Another text makes another number."""

    number: int
    answers: Answers
    told: TextInfo
    says: PredictionAnswers


class Session:
    """Holds the atlas of the text that was read last, and of some before it, and lets models read
    others in the background.

    >>> import regard, torch
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> session = Session(Atlas.of(regard.trace(x, x, x)))
    >>> session.read({"text": "to be or not", "model": "spelling", "tokens": 0})
    >>> session.work.wait()
    True
    >>> session.now.number, session.now.answers.atlas.maps[0].keys
    (2, ['to', 'be', 'or', 'not'])
    """

    def __init__(
        self, atlas: Atlas, told: TextInfo | None = None, reader: Reader | None = None
    ) -> None:
        told = told or TextInfo()
        self.models = known_models(told.model)
        self.work = Work()
        self._reader = reader
        self._opening = threading.Lock()
        self._turn = threading.Lock()
        """Held by whoever runs a model."""
        self._kept = [self._edition(1, atlas, told)]
        self._numbers = count(2)
        """Of the texts to come, shown or beside another. No two have the same."""

    @property
    def now(self) -> Edition:
        """The text that was read last."""
        return self._kept[-1]

    def edition(self, number: str | None) -> Edition | None:
        """The text with a number, or the last where none is named; None if it is not kept."""
        if number is None:
            return self.now
        return next((each for each in self._kept if str(each.number) == number), None)

    def about(self, shown: str | None = None) -> dict[str, Any]:
        """What a front end is told: the models, the text that it shows, and how far work is."""
        number, answers, told, _ = self.edition(shown) or self.now
        places = {of.name: place for place, of in enumerate(answers.atlas.maps)}
        return {
            "models": [{"name": name, "about": about} for name, about in self.models.items()],
            "edition": number,
            "text": told.text if len(told.text) <= SHOWN else "",
            "model": told.model,
            "wrote": told.wrote[:SHOWN],
            "heads": [
                {"kind": known.kind, "map": places[known.path], "head": known.head}
                for known in told.heads
                # A model's card is a file: it may name layers that the model does not have.
                if known.path in places
            ],
            "says": bool(told.ids),
            "silent": told.silent,
            "work": self.work.state(),
        }

    def gallery(self) -> list[dict[str, str]]:
        """The examples that can be read here."""
        from regard.view.gallery import EXAMPLES

        known = self.models
        return [
            each.told()
            for each in EXAMPLES
            if not (each.model.startswith("regard-") and each.model not in known)
        ]

    def read(self, asked: dict[str, Any]) -> None:
        """Begin to read another text: `text`, `model`, and `tokens` to go on with it; or an
        `example` of the gallery, by its name."""
        if "example" in asked:
            self._begin_example(asked["example"])
            return
        text, tokens = check_words(asked.get("text"), asked.get("tokens", 0))
        model = self._named(asked.get("model"))
        number = next(self._numbers)
        self.work.start(lambda tell: self._show(number, text, model, tokens, tell), edition=number)

    def beside(self, asked: dict[str, Any]) -> int:
        """The number of a text to compare with the one that is shown, which it does not replace.

        `text` and `model` are those of the shown `edition` where they are empty. A text that is
        kept already has its number; another begins to be read."""
        told = (self.edition(asked.get("edition")) or self.now).told
        text, _ = check_words(asked.get("text") or told.text, 0)
        model = self._named(asked.get("model") or told.model)
        for each in self._kept:
            if (each.told.text, each.told.model, each.told.wrote) == (text, model, ""):
                return each.number
        number = next(self._numbers)

        def job(tell: Tell) -> None:
            self._keep(self._read(number, text, model, 0, tell), beside=True)

        self.work.start(job, beside=number)
        return number

    def _named(self, model: object) -> str:
        if not isinstance(model, str) or model not in self.models:
            raise RegardError(
                "there is no such model here", got=repr(model), accepted=", ".join(self.models)
            )
        return model

    def _begin_example(self, name: object) -> None:
        # Imported late: whoever opens no gallery need not wait for it.
        from regard.view.gallery import example, opened

        which = example(name)
        number = next(self._numbers)
        # What no model reads keeps none waiting.
        turn = self._turn if which.model.startswith("regard-") else nullcontext()

        def read(tell: Tell) -> None:
            tell("opening the example", 0, 0)
            with turn:
                atlas, told = opened(which, self._opened, tell)
            tell("drawing", 0, 0)
            self._keep(self._edition(number, atlas, told))

        self.work.start(read, edition=number)

    def close(self) -> bool:
        """Stop what is being read; whether it has ended."""
        self.work.stop()
        return self.work.wait(PATIENCE)

    def _show(self, number: int, text: str, model: str, tokens: int, tell: Tell) -> None:
        self._keep(self._read(number, text, model, tokens, tell))

    def _read(self, number: int, text: str, model: str, tokens: int, tell: Tell) -> Edition:
        tell("opening the model", 0, 0)
        if model == SPELLING:
            atlas, told = _compared(text, tokens, tell), TextInfo(text, model)
        else:
            reader = self._opened(model)
            with self._turn:
                found = run(reader, text, tokens, tell)
            told = found.told(reader, text)
            atlas = found.atlas(model).know(told.badges)
        tell("drawing", 0, 0)
        return self._edition(number, atlas, told)

    def _keep(self, new: Edition, *, beside: bool = False) -> None:
        """The new text, and of those before it as many as are small. One that stands beside
        another leaves that the last."""
        kept, rows = [new, self.now] if beside else [new], 0
        for each in reversed(self._kept[: len(self._kept) - beside]):
            rows += sum(of.shape[1] for of in each.answers.atlas.maps)
            if len(kept) == KEPT or rows > ROWS:
                break
            kept.insert(0, each)
        self._kept = kept

    def _edition(self, number: int, atlas: Atlas, told: TextInfo) -> Edition:
        says = PredictionAnswers(atlas, lambda: self._predictor(told))
        return Edition(number, Answers(atlas), told, says)

    def _predictor(self, told: TextInfo) -> Predictor:
        """The model that read a text, which may have to be opened again."""
        # Imported late: whoever looks at maps alone need not wait for it.
        from regard.view.predictions import predictor_of

        return predictor_of(lambda: self._opened(told.model), told, self._turn)

    def _opened(self, model: str) -> Reader:
        """The model, which stays open until another is chosen."""
        with self._opening:
            if self._reader is None or self._reader.name != model:
                self._reader = None
                self._reader = load(model)
            return self._reader


def known_models(also: str = "") -> dict[str, str]:
    """The models that can read here, and what they are.

    >>> known_models()["spelling"]
    'no model: words are compared by their spelling'
    """
    found = own_names()
    for name, package in MODELS.items():
        try:
            package.place(name)
        except RegardError:
            continue
        found[name] = f"in the package {package.package}"
    if also and also != SPELLING and also not in found:
        found[also] = "named by the command"
    return found | {SPELLING: "no model: words are compared by their spelling"}


def _compared(text: str, tokens: int, tell: Tell) -> Atlas:
    if tokens:
        raise RegardError(
            "the comparison by spelling cannot generate text",
            got=f"{tokens} tokens",
            do="choose a model that generates, or ask for 0 tokens",
        )
    many = len(words(text))
    if many > WORDS:
        raise RegardError(
            "there are too many words to compare with each other",
            got=f"{many:,} words",
            accepted=f"{WORDS:,} at most",
            do="read a part of the text",
        )
    tell("spelling words", 0, 0)
    with telling(lambda done, total: tell("comparing words", done, total)):
        return spelled(text, Spelling()).atlas()
