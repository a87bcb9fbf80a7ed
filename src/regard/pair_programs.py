"""Functions of batch entry, head, query and key, read once: a program of tensor operations.

The convention is FlexAttention's: a function takes four numbers, as tensors without axes, and
returns one. Reading it records the operations it performs. Numbers that it captures are in the
program as they were; tensors that it captures are its inputs, so that they can be moved, learned
and counted. Where all operations work on each number alone, a program runs on whole tiles at once;
else PyTorch maps it over them.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, fx
from torch.autograd import forward_ad

from regard.between_graphs import between_graphs
from regard.errors import RegardError
from regard.transforms import under_torch_func
from regard.values import Local

Function = Callable[..., Any]
Places = tuple[Tensor, Tensor, Tensor, Tensor]

_aten = torch.ops.aten


class Code(Local):
    """Operations on captured tensors and four places."""

    def __init__(self, graph: fx.Graph, name: str, captured: tuple[Tensor, ...]) -> None:
        super().__init__()
        graph.eliminate_dead_code()
        self.graph, self.name = graph, name
        self.run = fx.GraphModule(torch.nn.Module(), graph)
        finalize(self, _forget, _source_of(self.run)).atexit = False
        self.is_pointwise = all(
            _is_pointwise(node) for node in graph.nodes if node.op == "call_function"
        )
        *_, b, h, q, k = (bool(n.users) for n in graph.nodes if n.op == "placeholder")
        self.used = b, h, q, k
        """Which of batch entry, head, query and key the answer depends on."""
        device = captured[0].device if captured else torch.device("cpu")
        example: Tensor = self.run(*captured, *places(device))
        self.result, self.axes = example.dtype, example.ndim
        self._parts: dict[fx.Node, Code] = {}
        self._elsewhere: dict[torch.device, Code] = {}

    def __repr__(self) -> str:
        return self.name

    def __call__(self, captured: tuple[Tensor, ...], at: Places) -> Tensor:
        """The values at places that broadcast."""
        if self.is_pointwise:
            found: Tensor = self.run(*_as_numbers_among(at, captured), *at)
            return found
        shape = torch.broadcast_shapes(*(t.shape for t in at))
        if 0 in shape:
            return torch.empty(shape, dtype=self.result, device=at[0].device)
        return mapped(lambda *place: self.run(*captured, *place), at)

    def part(self, node: fx.Node, captured: tuple[Tensor, ...]) -> Code:
        """The code that ends at one of the nodes of this one's graph."""
        if node not in self._parts:
            self._parts[node] = Code(_up_to(self.graph, node), self.name, captured)
        return self._parts[node]

    def on(self, device: torch.device, captured: tuple[Tensor, ...]) -> Code:
        """The same code for tensors on a device."""
        if not any("device" in node.kwargs for node in self.graph.nodes):
            return self
        if device not in self._elsewhere:
            graph = fx.Graph()
            graph.output(graph.graph_copy(self.graph, {}))
            for node in graph.nodes:
                if "device" in node.kwargs:
                    node.kwargs = {**node.kwargs, "device": device}
            self._elsewhere[device] = Code(graph, self.name, captured)
        return self._elsewhere[device]


@dataclass(frozen=True)
class Program:
    """A function that was read: its operations, and the tensors it captured."""

    code: Code
    captured: tuple[Tensor, ...]

    def __call__(self, *at: Tensor) -> Tensor:
        b, h, q, k = at
        return self.code(self.captured, (b, h, q, k))

    @property
    def used(self) -> tuple[bool, bool, bool, bool]:
        return self.code.used

    @property
    def result(self) -> torch.dtype:
        return self.code.result

    def part(self, node: fx.Node) -> Program:
        """The program that ends at one of the nodes of this one's graph."""
        return Program(self.code.part(node, self.captured), self.captured)

    def on(self, device: torch.device) -> Program:
        """The same program for places on a device."""
        captured = tuple(t.to(device) for t in self.captured)
        return Program(self.code.on(device, captured), captured)


reading = between_graphs(
    "regard reads functions of places before it runs them: compile without fullgraph=True, or "
    "write the mask out with masks.keep(mask.dense(queries, keys))"
)
"""What reads a function, which the compiler does not look into."""


@reading
def read(function: Function, what: str) -> Program:
    """The program of a function."""
    name = getattr(function, "__name__", type(function).__name__)
    if under_torch_func():
        # What is recorded there are the numbers below the transform: derivatives would be lost.
        raise RegardError(
            f"{what}: a function cannot be read under a transform of torch.func",
            got=name,
            do="make the mask or bias once, outside of what is transformed",
        )
    device = home(function)

    def scalar(*at: Tensor) -> Tensor:
        return torch.as_tensor(function(*at), device=device)

    try:
        # To read is not to differentiate: tensors that are captured keep their tangents.
        with forward_ad._set_fwd_grad_enabled(False):
            graph = graph_of(scalar, *places(device))
    except Exception as error:
        raise RegardError(
            f"{what}: the function cannot be read",
            got=f"{type(error).__name__} from {name}: {str(error).splitlines()[0][:200]}"
            if str(error)
            else f"{type(error).__name__} from {name}",
            accepted="a function of four numbers (batch entry, head, query, key), as tensors "
            "without axes, made of tensor operations: no `if` on them, no .item()",
            do="combine conditions with &, | and ~, choose with torch.where",
        ) from error
    lifted, captured = _lifted(graph)
    program = Program(Code(lifted, name, captured), captured)
    if program.code.axes:
        raise RegardError(
            f"{what}: the function gives more than one number for a pair",
            got=f"a tensor with {program.code.axes} axes from {name}",
            accepted="a tensor without axes",
        )
    return program


def home(function: Function) -> torch.device:
    """Where the tensors live that a function captures; the CPU if there are none."""
    inner = inspect.unwrap(getattr(function, "func", function))
    defaults: Any = getattr(inner, "__defaults__", None) or ()
    held: list[Any] = [getattr(inner, "__self__", None), *defaults]
    if inspect.isfunction(inspect.unwrap(getattr(inner, "__func__", inner))):
        found = inspect.getclosurevars(inner)
        held += [*found.nonlocals.values(), *found.globals.values()]
    devices = [t.device for t in held if isinstance(t, Tensor)]
    return devices[0] if devices else torch.device("cpu")


def places(device: torch.device) -> Iterator[Tensor]:
    """A batch entry, a head, a query and a key: separate tensors, which a graph distinguishes."""
    return (torch.zeros((), dtype=torch.int64, device=device) for _ in range(4))


def mapped(function: Function, at: tuple[Tensor, ...]) -> Tensor:
    """A function of numbers, for places that broadcast."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    shape = torch.broadcast_shapes(*(t.shape for t in at))
    aligned = [t.reshape((1,) * (len(shape) - t.ndim) + t.shape) for t in at]
    vectorised = function
    for axis in reversed(range(len(shape))):
        own = tuple(0 if t.shape[axis] > 1 else None for t in aligned)
        if any(dim == 0 for dim in own):
            vectorised = torch.vmap(vectorised, in_dims=own)
    # A number indexed by a number is a number, as in FlexAttention's kernels.
    with TransformGetItemToIndex():
        found: Tensor = vectorised(*(t.squeeze() for t in aligned))
    return found.reshape(shape)


def _as_numbers_among(at: Places, captured: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Captured numbers with an axis where places have some. Beside tensors with axes one without
    has no say in the type of a result: a byte less a whole number would stay a byte."""
    if not any(t.ndim for t in at):
        return captured
    return tuple(t if t.ndim else t.reshape(1) for t in captured)


def graph_of(function: Function, *example: Tensor) -> fx.Graph:
    """The operations a function of numbers performs."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.fx.experimental.proxy_tensor import make_fx

    with TransformGetItemToIndex():
        recorded = make_fx(function)(*example)
    _forget(_source_of(recorded))
    recorded.graph.eliminate_dead_code()
    return recorded.graph


def _source_of(module: fx.GraphModule) -> str:
    """What the text of a graph's code is kept under."""
    return type(module).forward.__code__.co_filename


def _forget(source: str) -> None:
    """PyTorch keeps that text for as long as the process runs, which may make a mask at each step.
    (Its own table is private: where there is none any more, it is not to be emptied.)"""
    linecache.cache.pop(source, None)
    getattr(getattr(fx.graph_module, "_loader", None), "eval_cache", {}).pop(source, None)


def _lifted(graph: fx.Graph) -> tuple[fx.Graph, tuple[Tensor, ...]]:
    """A graph whose captured tensors are its first inputs, and those tensors."""
    owner: Any = graph.owning_module
    names = list(dict.fromkeys(n.target for n in graph.nodes if n.op == "get_attr"))
    lifted = fx.Graph()
    tensors = tuple(getattr(owner, str(name)) for name in names)
    inputs = {}
    for i, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
        inputs[name] = lifted.placeholder(f"captured_{i}")
        inputs[name].meta["axes"] = tensor.ndim
        inputs[name].meta["whole"] = not (tensor.is_floating_point() or tensor.is_complex())
    known: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            known[node] = inputs[node.target]
        elif node.op == "output":
            lifted.output(known[node.args[0]])
        else:
            known[node] = lifted.node_copy(node, known.__getitem__)
    return lifted, tensors


def _up_to(graph: fx.Graph, node: fx.Node) -> fx.Graph:
    part, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for old in graph.nodes:
        if old.op != "output":
            known[old] = part.node_copy(old, known.__getitem__)
    part.output(known[node])
    return part


def _is_pointwise(node: fx.Node) -> bool:
    """Whether an operation does to each number of a tile what it does to a number alone."""
    target: Any = node.target
    if torch.Tag.pointwise in target.tags:
        return True
    match target.overloadpacket:
        case _aten.index:
            table, indices = node.args[0], node.args[1]
            axes = getattr(table, "meta", {}).get("axes")
            return axes == len(indices) and all(isinstance(i, fx.Node) for i in indices)  # type: ignore[arg-type,union-attr]
        case _aten._to_copy | _aten.clone | _aten.detach | _aten.alias | _aten.lift_fresh_copy:
            return True
        case _aten.full_like | _aten.zeros_like | _aten.ones_like | _aten.scalar_tensor:
            return True
    return False
