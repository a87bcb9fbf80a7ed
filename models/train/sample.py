"""Sample stories from stories15M, many at a time, and write them as token ids.

    python -m models.train.sample --minutes 1

Needs what prepare.py left in models/data. A token is drawn from those at least `--floor` times as
likely as the likeliest: no sorting, so that a GPU tells a few thousand stories a second.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from models.train.corpus import DATA, encoded
from models.train.stories15m import BEGIN, END


class Teller:
    """stories15M with a cache of fixed size; all stories advance together."""

    def __init__(
        self, weights: dict[str, Tensor], heads: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.weights = {name: w.to(device, dtype) for name, w in weights.items()}
        self.layers = sum(name.endswith("q_proj.weight") for name in weights)
        self.heads, self.device, self.dtype = heads, device, dtype

    # cuDNN would plan anew for every length.
    @sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
    @torch.inference_mode()
    def tell(
        self, stories: int, length: int, generator: torch.Generator, floor: float = 0.01
    ) -> Tensor:
        """[stories, length] ids after the mark of the beginning."""
        d = self.weights["model.embed_tokens.weight"].shape[1]
        shape = (self.layers, 2, stories, self.heads, length, d // self.heads)
        cache = torch.zeros(shape, device=self.device, dtype=self.dtype)
        told = torch.full((stories, length + 1), BEGIN, device=self.device)
        for t in range(length):
            logits = self._step(told[:, t], t, cache).float()
            # Gumbel noise turns the largest into a draw.
            likely = logits >= logits.amax(1, keepdim=True) + torch.tensor(floor).log().item()
            noise = torch.empty_like(logits).exponential_(generator=generator).log_()
            told[:, t + 1] = (logits - noise).masked_fill_(~likely, -torch.inf).argmax(1)
        return told[:, 1:]

    def _step(self, ids: Tensor, t: int, cache: Tensor) -> Tensor:
        w, x = self.weights, self.weights["model.embed_tokens.weight"][ids]
        cos, sin = self._angles(t, cache.shape[-1])
        for i in range(self.layers):
            at = f"model.layers.{i}."
            h = _normed(x, w[at + "input_layernorm.weight"])
            q, k, v = (
                linear(h, w[f"{at}self_attn.{n}_proj.weight"]).unflatten(1, (self.heads, -1))
                for n in "qkv"
            )
            cache[i, 0, :, :, t], cache[i, 1, :, :, t] = _turned(k, cos, sin), v
            keys, values = cache[i, :, :, :, : t + 1]
            mixed = scaled_dot_product_attention(_turned(q, cos, sin)[:, :, None], keys, values)
            x = x + linear(mixed.flatten(1), w[at + "self_attn.o_proj.weight"])
            h = _normed(x, w[at + "post_attention_layernorm.weight"])
            gate = silu(linear(h, w[at + "mlp.gate_proj.weight"]))
            up = linear(h, w[at + "mlp.up_proj.weight"])
            x = x + linear(gate * up, w[at + "mlp.down_proj.weight"])
        return linear(_normed(x, w["model.norm.weight"]), w["model.embed_tokens.weight"])

    def _angles(self, t: int, width: int) -> tuple[Tensor, Tensor]:
        angle = t * 10_000.0 ** -(torch.arange(0, width, 2, device=self.device) / width)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight.shape, weight, 1e-5)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def texts(told: Tensor, pieces: list[str]) -> Iterator[str]:
    """Each story as text, up to its end; one that was not finished up to its last full sentence."""
    spelled = [_spelled(piece) for piece in pieces]
    for row in told.tolist():
        ends = [row.index(mark) for mark in (BEGIN, END) if mark in row]
        story = b"".join(spelled[i] for i in row[: min(ends, default=len(row))])
        text = story.decode(errors="ignore").strip()
        last = max(text.rfind(mark) for mark in ('."', '!"', '?"', ".", "!", "?"))
        text = text[: last + 2].strip() if text[last + 1 : last + 2] == '"' else text[: last + 1]
        if len(text) > 200:
            yield text


def _spelled(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.encode()


def teller(device: torch.device, folder: Path = DATA) -> tuple[Teller, list[str]]:
    """stories15M as prepare.py left it, or as carried.py did, in bytes."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    about = json.loads((folder / "stories15m.json").read_text())
    weights = from_bytes(load_file(folder / "stories15m.safetensors"))
    return Teller(weights, about["heads"], device, dtype), about["pieces"]


def to_bytes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each row as whole numbers from -127 to 127, and the size of one beside it: half of half.

    >>> kept = to_bytes({"w": torch.tensor([[1.0, -2.0], [0.1, 0.0]]), "norm": torch.ones(2)})
    >>> kept["w"].dtype, kept["w.row"].shape, from_bytes(kept)["w"]
    (torch.int8, torch.Size([2, 1]), tensor([[ 1.0079, -2.0000], [ 0.1000,  0.0000]]))
    """
    kept = {name: w for name, w in weights.items() if w.ndim < 2}
    for name, w in weights.items():
        if w.ndim == 2:
            row = w.float().abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
            kept |= {name: (w.float() / row).round().to(torch.int8), f"{name}.row": row}
    return kept


def from_bytes(kept: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights again, of `to_bytes`; others as they are."""
    return {
        name: w * kept[f"{name}.row"] if f"{name}.row" in kept else w
        for name, w in kept.items()
        if not name.endswith(".row")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long to tell")
    parser.add_argument("--batch", type=int, default=0, help="stories at a time")
    parser.add_argument("--length", type=int, default=256, help="the longest story, in its tokens")
    parser.add_argument("--floor", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--teacher", type=Path, default=DATA, help="where stories15M lies")
    tokenizer = DATA / "small-tokenizer.json"
    parser.add_argument("--tokenizer", type=Path, default=tokenizer, help="of the model to train")
    parser.add_argument("--out", type=Path, default=DATA / "stories.safetensors")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, pieces = teller(device, given.teacher)
    batch = given.batch or (4096 if device.type == "cuda" else 64)
    generator = torch.Generator(device).manual_seed(given.seed)
    start, told = time.monotonic(), []
    while time.monotonic() - start < given.minutes * 60:
        told.append(model.tell(batch, given.length, generator, given.floor).short().cpu())
        print(f"{time.monotonic() - start:6.1f} s  {len(told) * batch:,} stories", flush=True)
    found = list(dict.fromkeys(text for batch in told for text in texts(batch, pieces)))
    letters = sum(map(len, found))
    print(f"{len(found):,} distinct stories, {letters / 1e6:.1f} M letters; encoding", flush=True)
    held = min(len(found) // 10, 1000)
    ids = {"stories": encoded(given.tokenizer, found[held:]),
           "stories.held": encoded(given.tokenizer, found[:held])}  # fmt: skip
    given.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(ids, given.out)
    seconds = time.monotonic() - start
    print(f"{len(ids['stories']) / 1e6:.2f} M tokens in {given.out}, {seconds:.0f} s")
    print("\n" + found[0])


class _Raw(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    pass


if __name__ == "__main__":
    main()
