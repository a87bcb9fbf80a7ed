"""What an argument has to be, where a call would end in another's error, or in none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.values import whole


def is_number(value: object) -> bool:
    """Whether it is a real number, or a tensor of one.

    >>> is_number(0.5), is_number(torch.tensor(2)), is_number("2"), is_number([2.0]), is_number(1j)
    (True, True, False, False, False)
    """
    if isinstance(value, (int, float)):
        return True
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.device.type != "meta"
    return isinstance(value, (torch.SymInt, torch.SymFloat, Real))


def counted(name: str, value: int, least: int = 1) -> int:
    """A whole number of at least so many; anything else is refused."""
    if whole(name, value) < least:
        raise RegardError(f"{name} is too small", got=str(value), accepted=f"{least} or more")
    return whole(name, value)


def flag(name: str, value: object) -> bool:
    """True or False; what only counts as one of them, as the text "no" does, is refused.

    >>> flag("training", True), flag("training", 0)
    (True, False)
    """
    if isinstance(value, (bool, torch.SymBool)):
        return value  # type: ignore[return-value]
    numpy = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    if not numpy and not (type(value) is int and value in (0, 1)):
        raise RegardError(
            f"{name} must be true or false", got=described(value), accepted="True or False"
        )
    return bool(value)


def refuse_dropout(dropout: float) -> None:
    """Unless it is a share of weights that may be dropped."""
    if not (is_number(dropout) and 0 <= dropout < 1):
        raise RegardError(
            "dropout is the share of weights to drop",
            got=described(dropout),
            accepted="0 <= dropout < 1",
        )


def refuse_no_list(name: str, value: object, accepted: str) -> None:
    """Unless it is a list, or another sequence that is no text."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RegardError(f"{name}= is a list", got=described(value), accepted=accepted)


def refuse_no_tensor(name: str, value: object, accepted: str) -> None:
    """Unless it is a tensor."""
    if not isinstance(value, Tensor):
        raise RegardError(f"{name} is a tensor", got=described(value), accepted=accepted)


def refuse_no_module(name: str, value: object) -> None:
    """Unless it is a module of PyTorch."""
    if not isinstance(value, nn.Module):
        raise RegardError(f"{name} is a model", got=described(value), accepted="a torch.nn.Module")


def device_of(device: torch.device | str) -> torch.device:
    """A device by its name; what is none is refused."""
    try:
        return torch.device(device)
    except (TypeError, RuntimeError):
        raise RegardError(
            "there is no such device", got=described(device), accepted='"cpu", "cuda" or "cuda:1"'
        ) from None


def path_of(path: object) -> Path:
    """A path by its text; what is none is refused.

    >>> path_of("seen.regard").name
    'seen.regard'
    """
    if isinstance(path, (str, os.PathLike)):
        with suppress(TypeError):
            return Path(path)
    raise RegardError(
        "a file is written and read by its path",
        got=described(path),
        accepted='a text such as "seen.regard", or a pathlib.Path',
    )


def described(value: Any) -> str:
    """An argument as an error says it: tensors by kind and axes, others as they print, with their
    type.

    >>> described(torch.zeros(2, 3)), described("two")
    ('torch.float32 [2, 3]', "'two' (str)")
    """
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, (int, float)):
        return str(value)
    return f"{value!r:.80} ({type(value).__name__})"
