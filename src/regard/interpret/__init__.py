"""Common uses of attention weights, from traces: without leaving the fused path.

>>> import torch, regard
>>> from regard import interpret, masks
>>> q, k = torch.randn(1, 8, 100, 64), torch.randn(1, 2, 100, 64)
>>> trace = regard.trace(q, k, k, mask=masks.causal())
>>> interpret.heavy_hitters(trace, 40, recent=16).keep.shape     # which keys to keep in a cache
torch.Size([1, 2, 40])
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.interpret.alignment import Word, token_times, word_times
from regard.interpret.citations import Citation, Citations, citations
from regard.interpret.eviction import heavy_hitters, window_votes
from regard.interpret.kept_positions import Kept
from regard.interpret.pruning import prune
from regard.interpret.word_alignment import alignment_error_rate, word_alignment, word_links

if TYPE_CHECKING:
    from regard.interpret import metrics
    from regard.interpret.attribution import (
        Anatomy,
        Attribution,
        Circuit,
        Compositions,
        LogitParts,
        anatomy,
        attribute,
        circuit,
        compositions,
        direct_logits,
    )
    from regard.interpret.faithfulness_report import Faithfulness, faithfulness
    from regard.interpret.head_scores import HeadScores, badges, heads
    from regard.interpret.interventions import (
        Effect,
        Effects,
        ablate,
        intervene,
        knock_out,
        patch,
    )
    from regard.interpret.word_maps import Counted, Grounding, grounding

__all__ = [
    "Anatomy",
    "Attribution",
    "Circuit",
    "Citation",
    "Citations",
    "Compositions",
    "Counted",
    "Effect",
    "Effects",
    "Faithfulness",
    "Grounding",
    "HeadScores",
    "Kept",
    "LogitParts",
    "Word",
    "ablate",
    "alignment_error_rate",
    "anatomy",
    "attribute",
    "badges",
    "circuit",
    "citations",
    "compositions",
    "direct_logits",
    "faithfulness",
    "grounding",
    "heads",
    "heavy_hitters",
    "intervene",
    "knock_out",
    "metrics",
    "patch",
    "prune",
    "token_times",
    "window_votes",
    "word_alignment",
    "word_links",
    "word_times",
]

# What runs models is imported when it is asked for: whoever trains need not wait for it.
_LATER = {
    "attribution": (
        "Anatomy", "Attribution", "Circuit", "Compositions", "LogitParts", "anatomy", "attribute",
        "circuit", "compositions", "direct_logits",
    ),
    "faithfulness_report": ("Faithfulness", "faithfulness"),
    "head_scores": ("HeadScores", "badges", "heads"),
    "interventions": ("Effect", "Effects", "ablate", "intervene", "knock_out", "patch"),
    "metrics": (),
    "word_maps": ("Counted", "Grounding", "grounding"),
}  # fmt: skip
_WHERE = {name: module for module, names in _LATER.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return import_module(f"{__name__}.{name}")
    if name in _WHERE:
        return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER, *_WHERE})
