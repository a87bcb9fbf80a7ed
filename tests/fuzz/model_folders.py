"""Folders of transformers' models: configuration, index, tokenizer, weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch

from regard import models
from tests.fuzz.own_folders import TEXT, copied, hostile
from tests.fuzz.targets import Target


def prepare(kept: Path) -> Callable[[Random, Path], str]:
    import transformers
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from tokenizers.pre_tokenizers import WhitespaceSplit

    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(**sizes, **heads)
    plain = Tokenizer(kinds.WordLevel({w: i for i, w in enumerate(["?", *TEXT.split()])}, "?"))
    plain.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="?")
    model = transformers.LlamaForCausalLM(config)
    wholes = [kept / "one", kept / "several"]
    model.save_pretrained(wholes[0])
    model.save_pretrained(wholes[1], max_shard_size="2KB")
    for whole in wholes:
        tokenizer.save_pretrained(whole)
    opened: list[object] = []

    def never(*args: object, **how: object) -> None:
        opened.append(args)

    def case(draw: Random, folder: Path) -> str:
        files = copied(draw.choice(wholes), folder)
        if draw.random() < 0.1:
            index = {"metadata": {}, "weight_map": {"a": "weights.bin", "b": "x.safetensors"}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
            (folder / "weights.bin").write_bytes(b"\x80\x04.")
        for path in draw.sample(files, draw.randint(1, 2)):
            hostile(path, draw)
        own, torch.load = torch.load, never
        try:
            reader = models.load(str(folder), device="cpu")
            seen = reader.run(TEXT)
            return "read" if len(seen) == 2 else "read in part"
        finally:
            torch.load = own
            if opened:
                raise AssertionError("something was unpickled")

    return case


target = Target("model folders", prepare, seconds=30.0)
