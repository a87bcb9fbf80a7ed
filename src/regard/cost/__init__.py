"""What attention costs: FLOPs, bytes, memory, cache, time at best. Counted, not run.

>>> from regard import cost
>>> found = cost.model("llama-3-8b", "128k", device="H100 SXM")
>>> found.cache.in_context / 2**30
16.0
"""

from regard.cost.building import call, layer, model
from regard.cost.cache import cache_bytes
from regard.cost.comparison import Comparison, compare
from regard.cost.configuration import Configuration
from regard.cost.costs import Cost
from regard.cost.counting import (
    dense_pairs,
    forward_flops,
    least_bytes,
    needed_pairs,
    visited_pairs,
)
from regard.cost.devices import DEVICES, Device, device
from regard.cost.parts import Part
from regard.cost.presets import PRESETS, preset

__all__ = [
    "DEVICES",
    "PRESETS",
    "Comparison",
    "Configuration",
    "Cost",
    "Device",
    "Part",
    "cache_bytes",
    "call",
    "compare",
    "dense_pairs",
    "device",
    "forward_flops",
    "layer",
    "least_bytes",
    "model",
    "needed_pairs",
    "preset",
    "visited_pairs",
]
