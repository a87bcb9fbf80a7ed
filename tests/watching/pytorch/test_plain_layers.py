"""PyTorch's own layers run without being asked about, and nothing goes unseen for that."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import regard
from regard.watching.by_hand.axes import Atom, reshaped
from regard.watching.by_hand.dataflow import keeps_apart
from regard.watching.pytorch import attention_mode
from regard.watching.pytorch.plain_layers import PLAIN, PlainLayer
from tests.watching.left_behind import nothing_in, nothing_in_the_process, nothing_in_the_thread

X = torch.randn(2, 5, 8)
held_elsewhere = F.scaled_dot_product_attention


class Layer(nn.Module):
    """Self-attention of two heads between PyTorch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop, self.cap, self.by_hand = nn.Dropout(0.0), nn.Identity(), False
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.query_norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.norm(x)).view(*x.shape[:2], 6, 4).transpose(1, 2)
        q, k, v = parts.split(2, 1)
        q = self.query_norm(q)
        if self.by_hand:
            self.given = q, k, v
            y = self.drop(self.cap(q @ k.transpose(-2, -1) / 2).softmax(-1)) @ v
        else:
            y = held_elsewhere(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(x)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.checkpoints = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x


LAYERS = ["layers.0", "layers.1"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The functions that a mode of ours was asked about."""
    found: list[Any] = []
    real = attention_mode.AttentionMode.__torch_function__

    def ask(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found.append(func)
        return real(self, func, types, args, kwargs)

    monkeypatch.setattr(attention_mode.AttentionMode, "__torch_function__", ask)
    return found


def seen_in(model: nn.Module, run: Callable[[], object] | None = None) -> dict[str, int]:
    """How many calls of each layer are seen in one run."""
    with regard.watch(model) as seen:
        (run or (lambda: model(X)))()
    nothing_in_the_process()
    nothing_in(model)
    return {path: layer.calls for path, layer in seen.items()}


def test_functions_of_plain_layers_are_not_asked_about(asked: list[Any]) -> None:
    model = Model()
    assert seen_in(model) == dict.fromkeys(LAYERS, 1)
    assert held_elsewhere in asked
    assert not {F.linear, F.layer_norm, F.gelu, F.dropout} & set(asked)


@pytest.mark.parametrize("kind", PLAIN)
def test_what_is_left_out_is_never_looked_at(kind: Any) -> None:
    """What these layers call is none of the functions that matter where nothing is followed."""
    found = []

    class Asked(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            found.append(func)
            return func(*args, **(kwargs or {}))

    sizes = {nn.Linear: (4, 4), nn.Embedding: (4, 4), nn.GroupNorm: (2, 4)}
    sizes |= {nn.Conv1d: (4, 4, 1), nn.Conv2d: (4, 4, 1)}
    sizes |= dict.fromkeys((nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d), (4,))
    layer = kind(*sizes.get(kind, ()))
    x = torch.randn(2, 4, 4, *([4] if kind in (nn.Conv2d, nn.BatchNorm2d) else []))
    with Asked():
        layer(torch.tensor([1]) if kind is nn.Embedding else x)
    assert found
    assert not set(found) & attention_mode._ASKED


@pytest.mark.parametrize("cap", [nn.Identity(), nn.Tanh()])
def test_attention_by_hand_goes_on_in_plain_layers(cap: nn.Module) -> None:
    """Its queries come out of a norm, its scores and weights go through layers."""
    model = Model()
    for layer in model.layers:
        layer.by_hand, layer.cap = True, cap
    plain = model(X)
    with regard.watch(model, keep="traces") as seen:
        out = model(X)
    torch.testing.assert_close(out, plain)
    for path in LAYERS:
        (trace,) = seen[path].traces
        assert trace.inputs.softcap == (1 if isinstance(cap, nn.Tanh) else None)
        q, k, _ = model.layers[int(path[-1])].given
        torch.testing.assert_close(trace.weights(), cap(q @ k.transpose(-2, -1) / 2).softmax(-1))


def test_attention_by_hand_may_begin_in_a_later_step() -> None:
    model, reports = Model(), []
    with regard.Monitor(
        model, look=1, every=1, rules=(), to=reports.append, on_error="raise"
    ) as monitor:
        for step in range(4):
            model.layers[0].by_hand = step >= 2
            model(X).sum().backward()
            monitor.step()
    assert [list(report.layers) for report in reports] == [LAYERS] * 4
    for path in LAYERS:
        rows = [report.layers[path].entropy for report in reports]
        assert rows[1] == pytest.approx(rows[3], rel=1e-4)


class Hooked:
    """Attention inside a hook of a plain layer."""

    calls = 0

    def __call__(self, module: nn.Module, *args: Any) -> None:
        self.calls += 1
        q = torch.randn(1, 1, 3, 4)
        held_elsewhere(q, q, q)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_module_forward_hook",
        "register_module_forward_pre_hook",
    ],
)
def test_hooks_of_plain_layers_may_attend(register: str, when: str) -> None:
    model, hook = Model(), Hooked()
    layer = model.layers[0].out

    def put() -> Any:
        if hasattr(layer, register):
            return getattr(layer, register)(hook)
        return getattr(nn.modules.module, register)(
            lambda module, *args: hook(module, *args) if module is layer else None
        )

    handle = put() if when == "before" else None
    with regard.watch(model) as seen:
        handle = handle or put()
        model(X)
    handle.remove()
    assert hook.calls == 1
    assert seen["layers.0"].calls == 2
    nothing_in(model)


@pytest.mark.parametrize("where", ["the module", "its class"])
def test_a_layer_may_be_given_another_forward(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, layer = Model(), nn.Linear(8, 8)
    model.layers[0].out = layer

    def attends(*args: Tensor) -> Tensor:
        x = args[-1]
        return held_elsewhere(x, x, x)

    with regard.watch(model) as seen:
        if where == "the module":
            layer.forward = attends  # type: ignore[method-assign]
            model(X)
        else:
            with monkeypatch.context() as patch:
                patch.setattr(nn.GELU, "forward", attends)
                model(X)
    assert seen["layers.0"].calls == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("caught", [False, True])
def test_what_ends_a_layer_early(
    error: type[BaseException], caught: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stays on; and a model that goes on is seen on."""
    model, linear = Model(), F.linear
    first = model.layers[0].project.weight

    def fails(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is first:
            raise error
        return linear(x, weight, bias)

    project = model.layers[0].forward

    def goes_on(x: Tensor) -> Tensor:
        try:
            return project(x)
        except error:
            q = x[:, None]
            return held_elsewhere(q, q, q)[:, 0]

    watch = regard.watch(model)
    seen = watch.attach()
    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", fails)
        if caught:
            model.layers[0].forward = goes_on
            model(X)
            assert {path: layer.calls for path, layer in seen.items()} == dict.fromkeys(LAYERS, 1)
            del model.layers[0].forward
        else:
            with pytest.raises(error):
                model(X)
            assert not seen
        nothing_in_the_process()
    before = {path: layer.calls for path, layer in seen.items()}
    model(X)
    assert {path: layer.calls for path, layer in seen.items()} == {
        path: before.get(path, 0) + 1 for path in LAYERS
    }
    watch.detach()
    nothing_in_the_process()
    nothing_in(model)


def test_watching_may_end_inside_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler may do that."""
    model, linear = Model(), F.linear
    watch = regard.watch(model)
    watch.attach()

    def ends(*args: Any) -> Tensor:
        watch.detach()
        return linear(*args)

    monkeypatch.setattr(F, "linear", ends)
    model(X)
    nothing_in_the_process()
    nothing_in(model)


def test_another_thread_runs_the_model_meanwhile(asked: list[Any]) -> None:
    model, other = Model(), torch.randn(2, 5, 8)
    unwatched = model(other)
    inside, done = threading.Event(), threading.Event()
    found: list[Any] = []

    def run() -> None:
        inside.wait(60)
        begun = len(asked)
        found.append(model(other))
        nothing_in_the_thread()
        found.append(len(asked) - begun)
        done.set()

    def wait(*_: Any) -> None:
        if threading.current_thread() is not thread and not done.is_set():
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=run)
    thread.start()
    model.layers[0].mlp[0].register_forward_hook(wait)
    with regard.watch(model) as seen:
        model(X)
    thread.join()
    assert {path: layer.calls for path, layer in seen.items()} == dict.fromkeys(LAYERS, 1)
    assert found[1] == 0
    assert torch.equal(found[0], unwatched)
    nothing_in_the_process()


def test_of_nested_watches_each_sees_all(asked: list[Any]) -> None:
    model = Model()
    with regard.watch(model) as outer:
        with regard.watch(model.layers[0]) as inner:
            model(X)
        assert isinstance(model.layers[0].out._compiled_call_impl, PlainLayer)
        model(X)
    assert {path: layer.calls for path, layer in outer.items()} == dict.fromkeys(LAYERS, 2)
    assert inner[""].calls == 1
    nothing_in(model)
    nothing_in_the_process()


@pytest.mark.parametrize("first", ["layer", "model"])
def test_a_plain_layer_may_be_watched_itself(first: str) -> None:
    """It attends to nothing: what is watched is told of its calls all the same."""
    model, runs = Model(), []
    layer = model.layers[0].out
    handle = layer.register_forward_hook(Hooked())
    own, whole = regard.watch(layer), regard.watch(model)
    seen = {"layer": own, "model": whole}
    for name in (first, *(seen.keys() - {first})):
        seen[name].attach()
    model(X)
    runs.append(own.seen[""].calls)
    seen[first].detach()
    model(X)
    for watch in seen.values():
        watch.detach()
    handle.remove()
    assert runs == [1]
    assert whole.seen["layers.1"].calls == (1 if first == "model" else 2)
    nothing_in(model)
    nothing_in_the_process()


def test_modes_of_others_see_what_they_saw() -> None:
    class Linears(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.calls += func is F.linear
            return func(*args, **(kwargs or {}))

    model = Model()
    with regard.watch(model) as seen, Linears() as around:
        model(X)
    assert around.calls == 8

    class Within(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with inside:
                out: Tensor = model(x)
            return out

    inside, whole = Linears(), Within()
    whole.model = model
    with regard.watch(whole) as seen:
        whole(X)
    assert inside.calls == 8
    assert {path: layer.calls for path, layer in seen.items()} == {
        f"model.{path}": 1 for path in LAYERS
    }


def test_copies_and_replicas_run_themselves() -> None:
    model = Model()
    layer = model.layers[0].out
    with regard.watch(model):
        model(X)
        copies = [copy.deepcopy(model), copy.copy(layer), pickle.loads(pickle.dumps(model))]
        replica = layer._replicate_for_data_parallel()
        replica.weight, replica.bias = torch.zeros(8, 8), layer.bias.detach()
        assert torch.equal(replica(X), layer.bias.expand(2, 5, 8))
    for made in (*copies, replica):
        nothing_in(made)


def test_what_checkpointing_runs_again_is_counted_once() -> None:
    model = Model()
    model.checkpoints = True
    x = X.clone().requires_grad_()
    assert seen_in(model, lambda: model(x).sum().backward()) == dict.fromkeys(LAYERS, 1)


@pytest.mark.compiled
@torch.no_grad()
def test_compiled_layers_beside() -> None:
    """One that is compiled in place before the watch, one meanwhile, and a compiled module."""
    model = Model()
    plain = model(X)
    model.layers[0].out.compile(backend="eager")
    model.layers[1].mlp = torch.compile(model.layers[1].mlp, backend="eager")
    with regard.watch(model) as seen:
        assert not isinstance(model.layers[0].out._compiled_call_impl, PlainLayer)
        model(X)
        model.layers[0].norm.compile(backend="eager")
        out = model(X)
    assert {path: layer.calls for path, layer in seen.items()} == dict.fromkeys(LAYERS, 2)
    torch.testing.assert_close(out, plain)
    own = [m for m in model.modules() if "_compiled_call_impl" in vars(m)]
    assert own == [model.layers[0].norm, model.layers[0].out]
    for module in own:
        del vars(module)["_compiled_call_impl"]
    nothing_in(model)
    nothing_in_the_process()


@pytest.mark.compiled
@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@torch.no_grad()
def test_layers_with_hooks_may_be_in_one_graph(register: str) -> None:
    """A part that does not attend may be compiled as one graph, whoever watches."""
    model, called = Model(), []
    plain = model(X)
    getattr(model.layers[0].mlp[0], register)(lambda *_: called.append(True))
    for layer in model.layers:
        layer.mlp = torch.compile(layer.mlp, fullgraph=True, backend="eager")
    with regard.watch(model) as seen:
        out = model(X)
    assert {path: layer.calls for path, layer in seen.items()} == dict.fromkeys(LAYERS, 1)
    assert called == [True]
    torch.testing.assert_close(out, plain)
    for layer in model.layers:
        assert not any("_compiled_call_impl" in vars(part) for part in layer.mlp._orig_mod)
    nothing_in_the_process()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_copies_of_parametrized_layers_run_themselves(when: str) -> None:
    """Their class copies all that they hold by itself, and the call of a copy is its own."""
    model = Model()
    layer = model.layers[0].out

    def put() -> None:
        parametrizations.weight_norm(layer)

    if when == "before":
        put()
    with regard.watch(model):
        if when == "meanwhile":
            put()
        model(X)
        twin = copy.deepcopy(model)
    for made in (twin, copy.deepcopy(twin)):
        part = made.layers[0].out
        assert torch.equal(made(X), model(X))
        replica = part._replicate_for_data_parallel()
        assert type(replica) is type(part)
        assert "__getstate__" not in vars(replica)
        shallow = copy.copy(nn.Module.__getattr__(part, "parametrizations"))
        nothing_in(shallow)
        with regard.watch(made) as seen:
            made(X)
        assert {path: layer.calls for path, layer in seen.items()} == dict.fromkeys(LAYERS, 1)
        nothing_in(made)
    nothing_in(model)


SHAPES = [
    ((2, 3, 8), (2, 3, 2, 4)), ((2, 3, 2, 4), (2, 3, 8)), ((2, 3, 2, 4), (6, 2, 4)),
    ((2, 3, 8), (6, 8)), ((6, 8), (2, 3, 8)), ((2, 3, 8), (2, 3, 8)), ((1, 3, 8), (3, 8)),
    ((3, 8), (1, 3, 8)), ((2, 3, 1), (2, 3)), ((2, 3), (2, 3, 1, 1)), ((24,), (2, 3, 4)),
    ((2, 12), (24,)), ((), (1, 1)), ((1, 1), ()), ((2, 3, 8), (2, 24)), ((2, 3, 8), (3, 2, 8)),
    ((1, 1, 4), (1, 1, 2, 2)), ((2, 6, 4), (2, 2, 3, 4)), ((2, 2, 3, 4), (4, 3, 2, 2)),
    ((2, 3, 4, 5), (2, 12, 5)),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), SHAPES)
def test_what_keeps_its_axes_apart_makes_nothing_to_follow(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    given = torch.zeros(before)
    out = given.reshape(after)
    axes = reshaped(tuple((Atom(n),) for n in before), after)
    if keeps_apart(given, out):
        assert axes is None or not any(len(axis) > 1 for axis in axes[:-1])
    else:
        assert axes is None or before != after


def test_a_copy_in_another_order_does_not_keep_its_axes() -> None:
    turned = torch.zeros(2, 3, 4).transpose(0, 1)
    assert not keeps_apart(turned, turned.contiguous())
    assert keeps_apart(turned, turned)
    # Heads, cut from the last axis or laid side by side.
    assert keeps_apart(torch.zeros(2, 3, 8), torch.zeros(2, 3, 2, 4))
    assert keeps_apart(torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 8))
