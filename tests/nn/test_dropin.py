import copy
import pickle
import warnings

import pytest
import torch
from hypothesis import given, strategies
from torch.testing import assert_close

import regard
from regard import nn

close = {"atol": 1e-5, "rtol": 1e-4}


MADE = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False, "batch_first": True},
    "other widths": {"kdim": 10, "vdim": 12, "batch_first": True},
    "other keys": {"kdim": 10},
    "bias_kv": {"add_bias_kv": True, "batch_first": True},
    "zero": {"add_zero_attn": True},
    "bias_kv and zero": {"add_bias_kv": True, "add_zero_attn": True, "bias": False, "vdim": 12},
}


def inputs(options, batch=3, itself=False, seed=0, dtype=torch.float32):
    """Query, key and value for a module made with these options."""
    draw = torch.Generator().manual_seed(seed)
    order = [] if batch is None else [batch]
    shapes = [(6, 16), (5, options.get("kdim", 16)), (5, options.get("vdim", 16))]
    first = options.get("batch_first", False)
    whole = [(*order, n, w) if first else (n, *order, w) for n, w in shapes]
    q, k, v = (torch.randn(shape, generator=draw, dtype=dtype) for shape in whole)
    return (q, q, q) if itself else (q, k, v)


def pair(batch_first=True, **options):
    """PyTorch's module and the drop-in with the same weights."""
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=batch_first, **options)
    return theirs, nn.DropIn.of(theirs)


def counted(module):
    """How often the drop-ins inside a model are called, as a growing list.

    Counts inside forward: hooks would themselves turn PyTorch's shortcuts off."""
    calls = []
    for name, part in module.named_modules():
        if isinstance(part, nn.DropIn):
            inner = part.forward

            def forward(*args, _inner=inner, _name=name, **options):
                calls.append(_name)
                return _inner(*args, **options)

            part.forward = forward
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
    layer.self_attn = nn.DropIn.of(layer.self_attn)
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


@pytest.mark.parametrize("name", MADE)
def test_it_is_made_like_torchs_and_has_its_attributes(name):
    torch.manual_seed(1)
    theirs = torch.nn.MultiheadAttention(16, 4, **MADE[name])
    torch.manual_seed(1)
    ours = nn.DropIn(16, 4, **MADE[name])
    for attribute in (
        "embed_dim", "num_heads", "head_dim", "kdim", "vdim", "batch_first", "dropout",
        "add_zero_attn", "_qkv_same_embed_dim", "training",
    ):  # fmt: skip
        assert getattr(ours, attribute) == getattr(theirs, attribute)
    for attribute in (
        "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight",
        "bias_k", "bias_v",
    ):  # fmt: skip
        mine, right = getattr(ours, attribute), getattr(theirs, attribute)
        assert (mine is None) == (right is None)
        assert mine is None or torch.equal(mine, right)
    assert torch.equal(ours.out_proj.weight, theirs.out_proj.weight)
    assert isinstance(ours, torch.nn.MultiheadAttention)


@pytest.mark.parametrize("name", MADE)
def test_checkpoints_load_both_ways(name, tmp_path):
    theirs, ours = torch.nn.MultiheadAttention(16, 4, **MADE[name]), nn.DropIn(16, 4, **MADE[name])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    q, k, v = inputs(MADE[name])
    torch.save(theirs.state_dict(), tmp_path / "theirs.pt")
    assert not torch.equal(ours.out_proj.weight, theirs.out_proj.weight)
    ours.load_state_dict(torch.load(tmp_path / "theirs.pt"), strict=True)
    assert_close(ours(q, k, v)[0], theirs(q, k, v)[0], **close)
    for p in ours.parameters():
        torch.nn.init.normal_(p)
    torch.save(ours.state_dict(), tmp_path / "ours.pt")
    theirs.load_state_dict(torch.load(tmp_path / "ours.pt"), strict=True)
    assert_close(ours(q, k, v)[0], theirs(q, k, v)[0], **close)


def test_a_replaced_model_saves_what_torch_loads():
    source, model = encoder(), encoder()
    nn.replace_attention(model)
    source.load_state_dict(model.state_dict(), strict=True)
    x = torch.randn(2, 6, 16)
    assert_close(model(x), source(x), **close)


def test_device_and_type_are_those_asked_for():
    ours = nn.DropIn(16, 4, device="meta", dtype=torch.float64, add_bias_kv=True)
    assert {(p.device.type, p.dtype) for p in ours.parameters()} == {("meta", torch.float64)}


@pytest.mark.parametrize("name", MADE)
@given(data=strategies.data())
def test_every_call_equals_torch(name, data):
    """Outputs, weights and the gradients of both, over masks of every form."""
    options = MADE[name]
    theirs = torch.nn.MultiheadAttention(16, 4, **options, dtype=torch.float64)
    for p in theirs.parameters():
        torch.nn.init.normal_(p, std=0.5)
    ours = nn.DropIn(16, 4, **options, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    batch = data.draw(strategies.sampled_from([None, 1, 3]), "batch")
    itself = data.draw(strategies.booleans(), "itself") and not {"kdim", "vdim"} & options.keys()
    seed = data.draw(strategies.integers(0, 99), "seed")
    q, k, v = inputs(options, batch, itself, seed, torch.float64)
    time = 0 if batch is None else 1 if options.get("batch_first") else 0
    Q, K = q.shape[time], k.shape[time]
    draw = torch.Generator().manual_seed(seed)

    def drawn(kind, *shape):
        if kind == "float":
            return torch.randn(shape, generator=draw, dtype=torch.float64)
        # The first key may always be seen: PyTorch gives NaN to a query without keys.
        hidden = torch.rand(shape, generator=draw) > 0.6
        hidden[..., 0] = False
        return hidden

    call = {
        "need_weights": data.draw(strategies.booleans(), "need_weights"),
        "average_attn_weights": data.draw(strategies.booleans(), "average"),
    }
    kind = data.draw(strategies.sampled_from(["bool", "float"]), "kind")
    if data.draw(strategies.booleans(), "padding"):
        call["key_padding_mask"] = drawn(kind, *([] if batch is None else [batch]), K)
    which = data.draw(strategies.sampled_from([None, 2, 3]), "attn_mask")
    if which is not None:
        call["attn_mask"] = drawn(kind, *([] if which == 2 else [(batch or 1) * 4]), Q, K)
    results = []
    for module in (theirs, ours):
        module.zero_grad()
        given = [t.clone().requires_grad_() for t in (q, k, v)]
        given = [given[0]] * 3 if itself else given
        out, weights = module(*given, **call)
        loss = out.sin().sum() + (0 if weights is None else weights.square().sum())
        loss.backward()
        learned = {n: p.grad for n, p in module.named_parameters()}
        results.append((out, weights, [t.grad for t in given], learned))
    assert_close(results[1], results[0])


def test_training_is_the_same_as_with_torch():
    theirs, ours = pair()
    ours = nn.DropIn(16, 4, batch_first=True)
    ours.load_state_dict(theirs.state_dict())
    losses = []
    for module in (theirs, ours):
        optimiser = torch.optim.SGD(module.parameters(), lr=0.5)
        for step in range(5):
            x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(step))
            loss = (module(x, x, x)[0] - x.roll(1, 1)).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        losses.append((loss, dict(module.named_parameters())))
    assert_close(losses[1], losses[0], **close)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_causal_with_keys_that_are_appended(need_weights, masked):
    """All may see them: what PyTorch gives for the mask written out."""
    theirs, ours = pair(add_bias_kv=True, add_zero_attn=True)
    x = torch.randn(2, 6, 16)
    padding = {"key_padding_mask": padded(6, 4)} if masked else {}
    right = theirs(x, x, x, attn_mask=FUTURE, need_weights=need_weights, **padding)
    got = ours(x, x, x, attn_mask=FUTURE, is_causal=True, need_weights=need_weights, **padding)
    assert_close(got, right, **close)


def test_taking_the_place_keeps_parameters_and_hooks():
    layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    theirs = layer.self_attn
    theirs.in_proj_bias.requires_grad_(False)
    optimiser = torch.optim.SGD(layer.parameters(), lr=1.0)
    called = []
    first = theirs.register_forward_pre_hook(lambda m, args: called.append("before"))
    theirs.register_forward_hook(lambda m, args, out: called.append("after"))
    nn.replace_attention(layer)
    ours = layer.self_attn
    assert ours.in_proj_weight is theirs.in_proj_weight
    assert not ours.in_proj_bias.requires_grad
    kept = ours.in_proj_weight.detach().clone()
    layer(torch.randn(2, 5, 16)).square().mean().backward()
    optimiser.step()
    assert called == ["before", "after"]
    assert not torch.equal(ours.in_proj_weight, kept)
    first.remove()
    layer(torch.randn(2, 5, 16))
    assert called == ["before", "after", "after"]


class Derived(torch.nn.MultiheadAttention):
    pass


def test_what_may_compute_something_else_is_refused_and_nothing_is_replaced():
    model = torch.nn.ModuleList([torch.nn.MultiheadAttention(16, 4), Derived(16, 4)])
    with pytest.raises(regard.RegardError, match=r"got: .*test_dropin\.Derived"):
        nn.replace_attention(model)
    assert type(model[0]) is torch.nn.MultiheadAttention
    parametrized = torch.nn.utils.parametrizations.weight_norm(
        torch.nn.MultiheadAttention(16, 4), "in_proj_weight"
    )
    with pytest.raises(regard.RegardError, match="remove parametrizations first"):
        nn.DropIn.of(parametrized)


def test_a_module_that_is_called_in_a_way_of_its_own_is_refused():
    wrapped, compiled = torch.nn.MultiheadAttention(16, 4), torch.nn.MultiheadAttention(16, 4)
    wrapped.forward = wrapped.forward
    compiled.compile(backend="eager")
    for module, name in ((wrapped, "forward"), (compiled, "_compiled_call_impl")):
        with pytest.raises(regard.RegardError, match=f"its {name} was replaced"):
            nn.DropIn.of(module)


REFUSED = {
    "no batch in keys": ({"key": torch.randn(6, 16)}, "all with a batch or all without"),
    "widths": ({"query": torch.randn(2, 6, 12)}, "queries 16, keys 16, values 16 wide"),
    "batches": ({"query": torch.randn(3, 6, 16)}, "each query of a batch its keys"),
    "values": ({"value": torch.randn(2, 5, 16)}, "as many keys as values"),
    "mask": ({"attn_mask": torch.ones(5, 6).bool()}, r"\[6, 6\] or \[8, 6, 6\]"),
    "mask of integers": ({"attn_mask": torch.ones(6, 6).long()}, "True is masked; or floats"),
    "padding": ({"key_padding_mask": torch.ones(6).bool()}, r"accepted: \[2, 6\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_are_caught_by_who_expects_torchs(name):
    wrong, words = REFUSED[name]
    x = torch.randn(2, 6, 16)
    call = {"query": x, "key": x, "value": x} | wrong
    theirs, ours = pair()
    with pytest.raises((RuntimeError, AssertionError)):
        theirs(**call)
    for kind in (regard.RegardError, RuntimeError, AssertionError):
        with pytest.raises(kind, match=words):
            ours(**call)


def test_no_heads_to_share_is_torchs_own_error():
    with pytest.raises(AssertionError, match="divisible"):
        nn.DropIn(16, 3)
    with pytest.raises(ValueError, match="greater than 0"):
        nn.DropIn(0, 3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_that_packs_padding_after_the_fact():
    """PyTorch's encoder decides on nested tensors when it is made, and gives them to its layers."""
    model = encoder().eval()
    assert model.use_nested_tensor
    x, hidden = torch.randn(2, 6, 16), padded(6, 4)
    with torch.no_grad():
        right = model(x, src_key_padding_mask=hidden)
        model.layers[0].self_attn = nn.DropIn.of(model.layers[0].self_attn)
        calls = counted(model)
        got = model(x, src_key_padding_mask=hidden)
    assert calls == ["layers.0.self_attn"]
    assert_close(got, right, **close)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_take_no_masks():
    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    with pytest.raises(nn.DropInError) as error:
        nn.DropIn(16, 4, batch_first=True)(x, x, x, key_padding_mask=padded(5, 3))
    assert str(error.value) == (
        "nested tensors attend to themselves, without masks\n"
        "  got:      query is key: True, key is value: True, masks: True\n"
        "  do:       pad them: torch.nested.to_padded_tensor, and key_padding_mask="
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("average", [True, False])
def test_weights_of_nested_tensors_are_padded_as_in_torch(average):
    theirs, ours = pair(batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(3, 16), torch.randn(5, 16)])
    with torch.no_grad():
        right = theirs.eval()(x, x, x, average_attn_weights=average)
        got = ours.eval()(x, x, x, average_attn_weights=average)
    assert_close(got[1], right[1])
    assert_close([*got[0].unbind()], [*right[0].unbind()])


def test_it_is_watched_under_its_own_name():
    model = encoder().eval()
    names = nn.replace_attention(model)
    with regard.watch(model) as seen, torch.no_grad():
        model(torch.randn(2, 6, 16))
    assert list(seen) == names


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_watched_once():
    model = encoder().eval()
    names = nn.replace_attention(model)
    with regard.watch(model, keep="traces") as seen, torch.no_grad():
        model(torch.randn(2, 6, 16), src_key_padding_mask=padded(6, 4))
    assert [len(seen[name].traces) for name in names] == [1, 1]


def test_a_copy_is_whole():
    layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    nn.replace_attention(layer)
    other = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    x = torch.randn(2, 5, 16)
    calls = counted(other)
    with torch.no_grad():
        assert_close(other(x), layer(x))
    assert calls == ["self_attn"]


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
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_compiles_as_one_graph():
    model = encoder().eval()
    nn.replace_attention(model)
    x, hidden = torch.randn(2, 6, 16), padded(6, 4)
    run = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        ours = run(x, src_key_padding_mask=hidden)
        right = model(x, src_key_padding_mask=hidden)
    # PyTorch's encoder packs the batch only when it is not compiled, which leaves 0 in the padding.
    assert_close(ours[~hidden], right[~hidden], **close)


def test_a_layer_that_is_not_training_stays_so():
    layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    nn.replace_attention(layer)
    assert not any(module.training for module in layer.modules())
