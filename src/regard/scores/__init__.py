"""How a query is compared with a key.

| score | logit |
|---|---|
| `scaled_dot()` (default) | q·k / √D |
| `dot()` | q·k |
| `general(W)` | q·W·k |
| `additive(Wq, Wk, w)` | w·tanh(q Wq + k Wk) |
| `cosine(temperature)` | cos(q, k) / temperature |
| `distance(bandwidth)` | -|q - k|² / 2 bandwidth² |
"""

from regard.scores.additive import additive
from regard.scores.cosine import cosine
from regard.scores.distance import distance
from regard.scores.dot import dot, scaled_dot
from regard.scores.general import general
from regard.scores.score import Score

__all__ = ["Score", "additive", "cosine", "distance", "dot", "general", "scaled_dot"]
