"""Whether PyTorch transforms the function that makes a call: `torch.func`, forward mode, batched
gradients. Under these, tensors carry more than their numbers, and code that goes past PyTorch's
operators must not."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def exporting() -> bool:
    """Whether torch.export is at work: such a program may run on another machine, and learn there
    what is not learned here. (`is_exporting` itself is always true to the compiler in torch 2.11;
    where there is no such flag, every graph may be exported.)"""
    flag: bool = getattr(torch.compiler, "_is_exporting_flag", True)
    return torch.compiler.is_compiling() and flag


def under_torch_func() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return torch._C._are_functorch_transforms_active()


def recorded() -> bool:
    """Whether `torch.jit.trace` records what is called. It records PyTorch's operators alone: what
    else writes to memory would be missing from its program, which gives what is found there."""
    return torch._C._get_tracing_state() is not None


RECORDED = "torch.jit.trace records PyTorch's operators, not what else is chosen or computed"


def in_forward_mode() -> bool:
    """Whether tensors may have tangents."""
    return forward_ad._current_level >= 0


def may_carry_tangents(tensors: Iterable[Tensor]) -> bool:
    """Whether forward mode may differentiate by some of these tensors. Under `torch.func` a tangent
    can hide below other transforms, and in a graph that is compiled no tensor shows its own: there
    every tensor may have one."""
    if not in_forward_mode():
        return False
    if under_torch_func() or torch.compiler.is_compiling():
        return True
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def may_learn(tensors: Iterable[Tensor]) -> bool:
    """Whether gradients may be asked of some of these tensors. Under `torch.func` one that wants a
    gradient does not show it below vmap: there every tensor may."""
    if not torch.is_grad_enabled():
        return False
    return any(t.requires_grad for t in tensors) or under_torch_func()


def transformed(tensors: Iterable[Tensor]) -> bool:
    """Whether these tensors may carry more than their numbers, a graph of autograd aside."""
    return under_torch_func() or may_carry_tangents(tensors)


def unobserved(tensors: Iterable[Tensor]) -> bool:
    """Whether operators are unobserved: no compiler, no mode, no tensor subclass."""
    return (
        not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    )


def is_batched(t: Tensor | None) -> bool:
    """Whether a gradient or tangent is many at once: autograd batches them by an older vmap, which
    `torch.func` does not know of."""
    return t is not None and torch._C._functorch.is_legacy_batchedtensor(t)


def unwrapped(t: Tensor) -> Tensor:
    """The tensor inside of what the transforms of `torch.func` hand on, all of its numbers as they
    lie in memory.

    >>> from torch.func import grad
    >>> held = []
    >>> _ = grad(lambda t: (held.append(unwrapped(t)), t.sum())[1])(torch.ones(2))
    >>> held
    [tensor([1., 1.])]
    """
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(t):
        t = functorch.get_unwrapped(t)
    return t


def is_mapped(t: Tensor) -> bool:
    """Whether a tensor stands for many, in some transform of `torch.func`."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(t):
        if functorch.is_batchedtensor(t):
            return True
        t = functorch.get_unwrapped(t)
    return False
