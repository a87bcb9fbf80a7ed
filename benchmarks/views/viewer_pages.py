"""One page of a model's attention by one tool, in a process of its own: what it takes, as JSON.

PYTHONPATH=src python -m benchmarks.views.viewer_pages regard|bertviz|circuitsvis TOKENS
"""

from __future__ import annotations

import importlib.metadata
import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

LAYERS, HEADS, WIDTH = 4, 8, 512
Write = Callable[[Path], object]


def model(n: int, attention: str) -> GPT2LMHeadModel:
    """A GPT-2 whose weights are drawn, not learned, and large enough for sharp heads."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=977,
        bos_token_id=0,
        eos_token_id=0,
        n_positions=n,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        initializer_range=0.06,
        attn_implementation=attention,
    )
    return GPT2LMHeadModel(config).eval()


def weights(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the peers are given: every weight of every layer, [1, H, n, n]."""
    reader = model(ids.shape[1], "eager")
    return tuple(reader(ids, output_attentions=True, use_cache=False).attentions)


def regard(ids: torch.Tensor, words: list[str]) -> Write:
    from regard import watch
    from regard.view import page

    reader = model(len(words), "sdpa")
    with watch(reader, keep="traces") as seen:
        reader(ids, use_cache=False)
    return lambda path: page(seen, path, tokens=words)


def bertviz(ids: torch.Tensor, words: list[str]) -> Write:
    from bertviz import head_view

    found = weights(ids)
    return lambda path: path.write_text(head_view(found, words, html_action="return").data)


def circuitsvis(ids: torch.Tensor, words: list[str]) -> Write:
    from circuitsvis.attention import attention_heads

    found = torch.cat([layer[0] for layer in weights(ids)])
    return lambda path: path.write_text(attention_heads(attention=found, tokens=words).local_src)


def main() -> None:
    tool, n = sys.argv[1], int(sys.argv[2])
    ids = torch.randint(977, (1, n), generator=torch.Generator().manual_seed(0))
    words = [f" word{i}" for i in ids[0].tolist()]
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        write = {"regard": regard, "bertviz": bertviz, "circuitsvis": circuitsvis}[tool](ids, words)
        read, used = time.perf_counter(), time.process_time()
        path = Path(folder) / "page.html"
        write(path)
        done = {
            "version": importlib.metadata.version(tool),
            "forward seconds": read - start,
            "page seconds": time.perf_counter() - read,
            "of the CPU": time.process_time() - used,
            "page MB": path.stat().st_size / 1e6,
            "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
        }
    print(json.dumps(done))


if __name__ == "__main__":
    main()
