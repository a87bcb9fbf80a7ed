"""Texts as a model takes them, several of like length at once."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.errors import RegardError
from regard.inputs import AttentionInputs
from regard.interpret.head_scores.texts.sides import Side, Sides
from regard.interpret.interventions.runs import Runner, arguments, items
from regard.interpret.two_texts import refuse_unknown_target
from regard.traces import Trace
from regard.watching.tokens import BROKEN, reads_two_texts, spelled, with_spaces

TOKENS = 4096
"""Tokens that are run at once, at most, where texts are put together."""
SAMPLE = 256
"""Tokens that show what a model is made of."""
RARE = 0.1
"""The share of all tokens that rare ones make up together, at most."""


@runtime_checkable
class Opened(Protocol):
    """A model with what makes tokens of text, as `regard.models.load` gives it."""

    model: nn.Module
    tokenizer: Any

    def ids(self, text: str) -> Tensor: ...


class Batch(NamedTuple):
    """What a model is called with once, the texts in it, and their numbers."""

    call: Any
    sides: tuple[Side, ...]
    numbers: Int[Tensor, "b"]


class Texts:
    """Texts, each one call. A text of several sequences counts as several."""

    def __init__(self, model: Any, texts: Any) -> None:
        self.reader = model if isinstance(model, Opened) else None
        self.model: nn.Module = model.model if self.reader is not None else model
        listed = [texts] if isinstance(texts, str) else texts
        strings = not isinstance(listed, (Tensor, Mapping)) and any(map(_written, listed))
        if strings and self.reader is None:
            items(listed)  # says what is accepted instead
        self.calls = [self._call(one) for one in listed] if strings else items(listed)
        self.calls = [
            call[None] if isinstance(call, Tensor) and call.ndim == 1 else call
            for call in self.calls
        ]
        self.sides = [sides_of(call) for call in self.calls]
        empty = [i for i, sides in enumerate(self.sides) if not sides[0].real.numel()]
        if empty:
            raise RegardError(
                "a text is empty: there is nothing to look at in it",
                got=f"texts {', '.join(map(str, empty[:5]))} of {len(self.calls)}, from 0",
                accepted="texts of one token or more",
                do="leave them out",
            )
        sizes = [len(sides[0].real) for sides in self.sides]
        self.starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self.count = sum(sizes)
        self.pads = True
        """Whether texts of unlike length may be put together: whether padding is looked at is seen
        when they are."""
        self._roles: dict[str, tuple[int, int]] | None = None
        self._counts: Counter[int] | None = None

    def _call(self, text: Any) -> Any:
        """What a model is called with for a string, or for two if it reads one and writes one."""
        reader: Any = self.reader
        if not hasattr(reader, "targets"):
            if not isinstance(text, str):
                raise RegardError(
                    "a text is a string", got=repr(text)[:60], do="give a list of strings"
                )
            return reader.ids(text)
        source, target = (text, None) if isinstance(text, str) else text
        written = reader.own_targets(source) if target is None else reader.targets(target)
        return reader.ids(source), written[:, :-1]

    def batches(self, only: Sequence[int] | None = None) -> Iterator[Batch]:
        """All texts, or those of some numbers."""
        chosen = range(len(self.calls)) if only is None else only
        plain = [i for i in chosen if self._plain(i)]
        for some in self._together(plain):
            yield self._padded(some)
        for i in chosen:
            if not self._plain(i):
                # Fresh ones: what is counted of a text is let go with its batch.
                sides = tuple(Side(s.real, s.ids, s.whole) for s in self.sides[i])
                many = torch.arange(len(sides[0].real)) + self.starts[i]
                yield Batch(self.calls[i], sides, many)

    def _plain(self, i: int) -> bool:
        call = self.calls[i]
        return isinstance(call, Tensor) and call.ndim == 2 and len(call) == 1 and _whole(call)

    def _together(self, plain: list[int]) -> Iterator[list[int]]:
        some: list[int] = []
        for i in sorted(plain, key=lambda i: self.calls[i].shape[1]):
            n = self.calls[i].shape[1]
            unlike = some and not self.pads and self.calls[some[0]].shape[1] != n
            if some and (unlike or n * (len(some) + 1) > TOKENS):
                yield some
                some = []
            some.append(i)
        if some:
            yield some

    def _padded(self, some: list[int]) -> Batch:
        rows = [self.calls[i][0] for i in some]
        longest = max(map(len, rows))
        # Filled up with a token of the text itself, which any model knows.
        ids = torch.stack([torch.cat([r, r[-1:].expand(longest - len(r))]) for r in rows])
        lengths = torch.tensor([len(r) for r in rows]).to(ids.device, non_blocking=True)
        real = torch.arange(longest, device=ids.device) < lengths[:, None]
        side = Side(real, ids, whole=all(len(r) == longest for r in rows))
        call: Any = ids
        if side.padded and _takes_mask(self.model):
            call = {"input_ids": ids, "attention_mask": side.real.long()}
        return Batch(call, (side,), torch.tensor([self.starts[i] for i in some]))

    def sides_of(self, batch: Batch, path: str, x: AttentionInputs) -> Sides:
        """What the queries and keys of a call read."""
        many = len(batch.sides[0].real)
        B, _, Q, K = x.shape
        if many == B and len(batch.sides) == 1:
            side = batch.sides[0]
            if side.places == Q == K:
                if reads_two_texts(self.model) and side.ids is not None:
                    refuse_unknown_target(path, batch.call)
                return Sides(side, side, True)
        if many == B and len(batch.sides) == 2:
            asks, holds = self.roles[path]
            query, key = batch.sides[asks], batch.sides[holds]
            if query.places == Q and key.places == K:
                return Sides(query, key, asks == holds)
        if B % many:
            raise RegardError(
                f"the batch entries of {path!r} are not those of the texts",
                got=f"{B} for {many} texts",
                accepted="as many, or a multiple",
                do="name other layers in layers=",
            )
        # No tokens that are known of: patches, frames, windows.
        query, key = (Side.of_places(B, n, x.q.device) for n in (Q, K))
        return Sides(query, key, Q == K)

    @property
    def roles(self) -> dict[str, tuple[int, int]]:
        """For each layer of a model of two texts: which of them the queries read, and which the
        keys. Seen in a run in which they are of different length."""
        if self._roles is None:
            call, sides = self.calls[0], self.sides[0]
            if sides[0].places == sides[1].places:
                call = _longer(call, sides[1].ids)
                sides = sides_of(call)
            found: dict[str, tuple[int, int]] = {}
            lengths = [side.places for side in sides]

            def look(place: tuple[str, int], trace: Trace) -> None:
                _, _, Q, K = trace.inputs.shape
                if Q in lengths and K in lengths:
                    found[place[0]] = lengths.index(Q), lengths.index(K)

            Runner(self.model).run(call, look=look)
            self._roles = found
        return self._roles

    @property
    def sample(self) -> Any:
        """What a model's form is seen with: the start of a text is enough, and its logits few."""
        return self.calls[0][:, :SAMPLE] if self._plain(0) else self.calls[0]

    @property
    def first(self) -> int | None:
        """The token that all texts begin with, if they do."""
        begins = {int(s[0].ids[0, s[0].first[0]]) for s in self.sides if s[0].ids is not None}
        return begins.pop() if len(begins) == 1 and len(self.sides) > 1 else None

    def vocabulary(self) -> Int[Tensor, "v"] | None:
        """Tokens to draw from: all that the tokenizer has, or those of the texts."""
        known = getattr(getattr(self.reader, "tokenizer", None), "__len__", None)
        counts = self.counts()
        if known is not None:
            special = getattr(self.reader.tokenizer, "all_special_ids", [0])  # type: ignore[union-attr]
            every = torch.arange(known())
            return every[~torch.isin(every, torch.tensor(list(special) or [-1]))]
        return torch.tensor(sorted(counts)) if counts else None

    def counts(self) -> Counter[int]:
        """How often each token stands in the texts."""
        if self._counts is None:
            told = [s for sides in self.sides for s in sides if s.ids is not None]
            by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
            for side in told:
                assert side.ids is not None
                real = side.ids.flatten() if side.whole else side.ids[side.real]
                by_device[real.device].append(real)
            self._counts = Counter()
            for tokens in by_device.values():
                self._counts.update(torch.cat(tokens).tolist())
        return self._counts

    def rare(self) -> Int[Tensor, "v"]:
        """The least frequent tokens, which make up a tenth of the texts at most; those that stand
        there once, if already these are more."""
        counts = self.counts()
        most, total, upto = RARE * sum(counts.values()), 0, 1
        for often, tokens in sorted(Counter(counts.values()).items()):
            total += often * tokens
            if total > most:
                break
            upto = often
        return torch.tensor([t for t, often in counts.items() if often <= upto], dtype=torch.long)

    def separators(self) -> Int[Tensor, "v"] | None:
        """Tokens without a letter or a digit: punctuation, line ends, special tokens. None where
        nothing says what tokens are."""
        tokenizer = getattr(self.reader, "tokenizer", None)
        if tokenizer is None:
            return None
        special = set(getattr(tokenizer, "all_special_ids", []))
        found = []
        for token in self.counts():
            text = spelled(tokenizer, [token])[0]
            bare = BROKEN not in text and not any(letter.isalnum() for letter in text)
            if bare or token in special:
                found.append(token)
        return torch.tensor(found, dtype=torch.long)

    def spelled(self, i: int) -> list[str]:
        """The tokens of a text, as they are written, with the spaces between words."""
        side = self.sides[i][0]
        assert self.reader is not None
        assert side.ids is not None
        return with_spaces(self.reader.tokenizer, side.ids[0].tolist())


def sides_of(call: Any) -> tuple[Side, ...]:
    """The texts in what a model is called with: one, or one to read and one to write."""
    if isinstance(call, Mapping):
        names = [("input_ids", "attention_mask"), ("decoder_input_ids", "decoder_attention_mask")]
        told = [(call[ids], call.get(mask)) for ids, mask in names if call.get(ids) is not None]
    else:
        tensors = [t for t in arguments(call)[0] if isinstance(t, Tensor) and t.ndim == 2]
        told = [(t, None) for t in tensors if _whole(t)][:2]
    if told:
        return tuple(
            Side.of_tokens(ids) if mask is None else Side(mask.bool(), ids) for ids, mask in told
        )
    args, kwargs = arguments(call)
    shaped = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim > 1]
    if not shaped:
        raise RegardError(
            "a text is a tensor of tokens, or of vectors",
            got=repr(call)[:60],
            accepted="[batch, length], or [batch, length, width]",
        )
    return (Side.of_places(shaped[0].shape[0], shaped[0].shape[1], shaped[0].device),)


def _longer(call: Any, ids: Tensor | None) -> Any:
    """The same call with one more token in the second text."""
    assert ids is not None

    def grown(t: Any) -> Any:
        return torch.cat([t, t[:, -1:]], 1) if t is ids else t

    if isinstance(call, Mapping):
        return {name: grown(t) for name, t in call.items() if name != "decoder_attention_mask"}
    return tuple(map(grown, call))


def _written(text: Any) -> bool:
    if isinstance(text, str):
        return True
    return isinstance(text, tuple) and len(text) > 0 and isinstance(text[0], str)


def _whole(t: Tensor) -> bool:
    return not t.is_floating_point() and t.dtype != torch.bool and not t.is_complex()


def _takes_mask(model: nn.Module) -> bool:
    named = inspect.signature(model.forward).parameters
    return "attention_mask" in named and "input_ids" in named
