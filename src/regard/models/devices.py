"""Where a model runs."""

from __future__ import annotations

import torch

from regard.errors import RegardError


def chosen_device(device: str) -> torch.device:
    """`auto` is CUDA where there is one.

    >>> chosen_device("cpu")
    device(type='cpu')
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise RegardError(
            "there is no such device here",
            got=f"{device!r}: {str(error).splitlines()[0]}",
            accepted="auto, cpu, cuda or cuda:1",
        ) from None
    return where
