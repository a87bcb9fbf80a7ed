"""Trace files: bytes, headers and descriptions, their checksums right or wrong."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

import regard
from regard import biases, masks
from regard.seen import Seen
from tests.fuzz.mutation import NUMBERS, bytes_changed, json_changed
from tests.fuzz.targets import Target

KINDS = ["bytes", "header", "description", "description", "values", "values", "both", "data"]


def written(path: Path) -> None:
    """A small file with one of most things."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 4), torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 3)
    seen = Seen("Model")
    calls: list[dict[str, Any]] = [
        {"mask": masks.causal() & masks.keep(torch.rand(2, 1, 5, 6) > 0.3), "softcap": 9.0},
        {"mask": masks.window(2, 1) | masks.global_tokens([0]), "sink": torch.zeros(4)},
        {"bias": biases.alibi(torch.ones(4)), "mask": masks.padding(torch.tensor([5, 6]))},
        {"mask": masks.documents(torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)), "scale": 0.3},
    ]
    for i, call in enumerate(calls):
        seen.layer(f"layers.{i}").take(regard.trace(q, k, v, **call), 0, keep=True)
    seen.save(path, tokens=[["a"] * 6, ["b"] * 6])


def everything(path: Path) -> str:
    """Asks a file all that a viewer would."""
    told: list[str] = []
    with regard.load(path) as seen:
        told += [repr(seen), repr(seen.tokens), repr(seen.model)]
        for layer in seen.values():
            told.append(repr(layer))
            for t in layer.traces:
                told.append(repr(t))
                for answer in (t.out, t.lse, t.entropy, t.received(), t.map(4), t.top(2).values):
                    told.append(str(answer.double().nan_to_num().sum().item()))
    return "\n".join(told)


def _values_changed(about: Any, draw: Random) -> Any:
    """Other numbers for masks, biases and comparisons, and masks put together in another way."""
    about = json.loads(json.dumps(about))
    trace = draw.choice(about["layers"])["traces"][0]
    for name, odd in (("integers", NUMBERS), ("floats", [0.0, -1.0, 1e30, 1e-30])):
        trace[name] = [draw.choice([n, n, draw.choice(odd)]) for n in trace[name]]
    match draw.randrange(4):
        case 0:
            trace["values"] = json.dumps(json_changed(json.loads(trace["values"]), draw))
        case 1:
            trace["integers"] = draw.choices(NUMBERS, k=3)
            window = '["Window",{"integer":0},{"integer":1},null]'
            mask = f'["{draw.choice(["And", "Or"])}",{window},["Not",["Causal",{{"integer":2}}]]]'
            trace["values"] = f'[["Dot",{{"float":0}}],{mask},null,{mask}]'
            trace["floats"], trace["tensors"] = [0.5], []
    return about


def _apart(raw: bytes) -> tuple[Any, Any, bytes]:
    size = struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8 : 8 + size])
    return head, json.loads(head["__metadata__"]["regard"]), raw[8 + size :]


def _together(head: Any, about: str | None, data: bytes) -> bytes:
    if about is not None:
        head = head | {"__metadata__": {"regard": about, "check": _check(about)}}
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + data


def _check(text: str) -> str:
    return f"{zlib.crc32(text.encode('utf-8', 'surrogatepass')):08x}"


def prepare(kept: Path) -> Callable[[Random, Path], str]:
    whole = kept / "whole"
    written(whole)
    raw, want = whole.read_bytes(), everything(whole)
    head, about, data = _apart(raw)
    whole.write_bytes(_together(head, json.dumps(about), data))
    assert everything(whole) == want, "what is taken apart can be put together again"

    def case(draw: Random, folder: Path) -> str:
        path = folder / "x"
        match kind := draw.choice(KINDS):
            case "bytes":
                path.write_bytes(bytes_changed(raw, draw))
            case "header":
                path.write_bytes(_together(json_changed(head, draw), None, data))
            case "description":
                path.write_bytes(_together(head, json.dumps(json_changed(about, draw)), data))
            case "values":
                changed = json.dumps(_values_changed(about, draw))
                path.write_bytes(_together(head, changed, data))
            case "both":
                changed = json.dumps(json_changed(about, draw))
                path.write_bytes(_together(json_changed(head, draw), changed, data))
            case _:
                path.write_bytes(raw[: -len(data)] + bytes_changed(data, draw))
        found = everything(path)
        # Bytes that were changed by accident are found; a forger's are not, and do no harm.
        if kind in ("bytes", "data"):
            assert found == want, "wrong data"
            return "same"
        return "same" if found == want else "other data"

    return case


target = Target("trace files", prepare, share=6)
