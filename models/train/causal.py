"""Train the causal language model on stories, books and Bibles.

    python -m models.train.causal --minutes 5.5 --compile

Needs what prepare.py left in models/data and, to be good, the stories of sample.py. Writes weights,
sizes, vocabulary and card to models/data/regard-small.
"""

from __future__ import annotations

import argparse
import json
import shutil

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from models.train.corpus import DATA
from models.train.training import Training, autocast, device_of, options
from regard.models.causal import CausalConfig, CausalModel
from regard.models.folder import save
from regard.models.tokenizer import MARK, Tokenizer

SHARES = {"stories": 0.8, "books": 0.13, "bibles": 0.07}
"""How many of the windows come from where. Stories read most easily at this size."""
REPEATS = 1 / 32
"""The share of windows that say random tokens over and over; only what can be known from the first
time counts. Text of this kind repeats itself too, but less plainly."""
IGNORED = -100
PROMPTS = (
    "Once upon a time, there was a little",
    "Tom and Anna went to the park. Tom saw a big red ball. Anna said,",
    "And the LORD said unto Moses,",
    "It was a dark evening, and Mr. Knightley",
)


class Windows:
    """Windows of text, each behind a mark: all on the device, drawn from seed and step."""

    def __init__(
        self,
        streams: dict[str, Tensor],
        size: int,
        device: torch.device,
        shares: dict[str, float] = SHARES,
        repeats: float = REPEATS,
    ) -> None:
        self.streams = {name: ids.to(device) for name, ids in streams.items()}
        self.size, self.device = size, device
        self.shares, self.repeats = shares, repeats

    def draw(self, step: int, batch: int, seed: int) -> tuple[Tensor, Tensor]:
        """[batch, size] ids, and what follows each."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        names = list(self.shares)
        counts = torch.multinomial(
            torch.tensor(list(self.shares.values())), batch, replacement=True, generator=generator
        ).bincount(minlength=len(names))
        rows = [self._some(name, int(n), generator) for name, n in zip(names, counts, strict=True)]
        text = torch.cat(rows)
        inputs = torch.cat([torch.full_like(text[:, :1], MARK), text[:, :-1]], 1)
        labels = text.clone()
        # Where a window begins is chance: the mark at its front cannot know what follows.
        labels[:, 0] = IGNORED
        repeated = int((torch.rand(batch, generator=generator) < self.repeats).sum())
        for row in torch.randperm(batch, generator=generator)[:repeated].tolist():
            inputs[row], labels[row] = self._repeated(generator)
        return inputs, labels

    def held(self, name: str, windows: int) -> tuple[Tensor, Tensor]:
        """Windows of text that is not learned from, evenly spread."""
        ids = self.streams[f"{name}.held"]
        n = min(windows, len(ids) // self.size)
        starts = torch.linspace(0, len(ids) - self.size, max(1, n)).long()
        text = self._cut(ids, starts)
        inputs = torch.cat([torch.full_like(text[:, :1], MARK), text[:, :-1]], 1)
        labels = text.clone()
        labels[:, 0] = IGNORED
        return inputs, labels

    def _some(self, name: str, count: int, generator: torch.Generator) -> Tensor:
        ids = self.streams[name]
        starts = torch.randint(len(ids) - self.size + 1, (count,), generator=generator)
        return self._cut(ids, starts)

    def _cut(self, ids: Tensor, starts: Tensor) -> Tensor:
        places = starts.to(self.device)[:, None] + torch.arange(self.size, device=self.device)
        return ids[places].long()

    def _repeated(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Tokens as frequent as in the books, in no order, said again until the window is full."""
        ids = self.streams["books"]
        period = int(torch.randint(self.size // 16, self.size // 2, (1,), generator=generator))
        places = torch.randint(len(ids), (period,), generator=generator).to(self.device)
        said = ids[places].long().repeat(self.size // period + 1)[: self.size]
        inputs = torch.cat([torch.full_like(said[:1], MARK), said[:-1]])
        labels = said.clone()
        # The first of a period repeats nothing that a token before it could tell.
        labels[: period + 1] = IGNORED
        return inputs, labels


def loss_of(model: torch.nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    logits = model(inputs)
    return cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def held_losses(model: CausalModel, windows: Windows, count: int = 64) -> dict[str, float]:
    """The loss a token on text that is not learned from."""
    model.eval()
    found = {}
    for name in windows.shares:
        inputs, labels = windows.held(name, count)
        with autocast(windows.device):
            parts = [
                float(loss_of(model, i, l))
                for i, l in zip(inputs.split(16), labels.split(16), strict=True)
            ]
        found[name] = round(sum(parts) / len(parts), 4)
    return found


def copied(model: CausalModel, plain: CausalModel) -> CausalModel:
    """The second with the weights of the first."""
    plain.load_state_dict(model.state_dict())
    return plain


def samples(model: CausalModel, tokenizer: Tokenizer, tokens: int = 80) -> dict[str, str]:
    """How the model goes on with some beginnings."""
    model.eval()
    device = next(model.parameters()).device
    found = {}
    for prompt in PROMPTS:
        ids = torch.tensor([[MARK, *tokenizer.encode(prompt)]], device=device)
        room = min(tokens, model.config.longest - ids.shape[1])
        told = model.continued(ids, room, temperature=0.7, stop=MARK)
        found[prompt] = tokenizer.decode(told[0, ids.shape[1] :].tolist())
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = CausalConfig()
    for name in ("d_model", "layers", "heads", "longest"):
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=getattr(sizes, name))
    parser.add_argument("--compile", action="store_true", help="the blocks, with torch.compile")
    options(parser, batch=128, rate=2e-3, out=DATA / "regard-small")
    given = parser.parse_args(arguments)
    device, tokenizer = device_of(given), Tokenizer.read(DATA / "small-tokenizer.json")
    streams = load_file(DATA / "small.safetensors") | load_file(DATA / "stories.safetensors")
    torch.manual_seed(given.seed)
    config = CausalConfig(
        len(tokenizer), given.d_model, given.layers, given.heads, given.longest, given.dropout
    )
    model = CausalModel(config).to(device)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f} M parameters; " + ", ".join(
        f"{name} {len(ids) / 1e6:.2f} M" for name, ids in streams.items()), flush=True)  # fmt: skip
    windows, training = Windows(streams, given.longest, device), Training(model, given)
    # What is compiled for training is not what validation and samples need: those use a copy.
    plain = CausalModel(config).to(device)
    if given.compile:
        for block in model.blocks:
            block.compile()
    training.run(
        lambda step: loss_of(model, *windows.draw(step, given.batch, given.seed)),
        lambda: held_losses(copied(model, plain), windows, 16),
    )
    training.finish()
    save(model, given.out)
    shutil.copy(DATA / "small-tokenizer.json", given.out / "tokenizer.json")
    copied(model, plain)
    losses, told = held_losses(plain, windows), samples(plain, tokenizer)
    card = {
        "name": "regard-small",
        "task": "causal language model",
        "licence": "Apache-2.0",
        "parameters": size,
        "data": {
            "stories": "sampled from stories15M (MIT; trained on TinyStories), "
            f"{len(streams['stories']):,} tokens, {SHARES['stories']:.0%} of the windows",
            "books": "17 books of Project Gutenberg, public domain, "
            f"{len(streams['books']):,} tokens, {SHARES['books']:.0%}",
            "bibles": "King James Version and World English Bible, public domain, "
            f"{len(streams['bibles']):,} tokens, {SHARES['bibles']:.0%}",
            "repeats": f"{REPEATS:.1%} of the windows say random tokens over and over",
        },
        "training": training.facts() | {
            "tokens": training.done * given.batch * given.longest
        },
        "loss": losses,
        "samples": told,
    }  # fmt: skip
    (given.out / "card.json").write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n")
    print(f"held out: {losses}\nwritten to {given.out}")
    for prompt, text in told.items():
        print(f"\n{prompt} |{text}")


if __name__ == "__main__":
    main()
