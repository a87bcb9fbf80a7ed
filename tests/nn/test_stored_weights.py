import pytest
import torch
from torch.testing import assert_close

import regard
from regard import masks, nn

close = {"atol": 1e-6, "rtol": 1e-5}


def torch_attention(**options):
    """PyTorch's module with biases that are not 0."""
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True, **options)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("bias", [True, False])
def test_self_attention_equals_torch(bias):
    theirs = torch_attention(bias=bias)
    x = torch.randn(2, 7, 16)
    assert_close(nn.from_torch(theirs)(x), theirs(x, x, x)[0], **close)


def test_cross_attention_of_other_widths_equals_torch():
    theirs = torch_attention(kdim=10, vdim=12)
    x, keys, values = torch.randn(2, 7, 16), torch.randn(2, 5, 10), torch.randn(2, 5, 12)
    y, seen = nn.from_torch(theirs)(x, keys, values, trace=True)
    out, weights = theirs(x, keys, values, average_attn_weights=False)
    assert_close(y, out, **close)
    assert_close(seen.weights(), weights, **close)


def test_masks_equal_torch():
    theirs = torch_attention()
    x, lengths = torch.randn(2, 7, 16), torch.tensor([7, 4])
    hidden = torch.arange(7) >= lengths[:, None]
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    ours = nn.from_torch(theirs)(x, mask=masks.causal() & masks.padding(lengths))
    assert_close(ours, theirs(x, x, x, hidden, attn_mask=future)[0], **close)


def test_from_torch_keeps_type_mode_dropout_and_frozenness():
    theirs = torch_attention(dropout=0.3).double().eval().requires_grad_(False)
    ours = nn.from_torch(theirs)
    assert ours.q_proj.weight.dtype == torch.float64
    assert not ours.training
    assert ours.dropout == 0.3
    assert not any(p.requires_grad for p in ours.parameters())


@pytest.mark.parametrize("widths", [{}, {"kdim": 8, "vdim": 12}], ids=["fused", "apart"])
def test_from_torch_keeps_parts_frozen_that_were(widths):
    theirs = torch.nn.MultiheadAttention(16, 4, **widths)
    frozen = {name for name, _ in theirs.named_parameters() if name != "out_proj.weight"}
    frozen -= {"v_proj_weight"}
    for name in frozen:
        theirs.get_parameter(name).requires_grad_(False)
    learned = {name for name, p in nn.from_torch(theirs).named_parameters() if p.requires_grad}
    assert learned == {"out_proj.weight"} | ({"v_proj.weight"} if widths else set())


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_from_torch_refuses_appended_keys(options):
    with pytest.raises(regard.RegardError, match="keys that PyTorch appends by itself"):
        nn.from_torch(torch.nn.MultiheadAttention(16, 4, **options))


def linear(out, width, bias=True):
    return {"weight": torch.randn(out, width)} | ({"bias": torch.randn(out)} if bias else {})


def state_of(parts):
    return {f"{name}.{kind}": t for name, part in parts.items() for kind, t in part.items()}


LAYOUTS = {
    "llama": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "bart": ("q_proj", "k_proj", "v_proj", "out_proj"),
    "phi": ("q_proj", "k_proj", "v_proj", "dense"),
    "bert": ("self.query", "self.key", "self.value", "output.dense"),
    "vit": ("attention.query", "attention.key", "attention.value", "output.dense"),
}


@pytest.mark.parametrize("names", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_reads_projections_stored_apart(names):
    sizes = (16, 8, 8, 16)
    parts = {name: linear(size, 16) for name, size in zip(names, sizes, strict=True)}
    attention = nn.MultiHeadAttention(16, 4, kv_heads=2, bias=True)
    state = {f"model.3.{name}": t for name, t in state_of(parts).items()}
    nn.load_weights(attention, state | {"model.30.q_proj.weight": torch.zeros(1)}, "model.3.")
    own = (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj)
    for name, projection in zip(names, own, strict=True):
        assert torch.equal(projection.weight, parts[name]["weight"])
        assert torch.equal(projection.bias, parts[name]["bias"])


def gpt2(state, x, heads, transposed):
    """GPT-2's attention, as its own code computes it."""
    weight, out = state["c_attn.weight"], state["c_proj.weight"]
    weight, out = (weight, out) if transposed else (weight.mT, out.mT)
    q, k, v = (x @ weight + state["c_attn.bias"]).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    s = q @ k.mT / q.shape[-1] ** 0.5
    p = s.masked_fill(torch.ones_like(s).triu(1) > 0, -torch.inf).softmax(-1)
    return (p @ v).transpose(1, 2).flatten(2) @ out + state["c_proj.bias"]


@pytest.mark.parametrize("transposed", [True, False], ids=["gpt2", "nn.Linear"])
def test_reads_fused_projections(transposed):
    fused, out = torch.randn(16, 48), torch.randn(16, 16)
    state = {
        "c_attn.weight": fused if transposed else fused.mT,
        "c_attn.bias": torch.randn(48),
        "c_proj.weight": out,
        "c_proj.bias": torch.randn(16),
        "bias": torch.ones(1, 1, 32, 32).tril().bool(),
        "masked_bias": torch.tensor(-1e4),
    }
    attention = nn.MultiHeadAttention(16, 4, bias=True)
    nn.load_weights(attention, state, layout=None if transposed else "side by side")
    x = torch.randn(2, 7, 16)
    right = gpt2(state, x, 4, transposed)
    assert_close(attention(x, mask=masks.causal()), right, atol=1e-4, rtol=1e-4)


def big_code(multi_query):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPTBigCodeConfig(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=4, multi_query=multi_query,
        attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    theirs = transformers.GPTBigCodeModel(config).h[0].attn.eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    return theirs


@pytest.mark.parametrize("multi_query", [True, False])
def test_reads_gpt_big_code(multi_query):
    theirs = big_code(multi_query)
    attention = nn.MultiHeadAttention(16, 4, kv_heads=1 if multi_query else 4, bias=True)
    layout = None if multi_query else "head by head"
    nn.load_weights(attention, theirs.state_dict(), layout=layout)
    x = torch.randn(2, 7, 16)
    right = theirs(x, attention_mask=torch.ones(1, 1, 7, 7).tril().bool())[0]
    assert_close(attention(x, mask=masks.causal()), right, atol=1e-4, rtol=1e-4)


def test_refuses_a_fused_projection_of_unknown_order():
    """nanoGPT and GPTBigCode have the same names and shapes, and other orders."""
    attention = nn.MultiHeadAttention(16, 4, bias=True)
    before = attention.q_proj.weight.clone()
    with pytest.raises(regard.RegardError, match="one of two orders") as error:
        nn.load_weights(attention, big_code(False).state_dict())
    assert 'layout="side by side"' in str(error.value)
    assert "GPTBigCode" in str(error.value)
    assert torch.equal(attention.q_proj.weight, before)


def test_refuses_head_by_head_where_heads_share_keys():
    attention = nn.MultiHeadAttention(16, 4, kv_heads=1, bias=True)
    with pytest.raises(regard.RegardError, match="a key head for each head"):
        nn.load_weights(attention, big_code(True).state_dict(), layout="head by head")


def test_reads_norms_of_queries_and_keys():
    parts = {name: linear(16, 16, bias=False) for name in LAYOUTS["llama"]}
    state = state_of(parts) | {"q_norm.weight": torch.randn(4), "k_norm.weight": torch.randn(4)}
    attention = nn.MultiHeadAttention(16, 4, qk_norm=True)
    nn.load_weights(attention, state)
    assert torch.equal(attention.k_norm.weight, state["k_norm.weight"])


def test_norms_of_gemma_are_told():
    """They multiply by 1 + weight, under the names and shapes of those that do not."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3TextConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, vocab_size=8,
    )  # fmt: skip
    theirs = transformers.Gemma3TextModel(config).layers[0].self_attn
    for norm in (theirs.q_norm, theirs.k_norm):
        torch.nn.init.normal_(norm.weight)
    attention = nn.MultiHeadAttention(16, 4, kv_heads=2, head_width=4, qk_norm=True)
    nn.load_weights(attention, theirs.state_dict(), norm_offset=1)
    x = torch.randn(2, 3, 4, 4)
    assert_close(attention.q_norm(x), theirs.q_norm(x), **close)
    assert_close(attention.k_norm(x), theirs.k_norm(x), **close)


def test_a_bias_that_the_source_lacks_is_zero():
    parts = {name: linear(16, 16, bias=name == "q_proj") for name in LAYOUTS["llama"]}
    attention = nn.MultiHeadAttention(16, 4, bias=True)
    torch.nn.init.ones_(attention.out_proj.bias)
    nn.load_weights(attention, state_of(parts))
    assert torch.equal(attention.q_proj.bias, parts["q_proj"]["bias"])
    assert not attention.out_proj.bias.any()


def test_refuses_what_has_no_place():
    parts = {name: linear(16, 16) for name in ("q_proj", "k_proj", "v_proj")}
    with pytest.raises(regard.RegardError) as error:
        nn.load_weights(nn.MultiHeadAttention(16, 4), state_of(parts) | {"sinks": torch.zeros(4)})
    assert str(error.value) == (
        "these weights are not those of this module\n"
        "  got:      no place for ['k_proj.bias', 'q_proj.bias', 'sinks', 'v_proj.bias']; "
        "nothing for ['out_proj.weight']\n"
        "  accepted: one tensor for each parameter; biases may be missing\n"
        "  do:       set bias=, qk_norm= and the prefix as the source has them"
    )


def test_refuses_keys_that_pytorch_appends():
    theirs = torch.nn.MultiheadAttention(16, 4, add_bias_kv=True)
    with pytest.raises(regard.RegardError, match=r"no place for \['bias_k', 'bias_v'\]"):
        nn.load_weights(nn.MultiHeadAttention(16, 4, bias=True), theirs.state_dict())


@pytest.mark.parametrize("other", ["query.weight", "in_proj_weight"])
def test_refuses_one_parameter_under_two_names(other):
    state = state_of({name: linear(16, 16, bias=False) for name in LAYOUTS["llama"]})
    state[other] = torch.zeros(48 if other == "in_proj_weight" else 16, 16)
    with pytest.raises(regard.RegardError, match=r"q_proj\.weight is in the source more than once"):
        nn.load_weights(nn.MultiHeadAttention(16, 4), state)


def test_refuses_other_shapes_and_leaves_the_module_as_it_was():
    parts = {name: linear(16, 16, bias=False) for name in LAYOUTS["llama"]}
    attention = nn.MultiHeadAttention(16, 4, kv_heads=2)
    before = attention.q_proj.weight.clone()
    with pytest.raises(regard.RegardError) as error:
        nn.load_weights(attention, state_of(parts))
    assert str(error.value).startswith(
        "k_proj.weight has another shape in the source\n  got:      [16, 16]\n  accepted: [8, 16]\n"
    )
    assert torch.equal(attention.q_proj.weight, before)


def test_refuses_fused_projections_of_other_heads():
    with pytest.raises(regard.RegardError, match=r"accepted: 32: \[16, 8, 8\] for queries"):
        nn.load_weights(
            nn.MultiHeadAttention(16, 4, kv_heads=2), {"in_proj_weight": torch.zeros(48, 16)}
        )


def test_weights_in_double_precision_stay_so():
    theirs = torch_attention(dtype=torch.float64)
    ours = nn.from_torch(theirs)
    assert torch.equal(ours.q_proj.weight, theirs.in_proj_weight[:16])
