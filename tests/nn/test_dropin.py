import warnings

import pytest
import torch
from torch.testing import assert_close

import regard
from regard import nn

close = {"atol": 1e-5, "rtol": 1e-4}


def pair(batch_first=True, **options):
    """PyTorch's module and the drop-in with the same weights."""
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=batch_first, **options)
    return theirs, nn.DropIn(nn.from_torch(theirs), batch_first)


def counted(module):
    """How often the drop-ins inside a model are called, as a growing list.

    Counts inside forward: hooks would themselves turn PyTorch's shortcuts off."""
    calls = []
    for name, part in module.named_modules():
        if isinstance(part, nn.DropIn):
            inner = part.attention.forward

            def forward(*args, _inner=inner, _name=name, **options):
                calls.append(_name)
                return _inner(*args, **options)

            part.attention.forward = forward
    return calls


def padded(*lengths):
    return torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]


FUTURE = torch.ones(6, 6, dtype=torch.bool).triu(1)
AS_FLOATS = torch.zeros(6, 6).masked_fill(FUTURE, -torch.inf)
CALLS = {
    "plain": {},
    "padding": {"key_padding_mask": padded(6, 4, 1)},
    "padding as floats": {"key_padding_mask": torch.zeros(3, 6).masked_fill(padded(6, 4, 1), -9.0)},
    "mask": {"attn_mask": FUTURE},
    "mask as floats": {"attn_mask": torch.randn(6, 6)},
    "mask for each head": {"attn_mask": (torch.rand(12, 6, 6) > 0.7) & ~torch.eye(6).bool()},
    "mask for each head as floats": {"attn_mask": torch.randn(12, 6, 6)},
    "both": {"attn_mask": FUTURE, "key_padding_mask": padded(6, 4, 1)},
    "both as floats": {
        "attn_mask": AS_FLOATS,
        "key_padding_mask": torch.zeros(3, 6).masked_fill(padded(6, 4, 1), -torch.inf),
    },
    "causal": {"attn_mask": FUTURE, "is_causal": True},
    "causal and padding": {
        "attn_mask": FUTURE, "is_causal": True, "key_padding_mask": padded(6, 4, 1)
    },
}  # fmt: skip


@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_self_attention_equals_torch(options, batch_first, need_weights):
    theirs, ours = pair(batch_first)
    x = torch.randn(3, 6, 16) if batch_first else torch.randn(6, 3, 16)
    right = theirs(x, x, x, need_weights=need_weights, **options)
    assert_close(ours(x, x, x, need_weights=need_weights, **options), right, **close)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_cross_attention_equals_torch(batch_first, average):
    theirs, ours = pair(batch_first, kdim=10, vdim=12)
    x, k, v = torch.randn(3, 6, 16), torch.randn(3, 5, 10), torch.randn(3, 5, 12)
    if not batch_first:
        x, k, v = (t.transpose(0, 1) for t in (x, k, v))
    options = {"key_padding_mask": padded(5, 2, 3), "average_attn_weights": average}
    assert_close(ours(x, k, v, **options), theirs(x, k, v, **options), **close)


def test_keys_may_be_the_query_and_values_not():
    theirs, ours = pair()
    x, v = torch.randn(2, 3, 6, 16)
    assert_close(ours(x, x, v), theirs(x, x, v), **close)


def test_without_a_batch_equals_torch():
    theirs, ours = pair(batch_first=False)
    x, hidden = torch.randn(6, 16), padded(6, 4)[1]
    for options in (
        {},
        {"key_padding_mask": hidden},
        {"attn_mask": torch.randn(4, 6, 6), "average_attn_weights": False},
    ):
        assert_close(ours(x, x, x, **options), theirs(x, x, x, **options), **close)


def test_weights_are_those_before_dropout():
    _, ours = pair(dropout=0.5)
    x = torch.randn(1, 6, 16)
    _, weights = ours(x, x, x)
    assert_close(weights.sum(-1), torch.ones(1, 6))


@pytest.mark.parametrize("hidden", [torch.ones(1, 6).bool(), torch.full((1, 6), -torch.inf)])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_query_that_sees_nothing_gives_zero_not_nan(hidden, need_weights):
    _, ours = pair(bias=False)
    x = torch.randn(1, 6, 16, requires_grad=True)
    out, weights = ours(x, x, x, key_padding_mask=hidden, need_weights=need_weights)
    assert not out.any()
    assert weights is None or not weights.any()
    out.sum().backward()
    assert x.grad.isfinite().all()


def test_causal_needs_no_mask_tensor():
    _, ours = pair()
    x = torch.randn(2, 6, 16)
    assert_close(ours(x, x, x, is_causal=True), ours(x, x, x, attn_mask=FUTURE), **close)


def encoder(**options):
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, **options)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options.get("norm_first"))


MODES = {
    "train": (True, True),
    "eval": (False, True),
    "eval without gradients": (False, False),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(("training", "gradients"), MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("masked", ["nothing", "padding", "causal", "both"])
def test_inside_an_encoder_it_is_really_called(training, gradients, masked, norm_first):
    model = encoder(norm_first=norm_first).train(training)
    x, hidden = torch.randn(2, 6, 16), padded(6, 4)
    options = {}
    if masked in ("padding", "both"):
        options["src_key_padding_mask"] = hidden
    if masked in ("causal", "both"):
        options["mask"] = FUTURE
    with torch.set_grad_enabled(gradients):
        right = model(x, **options)
        names = nn.replace_attention(model)
        calls = counted(model)
        ours = model(x, **options)
    assert calls == names == ["layers.0.self_attn", "layers.1.self_attn"]
    assert_close(ours[~hidden], right[~hidden], **close)


def test_a_stack_built_from_a_layer_with_a_drop_in():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    layer.self_attn = nn.DropIn(nn.from_torch(layer.self_attn), batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
    calls = counted(model)
    with torch.no_grad():
        model(torch.randn(2, 6, 16))
    assert len(calls) == 3


@pytest.mark.parametrize("gradients", [True, False])
def test_inside_a_whole_transformer(gradients):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.nn.Transformer(16, 4, 1, 2, 32, dropout=0.0, batch_first=True).eval()
    source, target = torch.randn(2, 5, 16), torch.randn(2, 6, 16)
    options = {"tgt_mask": FUTURE, "memory_key_padding_mask": padded(5, 3)}
    with torch.set_grad_enabled(gradients):
        right = model(source, target, **options)
        names = nn.replace_attention(model)
        calls = counted(model)
        assert_close(model(source, target, **options), right, **close)
    assert len(names) == 5
    assert calls == names


def test_loads_what_torch_saved():
    source, model = encoder(), encoder()
    nn.replace_attention(model)
    model.load_state_dict(source.state_dict())
    x = torch.randn(2, 6, 16)
    assert_close(model(x), source(x), **close)
    model.load_state_dict(model.state_dict())
    assert_close(model(x), source(x), **close)


def test_loads_what_torch_saved_with_other_widths():
    theirs, ours = pair(kdim=10, vdim=12)
    torch.nn.init.normal_(theirs.in_proj_bias)
    ours.load_state_dict(theirs.state_dict())
    x, k, v = torch.randn(3, 6, 16), torch.randn(3, 5, 10), torch.randn(3, 5, 12)
    assert_close(ours(x, k, v), theirs(x, k, v), **close)


def test_a_module_used_twice_stays_one():
    shared = torch.nn.MultiheadAttention(16, 4)
    model = torch.nn.ModuleDict({"a": shared, "b": shared})
    nn.replace_attention(model)
    assert model["a"] is model["b"]
    assert isinstance(model["a"], nn.DropIn)


def test_refuses_a_model_without_attention():
    with pytest.raises(regard.RegardError) as error:
        nn.replace_attention(torch.nn.Linear(2, 2))
    assert str(error.value) == (
        "there is nothing to replace in this model\n"
        "  got:      Linear\n"
        "  accepted: a model that contains nn.MultiheadAttention"
    )


@pytest.mark.compiled
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("as_floats", [True, False])
def test_compiles_as_one_graph(as_floats, need_weights):
    _, ours = pair()
    x, hidden = torch.randn(2, 6, 16), padded(6, 4)
    hidden = torch.zeros(2, 6).masked_fill(hidden, -torch.inf) if as_floats else hidden
    run = torch.compile(ours, fullgraph=True, backend="eager")
    options = {"key_padding_mask": hidden, "need_weights": need_weights}
    assert_close(run(x, x, x, **options), ours(x, x, x, **options), **close)


@pytest.mark.compiled
def test_an_encoder_compiles_as_one_graph():
    model = encoder().eval()
    nn.replace_attention(model)
    x, hidden = torch.randn(2, 6, 16), padded(6, 4)
    run = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        ours = run(x, src_key_padding_mask=hidden)
        assert_close(ours, model(x, src_key_padding_mask=hidden), **close)


def test_a_layer_that_is_not_training_stays_so():
    layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    nn.replace_attention(layer)
    assert not any(module.training for module in layer.modules())
