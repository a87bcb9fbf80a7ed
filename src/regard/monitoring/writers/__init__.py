"""Where reports go: files, the loggers of other people, functions; and what is said of those that
could not be written."""

from regard.monitoring.writers.destinations import (
    Function,
    MLflow,
    TensorBoard,
    WeightsAndBiases,
    Writer,
    writers,
)
from regard.monitoring.writers.json_lines import JsonLines
from regard.monitoring.writers.outlets import Outlet, Outlets

__all__ = [
    "Function",
    "JsonLines",
    "MLflow",
    "Outlet",
    "Outlets",
    "TensorBoard",
    "WeightsAndBiases",
    "Writer",
    "writers",
]
