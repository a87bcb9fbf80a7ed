"""Models with parts that cannot be looked into: tensors without numbers, modules that are compiled
by TorchScript. They run as they do unwatched; what was not seen is named."""

import pytest
import torch
from torch import nn

import regard
from regard.errors import RegardError
from tests.watching.left_behind import nothing_in, nothing_in_the_process

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")


class Scaled(nn.Module):
    """PyTorch's attention, called as a function."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


MODELS = {
    "function": Scaled,
    "layer": lambda: nn.TransformerEncoderLayer(16, 2, batch_first=True).eval(),
    "regard's": lambda: nn.Sequential(regard.nn.MultiHeadAttention(16, 2)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("keep", ["traces", "statistics"])
@pytest.mark.parametrize("learns", [False, True])
def test_a_model_without_numbers_runs_to_its_end(name, keep, learns):
    model, x = MODELS[name]().to("meta"), torch.empty(3, 5, 16, device="meta")
    found = None
    with (
        torch.set_grad_enabled(learns),
        pytest.raises(RegardError, match=r"cannot be looked into|no attention was seen"),
        regard.watch(model, keep=keep),
    ):
        found = model(x)
    assert found is not None
    assert found.shape == x.shape
    nothing_in(model)
    nothing_in_the_process()


def test_a_scripted_part_runs_beside_what_is_seen():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
    model, x = nn.Sequential(scripted, Scaled()), torch.randn(3, 5, 16)
    expected = model(x)
    with regard.watch(model, keep="traces") as seen:
        found = model(x)
    torch.testing.assert_close(found, expected)
    assert list(seen) == ["1"]
    nothing_in_the_process()


def test_attention_of_a_scripted_part_is_named():
    class Inner(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x)

    model = nn.Sequential(torch.jit.script(Inner()), Scaled())
    with (
        pytest.raises(RegardError, match=r"cannot be looked into(.|\n)*0: .*TorchScript"),
        regard.watch(model),
    ):
        model(torch.randn(3, 5, 16))


def test_a_model_that_is_scripted_as_a_whole_is_refused():
    model = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
    with pytest.raises(
        RegardError,
        match=r"models compiled by TorchScript cannot be watched(.|\n)*got: +Sequential",
    ):
        regard.watch(model).attach()
    assert "__getstate__" not in vars(model)
    nothing_in_the_process()
