"""A Device: how much it computes and moves in a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.errors import RegardError


@dataclass(frozen=True)
class Device:
    """What a device does in a second, at best."""

    name: str
    rates: dict[str, float]
    """FLOPs a second, for each dtype."""
    bandwidth: float
    """Bytes a second between memory and processor."""
    memory: float | None = None
    """Bytes it has."""
    about: str = ""
    """What it is, where its name does not say."""

    def rate(self, dtype: str) -> float:
        """FLOPs a second in a dtype; what has no rate of its own is computed in float32."""
        found = self.rates.get(dtype, self.rates.get("float32") if dtype != "float64" else None)
        if found is None:
            raise RegardError(
                f"no rate is known for {dtype} on {self.name}", accepted=", ".join(self.rates)
            )
        return found

    def ridge(self, dtype: str) -> float:
        """FLOPs for each byte above which arithmetic, not memory, sets the time.

        >>> Device("a", {"bfloat16": 600e12}, bandwidth=3e12).ridge("bfloat16")
        200.0
        """
        return self.rate(dtype) / self.bandwidth

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rates": self.rates,
            "bandwidth": self.bandwidth,
            "memory": self.memory,
            "about": self.about,
        }
