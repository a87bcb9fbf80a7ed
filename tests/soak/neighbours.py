"""Threads beside a training run: some watch models that they share, others merely run theirs."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import regard
from regard.watching.module_calls import _does_nothing
from tests.soak.models import batch
from tests.watching.left_behind import nothing_in


class Neighbours:
    """Threads that run until the `with` is left. What fails in one is raised there."""

    def __init__(
        self,
        trained: nn.Module,
        served: nn.Module,
        others: Sequence[nn.Module],
        counts: Counter[str],
    ) -> None:
        self._trained, self._served, self._others = trained, served, others
        self._counts = counts
        self._errors: list[BaseException] = []
        self._stop = threading.Event()
        works = (self._watch, self._watch, self._run, self._copy)
        self._threads = [threading.Thread(target=self._repeat, args=(work,)) for work in works]

    def __enter__(self) -> Neighbours:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._errors:
            raise self._errors[0]

    def _repeat(self, work: Callable[[int], None]) -> None:
        length = 3
        while not self._stop.wait(0.04):
            try:
                work(length := 3 + (length + 1) % 11)
            except BaseException as error:
                self._errors.append(error)
                return

    def _watch(self, length: int) -> None:
        """A request to a served model, watched in its thread."""
        with torch.no_grad(), regard.watch(self._served, keep="traces") as seen:
            self._served(batch(length))
        lengths = [trace.inputs.q.shape[2] for layer in seen.values() for trace in layer.traces]
        assert lengths == [length] * 2, lengths
        self._counts["runs watched beside"] += 1

    def _run(self, length: int) -> None:
        """Attention with logits that no clipping may take for those of the model in training."""
        x = 1e4 * batch(length)
        assert type(F.scaled_dot_product_attention(x, x, x)) is torch.Tensor
        assert torch.isfinite(regard.attention(x, x, x, mask=regard.masks.causal())).all()
        for other in self._others:
            other(x)
        self._counts["runs unwatched beside"] += 1

    def _copy(self, length: int) -> None:
        """Of the model in training, as those take who save it while it is trained on."""
        twin = copy.deepcopy(self._trained)
        for module in twin.modules():
            # Hooks are copied one by one: if a watch was attached meanwhile, the last may be there.
            for key, hook in list(module._forward_hooks.items()):
                if hook is _does_nothing:
                    del module._forward_hooks[key]
        nothing_in(twin)
        with torch.no_grad():
            twin(batch(length))
        self._counts["copies beside"] += 1
