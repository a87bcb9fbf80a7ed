"""Arguments of other kinds are refused in words, wherever they are given."""

import math

import pytest
import torch

import regard
from regard import biases, cost, interpret, linear, masks, models, nn, parallel, scores, view
from regard.arguments import described, flag, is_number
from regard.seen import Seen

q, k, v = torch.randn(3, 2, 4, 6, 8)
fades, rate = -torch.rand(2, 4, 6), torch.rand(2, 4, 6)
table = [[1.0, 2.0, 3.0]]
MODEL = models.CausalModel(models.CausalConfig(9, d_model=8, layers=1, heads=2)).eval()
TEXT = [torch.tensor([[1, 2, 3]])]


WORDS = ["a", " cat"]
SEEN = Seen()
SEEN.layer("a.encoder_attn").take(regard.trace(q, k, v), 0, keep=True)


def logit(output):
    return output[:, -1, 0]


REFUSED = {
    "softcap bounds the logits": lambda: regard.attention(q, k, v, softcap="a"),
    "dropout is the share": lambda: regard.attention(q, k, v, dropout="a"),
    r"(?s)dropout is the share.*None": lambda: regard.trace(q, k, v, dropout=None),
    "scale is a number": lambda: regard.attention(q, k, v, scale=[1.0]),
    r"(?s)scale is a number.*\[6\]": lambda: regard.plan(q, k, v, scale=torch.ones(6)),
    "cosine: temperature must be positive": lambda: scores.cosine("a"),
    "distance: bandwidth must be positive": lambda: scores.distance("x"),
    "(?s)bandwidth must be positive.*nan": lambda: scores.distance(math.nan),
    "general: W is a tensor": lambda: scores.general(table),
    "additive: Wk is a tensor": lambda: scores.additive(torch.ones(8, 2), None, torch.ones(2)),
    "alibi: one slope per head": lambda: biases.alibi("a"),
    "(?s)alibi: one slope.*None": lambda: biases.alibi(None),
    "offset must be a whole number": lambda: biases.alibi([1.0], offset=(3,)),
    "slopes: heads must be a whole number": lambda: biases.slopes(2.5),
    "slopes: heads is too small": lambda: biases.slopes(0),
    "relative: the table is a tensor": lambda: biases.relative(table),
    "dense: the bias is a tensor": lambda: biases.dense(table),
    "window_size has a left and a right": lambda: masks.from_flash(window_size=(3,)),
    "a side of window_size must be a whole": lambda: masks.from_flash(window_size=(3, 0.5)),
    "sliding_window must be a whole number": lambda: masks.from_huggingface(sliding_window="a"),
    "attention_mask is a tensor": lambda: masks.from_huggingface([[1, 1, 0]]),
    "from_sdpa: the mask is a tensor": lambda: masks.from_sdpa([[True]]),
    "links are made of the weights": lambda: interpret.word_links(table),
    "at_least= is a weight": lambda: interpret.word_links(torch.ones(1, 1), at_least="a"),
    "found= are links": lambda: interpret.alignment_error_rate(3, [(0, 0)]),
    "features are made by a function": lambda: linear.attention(q, k, v, features="relu"),
    "state= is the state after earlier tokens": lambda: linear.gated(q, k, v, fades, state=0),
    "log_decay has a number": lambda: linear.gated(q, k, v, None),
    "(?s)log_decay has a number.*meta": lambda: linear.gated(q, k, v, fades.to("meta")),
    "beta has a number": lambda: linear.delta(q, k, v, None),
    "(?s)beta has.*complex": lambda: linear.delta(q, k, v, rate.to(torch.complex64)),
    "random_features: seed must be": lambda: linear.random_features(8, seed=0.5),
    "scale must be positive": lambda: linear.random_features(8, scale="a"),
    "heads must be a whole number": lambda: nn.MultiHeadAttention(16, 2.0),
    "key_width must be a whole number": lambda: nn.MultiHeadAttention(16, 2, key_width="a"),
    "head_width is too small": lambda: nn.MultiHeadAttention(16, 2, head_width=-1),
    "d_model is too small": lambda: nn.MultiHeadAttention(0, 1),
    "(?s)dropout is the share.*1.5": lambda: nn.MultiHeadAttention(16, 2, dropout=1.5),
    "hidden must be a whole number": lambda: nn.EncoderBlock(16, 2, hidden=8.0),
    "d_model must be a whole number": lambda: nn.DecoderBlock("a", 2),
    "(?s)hidden must be.*1.5": lambda: nn.AdditiveAttention(16, hidden=1.5),
    "(?s)d_model must be.*None": lambda: nn.DotAttention(None),
    "(?s)scale is a number.*list": lambda: nn.StaticAttention([1.0]),
    "turn by powers of a base": lambda: nn.MultiHeadAttention(16, 2, rotary=nn.Rotary(math.nan)),
    "Rotary: width must be": lambda: nn.MultiHeadAttention(16, 2, rotary=nn.Rotary(width="a")),
    "(?s)features are made.*None": lambda: nn.LinearAttention(16, 2, feature=None),
    "q, k and v": lambda: nn.linear_attention(q, k[:, 0], v),
    "padding": lambda: nn.linear_attention(q, k, v, lengths="a"),
    "(?s)chunk must be.*0.5": lambda: nn.linear_attention(q, k, v, chunk=0.5),
    "weights come from PyTorch's own": lambda: nn.from_torch(torch.nn.Linear(2, 2)),
    "loaded into an attention module": lambda: nn.load_weights(torch.nn.Linear(2, 2), {}),
    "norm_offset= is added": lambda: nn.load_weights(
        nn.MultiHeadAttention(4, 2), {}, norm_offset="1"
    ),
    "layout= is the order": lambda: nn.load_weights(nn.MultiHeadAttention(4, 2), {}, layout="x"),
    "those of a state dict": lambda: nn.load_weights(nn.MultiHeadAttention(4, 2), None),
    "what is given is a model": lambda: nn.replace_attention("model"),
    "every must be a whole number": lambda: regard.watch(nn.MultiHeadAttention(4, 2), every=2.5),
    "what is warmed up is a model": lambda: regard.warm_up("model"),
    "(?s)no such device.*gpu": lambda: regard.warm_up(width=8, device="gpu"),
    "(?s)by its path.*None": lambda: regard.load(None),
    "(?s)by its path.*3": lambda: regard.trace(q, k, v).save(3),
    "(?s)by its path.*4": lambda: SEEN.save(4),
    "(?s)by its path.*5": lambda: regard.watch(nn.MultiHeadAttention(4, 2), keep="traces", spill=5),
    "(?s)by its path.*6": lambda: view.page(regard.trace(q, k, v), 6),
    "a model is opened by its name": lambda: models.load(3),
    "(?s)no such device.*None": lambda: regard.load("run.regard", device=None),
    "a device has a name": lambda: cost.device(4),
    "a model has a name": lambda: cost.model(None, 8),
    "(?s)unknown dtype.*float32": lambda: cost.layer(64, 4, 8, dtype=["float32"]),
    "tile counts queries and keys": lambda: cost.layer(64, 4, 8, tile=128),
    "tile: a side must be": lambda: cost.layer(64, 4, 8, tile=(1.5, 2)),
    "context must be a whole number": lambda: cost.cache_bytes(cost.preset("gpt2"), 0.5),
    "a cache is that of a model": lambda: cost.cache_bytes("gpt2", 8),
    "layer: heads must be a whole": lambda: cost.layer(64, "a", 8),
    "a: vocabulary is too small": lambda: cost.Configuration("a", 64, 4, 2, vocabulary=-1),
    "a: windows says": lambda: cost.Configuration("a", 64, 4, 2, windows=8),
    "a window must be a whole": lambda: cost.Configuration("a", 64, 4, 2, windows=("8",)),
    "keys are scored by a trace": lambda: interpret.heavy_hitters(q, 4, recent=2),
    "share= is how much": lambda: interpret.prune(regard.trace(q, k, v), [0], "a"),
    "what has an anatomy is a model": lambda: interpret.anatomy("gpt2"),
    "seen= is what was seen of a model": lambda: interpret.citations(None, [range(2)]),
    "layers= are patterns": lambda: interpret.citations({}, [range(2)], layers=[0]),
    "a metric is a function": lambda: interpret.ablate(MODEL, TEXT, "loss"),
    "(?s)texts are what the model.*None": lambda: interpret.ablate(MODEL, None, len),
    "batch must be a whole number": lambda: interpret.ablate(MODEL, TEXT, logit, batch=0.5),
    "seed must be a whole number": lambda: interpret.ablate(MODEL, TEXT, logit, seed="a"),
    "a layer must be a whole": lambda: interpret.knock_out(
        MODEL, TEXT, logit, [(2, 0)], heads=[("a", 0)]
    ),
    "by_document takes lengths": lambda: parallel.by_document(8, 2),
    "layers is too small": lambda: models.CausalConfig(layers=-1),
    "longest must be a whole": lambda: models.TranslatorConfig(longest="a"),
    "there is nothing to draw": lambda: view.heat_map(None),
    "there is nothing to look at": lambda: view.head_grid("a"),
    # Calls that came before are not checked anew.
    "(?s)training must be.*again": lambda: (
        [regard.attention(q, k, v) for _ in range(3)]
        and regard.attention(q, k, v, training="again")
    ),
    "(?s)training must be.*traced": lambda: (
        [regard.trace(q, k, v) for _ in range(3)] and regard.trace(q, k, v, training="traced")
    ),
    "training must be true or false": lambda: regard.attention(q, k, v, dropout=0.5, training="no"),
    "(?s)unknown backend.*tiled.*or None": lambda: regard.attention(q, k, v, backend=["tiled"]),
    r"(?s)unknown backend.*\{\}": lambda: regard.trace(q, k, v, backend={}),
    "general must be true or false": lambda: nn.DotAttention(8, general="no"),
    "bias must be true or false": lambda: nn.MultiHeadAttention(16, 2, bias="no"),
    "(?s)qk_norm must be true": lambda: nn.MultiHeadAttention(16, 2, qk_norm="no"),
    "Rotary: interleaved must be": lambda: nn.Rotary(interleaved="no")(q),
    "embed_dim must be a whole": lambda: nn.DropIn("8", 2),
    "num_heads must be a whole": lambda: nn.DropIn(8, 2.0),
    "kdim must be a whole": lambda: nn.DropIn(8, 2, kdim="a"),
    "batch_first must be true": lambda: nn.DropIn(8, 2, batch_first="no"),
    "(?s)dropout is the share.*'x'": lambda: nn.DropIn(8, 2, dropout="x"),
    "gradients must be true or false": lambda: regard.watch(MODEL, keep="traces", gradients="no"),
    "frozen must be true or false": lambda: interpret.ablate(MODEL, TEXT, logit, frozen="no"),
    "(?s)frozen must be true.*2": lambda: interpret.patch(MODEL, TEXT, TEXT, logit, frozen=2),
    "positive must be true": lambda: interpret.attribute(MODEL, TEXT[0], logit, positive="no"),
    "probes must be true or false": lambda: interpret.heads(MODEL, TEXT, probes="no"),
    "links= is a list": lambda: interpret.heads(MODEL, TEXT, links=3),
    "parses= is a list": lambda: interpret.heads(MODEL, TEXT, parses=3),
    "a parse is the place": lambda: interpret.heads(MODEL, TEXT, parses=["x"]),
    "(?s)a parse is.*got: +3": lambda: interpret.heads(MODEL, TEXT, parses=[3]),
    "predicts must be true or false": lambda: interpret.word_alignment(
        SEEN, [[2]], [[0]], predicts=2
    ),
    "targets= is a list": lambda: interpret.word_alignment(SEEN, 3, [[0]]),
    "a word of sources= is a list": lambda: interpret.word_alignment(SEEN, [[1]], [0]),
    "a place of targets must be": lambda: interpret.word_alignment(SEEN, [[1.5]], [[0]]),
    "sources= names a token twice": lambda: interpret.word_alignment(SEEN, [[1]], [[0, 0]]),
    "weights that can be compared": lambda: interpret.word_links(torch.tensor([[math.nan, 1.0]])),
    "passages= is a list": lambda: interpret.citations(SEEN, 3),
    "tokens must be a whole": lambda: interpret.citations(SEEN, [range(2)], prompt=1, tokens=1.5),
    "batch= says which sequence": lambda: interpret.citations(SEEN, [range(2)], prompt=1, batch=9),
    "(?s)tokens must be.*'3'": lambda: interpret.token_times(SEEN, "3", [(0, 0)]),
    "smooth must be a whole": lambda: interpret.token_times(
        SEEN, 1, [(0, 0)], prompt=1, smooth=3.0
    ),
    "seconds= is how long": lambda: interpret.token_times(SEEN, 1, [(0, 0)], prompt=1, seconds=-1),
    "(?s)tokens= are texts.*1, 2": lambda: interpret.word_times(SEEN, [1, 2], [(0, 0)], prompt=1),
    "tokens= is a list": lambda: interpret.grounding(SEEN, 3),
    "grid= counts rows and columns": lambda: interpret.grounding(SEEN, WORDS, grid=3),
    "grounding: rows must be": lambda: interpret.grounding(SEEN, WORDS, grid=("a", 2)),
    "passes must be a whole": lambda: interpret.grounding(SEEN, WORDS, passes="x"),
    "runs= has the runs": lambda: parallel.Layout("x", "me"),
    "(?s)runs= has the runs.*0, 'a'": lambda: parallel.Layout([(0, "a")], "me"),
    "(?s)tokens= are texts.*per sequence": lambda: view.page(SEEN, "never.html", [1, 2]),
    "tokens= are texts": lambda: view.heat_map(regard.trace(q, k, v), 3),
}


@pytest.mark.parametrize("words", REFUSED)
def test_arguments_of_other_kinds_are_refused_in_words(words, monkeypatch):
    # Wrong types reach regard's own checks even when the shape-checking hook is on.
    monkeypatch.setattr("jaxtyping.config.jaxtyping_disable", True)
    with pytest.raises(regard.RegardError, match=words):
        REFUSED[words]()


def test_numbers_of_any_kind_are_numbers():
    np = pytest.importorskip("numpy")
    assert all(map(is_number, (1, 0.5, torch.tensor(2.0), np.float32(1), np.int64(2))))
    assert not any(
        map(is_number, ("1", None, [1.0], 1j, torch.ones(2), torch.ones(1, device="meta")))
    )


def test_flags_of_any_kind_are_flags():
    numpy = pytest.importorskip("numpy")
    assert [flag("a", value) for value in (True, 1, numpy.bool_(1), False, 0)] == [True] * 3 + [
        False
    ] * 2


def test_a_long_argument_is_cut():
    assert len(described(list(range(1000)))) < 100
