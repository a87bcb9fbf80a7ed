"""The numbers behind every view: maps, their tiles, and descriptions of heads and places."""

from regard.view.atlas.atlas import Atlas
from regard.view.atlas.badges import head_badges
from regard.view.atlas.bare_weights import Weights, looked_at
from regard.view.atlas.choice import Choice, Head, choose, layer_of, read
from regard.view.atlas.cores import on_cores, one_core
from regard.view.atlas.drawn_numbers import (
    CAP,
    FAINT,
    Figures,
    allowed,
    figures,
    given,
    got,
    runs,
    worth_showing,
)
from regard.view.atlas.heads import STATISTICS, HeadFigures, Statistic, head_figures
from regard.view.atlas.labels import LEFT_TO_RIGHT, centre, clean, fit, stack
from regard.view.atlas.maps import Map, check_place
from regard.view.atlas.patches import Patches
from regard.view.atlas.summaries import KEEP, Summary, only_statistics, refuse_places
from regard.view.atlas.tensor_bytes import to_bytes
from regard.view.atlas.tiles import SIDE, CancelledError, Go, halves, levels, tile

__all__ = [
    "CAP",
    "FAINT",
    "KEEP",
    "LEFT_TO_RIGHT",
    "SIDE",
    "STATISTICS",
    "Atlas",
    "CancelledError",
    "Choice",
    "Figures",
    "Go",
    "Head",
    "HeadFigures",
    "Map",
    "Patches",
    "Statistic",
    "Summary",
    "Weights",
    "allowed",
    "centre",
    "check_place",
    "choose",
    "clean",
    "figures",
    "fit",
    "given",
    "got",
    "halves",
    "head_badges",
    "head_figures",
    "layer_of",
    "levels",
    "looked_at",
    "on_cores",
    "one_core",
    "only_statistics",
    "read",
    "refuse_places",
    "runs",
    "stack",
    "tile",
    "to_bytes",
    "worth_showing",
]
