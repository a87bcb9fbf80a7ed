"""What attention costs: FLOPs, bytes, memory, cache, time at best. Counted, not run.

>>> from regard import cost
>>> found = cost.model("llama-3-8b", "128k", device="H100 SXM")
>>> found.cache.in_context / 2**30
16.0
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.cost.call_counts import (
    dense_pairs,
    forward_flops,
    least_bytes,
    needed_pairs,
    visited_pairs,
)

if TYPE_CHECKING:
    from regard.cost.cache import cache_bytes
    from regard.cost.comparison import Comparison, compare
    from regard.cost.configuration import Configuration
    from regard.cost.costs import Cost
    from regard.cost.devices import DEVICES, device
    from regard.cost.model_costs import call, layer, model
    from regard.cost.parts import Part
    from regard.cost.presets import PRESETS, preset
    from regard.cost.rates import Device

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

# Every call of attention needs the counting, few programs the rest: it is imported when asked for,
# so that `import regard` stays quick.
_HOMES = {
    "cache": ("cache_bytes",),
    "comparison": ("Comparison", "compare"),
    "configuration": ("Configuration",),
    "costs": ("Cost",),
    "devices": ("DEVICES", "device"),
    "model_costs": ("call", "layer", "model"),
    "parts": ("Part",),
    "presets": ("PRESETS", "preset"),
    "rates": ("Device",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"regard.cost.{home}"), name)
    raise AttributeError(f"module 'regard.cost' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
