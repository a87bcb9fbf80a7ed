"""The rules of a monitor, by the path that they had: they are in `regard.monitoring.rules`."""

from regard.monitoring.rules import (
    RULES,
    DeadHead,
    EntropyCollapse,
    LogitExplosion,
    NonFinite,
    Rule,
    SinkHead,
    UniformHead,
)

__all__ = [
    "RULES",
    "DeadHead",
    "EntropyCollapse",
    "LogitExplosion",
    "NonFinite",
    "Rule",
    "SinkHead",
    "UniformHead",
]
