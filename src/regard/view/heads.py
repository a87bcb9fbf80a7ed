"""Numbers for every head of a model, by the path that they had: they are in `regard.view.atlas`."""

from regard.view.atlas import STATISTICS, HeadFigures, Statistic, head_figures

__all__ = ["STATISTICS", "HeadFigures", "Statistic", "head_figures"]
