"""Low-rank adapters around a projection, as PEFT builds them: what of them reaches the output.

A layer with an adapter holds the projection that it adapts as `base_layer`, and gives
W·x + b + s·B·A·x. Multiplying rows of the output is exact if the rows of W, b and B are multiplied
alike, whatever the scaling s (LoRA, rsLoRA), the rank, or the dropout of x before A. With DoRA the
output is m·(W + s·B·A)·x / ‖W + s·B·A‖ + b: the norm takes any factor of the rows out again, and
the magnitudes m and the bias carry it alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.errors import RegardError


def is_adapted(projection: Any) -> bool:
    return isinstance(projection, nn.Module) and isinstance(
        getattr(projection, "base_layer", None), nn.Module
    )


def parts(projection: Any) -> tuple[bool, list[Tensor]]:
    """Whether the weight of the layer inside reaches the output as it is; and what the adapters in
    use add to it, each with the axis of outputs first."""
    if getattr(projection, "disable_adapters", False):
        return True, []
    low_rank = getattr(projection, "lora_B", None)
    if not isinstance(low_rank, nn.ModuleDict) or not hasattr(projection, "active_adapters"):
        raise _unknown(projection, "is no low-rank adapter of PEFT's")
    # What is merged is in the weight already, and taken out of it again when it is unmerged.
    names = list(projection.merged_adapters) or list(projection.active_adapters)
    used = [name for name in names if name in low_rank]
    variants = {name: _variant(projection, name) for name in used}
    kinds = {kind for kind in variants.values() if kind}
    if not kinds:
        return True, [t for name in used for t in _weight_and_bias(low_rank[name])]
    if kinds != {"Dora"}:
        raise _unknown(projection, f"is of the kind {', '.join(sorted(kinds - {'Dora'}))}")
    if len(used) > 1:
        raise _unknown(projection, f"adds up several ({', '.join(used)}), one of them DoRA")
    if projection.merged_adapters:
        raise _unknown(projection, "has DoRA merged into its weight")
    if isinstance(projection.lora_dropout[used[0]], nn.Dropout):
        raise _unknown(projection, "has dropout inside DoRA, which keeps part of the output")
    return False, [projection.lora_magnitude_vector[used[0]].weight]


def _variant(projection: Any, name: str) -> str:
    """What else than LoRA an adapter is, by PEFT's name for it; empty for LoRA."""
    made = getattr(projection, "lora_variant", {}).get(name)
    if made is not None:
        return type(made).__name__.removesuffix("Variant").removesuffix("Linear")
    # Before variants had classes, only DoRA was told apart.
    return "Dora" if getattr(projection, "use_dora", {}).get(name) else ""


def _weight_and_bias(layer: Any) -> list[Tensor]:
    bias = getattr(layer, "bias", None)
    return [layer.weight, *([] if bias is None else [bias])]


def _unknown(projection: nn.Module, why: str) -> RegardError:
    return RegardError(
        "QK-clip does not know how this adapter scales with its weights",
        got=f"{type(projection).__name__}, which {why}",
        accepted="LoRA and rsLoRA, also several and merged; one DoRA without dropout",
        do="leave the layer out: QKClip(layers=...)",
    )
