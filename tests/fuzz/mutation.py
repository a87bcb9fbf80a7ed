"""Small changes to bytes and to JSON."""

from __future__ import annotations

import json
from random import Random
from typing import Any

NUMBERS = [0, 1, -1, 2, 3, 7, 255, 1 << 16, 1 << 28, 1 << 31, 1 << 40, 1 << 62, 1 << 63, 10**30]
ODD: list[Any] = [
    None, True, False, "", "x", "\x1b[31m", "\ud800", "../..", "/dev/zero", 0.5, -0.0, 1e308,
    -1e308, [], {}, [[]], {"": None}, "9" * 50, [0] * 9, ["a", "b"], [None] * 3,
]  # fmt: skip


def bytes_changed(raw: bytes, draw: Random) -> bytes:
    """Some bytes flipped, cut out, put in, doubled, or the end cut off."""
    data = bytearray(raw)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        size = draw.choice([1, 1, 2, 8, 64])
        match draw.randrange(5):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= draw.randint(1, 255)
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = draw.randbytes(size)
            case 3:
                data[at:at] = data[at : at + size]
            case _:
                del data[at:]
    return bytes(data)


def json_changed(node: Any, draw: Random) -> Any:
    """The same JSON with one to three places changed."""
    node = json.loads(json.dumps(node))
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        places = list(_places(node))
        if not places:
            return draw.choice(ODD)
        holder, key = draw.choice(places)
        match draw.randrange(8):
            case 0:
                del holder[key]
            case 1:
                holder[key] = draw.choice(ODD)
            case 2 if isinstance(holder[key], int):
                holder[key] += draw.choice([-1, 1])
            case 3:
                other, name = draw.choice(places)
                holder[key] = json.loads(json.dumps(other[name]))
            case 4 if isinstance(holder, list):
                holder.insert(key, json.loads(json.dumps(holder[key])))
            case 5 if isinstance(holder, dict):
                holder[draw.choice(["x", "path", "shape", "layers", "tensors"])] = holder.pop(key)
            case _:
                holder[key] = draw.choice(NUMBERS)
    return node


def _places(node: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [node]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                waiting.append(holder[key])
    return found
