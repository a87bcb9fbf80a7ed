"""A model that is differentiated or mapped by `torch.func` while it is watched."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.testing import assert_close

import regard
from regard.errors import RegardError, RegardWarning
from tests.watching.left_behind import nothing_in, nothing_in_the_process

# PyTorch's own, of its attention under vmap.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.fixture(params=["PyTorch's", "regard's"])
def model(request):
    torch.manual_seed(0)
    if request.param == "regard's":
        return nn.Sequential(regard.nn.MultiHeadAttention(16, 2), nn.Tanh())
    return nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()


@pytest.fixture
def x():
    return torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))


def loss_of(model):
    return lambda weights, x: functional_call(model, weights, (x,)).square().sum()


def run_plain(model, x, keep="traces"):
    with regard.watch(model, keep=keep) as seen:
        model(x)
    return next(iter(seen.values()))


def gradients(model, x):
    return grad(loss_of(model))(dict(model.named_parameters()), x)


def pulled(model, x):
    loss, back = vjp(loss_of(model), dict(model.named_parameters()), x)
    return back(torch.ones_like(loss))


@pytest.mark.parametrize("differentiated", [gradients, pulled])
@pytest.mark.parametrize("keep", ["traces", "statistics"])
def test_gradients_are_those_of_the_unwatched_model_and_are_seen(model, x, differentiated, keep):
    expected = differentiated(model, x)
    with regard.watch(model, keep=keep) as seen:
        found = differentiated(model, x)
    assert_close(found, expected)
    layer, plain = next(iter(seen.values())), run_plain(model, x, keep)
    assert_close(layer.entropy, plain.entropy)
    if keep == "traces":
        assert not torch._C._functorch.is_functorch_wrapped_tensor(layer.trace.inputs.q)
        assert_close(layer.trace.weights(), plain.trace.weights())
        assert_close(layer.trace.received(), plain.trace.received())
    nothing_in(model)
    nothing_in_the_process()


def test_tangents_are_those_of_the_unwatched_model(x):
    model = nn.Sequential(regard.nn.MultiHeadAttention(16, 2))
    expected = jvp(model, (x,), (x,))
    with regard.watch(model, keep="traces") as seen:
        found = jvp(model, (x,), (x,))
    assert_close(found, expected)
    assert_close(seen["0"].trace.weights(), run_plain(model, x).trace.weights())


def each(model, x):
    """The gradient of each sample."""
    of_one = grad(lambda weights, one: loss_of(model)(weights, one[None]))
    return vmap(of_one, in_dims=(None, 0))(dict(model.named_parameters()), x)


def mapped(model, x):
    return vmap(lambda one: model(one[None])[0])(x)


@pytest.mark.parametrize("run", [each, mapped])
@pytest.mark.parametrize("keep", ["traces", "statistics"])
def test_what_is_mapped_runs_to_its_end_and_is_named(model, x, run, keep):
    expected = run(model, x)
    with (
        pytest.raises(RegardError, match=r"cannot be looked into(.|\n)*torch\.func\.vmap"),
        regard.watch(model, keep=keep),
    ):
        found = run(model, x)
    assert_close(found, expected)
    nothing_in_the_process()


def test_what_is_mapped_is_named_when_a_watch_is_detached(model, x):
    watching = regard.watch(model)
    seen = watching.attach()
    mapped(model, x)
    model(x)
    with pytest.warns(RegardWarning, match=r"torch\.func\.vmap"):
        watching.detach()
    (layer,) = seen.values()
    assert layer.calls == 1


def test_a_monitor_lets_gradients_of_each_sample_be(model, x):
    expected = each(model, x)
    monitor = regard.Monitor(model, every=1)
    with monitor:
        found = each(model, x)
    assert_close(found, expected)


def test_a_loss_on_traces_is_differentiated_inside(x):
    model = nn.Sequential(regard.nn.MultiHeadAttention(16, 2))

    def penalty(weights, x):
        with regard.watch(model, keep="traces", gradients=True) as seen:
            functional_call(model, weights, (x,))
        return seen["0"].trace.entropy.sum()

    found = grad(penalty)(dict(model.named_parameters()), x)
    with regard.watch(model, keep="traces", gradients=True) as seen:
        model(x)
    seen["0"].trace.entropy.sum().backward()
    for name, weight in model.named_parameters():
        expected = torch.zeros_like(weight) if weight.grad is None else weight.grad
        assert_close(found[name], expected)
