"""What models say of a text, with parts of them switched off: against their own dense runs."""

from __future__ import annotations

import http.client
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from regard.errors import RegardError
from regard.models import load
from regard.models.card import Card
from regard.models.readers import HuggingFaceReader, OwnTranslator, Reader
from regard.view.atlas import Atlas
from regard.view.predictions import predictor_of
from regard.view.subjects import TextInfo, run
from regard.view.subjects.model_runs import tokens_given
from regard.view.web import App
from regard.view.web.prediction_queries import PredictionAnswers
from tests.view import tiny_models
from tests.view.http_client import Visitor, asked
from tests.view.small_traces import seen

TEXT = "the cat sat on the mat and the cat"


class Case(NamedTuple):
    reader: Reader
    told: TextInfo
    atlas: Atlas
    answers: PredictionAnswers

    def ask(self, name: str, **words: object) -> Any:
        _, body = self.answers.answer(name, {k: str(v) for k, v in words.items()})
        if isinstance(body, bytes):
            return json.loads(body)
        return [json.loads(line) for line in body]


def case(reader: Reader, text: str = TEXT, tokens: int = 0) -> Case:
    found = run(reader, text, tokens, lambda *_: None)
    told, atlas = found.told(reader, text), found.atlas(reader.name)
    turn = threading.Lock()
    return Case(
        reader, told, atlas,
        PredictionAnswers(atlas, lambda: predictor_of(lambda: reader, told, turn)),
    )  # fmt: skip


class Bytes:
    """A tokenizer of transformers' shape: one token for each byte."""

    eos_token_id = 10

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Any, **_: Any) -> str:
        return bytes(int(i) for i in ids).decode(errors="replace")


def hugging_face() -> Reader:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).eval()
    return HuggingFaceReader("tiny", model, Bytes(), Card({}), 128)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder: Path = tmp_path_factory.mktemp("models")
    return {
        "causal": case(load(tiny_models.causal(folder / "c"))),
        "translator": case(load(tiny_models.translator(folder / "t"))),
        "huggingface": case(hugging_face()),
    }


def whole(of: Case) -> Tensor:
    """What the model says at every place of its text, in one plain run."""
    ids, model = torch.tensor([of.told.ids]), of.reader.model
    with torch.no_grad():
        if isinstance(of.reader, OwnTranslator):
            return model(torch.tensor([of.told.source]), ids[:, :-1])[0].softmax(-1)
        out = model(ids)
    return (out if isinstance(out, Tensor) else out.logits)[0].softmax(-1)


@pytest.mark.parametrize("name", ["causal", "translator", "huggingface"])
def test_the_ten_likeliest_tokens_and_the_rank_of_the_one_that_follows(
    cases: dict[str, Case], name: str
) -> None:
    of = cases[name]
    said = whole(of)
    for at in (0, len(said) // 2, len(said) - 1):
        told = of.ask("prediction", at=at)
        assert (told["at"], told["places"], told["moved"]) == (at, len(said), None)
        most = said[at].topk(10)
        assert [row["id"] for row in told["tokens"]] == most.indices.tolist()
        shares = [row["before"]["probability"] for row in told["tokens"]]
        torch.testing.assert_close(torch.tensor(shares), most.values, rtol=1e-4, atol=1e-6)
        assert [row["before"]["rank"] for row in told["tokens"]] == list(range(1, 11))
        if at + 1 == len(of.told.ids):
            assert told["next"] is None
        else:
            follows = of.told.ids[at + 1]
            place = said[at].argsort(descending=True).tolist().index(follows) + 1
            assert (told["next"]["id"], told["next"]["before"]["rank"]) == (follows, place)


def attended(of: Case, path: str, change: Any) -> Tensor:
    """The shares of the last place, where a projection's input [B, N, H·E] is changed by hand."""
    module: Any = of.reader.model.get_submodule(path)
    name = "out_proj" if hasattr(module, "out_proj") else "o_proj"
    hook = getattr(module, name).register_forward_pre_hook(lambda _, x: (change(x[0].clone()),))
    try:
        return whole(of)[-1]
    finally:
        hook.remove()


@pytest.mark.parametrize("name", ["causal", "translator", "huggingface"])
def test_heads_and_layers_that_are_off_write_nothing(cases: dict[str, Case], name: str) -> None:
    of = cases[name]
    place = len(of.atlas.maps) - 1
    path = of.atlas.maps[place].name
    said = whole(of)
    last = len(said) - 1

    def silenced(x: Tensor, heads: slice) -> Tensor:
        x.unflatten(-1, (4, -1))[..., heads, :] = 0
        return x

    for off, heads in ((f"head:{place}:1", slice(1, 2)), (f"layer:{place}", slice(0, 4))):
        expected = attended(of, path, lambda x, heads=heads: silenced(x, heads))
        told = of.ask("prediction", at=last, off=off)
        for row in told["tokens"]:
            for when, shares in (("before", said[last]), ("after", expected)):
                share = row[when]["probability"]
                assert share == pytest.approx(float(shares[row["id"]]), rel=1e-3)
        moved = float((said[last] - expected).abs().sum() / 2)
        assert told["moved"] == pytest.approx(moved, rel=1e-3)
        assert moved > 1e-4
    both = of.ask("prediction", at=last, off=f"head:0:1,head:{place}:1")
    assert both["moved"] != pytest.approx(
        of.ask("prediction", at=last, off="head:0:1")["moved"], rel=1e-3
    )
    # Nothing of it stays in the model.
    assert torch.equal(whole(of), said)


def test_an_edge_that_is_cut_is_masked_in_all_layers_or_in_one_head(
    cases: dict[str, Case],
) -> None:
    of = cases["huggingface"]
    last, model = len(whole(of)) - 1, of.reader.model
    hidden = torch.zeros(last + 1, last + 1)
    hidden[last, 3] = -math.inf
    hidden += torch.full_like(hidden, -math.inf).triu(1)
    with torch.no_grad():
        out: Any = model(torch.tensor([of.told.ids]), attention_mask=hidden[None, None])
    expected = out.logits[0, -1].softmax(-1)
    told = of.ask("prediction", at=last, off=f"edge:0:{last}:3")
    for row in told["tokens"]:
        assert row["after"]["probability"] == pytest.approx(float(expected[row["id"]]), rel=1e-3)
    # In the one row that is asked about, all heads one by one are the same as the edge.
    pairs = ",".join(f"pair:{layer}:{last}:3:{head}" for layer in range(2) for head in range(4))
    assert of.ask("prediction", at=last, off=pairs)["moved"] == pytest.approx(told["moved"])
    # An edge of a later token changes nothing here, and is no error.
    assert of.ask("prediction", at=5, off=f"edge:0:{last}:3")["moved"] == 0


def test_edges_of_a_translator_are_those_of_its_text_or_its_source(cases: dict[str, Case]) -> None:
    of = cases["translator"]
    last = len(whole(of)) - 1
    names = [m.name for m in of.atlas.maps]
    moved = [
        of.ask("prediction", at=last, off=f"edge:{at}:{0 if 'encoder' in name else last}:0")
        for at, name in enumerate(names)
    ]
    assert all(told["moved"] > 0 for told in moved), (names, moved)


def test_what_heads_give_the_logit_directly(cases: dict[str, Case]) -> None:
    of = cases["causal"]
    at = 4
    token = of.ask("prediction", at=at)["tokens"][0]["id"]
    told = of.ask("contributions", at=at, token=token)
    model: Any = of.reader.model
    kept: list[Tensor] = []
    attention = model.blocks[1].attention.out_proj
    hook = attention.register_forward_pre_hook(lambda _, x: kept.append(x[0][0, at]))
    stream: list[Tensor] = []
    ends = model.norm.register_forward_pre_hook(lambda _, x: stream.append(x[0][0, at]))
    with torch.no_grad():
        logits = model(torch.tensor([of.told.ids]))[0, at]
        each = kept[0].unflatten(0, (4, -1))
        weight = attention.weight.unflatten(1, (4, -1))
        wrote = torch.einsum("he,dhe->hd", each, weight)
        scale = (stream[0].var(correction=0) + model.norm.eps).rsqrt()
        centred = wrote - wrote.mean(-1, keepdim=True)
        expected = centred * scale * model.norm.weight @ model.embedding.weight[token]
    hook.remove()
    ends.remove()
    assert [part["map"] for part in told["maps"]] == [0, 1]
    torch.testing.assert_close(
        torch.tensor(told["maps"][1]["heads"]), expected, rtol=1e-3, atol=1e-5
    )
    given = told["rest"] + sum(sum(part["heads"]) for part in told["maps"])
    assert given == pytest.approx(told["logit"]) == pytest.approx(float(logits[token]), rel=1e-4)
    # Where the model's form does not allow it, that is said.
    none = cases["translator"].ask("contributions", at=0, token=1)
    assert "not a stack of blocks" in none["why"]


@pytest.mark.parametrize("name", ["causal", "translator", "huggingface"])
def test_a_text_goes_on_as_the_model_would_without_a_cache(
    cases: dict[str, Case], name: str
) -> None:
    of = cases[name]
    written = of.ask("continuation", at=3, tokens=5)
    ids = list(of.told.ids[:4])
    for line in written:
        again = Case(of.reader, of.told, of.atlas, of.answers)._replace(
            told=TextInfo(ids=(*ids, 0) if of.told.source else tuple(ids), source=of.told.source)
        )
        assert line["id"] == int(whole(again)[-1].argmax())
        ids.append(line["id"])
    drawn = [of.ask("continuation", at=3, tokens=5, temperature=2, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    # What is off stays off, also for what is remembered of the text.
    off = ",".join(["layer:0", "edge:1:2:1", "edge:1:3:0"])
    changed = of.ask("continuation", at=3, tokens=1, off=off)
    assert (
        changed[0]["id"]
        == max(
            of.ask("prediction", at=3, off=off)["tokens"],
            key=lambda row: row["after"]["probability"],
        )["id"]
    )


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        ("prediction", {"at": 99}, "there is no such token in the text"),
        ("prediction", {}, "without 'at'"),
        ("prediction", {"at": "x"}, "cannot be read"),
        ("prediction", {"at": 1, "off": "head:9:0"}, "there is no such map"),
        ("prediction", {"at": 1, "off": "head:0:4"}, "has no such head"),
        ("prediction", {"at": 1, "off": "edge:0:1:99"}, "has no such key"),
        ("prediction", {"at": 1, "off": "head:0:-1"}, "this cannot be switched off"),
        ("prediction", {"at": 1, "off": "all:0"}, "this cannot be switched off"),
        ("prediction", {"at": 1, "off": ",".join(["layer:0"] * 65)}, "too many parts are switched"),
        ("contributions", {"at": 1, "token": 10**6}, "the vocabulary has no such token"),
        ("contributions", {"at": 1, "token": -1}, "the vocabulary has no such token"),
        ("continuation", {"at": 1, "tokens": 0}, "the number of tokens to generate"),
        ("continuation", {"at": 1, "tokens": 500}, "longer than the model can read"),
        ("continuation", {"at": 1, "tokens": 5, "temperature": "nan"}, "temperature divides"),
        ("continuation", {"at": 1, "tokens": 5, "seed": -1}, "seed is a number"),
    ],
)
def test_what_makes_no_sense_is_told(
    cases: dict[str, Case], name: str, words: dict[str, Any], says: str
) -> None:
    with pytest.raises(RegardError, match=says):
        cases["causal"].ask(name, **words)


def test_a_model_that_only_reads_says_so() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, num_attention_heads=2, vocab_size=128)
    reader = HuggingFaceReader("b", transformers.BertModel(config).eval(), Bytes(), Card({}), 128)
    of = case(reader)
    assert of.told.silent == "this model does not predict tokens"
    with pytest.raises(RegardError, match="does not predict tokens"):
        of.ask("prediction", at=0)


@pytest.fixture(scope="module")
def visited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[App, Visitor]]:
    name = tiny_models.causal(tmp_path_factory.mktemp("served"))
    of = case(load(name), tokens=4)
    with App(of.atlas, told=of.told, reader=tiny_models.slow(name, 0.01)) as app:
        yield app, Visitor.enter(app.url)


def test_the_app_answers_and_stops_when_nobody_listens(visited: tuple[App, Visitor]) -> None:
    app, visitor = visited
    told = app.session.now.told
    # The last token was written and not read: all others are in the map.
    assert len(told.ids) == app.atlas.maps[0].shape[1]
    found = json.loads(visitor.get("prediction?at=2&off=head:0:1").body)
    assert len(found["tokens"]) == 10
    assert visitor.get("prediction?at=-1").status == 400
    assert visitor.get("prediction?at=2&edition=7").status == 205
    assert asked(app.port, "GET", f"{visitor.room}prediction?at=2").status == 403
    whole = visitor.get("continuation?at=2&tokens=3&temperature=1&seed=5")
    assert whole.headers["Transfer-Encoding"] == "chunked"
    assert len(whole.body.splitlines()) == 3
    # Who hangs up stops it, between two parts of the model and not at the end of the text.
    line = http.client.HTTPConnection("127.0.0.1", app.port, timeout=20)
    line.request("GET", f"{visitor.room}continuation?at=2&tokens=50&temperature=1",
                 headers={"Cookie": visitor.cookie})  # fmt: skip
    runs: list[int] = []
    reader = app.session._reader
    assert reader is not None
    reader.model.register_forward_hook(lambda *_: runs.append(1))
    answer = line.getresponse()
    assert json.loads(answer.readline())["token"]
    line.close()
    answer.close()
    began, ran = time.monotonic(), -1
    while ran != (ran := len(runs)):
        time.sleep(0.5)
    assert time.monotonic() - began < 5
    assert ran < 25
    assert json.loads(visitor.get("prediction?at=2").body)["at"] == 2


def test_nothing_is_foretold_of_a_trace() -> None:
    with App(seen(5)) as app:
        refused = Visitor.enter(app.url).get("prediction?at=0")
    assert (refused.status, b"no model that predicts" in refused.body) == (400, True)


def test_tokens_that_are_read_twice_count_once() -> None:
    model = torch.nn.Embedding(9, 2)
    with tokens_given(model) as ids:
        for given in ([1, 2], [3], [1, 2, 3, 4]):
            model(torch.tensor([given]))
    assert ids == [1, 2, 3, 4]


def test_predictor_runs_are_one_at_a_time(cases: dict[str, Case]) -> None:
    """What is off for one question is on for another that comes meanwhile."""
    of = cases["causal"]
    expected = {off: of.ask("prediction", at=5, off=off) for off in ("", "layer:0", "head:1:2")}
    wrong: list[str] = []

    def ask(off: str) -> None:
        found = [of.ask("prediction", at=5, off=off) for _ in range(5)]
        wrong.extend(off for each in found if each != expected[off])

    threads = [threading.Thread(target=ask, args=(off,)) for off in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
