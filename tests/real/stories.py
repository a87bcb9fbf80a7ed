"""stories15M as a model of transformers."""

from __future__ import annotations

from typing import Any

from models.train.stories15m import pieces, weights

__all__ = ["pieces", "stories"]


def stories(implementation: str = "eager") -> Any:
    """The model as transformers' own, with every number of the file in its place."""
    import transformers

    sizes, found = weights()
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    config = transformers.LlamaConfig(
        vocab_size=sizes["vocabulary"], hidden_size=sizes["d"], intermediate_size=sizes["hidden"],
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"],
        max_position_embeddings=sizes["length"], rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    kind = transformers.LlamaForCausalLM
    model = kind._from_config(config, attn_implementation=implementation).eval()
    model.load_state_dict(found)
    return model
