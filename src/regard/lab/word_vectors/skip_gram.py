"""Skip-gram with negative sampling: vectors that foresee a word's neighbours."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from regard.lab.material.text import king_james
from regard.lab.word_vectors.vectors import Vectors

RARE, NEGATIVES, BATCH, THIN, RATE = 5, 5, 4096, 1e-3, 1e-2


def train(width: int, window: int, epochs: int, done: Callable[[], None]) -> Vectors:
    """Skip-gram with negative sampling over the whole text, so many times."""
    words = re.findall(r"[a-z]+", king_james())
    counts = {w: n for w, n in Counter(words).most_common() if n >= RARE}
    names, often = list(counts), torch.tensor(list(counts.values())).float()
    place = {name: i for i, name in enumerate(names)}
    ids = torch.tensor([place[word] for word in words if word in place])
    share = often / often.sum()
    kept = ((THIN / share).sqrt() + THIN / share).clamp(max=1)
    noise = (often**0.75).cumsum(0) / (often**0.75).sum()
    inside = (0.1 * torch.randn(len(names), width)).requires_grad_()
    outside = torch.zeros(len(names), width, requires_grad=True)
    optimiser = torch.optim.Adam([inside, outside], lr=RATE)
    for epoch in range(epochs):
        optimiser.param_groups[0]["lr"] = RATE * (1 - 0.9 * epoch / epochs)
        thinned = ids[torch.rand(len(ids)) < kept[ids]]
        for centre, near in pairs(thinned, window):
            drawn = torch.searchsorted(noise, torch.rand(len(centre), NEGATIVES))
            other = outside[drawn.clamp(max=len(names) - 1)]
            here = inside[centre]
            true, false = (here * outside[near]).sum(1), (other @ here[:, :, None]).squeeze(2)
            optimiser.zero_grad()
            (-(logsigmoid(true).sum() + logsigmoid(-false).sum()) / len(centre)).backward()
            optimiser.step()
        done()
    return Vectors.of(names, inside.detach(), len(ids))


def pairs(ids: Int[Tensor, "n"], window: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of words and one neighbour each, in random order; near ones are drawn more often."""
    reach = torch.randint(1, window + 1, (len(ids),))
    found = []
    for apart in range(1, window + 1):
        before, after = ids[:-apart], ids[apart:]
        found.append(torch.stack([after, before])[:, reach[apart:] >= apart])
        found.append(torch.stack([before, after])[:, reach[:-apart] >= apart])
    all_pairs = torch.cat(found, 1)
    for some in torch.randperm(all_pairs.shape[1]).split(BATCH):
        yield all_pairs[0, some], all_pairs[1, some]
