"""The one object: a trace, from which every weight can be had."""

from regard.traces.places import Chosen, Region, places, pooled_region, region_of
from regard.traces.trace import Trace

__all__ = ["Chosen", "Region", "Trace", "places", "pooled_region", "region_of"]
