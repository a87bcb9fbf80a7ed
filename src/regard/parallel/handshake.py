"""Whether all ranks make the same call, before they wait for each other in it.

A collective that ranks enter with different shapes hangs, ends the process or, worst, fills memory
with what was meant for something else. So ranks first compare a digest of what they are about to
do: on a CPU before every call, where that is cheap; on other devices, where it would wait for them,
at the first call of a kind.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import RegardError
from regard.parallel.collectives import gathered, lost
from regard.parallel.ranks import Ranks
from regard.values import Value

Facts = dict[str, str]
"""What is compared: a name for each part of a call, and what it is, in words."""

READ = 1 << 20
"""Bytes of a mask's tensor up to which its numbers are compared, too."""

_AGREED: WeakKeyDictionary[dist.ProcessGroup, set[bytes]] = WeakKeyDictionary()
"""The kinds that ranks agreed on, group by group: all members of a group forget at the same call,
whatever each does in other groups, and a group that is made anew knows nothing of one before."""
_ROOM = 4096


def agree(
    ranks: Ranks, device: torch.device, facts: Facts, contents: Callable[[], Facts] = dict
) -> None:
    """Refuse, on every rank, what is not the same on all of them. `contents` is asked only where
    ranks are."""
    kind, agreed = _digest(facts), _AGREED.setdefault(ranks.group, set())
    if device.type != "cpu" and kind in agreed:
        return
    facts = facts | contents()
    mine = _digest(facts)
    sent = torch.tensor(list(mine), dtype=torch.uint8, device=device)
    found = [bytes(row.tolist()) for row in gathered(ranks, [sent])[0].cpu()]
    if any(each != mine for each in found):
        raise _differ(ranks, facts)
    if "refused" in facts:
        # Alike on all ranks, but nothing that they go on with.
        return
    if len(agreed) >= _ROOM:
        agreed.clear()
    agreed.add(kind)


@contextmanager
def refused_together(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """A block in which an error on this rank is reported to the others, which are about to compare
    their calls and would wait for it.

    On a GPU they compare the first of a kind only. Whether they do so now, this rank cannot know
    unless they never agreed on anything: it raises at once, since in a collective that no other
    rank enters its reason would be lost, too. To tell them there would take a collective of every
    call.
    """
    try:
        yield
    except Exception as error:
        if device.type == "cpu" or not _AGREED.get(ranks.group):
            # What the others are told; here the reason itself is raised.
            with suppress(RegardError):
                agree(ranks, device, {"refused": _reason(error)})
        raise


def contents_of(**values: Value | None) -> Facts:
    """The numbers in the tensors of masks, as digests; of large ones the shape must do."""
    facts = {}
    for name, value in values.items():
        tensors = [] if value is None else value.tensors()
        for i, t in enumerate(tensors):
            if t.numel() * t.element_size() <= READ:
                facts[f"tensor {i} of {name}"] = _digest_of(t)
    return facts


def numbers_of(t: Tensor) -> str:
    """The numbers in a tensor, as a digest; of a large one the shape."""
    return _digest_of(t) if t.numel() * t.element_size() <= READ else described(t)


def described(part: Any) -> str:
    """A part of a call in words: of tensors the shape, since learned numbers may differ by
    roundings."""
    if isinstance(part, Tensor):
        return f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}"
    if isinstance(part, Value) and part.tensors():
        return f"{part._called()}({', '.join(map(described, part._parts()))})"
    if isinstance(part, tuple):
        return f"({', '.join(map(described, part))})"
    return getattr(part, "__name__", repr(part))


def _digest(facts: Facts) -> bytes:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def _digest_of(t: Tensor) -> str:
    there = t.detach().cpu().contiguous()
    size = there.numel() * there.element_size()
    return hashlib.sha256(ctypes.string_at(there.data_ptr(), size) if size else b"").hexdigest()


def _reason(error: Exception) -> str:
    said = str(error)
    return said if isinstance(error, RegardError) else f"{type(error).__name__}: {said}"


def _differ(ranks: Ranks, facts: Facts) -> RegardError:
    every: list[Any] = [None] * ranks.size
    try:
        dist.all_gather_object(every, facts, group=ranks.group)
    except RuntimeError as error:
        return lost("all_gather_object", ranks, error)
    refused = {rank: each["refused"] for rank, each in enumerate(every) if "refused" in each}
    if refused:
        rank, why = next(iter(refused.items()))
        return RegardError(
            f"rank {rank} refused what was asked, so no rank does it",
            got=why.replace("\n", "; "),
            do="see what it was given there",
        )
    names = sorted({name for each in every for name in each})
    differ = [name for name in names if len({each.get(name) for each in every}) > 1]
    return RegardError(
        f"ranks make different calls: {', '.join(differ)}",
        got="; ".join(_by_rank(name, every) for name in differ),
        accepted="the same call on every rank of the mesh, but for the tokens that each has",
    )


def _by_rank(name: str, every: list[Facts]) -> str:
    groups: dict[str, list[int]] = {}
    for rank, facts in enumerate(every):
        groups.setdefault(facts.get(name, "nothing"), []).append(rank)
    shown = (
        f"{text[:120]} on rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}"
        for text, who in groups.items()
    )
    return f"{name}: {' but '.join(shown)}"
