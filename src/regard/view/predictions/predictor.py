"""A model that predicts tokens, and the text that it read: its logits at any place of it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.cancellation import step
from regard.errors import RegardError
from regard.interpret.interventions import Intervention, intervene
from regard.interpret.metrics import logits_of
from regard.models.readers import HuggingFaceReader, OwnReader, OwnTranslator, Reader
from regard.models.tokenizer import MARK
from regard.view.subjects import TextInfo

WAIT = 0.05
"""Seconds between two looks at whether an answer is still wanted, while another run goes on."""


class Predictor:
    """A causal model of this package, and a text.

    `turn` is held by whoever runs the model: what is switched off for one run is not for another.
    """

    def __init__(self, reader: Reader, told: TextInfo, turn: threading.Lock) -> None:
        self.reader, self.turn = reader, turn
        self.ids = torch.tensor([told.ids], device=next(reader.model.parameters()).device)
        self.source = self.ids.new_tensor([told.source])

    @property
    def places(self) -> int:
        """The places after which a token is predicted."""
        return self.ids.shape[1]

    def ends(self, token: int) -> bool:
        """Whether nothing comes after a token."""
        return token == MARK

    def until(self, at: int) -> Int[Tensor, "1 n"]:
        """The tokens up to a place, which is all that a causal model may look at from there."""
        if not 0 <= at < self.places:
            raise RegardError(
                "there is no such token in the text",
                got=str(at),
                accepted=f"0 to {self.places - 1}",
            )
        return self.ids[:, : at + 1]

    def arguments(self, ids: Int[Tensor, "1 n"]) -> dict[str, Any]:
        """What the model is called with."""
        return {"input_ids": ids}

    def logits(
        self, ids: Int[Tensor, "1 n"], changes: Sequence[Intervention] = ()
    ) -> Float[Tensor, "v"]:
        """What follows some tokens, as logits."""
        with self.running(changes):
            return logits_of(self.reader.model(**self.arguments(ids)))[0, -1].float()

    def step(
        self, ids: Int[Tensor, "1 n"], memory: Any, changes: Sequence[Intervention]
    ) -> tuple[Float[Tensor, "v"], Any]:
        """What follows some tokens, of which the memory, if there is one, holds all but the last;
        and a memory that holds them all, if the model has one."""
        model: Any = self.reader.model
        with self.running(changes):
            memory = model.memory() if memory is None else memory
            new = ids[:, memory.get_seq_length() :]
            return model(new, past_key_values=memory)[0, -1].float(), memory

    @contextmanager
    def running(self, changes: Sequence[Intervention] = ()) -> Iterator[None]:
        """Within it the model is this predictor's alone, does what interventions make of it, and
        can be stopped between any two of its parts."""
        while not self.turn.acquire(timeout=WAIT):
            step()
        with ExitStack() as stack:
            stack.callback(self.turn.release)
            for module in self.reader.model.modules():
                if not any(module.children()):
                    hook = module.register_forward_hook(lambda *_: step())
                    stack.callback(hook.remove)
            stack.enter_context(torch.no_grad())
            stack.enter_context(self.reader.explained())
            if changes:
                stack.enter_context(intervene(self.reader.model, *changes))
            yield


class TranslatorPredictor(Predictor):
    """An encoder–decoder of this package; places are those of what it wrote."""

    @property
    def places(self) -> int:
        return self.ids.shape[1] - 1

    def arguments(self, ids: Int[Tensor, "1 n"]) -> dict[str, Any]:
        return {"input_ids": self.source, "decoder_input_ids": ids}

    def step(
        self, ids: Int[Tensor, "1 n"], memory: Any, changes: Sequence[Intervention]
    ) -> tuple[Float[Tensor, "v"], Any]:
        # What is written is short; and what is switched off in the encoder has to be run.
        return self.logits(ids, changes), None


class HuggingFacePredictor(Predictor):
    """A causal model of transformers."""

    def ends(self, token: int) -> bool:
        known: Any = getattr(self.reader.model, "generation_config", None)
        ends = getattr(known, "eos_token_id", None)
        if ends is None:
            ends = getattr(self.reader.tokenizer, "eos_token_id", None)
        return token in (ends if isinstance(ends, (list, tuple)) else [ends])

    def arguments(self, ids: Int[Tensor, "1 n"]) -> dict[str, Any]:
        model = self.reader.model
        known = inspect.signature(model.forward).parameters
        # Logits of all places of a long text would be larger than the model.
        last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        return {"input_ids": ids, "use_cache": False, **last}

    def step(
        self, ids: Int[Tensor, "1 n"], memory: Any, changes: Sequence[Intervention]
    ) -> tuple[Float[Tensor, "v"], Any]:
        model: Any = self.reader.model
        new = ids if memory is None else ids[:, -1:]
        given = self.arguments(new) | {"use_cache": True, "past_key_values": memory}
        with self.running(changes):
            out = model(**given)
            return logits_of(out)[0, -1].float(), getattr(out, "past_key_values", None)


def predictor_of(opened: Callable[[], Reader], told: TextInfo, turn: threading.Lock) -> Predictor:
    """A model and the text that it read, or the reason why it predicts nothing."""
    if not told.ids:
        raise RegardError(
            told.silent or "no model that predicts tokens read this text",
            got=repr(told.model or "a trace"),
            accepted="what a causal model read, or the translator of this package",
        )
    kinds = (
        (OwnTranslator, TranslatorPredictor),
        (OwnReader, Predictor),
        (HuggingFaceReader, HuggingFacePredictor),
    )
    reader = opened()
    return next(kind for of, kind in kinds if isinstance(reader, of))(reader, told, turn)
