"""Faithfulness: whether attention weights point at what decided."""

from regard.interpret.faithfulness_report.measurement import faithfulness
from regard.interpret.faithfulness_report.report import Faithfulness
from regard.interpret.faithfulness_report.token_scores import TokenScores

__all__ = ["Faithfulness", "TokenScores", "faithfulness"]
