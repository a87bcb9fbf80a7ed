"""What ran and attended, but was not seen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import nn
from torch.jit._script import RecursiveScriptModule

from regard.errors import RegardError
from regard.nn import LinearAttention
from regard.watching.by_hand import HandWritten
from regard.watching.choices import matches

SEEN = (
    "F.scaled_dot_product_attention, flex_attention, nn.MultiheadAttention, regard's attention and "
    "Hugging Face's attention interface"
)


class Gaps:
    """Which modules of a model ran while it was looked at, and which were seen to attend."""

    def __init__(
        self, model: nn.Module, layers: tuple[str, ...] | None, where: Callable[[], str]
    ) -> None:
        self.model, self.layers = model, layers
        self.ran: set[str] = set()
        self.attended: set[str] = set()
        self.by_hand = HandWritten(model, where, self._wanted, self.attended)
        self.left_alone: dict[str, str] = {}
        """Why a call was not traced, by the path of the module that made it."""
        self._there: set[int] = set()
        """The modules that are followed, or need not be, by identity. Who watches holds them."""

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """From now on these modules are watched, and no others that may come into the model."""
        self._there = set(map(id, modules))
        self.ran.clear()
        self.attended.clear()
        self.by_hand.found.clear()
        self.left_alone.clear()

    def is_scripted(self, path: str, module: nn.Module) -> bool:
        """Whether a module is compiled by TorchScript, which runs it past all who follow it. If it
        calls PyTorch's attention, that will be missing."""
        if not isinstance(module, RecursiveScriptModule):
            return False
        if not path:
            raise RegardError(
                "models compiled by TorchScript cannot be watched",
                got=f"{module.original_name}, made by torch.jit.script or loaded from its file",
                accepted="the module that it was made of",
            )
        # Its parts are inside its own graph.
        whole = not any(any(_inside([path], at)) for at in self.left_alone)
        if whole and "scaled_dot_product_attention" in str(getattr(module, "inlined_graph", "")):
            self.left_alone[path] = "TorchScript runs it, which tells nobody of its calls"
        return True

    def refuse(self, seen: Collection[str], runs: int, huggingface: Any) -> None:
        """Nothing that ran, attended and is wanted may be missing from what was seen."""
        name = type(self.model).__name__
        left = self._left()
        if left:
            raise RegardError(
                "attention ran that cannot be looked into; it was computed as without a watch",
                got="; ".join(left.values()),
                do="name the other layers in layers=, or run the model unwatched",
            )
        others = sorted(path for path in self.attended if not self._wanted(path))
        if not seen and others:
            raise RegardError(
                "no layer that attended has such a path",
                got=f"layers={list(self.layers or [])}",
                accepted=_some(map(repr, others)),
                do="name paths as they are, or with * for any part: '*.0.*'",
            )
        missed = self._missed(huggingface)
        helps = [huggingface.hint(self.model, path) for path in missed] if huggingface else []
        mend = next(filter(None, helps), f"write attention with one of these: {SEEN}")
        came = self._came(missed)
        mend = "change the model first, then watch it" if came else mend
        if not seen and not came:
            family = "" if huggingface is None else f" ({huggingface.family(self.model)})"
            by_hand = f"; attention by hand in {_some(missed.values())}" if missed else ""
            raise RegardError(
                "the model ran, but no attention was seen",
                got=f"{name}{family}, run {runs} times{by_hand}",
                accepted=f"models that call {SEEN}",
                do=mend
                if missed
                else "see whether the model computes attention by hand, or outside its forward",
            )
        if missed:
            raise RegardError(
                "attention layers ran, but their attention was not seen",
                got=f"{name}: {', '.join(missed.values())}",
                do=f"{mend}; or leave them out on purpose: name the other layers in layers=",
            )

    def missed(self, huggingface: Any) -> list[str]:
        """What is said of each module that attended without being seen, and is wanted."""
        return [*self._left().values(), *self._missed(huggingface).values()]

    def _left(self) -> dict[str, str]:
        """What is said of each module that made a call which was not traced, and is wanted."""
        wanted = filter(self._wanted, self.left_alone)
        return {path: f"{path or '(model)'}: {self.left_alone[path]}" for path in wanted}

    def _missed(self, huggingface: Any) -> dict[str, str]:
        """What attended without being seen: the innermost of such modules by their paths, and what
        is said of each."""
        linear = {p for p, m in self.model.named_modules() if isinstance(m, LinearAttention)}
        named = [] if huggingface is None else huggingface.attenders_by_name(self.model)
        silent = {
            path
            for path in (*linear, *named)
            if path in self.ran and not any(_inside(self.attended, path))
        }
        # Nobody was told of their calls, or whose these are.
        came = self._came({*linear, *named})
        missed = {path for path in silent | came | set(self.by_hand.found) if self._wanted(path)}
        found = {}
        for path in sorted(missed):
            if any(_inside(missed - {path}, path)):
                continue
            by_hand = [at for at in self.by_hand.found if any(_inside([at], path))]
            why = f" (by hand, {self.by_hand.found[by_hand[0]]})" if by_hand else ""
            why = " (linear attention; trace=True in its call shows it)" if path in linear else why
            why = " (it came into the model while that was watched)" if path in came else why
            found[path] = f"{path or '(model)'}{why}"
        return found

    def _came(self, paths: Collection[str]) -> set[str]:
        """Which of these modules were not in the model when the watching began: it walks through a
        model once, and another that takes the place of one of its parts is not followed."""
        parts = dict(self.model.named_modules()) if paths else {}
        return {path for path in paths if path in parts and id(parts[path]) not in self._there}

    def _wanted(self, path: str) -> bool:
        return matches(path, self.layers)


def _inside(paths: Iterable[str], path: str) -> Iterator[bool]:
    """Whether each of the paths is this one, or of a module in it."""
    return (not path or at == path or at.startswith(f"{path}.") for at in paths)


def _some(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:6]) + (", …" if len(every) > 6 else "")
