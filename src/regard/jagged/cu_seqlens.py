"""cu_seqlens: where sequences that are packed end to end begin and end, as FlashAttention's varlen
functions and packing data loaders have it: [0, …, n], one number more than there are sequences.

The host must know these numbers to plan a call. On a GPU that waits for the device, so each tensor
is read once, until it is written to: the layers of a model share it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from regard.errors import RegardError
from regard.transforms import under_torch_func

Ends = tuple[int, ...]
"""0 and the end of each sequence, on the host."""

_READ = WeakTensorKeyDictionary()
_ACCEPTED = (
    "an int32 or int64 tensor [sequences + 1] that begins at 0 and ends at the number of tokens; "
    "or a pair of them, (cu_seqlens_q, cu_seqlens_k)"
)


def read(ends: Tensor) -> Ends:
    """The numbers of a tensor. On a card they are remembered with it; on the host reading is quick,
    and whoever shares the memory may write to it unseen."""
    if ends.device.type == "cpu" or ends.is_inference():
        return _numbers(ends)
    version = ends._version
    known = _READ.get(ends)
    if known is not None and known[0] == version:
        found: Ends = known[1]
        return found
    found = _numbers(ends)
    _READ[ends] = version, found
    return found


def _numbers(ends: Tensor) -> Ends:
    # Within transforms, PyTorch 2.9 reads tensors number by number alone.
    return tuple(map(int, ends) if under_torch_func() else ends.tolist())


def both(cu_seqlens: Any) -> tuple[Tensor, Tensor]:
    """Those of the queries and those of the keys."""
    several = isinstance(cu_seqlens, (tuple, list))
    pair = cu_seqlens if several else (cu_seqlens, cu_seqlens)
    if len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
        got = type(cu_seqlens).__name__
        if several:
            kinds = [type(part).__name__ for part in pair[:3]]
            got += f" of {', '.join(kinds) or 'nothing'}{', …' if len(pair) > 3 else ''}"
        raise RegardError(
            "cu_seqlens= tells where sequences begin and end",
            got=got,
            accepted=_ACCEPTED,
            do="torch.tensor([0, 3, 8], dtype=torch.int32, device=q.device) for sequences of 3 and "
            "5 tokens",
        )
    return pair[0], pair[1]


def checked(name: str, ends: Tensor, whose: str, tokens: Tensor) -> Ends:
    """The numbers of a tensor that says how the tokens of another are cut into sequences."""
    _check_kind(name, ends, whose, tokens)
    found = read(ends)
    if found[0] != 0:
        raise RegardError(
            f"{name} does not begin at 0",
            got=_shown(found),
            accepted=_ACCEPTED,
            do="from lengths: torch.nn.functional.pad(lengths.cumsum(0), (1, 0))",
        )
    if list(found) != sorted(found):
        raise RegardError(
            f"{name} goes down, and no sequence has fewer than 0 tokens",
            got=_shown(found),
            accepted="numbers that never decrease; equal neighbours are an empty sequence",
            do="give ends, not lengths: torch.nn.functional.pad(lengths.cumsum(0), (1, 0))",
        )
    if found[-1] != len(tokens):
        raise RegardError(
            f"{name} does not end at the number of tokens",
            got=f"{_shown(found)} for {whose} {list(tokens.shape)}, which has {len(tokens)} tokens",
            accepted=f"{len(tokens)} as the last number",
            do="cut off what is padding, or count it as a sequence; tokens are the first axis: "
            "[tokens, heads, width]",
        )
    return found


def _shown(ends: Ends) -> str:
    """Some at the front and the end."""
    few = ends if len(ends) < 9 else (*ends[:4], "…", *ends[-4:])
    return f"[{', '.join(map(str, few))}]"


def check_tokens(q: Any, k: Any, v: Any) -> None:
    """Whether tensors are tokens end to end."""
    given = {"q": q, "k": k, "v": v}
    for name, t in given.items():
        if not isinstance(t, Tensor):
            raise RegardError(
                f"{name} must be a tensor", got=type(t).__name__, accepted="torch.Tensor"
            )
    if any(t.is_nested for t in given.values()):
        raise RegardError(
            "nested tensors bring their lengths along, and cu_seqlens= tells those of others",
            got=", ".join(f"{n} {'nested' if t.is_nested else 'dense'}" for n, t in given.items()),
            accepted="nested tensors without cu_seqlens=, or dense ones with it",
            do="leave out cu_seqlens=, or pass the values [tokens, heads, width] of each",
        )
    if any(t.ndim != 3 for t in given.values()):
        raise RegardError(
            "cu_seqlens= goes with tokens end to end, without a batch axis",
            got=", ".join(f"{name} {list(t.shape)}" for name, t in given.items()),
            accepted="q [total_q, H, D], k [total_k, G, D], v [total_k, G, E]",
            do="of [1, N, H, D] that is t[0]; of [B, H, N, D] it is t.transpose(1, 2).flatten(0, "
            "1); leave out cu_seqlens= where all sequences are as long",
        )
    if len(k) != len(v):
        raise RegardError(
            "each key needs its value",
            got=f"k {list(k.shape)}, v {list(v.shape)}",
            accepted="k and v with the same tokens and heads",
        )


def _check_kind(name: str, ends: Tensor, whose: str, tokens: Tensor) -> None:
    if ends.dtype not in (torch.int32, torch.int64) or ends.is_nested:
        raise RegardError(
            f"{name} counts tokens in whole numbers",
            got=str(ends.dtype).removeprefix("torch."),
            accepted=_ACCEPTED,
            do=f"{name}.to(torch.int32)",
        )
    if ends.ndim != 1 or not len(ends):
        raise RegardError(
            f"{name} is one list for all sequences, without a batch axis",
            got=f"{list(ends.shape)}",
            accepted=_ACCEPTED,
            do="for no sequences: [0]"
            if ends.ndim == 1
            else "pack the rows of a batch into one, the ends of each moved by the tokens before",
        )
    # Where there are no numbers, there is still a call to plan.
    here = "cpu" if tokens.device.type == "meta" else tokens.device
    if ends.device != torch.device(here):
        raise RegardError(
            f"{name} lives on another device",
            got=f"{ends.device}, while {whose} is on {tokens.device}",
            accepted=f"{here}",
            do=f"move it once, before the layers of a model share it: {name}.to({str(here)!r})",
        )
    if not _has_numbers(ends):
        raise RegardError(
            f"{name} cannot be read here",
            got=f"a {type(ends).__name__} that stands for others while a function is traced or "
            "mapped",
            accepted="a tensor that holds its numbers: the same sequences for all of a map",
            do="take cu_seqlens= from outside of the function that is transformed",
        )


def _has_numbers(ends: Tensor) -> bool:
    functorch = torch._C._functorch
    while functorch.is_gradtrackingtensor(ends):
        ends = functorch.get_unwrapped(ends)
    return type(ends) in (Tensor, torch.nn.Parameter) and not functorch.is_batchedtensor(ends)
