"""Masks cut into tiles: their states, how many pairs they allow, and how they look."""

from regard.masks.tiles.area_table import AreaTable
from regard.masks.tiles.mask_text import draw
from regard.masks.tiles.pair_counts import (
    band_edges,
    count,
    grid,
    pairs_one_by_one,
    seen_keys,
    survey,
)
from regard.masks.tiles.pair_rule import PairRule
from regard.masks.tiles.states import EMPTY, FULL, PARTIAL, Tiles, judge_band, states

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "AreaTable",
    "PairRule",
    "Tiles",
    "band_edges",
    "count",
    "draw",
    "grid",
    "judge_band",
    "pairs_one_by_one",
    "seen_keys",
    "states",
    "survey",
]
