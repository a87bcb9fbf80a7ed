"""The weights that make queries and keys: where a module has them, which may be changed, and whose
they are when adapters add to them or ranks share them."""

from regard.monitoring.projections.head_share import HeadShare
from regard.monitoring.projections.module_projections import (
    Find,
    Frozen,
    Projections,
    attends_by_name,
    check,
    named,
    projections,
    refuse_norms,
    scale_,
    trained,
    whole,
)
from regard.monitoring.projections.sharded_weights import refuse_flat, reshard, settle
from regard.monitoring.projections.shared_weights import (
    memory,
    refuse_shared,
    shared_in_part,
    together,
)

__all__ = [
    "Find",
    "Frozen",
    "HeadShare",
    "Projections",
    "attends_by_name",
    "check",
    "memory",
    "named",
    "projections",
    "refuse_flat",
    "refuse_norms",
    "refuse_shared",
    "reshard",
    "scale_",
    "settle",
    "shared_in_part",
    "together",
    "trained",
    "whole",
]
