"""What a smaller KV cache costs a trained model, stories15M: its loss, the tokens it would say,
whether it finds a phrase again; and how many bytes it saves.

python -m benchmarks.models.caches [--quick | --names]
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers
from tests.real.stories import stories
from torch import Tensor

from benchmarks.measurement import write
from models.train.stories15m import BEGIN, END, pieces
from regard import caches
from regard.caches import EvictingCache, HeavyHitters, PerHead, WindowVotes

PROMPT, REST, TEXTS = 176, 24, 4
NEEDLES, PHRASE = 8, 6
"""How many phrases are hidden, and how many tokens each has."""
QUICK = "--quick" in sys.argv


def tell(model: Any) -> Tensor:
    """Stories of the model's own, which do not end."""
    torch.manual_seed(0)
    begin, many = torch.full((max(TEXTS, NEEDLES), 1), BEGIN), PROMPT + REST - 1
    told: Tensor = model.generate(
        begin, do_sample=True, temperature=0.8, max_new_tokens=many, min_new_tokens=many,
        suppress_tokens=[BEGIN, END], pad_token_id=0,
    )  # fmt: skip
    return told


def policies(budget: int) -> dict[str, caches.Policy]:
    window = min(16, budget // 4)
    return {
        "recent alone": HeavyHitters(budget, recent=budget),
        "heavy hitters": HeavyHitters(budget, recent=window),
        "heavy hitters, shared": PerHead(HeavyHitters(budget, recent=window)),
        "window votes": WindowVotes(budget, window=window),
        "window votes, shared": PerHead(WindowVotes(budget, window=window)),
    }


def made(model: Any, policy: caches.Policy | None) -> Any:
    whole = transformers.DynamicCache(config=model.config)
    return whole if policy is None else EvictingCache(model, policy)


def held(cache: Any) -> int:
    """Bytes of a cache."""
    if isinstance(cache, EvictingCache):
        return cache.nbytes()
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def continued(model: Any, texts: Tensor, policy: caches.Policy | None) -> tuple[Tensor, int, int]:
    """Log-probabilities of all tokens at each place after the prompt, read one by one; and bytes
    after the prompt and at the end."""
    cache = made(model, policy)
    parts = [texts[:, :PROMPT], *texts[:, PROMPT:-1].split(1, 1)]
    said, sizes = [], []
    for part in parts:
        said.append(model(part, past_key_values=cache, logits_to_keep=1).logits[:, -1])
        sizes.append(held(cache))
    return torch.stack(said, 1).log_softmax(-1), sizes[0], sizes[-1]


def quality(model: Any, told: Tensor, budgets: list[int]) -> list[dict[str, Any]]:
    """Loss on what the model itself went on with, and how often its first choice is the same."""
    texts = told[:TEXTS]
    rest = texts[:, PROMPT:, None]
    whole, *size = continued(model, texts, None)
    rows = [_row("all tokens", PROMPT + REST - 1, whole, whole, rest, size, size)]
    for budget in budgets:
        for name, policy in policies(budget).items():
            got, *bytes_held = continued(model, texts, policy)
            rows.append(_row(name, budget, got, whole, rest, bytes_held, size))
    return rows


def _row(
    name: str,
    budget: int,
    got: Tensor,
    whole: Tensor,
    rest: Tensor,
    own: list[int],
    all_of: list[int],
) -> dict[str, Any]:
    return {
        "cache": name,
        "budget": budget,
        "loss": float(-got.gather(-1, rest).mean()),
        "same first choice": float((got.argmax(-1) == whole.argmax(-1)).float().mean()),
        "KiB after the prompt": own[0] / 1024 / TEXTS,
        "KiB at the end": own[1] / 1024 / TEXTS,
        "of all tokens, at the end": own[1] / all_of[1],
    }


def needles(model: Any, told: Tensor, budgets: list[int]) -> list[dict[str, Any]]:
    """A phrase of random tokens near the beginning of a story; its first half is said again at the
    end. Whether the model goes on with the second half: that phrase is the only place to know it
    from."""
    draw = torch.Generator().manual_seed(1)
    story = told[:NEEDLES, :PROMPT]
    phrase = torch.randint(300, 4000, (NEEDLES, PHRASE), generator=draw)
    half = PHRASE // 2
    hay = torch.cat([story[:, :20], phrase, story[:, 20:]], 1)
    question = phrase[:, : half + 1]
    rows = []
    named: list[tuple[str, int, caches.Policy | None]] = [("all tokens", hay.shape[1], None)]
    named += [(name, n, policy) for n in budgets for name, policy in policies(n).items()]
    for name, budget, policy in named:
        row: dict[str, Any] = {"cache": name, "budget": budget}
        for known in (True, False):
            cache = made(model, policy)
            if known:
                given = torch.cat([hay, question[:, :-1]], 1)
                said = [model(given, past_key_values=cache, logits_to_keep=1).logits[:, -1]]
            else:
                model(hay, past_key_values=cache, logits_to_keep=1)
                for i in range(half):
                    out = model(
                        question[:, i : i + 1], past_key_values=cache, logits_to_keep=1
                    ).logits[:, -1]
                said = [out]
            for i in range(half, PHRASE - 1):
                said.append(
                    model(phrase[:, i : i + 1], past_key_values=cache, logits_to_keep=1).logits[
                        :, -1
                    ]
                )
            found = torch.stack(said, 1).log_softmax(-1)
            when = "asked in the prompt" if known else "asked afterwards"
            answer = phrase[:, half:, None]
            row[f"{when}: found"] = float((found.argmax(-1) == answer[..., 0]).float().mean())
            row[f"{when}: loss"] = float(-found.gather(-1, answer).mean())
        rows.append(row)
    return rows


NAMES = ["Tim", "Tom", "Ben", "Max", "Sam", "Jack", "Bob", "John"]


def names(model: Any, budget: int) -> list[dict[str, Any]]:
    """Who a story was about, asked after another story: which of eight names is the likeliest."""
    ids = {text: i for i, text in enumerate(pieces())}
    begin, asked = (
        [ids[f" {word}"] for word in text.split()]
        for text in ("Once upon a time there was a boy named", "The name of the boy was")
    )
    right = torch.tensor([ids[f" {name}"] for name in NAMES])
    torch.manual_seed(0)
    other = model.generate(
        torch.tensor([[BEGIN]]), do_sample=True, max_new_tokens=140, min_new_tokens=140,
        suppress_tokens=[BEGIN, END, *right.tolist()], pad_token_id=0,
    )[0, 1:]  # fmt: skip
    stories_told = torch.tensor([[BEGIN, *begin, i, *other.tolist()] for i in right.tolist()])
    question = torch.tensor(asked).expand(len(NAMES), -1)
    rows = []
    for name, policy in {"all tokens": None, **policies(budget)}.items():
        row: dict[str, Any] = {"cache": name, "budget": budget if policy else "all"}
        for when in ("asked in the prompt", "asked afterwards"):
            cache = made(model, policy)
            parts = [stories_told, *question.split(1, 1)]
            for part in [torch.cat(parts, 1)] if when == "asked in the prompt" else parts:
                said = model(part, past_key_values=cache, logits_to_keep=1).logits[:, -1]
            among = said[:, right].log_softmax(-1)
            row[f"{when}: right"] = float((among.argmax(-1) == torch.arange(8)).float().mean())
            row[f"{when}: loss"] = float(-among.diagonal().mean())
        rows.append(row)
    return rows


@torch.no_grad()
def main() -> None:
    model = stories("regard")
    if "--names" in sys.argv:
        title = "Which of eight names a story had, 140 tokens ago (chance: 0.125, loss 2.08)"
        write("caches_names", {title: names(model, 48)})
        return
    told, budgets = tell(model), [48] if QUICK else [24, 64]
    title = f"{TEXTS} stories of {PROMPT} tokens, {REST} more read one by one"
    tables = {
        f"Quality and memory: {title}": quality(model, told, budgets),
        f"Needles: {NEEDLES} phrases, {PROMPT - 20} tokens ago": needles(model, told, budgets),
    }
    write("caches_quick" if QUICK else "caches", tables)


if __name__ == "__main__":
    main()
