"""Where a model runs, and in which precision."""

from __future__ import annotations

import torch

from regard.errors import RegardError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


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
    except (TypeError, RuntimeError, AssertionError) as error:
        raise RegardError(
            "there is no such device here",
            got=f"{device!r}: {str(error).splitlines()[0]}",
            accepted="auto, cpu, cuda or cuda:1",
        ) from None
    return where


def chosen_dtype(dtype: str) -> torch.dtype | None:
    """None for `auto`.

    >>> chosen_dtype("bfloat16")
    torch.bfloat16
    """
    if dtype == "auto":
        return None
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise RegardError("unknown dtype", got=repr(dtype), accepted=", ".join(["auto", *DTYPES]))
    return DTYPES[dtype]
