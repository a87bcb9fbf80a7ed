"""What a call of PyTorch's attention is looked at in: no other call is looked at meanwhile, and
autograd is on only if somebody wants that."""

from __future__ import annotations

from contextvars import ContextVar

import torch

from regard.calls.watchers import learned

looking: ContextVar[bool] = ContextVar("looking", default=False)
"""Whether a call is being looked at: one watch shows it to all, and what it does for it is not the
model's."""


class Alone:
    """What a call is looked at in. (Generators make contexts that take longer: this is gone through
    at every layer.)"""

    def __enter__(self) -> None:
        self._token = looking.set(True)

    def __exit__(self, *_: object) -> None:
        looking.reset(self._token)


class Beside:
    """What a trace beside PyTorch's own call is made in: with autograd if somebody wants that.
    (torch.set_grad_enabled takes longer.)"""

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        if self._before and not learned():
            torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)
