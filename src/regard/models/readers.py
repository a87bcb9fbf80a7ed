"""One small interface to every model: it reads a text while it is watched, and continues it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.cancellation import UnwantedError
from regard.errors import RegardError
from regard.models.card import Card
from regard.models.causal import CausalModel, refuse_long
from regard.models.tokenizer import MARK, MARK_TEXT, Tokenizer
from regard.models.translator import TranslatorModel
from regard.seen import Seen
from regard.watching import Keep, spelled, watch

STRAIGHT = str.maketrans("“”‘’", "\"\"''")


class Reader:
    """A model, its tokenizer and its card.

    `read` gives the tokens the model sees, `run` what its attention does with them, `generate` the
    text that follows. The model itself is `model`, a plain module for `regard.watch`.
    """

    def __init__(
        self, name: str, model: nn.Module, tokenizer: Any, card: Card, longest: int | None
    ) -> None:
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.card, self.longest = card, longest

    def ids(self, text: str) -> Int[Tensor, "1 n"]:
        """A text as the model takes it."""
        raise NotImplementedError

    def read(self, text: str) -> list[str]:
        """The tokens of a text as the model sees them."""
        return self.spelled(self.ids(text)[0].tolist())

    @torch.no_grad()
    def run(self, text: str, *, keep: Keep = "traces", layers: Sequence[str] | None = None) -> Seen:
        """What attention does while the model reads a text."""
        ids = self.ids(text)
        with self.explained(), watch(self.model, keep=keep, layers=layers) as seen:
            self.model(ids)
        seen.model, seen.tokens = self.name, self.spelled(ids[0].tolist())
        return seen

    def generate(
        self, text: str, tokens: int = 40, *, temperature: float = 0.8, seed: int = 0
    ) -> str:
        """The text that follows, without the text itself; temperature 0 is the likeliest."""
        raise NotImplementedError

    def why_silent(self) -> str:
        """Why the model does not say which token follows; nothing where it does."""
        return ""

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Around a run: sizes and weights that fit each other may still not fit a text."""
        try:
            yield
        except (RegardError, UnwantedError):
            raise
        except Exception as error:
            said = next(iter(str(error).splitlines()), "")
            raise RegardError(
                "the model cannot read the text",
                got=f"{self.name!r}: {type(error).__name__} {said}",
                do="see whether its files belong together: config.json, weights and tokenizer",
            ) from error

    def spelled(self, ids: list[int]) -> list[str]:
        """The text of each token."""
        return spelled(self.tokenizer, ids)

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def __repr__(self) -> str:
        size = sum(p.numel() for p in self.model.parameters()) / 1e6
        kind = type(self.model).__name__
        return f"{type(self).__name__}({self.name!r}, {kind}, {size:.3g} M parameters)"


class OwnReader(Reader):
    """A causal model of this package."""

    model: CausalModel
    tokenizer: Tokenizer

    def encode(self, text: str) -> list[int]:
        """The ids of a text, its quotation marks straight, as in all that these models learned."""
        return self.tokenizer.encode(text.translate(STRAIGHT))

    def ids(self, text: str) -> Int[Tensor, "1 n"]:
        ids = torch.tensor([[MARK, *self.encode(text)]], device=self._device())
        refuse_long(ids.shape[1], self.model.config.longest)
        return ids

    def generate(
        self, text: str, tokens: int = 40, *, temperature: float = 0.8, seed: int = 0
    ) -> str:
        ids = self.ids(text)
        refuse_long(ids.shape[1] + tokens, self.model.config.longest)
        with self.explained():
            told = self.model.continued(ids, tokens, temperature=temperature, seed=seed, stop=MARK)
        return self.tokenizer.decode(told[0, ids.shape[1] :].tolist())

    def spelled(self, ids: list[int]) -> list[str]:
        """The text of each token; the mark has a name."""
        return [MARK_TEXT if i == MARK else text
                for i, text in zip(ids, spelled(self.tokenizer, ids), strict=True)]  # fmt: skip


class OwnTranslator(OwnReader):
    """A model of this package that reads one text and writes another."""

    model: TranslatorModel  # type: ignore[assignment]

    def ids(self, text: str) -> Int[Tensor, "1 n"]:
        ids = torch.tensor([[*self.encode(text), MARK]], device=self._device())
        refuse_long(ids.shape[1], self.model.config.longest)
        return ids

    def targets(self, text: str, *, ended: bool = True) -> Int[Tensor, "1 n"]:
        """A text to be written, from its mark to its mark, or without the latter if it goes on."""
        ids = [MARK, *self.encode(text), *([MARK] if ended or not text else [])]
        refuse_long(len(ids) - 1, self.model.config.longest)
        return torch.tensor([ids], device=self._device())

    def own_targets(self, text: str) -> Int[Tensor, "1 n"]:
        """The model's own translation as it is written, cut where it can read no more."""
        # As text and back, so that rows are `writes(generate(text))` whatever was written.
        ids = [MARK, *self.encode(self.generate(text)), MARK]
        return torch.tensor([ids[: self.model.config.longest + 1]], device=self._device())

    def writes(self, text: str, *, ended: bool = True) -> list[str]:
        """The token that each row of the decoder writes."""
        return self.spelled(self.targets(text, ended=ended)[0, 1:].tolist())

    @torch.no_grad()
    def run(
        self,
        text: str,
        *,
        keep: Keep = "traces",
        layers: Sequence[str] | None = None,
        target: str | None = None,
        ended: bool = True,
    ) -> Seen:
        """What attention does while the model reads a text and writes `target`; its own
        translation, if none is given. `ended` says whether the target ends there.

        The rows of decoder.*.memory are the tokens of `writes(target)`, its keys those of
        `read(text)`. What is seen has no `tokens`, as there are two texts.
        """
        written = self.own_targets(text) if target is None else self.targets(target, ended=ended)
        with watch(self.model, keep=keep, layers=layers) as seen:
            self.model(self.ids(text), written[:, :-1])
        seen.model = self.name
        return seen

    def generate(
        self, text: str, tokens: int = 160, *, temperature: float = 0.0, seed: int = 0
    ) -> str:
        """The translation: always the likeliest, so that `temperature` has to be 0."""
        if temperature:
            raise RegardError("a translation is not sampled", got=f"{temperature=}", accepted="0")
        return self.translation(text, tokens)[0]

    def translation(self, text: str, tokens: int = 160) -> tuple[str, bool]:
        """The likeliest translation, and whether it ends there: else it was cut after so many
        tokens."""
        ids = self.model.written(self.ids(text), tokens, MARK)[0].tolist()
        return self.tokenizer.decode(ids), ids[-1] == MARK


class HuggingFaceReader(Reader):
    """A model of transformers."""

    def why_silent(self) -> str:
        """Why the model does not say which token follows; nothing where it does."""
        model: Any = self.model
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return "this model writes another text than it reads, and here it only reads"
        if not (hasattr(model, "can_generate") and model.can_generate()):
            return "this model does not predict tokens"
        return ""

    def ids(self, text: str) -> Int[Tensor, "1 n"]:
        with self.explained():
            found: list[int] = self.tokenizer(text, verbose=False)["input_ids"]
        if not found:
            raise RegardError("the tokenizer gave no tokens for the text", got=repr(text[:20]))
        if self.longest is not None:
            refuse_long(len(found), self.longest)
        return torch.tensor([found], device=self._device())

    def generate(
        self, text: str, tokens: int = 40, *, temperature: float = 0.8, seed: int = 0
    ) -> str:
        model: Any = self.model
        if not (hasattr(model, "can_generate") and model.can_generate()):
            raise RegardError(
                "this model cannot generate text",
                got=f"{self.name!r} ({type(model).__name__})",
                accepted="models with a language modelling head",
                do="look at what it reads: run(text)",
            )
        ids = self.ids(text)
        drawing = {"do_sample": True, "temperature": temperature} if temperature else {
            "do_sample": False, "temperature": None, "top_p": None, "top_k": None
        }  # fmt: skip
        with self.explained(), torch.random.fork_rng():
            torch.manual_seed(seed)
            told = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **drawing
            )
        return str(self.tokenizer.decode(told[0, ids.shape[1] :], skip_special_tokens=True))
