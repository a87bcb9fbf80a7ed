"""Where a language model has its parts: blocks, the last norm, embeddings in and out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.arguments import refuse_no_module
from regard.errors import RegardError
from regard.interpret.attribution.head_matrices import is_attention
from regard.interpret.attribution.linear_maps import inside, linear_map, parts_of

NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f", "final_norm", "ln_out")
ATTENTION_NORMS = (
    "attention_norm", "input_layernorm", "ln_1", "ln1", "norm1", "self_attn_layer_norm",
    "ln_attn", "input_layer_norm", "attn_norm",
)  # fmt: skip
NETWORKS = ("mlp", "network", "feed_forward", "ffn", "block_sparse_moe", "fc2", "linear2")
EMBEDDINGS = ("embedding", "embed_tokens", "wte", "embed_in", "tok_embeddings", "token_embedding",
              "word_embeddings", "embed")  # fmt: skip
UNEMBEDDINGS = ("lm_head", "embed_out", "unembedding", "unembed", "output", "head")


@dataclass(frozen=True, eq=False)
class Anatomy:
    """The parts of a language model, for what reads them: modules by path.

    `anatomy(model)` finds them by the names in use. Make one, or change one with
    `dataclasses.replace`, where it does not."""

    blocks: tuple[str, ...]
    """The blocks that read the residual stream and add to it, first to last."""
    attentions: tuple[str, ...]
    """The attention module of each."""
    embedding: Float[Tensor, "v d"]
    unembedding: Float[Tensor, "v d"]
    unembedding_bias: Float[Tensor, "v"] | None = None
    norm: str | None = None
    """What the stream goes through before the unembedding."""
    attention_norm: str | None = None
    """What attention reads the stream through: a name inside a block."""
    network: str | None = None
    """The part of a block that adds to the stream beside attention: a name inside it."""


def anatomy(model: nn.Module) -> Anatomy:
    """The parts of a language model that is built as most are: regard's own, and those of Hugging
    Face that name their parts as GPT-2, Llama, GPT-NeoX or OPT do.

    >>> from regard import interpret, models
    >>> found = interpret.anatomy(models.load("regard-small", device="cpu").model)
    >>> found.blocks[-1], found.attentions[-1], found.norm
    ('blocks.7', 'blocks.7.attention', 'norm')
    """
    refuse_no_module("what has an anatomy", model)
    attentions = [path for path, module in model.named_modules() if is_attention(module)]
    blocks, container = _blocks(model, attentions)
    above = container.rpartition(".")[0]
    around = model.get_submodule(above)
    first = model.get_submodule(blocks[0])
    norm = next((name for name in NORMS if isinstance(inside(around, name), nn.Module)), None)
    embedding = _embedding(model, around)
    weight, bias = _unembedding(model, embedding)
    return Anatomy(
        tuple(blocks),
        tuple(attentions),
        embedding.detach(),
        weight.detach(),
        None if bias is None else bias.detach(),
        None if norm is None else f"{above}.{norm}".removeprefix("."),
        next((n for n in ATTENTION_NORMS if isinstance(inside(first, n), nn.Module)), None),
        next((n for n in NETWORKS if isinstance(inside(first, n), nn.Module)), None),
    )


def _blocks(model: nn.Module, attentions: Iterable[str]) -> tuple[list[str], str]:
    """The block of each attention module, and what holds them all."""
    found = [re.match(r"(.*?)\.(\d+)(?:\.|$)", path) for path in attentions]
    containers = {match.group(1) for match in found if match}
    blocks = [match.group(0).rstrip(".") for match in found if match]
    if not blocks or None in found or len(containers) > 1 or len(set(blocks)) < len(blocks):
        raise RegardError(
            "this model is not a stack of blocks with one attention each",
            got=f"{type(model).__name__}: {', '.join(attentions) or 'no attention by name'}",
            accepted="a decoder or an encoder whose blocks add to one stream",
            do="say where its parts are: anatomy=interpret.Anatomy(blocks=..., ...)",
        )
    return blocks, containers.pop()


def _embedding(model: nn.Module, around: nn.Module) -> Tensor:
    ask: Any = getattr(model, "get_input_embeddings", None)
    found = ask() if callable(ask) else None
    for whole in (around, model):
        for name in EMBEDDINGS:
            found = inside(whole, name) if found is None else found
    weight = getattr(found, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise _unknown(model, "embedding of tokens", EMBEDDINGS)
    return weight


def _unembedding(model: nn.Module, embedding: Tensor) -> tuple[Tensor, Tensor | None]:
    ask: Any = getattr(model, "get_output_embeddings", None)
    found = ask() if callable(ask) else None
    for name in UNEMBEDDINGS:
        found = inside(model, name) if found is None else found
    if found is None and not callable(ask):
        # The same matrix again, as in models that have no other.
        return embedding, None
    if not isinstance(found, nn.Module):
        raise _unknown(model, "unembedding", UNEMBEDDINGS)
    weight, bias = linear_map(found, embedding.shape[1])
    return weight.T, bias


def _unknown(model: nn.Module, what: str, names: Iterable[str]) -> RegardError:
    return RegardError(
        f"the {what} of this model is not known by name",
        got=f"{type(model).__name__} with {parts_of(model)}",
        accepted=", ".join(names),
        do="say where its parts are: anatomy=interpret.Anatomy(...)",
    )


def refuse_other_width(model: nn.Module, body: Anatomy, wide: int) -> None:
    """Embedding and unembedding act on the residual stream directly, with no projection between."""
    for what, matrix in (("embedding", body.embedding), ("unembedding", body.unembedding)):
        if matrix.shape[1] != wide:
            raise RegardError(
                f"between the {what} of this model and its stream is another projection",
                got=f"{type(model).__name__}: {matrix.shape[1]} numbers for each token, "
                f"a stream of {wide}",
                accepted="tokens as wide as the stream",
                do="multiply the two: dataclasses.replace(interpret.anatomy(model), "
                f"{what}=..., ...)",
            )


class FrozenNorm:
    """A norm that has seen a stream: it centres, or does not, and multiplies with what it did then.

    So each part of the stream has its own share of what comes out."""

    def __init__(
        self, norm: nn.Module | None, stream: Float[Tensor, "b d"], out: Float[Tensor, "b d"]
    ) -> None:
        self.gain, self.bias, self.centres = gain_of(norm, stream)
        read = self.part(stream.double(), scaled=False)
        kept = out.double() - self.bias
        self.scale = (kept * read).sum(-1, keepdim=True) / read.square().sum(-1, keepdim=True)
        off = float((self.scale * read - kept).abs().max() / kept.abs().max())
        if norm is not None and not off < 1e-2:
            raise RegardError(
                "the last norm does more than centre and scale",
                got=f"{type(norm).__name__}, {off:.0%} off",
                accepted="LayerNorm or RMSNorm",
                do="give a metric and attribute(method='gradients') instead",
            )

    def part(self, x: Float[Tensor, "*n d"], *, scaled: bool = True) -> Float[Tensor, "*n d"]:
        """What comes out for a part of the stream."""
        x = x - x.mean(-1, keepdim=True) if self.centres else x
        return self.gain * x * self.scale if scaled else self.gain * x


def gain_of(norm: nn.Module | None, like: Tensor) -> tuple[Tensor, Tensor, bool]:
    """What a norm multiplies with after scaling, what it adds, and whether it centres."""
    wide = like.shape[-1]
    one, none = (torch.full((wide,), x, dtype=torch.float64, device=like.device) for x in (1, 0))
    if norm is None:
        return one, none, False
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    added = none if bias is None else bias.detach().double()
    # Numbers without a mean come out alike whether a norm centres or not; 16 makes its epsilon
    # small, and is exact in every precision.
    x = one.clone()
    x[1::2] = -1
    if wide % 2 and wide > 1:
        x[-3:] = torch.tensor([2.0, -1.0, -1.0]).to(x)
    with torch.no_grad():
        plain, shifted, turned = (
            norm((16 * given)[None].to(like.dtype))[0].double() for given in (x, x + 3, -x)
        )
    found = (plain - turned) / 2 / x * x.square().mean().sqrt()
    centres = bool((plain - shifted).abs().max() < 0.1 * plain.abs().max())
    # Some multiply with 1 + weight. The parameter itself is exact in low precision, too.
    own = one if weight is None else weight.detach().double()
    exact = [own] if weight is None else [own, 1 + own]
    gain = min(exact, key=lambda one: float((one - found).abs().max()))
    gain = gain if (gain - found).abs().max() < 0.02 * found.abs().max() else found
    return gain, added, centres
