"""What an interrupt can keep PyTorch from putting back, and what is done about it.

Python hears of Ctrl-C between any two calls, also inside of what begins or ends a `with`. PyTorch's
own contexts then stay as they are, or worse, are ended later: a generator does so when the last
traceback that holds it is let go of, long after everybody has left."""

from __future__ import annotations

import sys
from contextlib import _GeneratorContextManager
from traceback import walk_tb

import torch
from torch.overrides import _pop_mode_temporarily

_ENDS_OF_WITHS = frozenset(
    {_GeneratorContextManager.__enter__.__code__, _GeneratorContextManager.__exit__.__code__}
)
_WITHOUT_A_MODE = getattr(_pop_mode_temporarily, "__wrapped__", _pop_mode_temporarily).__code__


class Settings:
    """Of PyTorch, in this thread, as they are now."""

    def __init__(self) -> None:
        self._autograd = torch.is_grad_enabled()
        torch.autocast_increment_nesting()
        self._autocasts = torch.autocast_decrement_nesting()

    def put_back(self) -> None:
        """As they were. (What autocast keeps of weights it lets go of when it is left as often as
        it was entered.)"""
        torch._C._set_grad_enabled(self._autograd)
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > self._autocasts:
            pass
        if not self._autocasts:
            torch.clear_autocast_cache()


def was_interrupted() -> bool:
    """Whether what is being left ends by what is no error of anybody: Ctrl-C, most often."""
    kind = sys.exc_info()[0]
    return kind is not None and not issubclass(kind, Exception)


def put_modes_back() -> None:
    """Where an error came while PyTorch had taken a function mode off, as it does while the mode is
    asked about a function, have it put back now: it would be when nobody is there to turn it off.
    """
    error, known = sys.exc_info()[1], set[int]()
    while error is not None and id(error) not in known:
        known.add(id(error))
        for frame, _ in reversed([*walk_tb(error.__traceback__)]):
            if frame.f_code in _ENDS_OF_WITHS:
                generator = frame.f_locals["self"].gen
                if getattr(generator, "gi_code", None) is _WITHOUT_A_MODE:
                    generator.close()
        error = error.__context__
