"""Train the encoder–decoder: newer English into the English of the King James Version.

    python -m models.train.translate --steps 3000

Needs what prepare.py left in models/data. Writes weights, sizes, vocabulary and card to
models/data/regard-king-james.
"""

from __future__ import annotations

import argparse
import json
import shutil

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from models.train.corpus import DATA, HELD_BOOKS
from models.train.training import Training, autocast, device_of, options
from regard.models.folder import save
from regard.models.tokenizer import MARK, Tokenizer
from regard.models.translator import TranslatorConfig, TranslatorModel

IGNORED = -100
STEP = 16
"""Lengths are rounded up to this, so that kernels meet few shapes."""
SENTENCES = (
    "Don't be afraid, for you are with me.",
    'Where are you going? He said to her, "I am going to the city."',
    "You shall love your neighbor as yourself.",
    "When the king saw that his servants had gone, he was very angry.",
)


class Pairs:
    """Sources and targets of like length together, drawn from seed and step."""

    def __init__(
        self, kept: dict[str, Tensor], name: str, longest: int, device: torch.device
    ) -> None:
        sides = [
            kept[f"{name}.{side}"].long().split(kept[f"{name}.{side}.lengths"].tolist())
            for side in ("source", "target")
        ]
        end = torch.tensor([MARK])
        fitting = [
            (torch.cat([source, end]), torch.cat([end, target, end]))
            for source, target in zip(*sides, strict=True)
            if max(len(source), len(target)) < longest
        ]
        # Pairs of one batch are neighbours in this order, so that little is padding.
        self.pairs = sorted(fitting, key=lambda pair: (len(pair[1]), len(pair[0])))
        self.device = device

    def draw(self, step: int, batch: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sources, their lengths, the targets' beginnings, and what follows those."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        last = max(1, len(self.pairs) - batch + 1)
        start = int(torch.randint(last, (1,), generator=generator))
        return self.batch(start, batch)

    def batch(self, start: int, batch: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        chosen = self.pairs[start : start + batch]
        lengths = torch.tensor([len(source) for source, _ in chosen])
        sources = padded([source for source, _ in chosen], MARK)
        inputs = padded([target[:-1] for _, target in chosen], MARK)
        labels = padded([target[1:] for _, target in chosen], IGNORED)
        to = lambda t: t.to(self.device, non_blocking=True)  # noqa: E731
        return to(sources), lengths, to(inputs), to(labels)


def padded(rows: list[Tensor], value: int) -> Tensor:
    together = pad_sequence(rows, batch_first=True, padding_value=value)
    missing = -together.shape[1] % STEP
    return torch.nn.functional.pad(together, (0, missing), value=value)


def loss_of(
    model: torch.nn.Module,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    smoothing: float = 0.0,
) -> Tensor:
    sources, lengths, inputs, labels = batch
    logits = model(sources, inputs, lengths=lengths)
    return cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED,
        label_smoothing=smoothing,
    )  # fmt: skip


@torch.no_grad()
def held_loss(model: TranslatorModel, pairs: Pairs, size: int = 32) -> dict[str, float]:
    """The loss a token on books that are not learned from."""
    model.eval()
    with autocast(pairs.device):
        parts = [
            float(loss_of(model, pairs.batch(at, size))) for at in range(0, len(pairs.pairs), size)
        ]
    return {"held-out books": round(sum(parts) / len(parts), 4)}


def samples(model: TranslatorModel, tokenizer: Tokenizer) -> dict[str, str]:
    """How the model says some sentences."""
    model.eval()
    device = next(model.parameters()).device
    found = {}
    for sentence in SENTENCES:
        ids = torch.tensor([[*tokenizer.encode(sentence), MARK]], device=device)
        found[sentence] = tokenizer.decode(model.written(ids, 80, MARK)[0].tolist())
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = TranslatorConfig()
    for name in ("d_model", "layers", "heads", "longest"):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(sizes, name))
    parser.add_argument("--smoothing", type=float, default=0.05, help="of the labels")
    options(parser, batch=384, rate=2e-3, dropout=0.1, out=DATA / "regard-king-james")
    given = parser.parse_args(arguments)
    device, tokenizer = device_of(given), Tokenizer.read(DATA / "king-james-tokenizer.json")
    kept = load_file(DATA / "king-james.safetensors")
    torch.manual_seed(given.seed)
    config = TranslatorConfig(
        len(tokenizer), given.d_model, given.layers, given.heads, given.longest, given.dropout
    )
    model = TranslatorModel(config).to(device)
    size = sum(p.numel() for p in model.parameters())
    learned, held = (Pairs(kept, name, given.longest, device) for name in ("learned", "held"))
    print(f"{size / 1e6:.2f} M parameters; {len(learned.pairs):,} pairs, {len(held.pairs)} held",
          flush=True)  # fmt: skip
    training = Training(model, given)
    training.run(
        lambda step: loss_of(model, learned.draw(step, given.batch, given.seed), given.smoothing),
        lambda: held_loss(model, held),
    )
    training.finish()
    save(model, given.out)
    shutil.copy(DATA / "king-james-tokenizer.json", given.out / "tokenizer.json")
    losses, told = held_loss(model, held), samples(model, tokenizer)
    card = {
        "name": "regard-king-james",
        "task": "newer English into that of the King James Version",
        "licence": "Apache-2.0",
        "parameters": size,
        "data": "verses of the World English Bible (also clause by clause), the American Standard "
        f"Version and Darby's with those of the King James Version, all public domain: "
        f"{len(learned.pairs):,} pairs; held out: {', '.join(HELD_BOOKS.values())}",
        "training": training.facts(),
        "loss": losses,
        "samples": told,
    }
    (given.out / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n")
    print(f"held out: {losses}\nwritten to {given.out}")
    for sentence, text in told.items():
        print(f"\n{sentence}\n  {text}")


if __name__ == "__main__":
    main()
