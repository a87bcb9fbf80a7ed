"""How much memory traces hold, and how much is left."""

from __future__ import annotations

import math
import os
from pathlib import Path
from time import monotonic

import torch

from regard.traces import Trace
from regard.transforms import unwrapped

SHARE = 0.5
"""The share of what was free that traces may hold before it is said aloud."""
MOMENT = 1.0
"""Seconds for which it is taken to be known what is free: a step of generating is shorter, and to
ask a GPU takes as long as a layer."""


def held_by(trace: Trace) -> dict[int, int]:
    """The bytes of each memory that a trace keeps from being freed, by address. (A query that is a
    part of a larger tensor keeps all of it.)"""
    inside = (*trace.inputs.tensors(), *trace.rows.at_hand())
    storages = [unwrapped(t).untyped_storage() for t in inside]
    return {s.data_ptr(): s.nbytes() for s in storages}


class Weight:
    """Memory that kept traces hold, and whether the rest of a run will still fit."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._total = self._taken = self._one = 0
        self._room = self._unasked = 0
        self._asked = -math.inf
        """When it was asked last what is left; and for a while, or until so much is held
        (`_unasked`, more by `_room` than was held then), it is not asked again."""

    def emptied(self) -> Weight:
        """That of no traces, once those that were kept are gone."""
        found = Weight()
        found._room = found._unasked = self._room
        found._asked = self._asked
        return found

    def add(self, trace: Trace, layers: int) -> str | None:
        """Count a trace. A sentence says so if what so many layers keep in a run is too much.

        To weigh a trace, and to ask what is left, takes longer than a short layer does: the first
        layer of a run is weighed, and the others are taken to be like it; and what is left is asked
        for then, unless it was a moment ago, and when much was taken since."""
        to_come = -(self._taken + 1) % max(layers, 1)
        begins = self._taken % max(layers, 1) == 0
        self._taken += 1
        if begins:
            new = {at: size for at, size in held_by(trace).items() if self._held.get(at) != size}
            self._held |= new
            self._one = sum(new.values())
        self._total += self._one
        held, one, device = self._total, self._one, trace.inputs.q.device
        to_hold = held + one * to_come
        if begins:
            known = to_hold <= self._unasked and monotonic() < self._asked + MOMENT
        else:
            known = held <= self._unasked
        if known:
            return None
        left = free(device)
        self._asked = monotonic()
        if left is None or to_hold <= SHARE * (held + left):
            self._room = (left or 0) // 16
            self._unasked = held + self._room
            return None
        return (
            f"traces hold {shown(held)} and will hold about {shown(to_hold)} when "
            f"this run of the model ends ({shown(one)} for each of {layers} layers); "
            f"{shown(left)} is free on {device}"
        )


def free(device: torch.device) -> int | None:
    """Bytes that can still be had on a device; None where that is not known."""
    if device.type == "cuda":
        # Not by memory_reserved and memory_allocated: each spells out all that is counted.
        told = torch.cuda.memory_stats_as_nested_dict(device)
        if not told:
            return int(torch.cuda.mem_get_info(device)[0])
        reserved, taken = (
            int(told[f"{kind}_bytes"]["all"]["current"]) for kind in ("reserved", "allocated")
        )
        return int(torch.cuda.mem_get_info(device)[0]) + reserved - taken
    if device.type != "cpu":
        return None
    memory = Path("/proc/meminfo")
    if memory.exists():
        for line in memory.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    pages = {"SC_AVPHYS_PAGES", "SC_PAGE_SIZE"}
    if pages <= os.sysconf_names.keys():
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def shown(size: float) -> str:
    """A number of bytes, for people.

    >>> shown(512), shown(3 * 2**20), shown(5.25 * 2**30)
    ('512 bytes', '3.0 MiB', '5.2 GiB')
    """
    for unit, bytes_ in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_:
            return f"{size / bytes_:.1f} {unit}"
    return f"{size:.0f} bytes"
