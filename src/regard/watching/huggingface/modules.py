"""Modules of transformers that attend: by its interface, or by hand, where nothing can be seen."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from regard.watching import reach

Modules = Iterable[tuple[str, nn.Module]]
"""What `named_modules` gives: to go through a model takes longer than to run a short layer."""


def attenders_by_name(model: nn.Module) -> list[str]:
    """Paths of the modules that attend when they run, and of those of transformers that say so in
    their name."""
    known = attenders(model)
    return known + [
        path
        for path, module in model.named_modules()
        if type(module).__module__.startswith("transformers.")
        and type(module).__name__.endswith("Attention")
        and path not in known
    ]


def what_helps(model: PreTrainedModel, own: str | None) -> str:
    """How a model could be seen whose own implementation of attention cannot."""
    if model._supports_sdpa and own != "sdpa" and not settable(model):
        return 'load it with attn_implementation="sdpa"'
    return (
        "run it unwatched with output_attentions=True, which gives n×n weights if this family "
        "has them"
    )


def attenders(model: nn.Module) -> list[str]:
    """Paths of the modules that attend when they run: by transformers' interface, or by hand."""
    by_hand = {path for part in _by_hand(model.named_modules()) for path in part.attention}
    return [
        path
        for path, module in model.named_modules()
        if path in by_hand or _mentions(module, "ALL_ATTENTION_FUNCTIONS")
    ]


def never_attends(module: nn.Module) -> bool:
    """Whether a module of theirs leaves attention to those inside of it."""
    kind: Any = type(module)
    return _kind_never_attends(kind)


@cache
def _kind_never_attends(kind: type) -> bool:
    # A monitor asks this of every module each time that it looks.
    theirs = kind.__module__.startswith("transformers.")
    return theirs and "Attention" not in kind.__name__ and not _kind_can_be_seen(kind)


def needs_asking(modules: Collection[nn.Module], switched: Collection[int]) -> bool:
    """Whether one of the modules of a model may attend otherwise than by transformers' interface
    with one of the configs (by identity) that are switched: where only a function mode sees it."""
    return reach.needs_asking(modules, PreTrainedModel.__mro__) or any(
        not settable(part)
        if isinstance(part, PreTrainedModel)
        else _mentions(part, "ALL_ATTENTION_FUNCTIONS")
        and id(getattr(part, "config", None)) not in switched
        for part in modules
    )


def islands(modules: Modules, switched: Collection[int]) -> Iterator[str]:
    """Paths of models of theirs, inside of somebody else's, that need no asking."""
    every, inside = list(modules), "\0"
    for path, part in every:
        if path and isinstance(part, PreTrainedModel) and not path.startswith(inside):
            below = [m for at, m in every if at == path or at.startswith(f"{path}.")]
            if not needs_asking(below, switched):
                inside = f"{path}."
                yield path


def settable(model: PreTrainedModel) -> bool:
    """Whether the attention of a model can be set by name."""
    kind: Any = type(model)
    return _kind_settable(kind)


@cache
def _kind_settable(kind: Any) -> bool:
    # It reads the file that the class is in.
    return bool(kind._can_set_attn_implementation())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def by_hand(config: type) -> bool:
    """Whether all models with configs of a class compute attention by hand, whatever the name of
    their implementation."""
    return _by_hand_config(config)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def adds_masks(config: type) -> bool:
    """Whether all models with configs of a class are written for masks that are added to logits:
    transformers lets them have no other attention than "eager". Some join a mask with others of
    their own, or compute part of attention by hand."""
    return _adds_masks_config(config)


@cache
def _by_hand_config(config: type) -> bool:
    found = _models_with(config)
    return bool(found) and not any(map(_kind_settable, found))


@cache
def _adds_masks_config(config: type) -> bool:
    fused = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
    found = _models_with(config)
    return bool(found) and not any(getattr(kind, name, False) for kind in found for name in fused)


def _models_with(config: type) -> list[Any]:
    # Asked while one of them runs, so they are there.
    return [kind for kind in _below(PreTrainedModel) if kind.config_class is config]


def _below(kind: Any) -> Iterator[Any]:
    for lower in kind.__subclasses__():
        yield lower
        yield from _below(lower)


class _ByHand(NamedTuple):
    """A model of transformers that does not use its attention interface."""

    model: Any
    attention: list[str]


def _by_hand(modules: Modules) -> Iterator[_ByHand]:
    for path, part in modules:
        if not isinstance(part, PreTrainedModel) or settable(part):
            continue
        if type(part).__module__.startswith("transformers."):
            inside = part.named_modules(prefix=path)
            yield _ByHand(part, [at for at, m in inside if type(m).__name__.endswith("Attention")])


def family(model: nn.Module) -> str:
    """The kind of model, as transformers calls it."""
    return str(getattr(getattr(model, "config", None), "model_type", type(model).__name__))


def _kind_can_be_seen(kind: Any) -> bool:
    known = ("ALL_ATTENTION_FUNCTIONS", "scaled_dot_product_attention")
    return issubclass(kind, nn.MultiheadAttention) or any(
        _class_mentions(kind, name) for name in known
    )


def _mentions(module: nn.Module, name: str) -> bool:
    """Whether a method of a module's class speaks of something by name."""
    kind: Any = type(module)
    return _class_mentions(kind, name)


@cache
def _class_mentions(kind: type, name: str) -> bool:
    methods = (
        inspect.unwrap(method)
        for base in kind.__mro__
        if base not in PreTrainedModel.__mro__
        for method in vars(base).values()
        if inspect.isfunction(method)
    )
    return any(name in method.__code__.co_names for method in methods)
