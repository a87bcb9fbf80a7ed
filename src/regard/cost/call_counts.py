"""Counting what a call asks for: pairs, FLOPs, bytes. Nothing is run."""

from __future__ import annotations

from regard.inputs import AttentionInputs
from regard.masks.algebra import Mask
from regard.masks.tiles import count, survey


def needed_pairs(x: AttentionInputs) -> int:
    """Query-key pairs that the mask allows, over all batch entries and heads."""
    B, H, Q, K = x.shape
    if x.mask is None:
        return B * H * Q * K
    return count(x.mask, x.shape, x.mask.device) * _repeats(x.mask, x)


def visited_pairs(x: AttentionInputs, rows: int, keys: int) -> int:
    """Pairs in tiles of rows × keys that hold an allowed pair: what a tiled kernel computes."""
    B, H, Q, K = x.shape
    if x.mask is None:
        return B * H * Q * K
    return survey(x.mask, x.shape, rows, keys, x.mask.device).visited * _repeats(x.mask, x)


def dense_pairs(x: AttentionInputs) -> int:
    """Every pair, allowed or not."""
    B, H, Q, K = x.shape
    return B * H * Q * K


def forward_flops(x: AttentionInputs, pairs: int) -> int:
    """FLOPs of the two matrix products for so many pairs: 2·D for q·k, 2·E for p·v."""
    return 2 * pairs * (x.q.shape[-1] + x.v.shape[-1])


def least_bytes(x: AttentionInputs) -> int:
    """Bytes that must move: every input read once, the output written once."""
    B, H, Q, _ = x.shape
    read = sum(t.numel() * t.element_size() for t in x.tensors())
    return read + B * H * Q * x.v.shape[-1] * x.v.element_size()


def _repeats(mask: Mask, x: AttentionInputs) -> int:
    return (x.shape.B // max(mask.batch, 1)) * (x.shape.H // max(mask.heads, 1))
