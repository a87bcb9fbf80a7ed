"""Whether a token far from the beginning gains from what stands before it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.train.causal import IGNORED, Windows
from models.train.training import autocast
from regard.models.causal import CausalModel
from regard.models.tokenizer import MARK

Table = dict[str, list[float]]


@torch.no_grad()
def token_losses(model: CausalModel, inputs: Tensor, labels: Tensor) -> Tensor:
    """[b, n]: the loss at each token; NaN where none counts."""
    model.eval()
    rows = []
    for i, l in zip(inputs.split(8), labels.split(8), strict=True):
        with autocast(inputs.device):
            logits = model(i)
        loss = cross_entropy(logits.transpose(1, 2).float(), l, reduction="none")
        rows.append(loss.masked_fill(l == IGNORED, torch.nan))
    return torch.cat(rows)


def near_losses(model: CausalModel, inputs: Tensor, labels: Tensor, known: int) -> Tensor:
    """The same losses where no token sees further back than `known` tokens, nor less than half of
    that once there are so many: windows that overlap by half, behind a mark each."""
    n, half = inputs.shape[1], known // 2
    found = token_losses(model, inputs[:, :known], labels[:, :known])
    parts = [found]
    for start in range(half, n - known + 1, half):
        window = inputs[:, start : start + known].clone()
        window[:, 0] = MARK
        parts.append(token_losses(model, window, labels[:, start : start + known])[:, half:])
    return torch.cat(parts, 1)


def by_position(
    model: CausalModel, old: CausalModel, windows: Windows, known: int, count: int = 24
) -> dict[str, Table]:
    """For each text, the mean loss of each stretch of `known` tokens, in nats: of the model that
    sees all that stands before, of the same model that sees the last `known` tokens, of the old one
    that sees as many, and of the old one that sees all."""
    return {name: _rows(model, old, *windows.held(name, count), known) for name in windows.shares}


def _rows(
    model: CausalModel, old: CausalModel, inputs: Tensor, labels: Tensor, known: int
) -> Table:
    found = {
        "all": token_losses(model, inputs, labels),
        f"last {known}": near_losses(model, inputs, labels, known),
        f"before, last {known}": near_losses(old, inputs, labels, known),
        "before, all": token_losses(old, inputs, labels),
    }
    table: Table = {}
    for name, losses in found.items():
        stretches = losses.split(known, 1)
        table[name] = [round(float(part.nanmean()), 4) for part in stretches]
    return table


def far_repeats(model: CausalModel, windows: Windows, rows: int = 4) -> dict[str, float]:
    """The loss on random tokens that are said again, by how many tokens before they were said."""
    found, period = {}, windows.size // 2
    while period >= 32:
        generator = torch.Generator().manual_seed(period)
        said = torch.randint(1, model.config.vocabulary, (rows, period), generator=generator)
        text = said.repeat(1, 2).to(windows.device)
        inputs = torch.cat([torch.full_like(text[:, :1], MARK), text[:, :-1]], 1)
        labels = text.clone()
        # The first of a period repeats nothing that a token before it could tell.
        labels[:, : period + 1] = IGNORED
        found[str(period)] = round(float(token_losses(model, inputs, labels).nanmean()), 3)
        period //= 2
    return found
