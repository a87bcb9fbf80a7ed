"""The attention implementation of a model's configs, turned to regard's for the time of a run."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations import flash_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from regard.errors import RegardError
from regard.watching.huggingface.modules import settable
from regard.watching.huggingface.shared_values import made_in_run
from regard.watching.huggingface.switched_name import SwitchedName

NAME = "regard_watching"
"""What the implementation is called while somebody watches: not "regard", which a model may have
been loaded with, so that a compiled model is compiled anew. "sdpa", "flash" or "/" in it would mean
something to transformers."""


@dataclass
class _Switched:
    config: Any
    own: str | None
    """The implementation it had."""
    holders: list[Switch]


own_functions: list[Any] = []
"""Attention functions of regard that models may be loaded with."""
switched: dict[int, _Switched] = {}
"""Configs that are switched to regard, by identity: several watches may hold one."""
_switching = threading.Lock()


class Switch:
    """Turns a model's attention implementation to regard's, and back."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.configs = {id(config): config for config in _configs(modules)}

    def refuse_others(self, sdpa: str | None) -> None:
        """Say so if attention is computed by functions of others, which regard's would put aside:
        they may do more, such as gather a sequence that is split over ranks. `sdpa` is who stands
        in the place of PyTorch's own function."""
        for key, config in self.configs.items():
            held = switched.get(key)
            own = config._attn_implementation if held is None else held.own
            other = sdpa if own == "sdpa" and sdpa is not None else _other(own)
            if other is not None:
                raise RegardError(
                    "this model's attention function is not transformers' own, and watching would "
                    "replace it",
                    got=f"attn_implementation={own!r}, which is {other}",
                    accepted="the functions of transformers and PyTorch, and of regard",
                    do="watch without context or sequence parallelism (context_parallel, Ulysses, "
                    "ring attention) and without packages that replace attention",
                )

    def on(self) -> None:
        made_in_run.set({})
        with _switching:
            for key, config in self.configs.items():
                held = switched.setdefault(key, _Switched(config, _implementation(config), []))
                held.holders.append(self)
                # The attribute behind the property: setting that would set every config below.
                config._attn_implementation_internal = SwitchedName(NAME, held.own)

    def off(self) -> None:
        """Back, if it was on: an interrupt may have come while it was turned on."""
        made_in_run.set(None)
        with _switching:
            for key in self.configs:
                held = switched.get(key)
                if held is None:
                    continue
                held.holders = [other for other in held.holders if other is not self]
                if not held.holders:
                    held.config._attn_implementation_internal = held.own
                    del switched[key]


def _implementation(config: Any) -> str | None:
    own: str | None = config._attn_implementation
    return own


def _beside_presses(function: Any) -> Any:
    """What kvpress has wrapped, as it does with every attention function when it is imported. The
    wrapper only hides keys that a press took from single heads, which each call is asked for."""
    while getattr(function, "__globals__", {}).get("__name__") == "kvpress.attention_patch":
        held = [cell.cell_contents for cell in function.__closure__ or ()]
        inside = [one for one in held if callable(one)]
        if len(inside) != 1:
            break
        function = inside[0]
    return function


def _other(implementation: str | None) -> str | None:
    """Whose function an implementation is, if not of transformers or regard. A kernel from the hub,
    named by its repository, is one that the model was loaded with."""
    if implementation is None or "/" in implementation:
        return None
    function = _beside_presses(ALL_ATTENTION_FUNCTIONS.get(implementation, None))
    if any(function is own for own in own_functions):
        return None
    found = [function]
    if "flash" in implementation:
        found.append(flash_attention._flash_attention_forward)
    for given in found:
        while isinstance(given, partial):
            given = given.func
        # A wrapper may bear the names of what it wraps; what it can reach tells where it is from.
        module = getattr(given, "__globals__", {}).get("__name__", type(given).__module__)
        if given is not None and module.split(".")[0] not in ("transformers", "regard"):
            return f"{module}.{getattr(given, '__qualname__', type(given).__qualname__)}"
    return None


def _configs(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[Any]:
    """The configs that decide which attention the modules of a model call."""
    models = [(path, part) for path, part in modules if isinstance(part, PreTrainedModel)]
    by_hand = {id(part.config) for _, part in models if not settable(part)}
    inside = tuple(f"{path}." if path else "" for path, _ in models)
    held = {
        id(config): config
        for path, part in modules
        if isinstance(config := vars(part).get("config"), PreTrainedConfig)
        and f"{path}.".startswith(inside)
    }
    waiting = list(held.values())
    while waiting:
        config = waiting.pop()
        if id(config) not in by_hand:
            yield config
            below = (getattr(config, name, None) for name in config.sub_configs)
            waiting += [sub for sub in below if sub is not None]


def own_implementation(module: nn.Module) -> str | None:
    """The implementation that a module would call unwatched."""
    held = switched.get(id(getattr(module, "config", None)))
    return None if held is None else held.own
