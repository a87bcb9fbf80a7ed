"""Texts that are read in the app: by which models, what comes of it, how it is stopped."""

from __future__ import annotations

import gc
import json
import re
import threading
import time
import weakref
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import regard
from regard import RegardError
from regard.commands.first_view import first_view
from regard.commands.named_subject import subject_of
from regard.models import load, named_models
from regard.view.atlas import Atlas
from regard.view.subjects import Spelling, TextInfo, ViewOptions, known_heads, look
from regard.view.terminal import show
from regard.view.web import session as sessions
from regard.view.web.background_work import Tell, Work
from regard.view.web.session import Session, known_models
from tests.view import tiny_models
from tests.view.small_traces import seen

TEXT = "The cat sat on the mat."


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.causal(tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_models.translator(tmp_path_factory.mktemp("translator"))


def session(model: str = "") -> Session:
    return Session(Atlas.of(seen(5)), TextInfo("", model))


def read(on: Session, text: str, model: str, tokens: int = 0) -> dict[str, Any]:
    on.read({"text": text, "model": model, "tokens": tokens})
    on.work.wait(20)
    return on.about()


def test_a_model_reads_a_text(causal: str) -> None:
    on = session(causal)
    about = read(on, TEXT, causal)
    assert about["work"]["state"] == "done"
    assert (about["edition"], about["text"], about["model"]) == (2, TEXT, causal)
    atlas = on.now.answers.atlas
    assert [m.name for m in atlas.maps] == ["blocks.0.attention", "blocks.1.attention"]
    assert atlas.model == causal
    keys = atlas[0].keys
    assert keys is not None
    assert keys[0] == "<text>"
    assert "".join(keys[1:]) == TEXT


@pytest.mark.parametrize(
    ("name", "maps", "kinds"),
    [("regard-small", 8, {"induction", "previous"}), ("regard-king-james", 9, {"alignment"})],
)
def test_the_models_of_this_package_read_and_write(name: str, maps: int, kinds: set[str]) -> None:
    on = session()
    about = read(on, "And the king said to the people, Do not be afraid.", name, 8)
    assert about["work"]["state"] == "done", about["work"]
    assert len(on.now.answers.atlas.maps) == maps
    assert all(m.keys and m.queries for m in on.now.answers.atlas.maps)
    assert about["wrote"].strip()
    assert kinds <= {known["kind"] for known in about["heads"]}


def test_heads_that_the_card_names_are_told(causal: str, translator: str) -> None:
    on = session(causal)
    on.models[translator] = "without a card"
    assert on.about()["heads"] == []
    assert read(on, TEXT, causal)["heads"] == [
        {"kind": "induction", "map": 1, "head": 3},
        {"kind": "previous", "map": 0, "head": 1},
    ]
    assert read(on, TEXT, translator)["heads"] == []
    subject = subject_of([TEXT], causal)
    assert first_view(subject, subject.atlas(), ViewOptions()) == "map=1&head=3"
    assert first_view(subject, subject.atlas(), ViewOptions(layer="0", head="2")) == "head=2"


def test_a_model_goes_on_in_the_same_map(causal: str) -> None:
    on = session(causal)
    about = read(on, TEXT, causal, 6)
    assert about["work"] == {
        "state": "done", "doing": "drawing", "done": 0, "total": 0, "stopping": False,
        "number": 1, "edition": 2,
    }  # fmt: skip
    reader = regard.models.load(causal)
    given, wrote = reader.read(TEXT), reader.generate(TEXT, 6)
    assert about["wrote"] == wrote
    of = on.now.answers.atlas[1]
    # The last token was written, and not read: it has no row.
    n = len(given) + 5
    assert of.shape == (4, n, n)
    assert of.describe()["starts"] == [0, *range(len(given), n)]
    assert of.keys is not None
    assert list(of.keys[: len(given)]) == given
    assert "".join(of.keys[1:]).encode()[:20] == (TEXT + wrote).encode()[:20]


def test_a_model_of_transformers_goes_on_past_its_window(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.models.test_recorded_text import write

    sizes = {"sliding_window": 4, "num_key_value_heads": 1}
    folder = str(write(tmp_path / "mistral", "MistralForCausalLM", **sizes))
    on = session(folder)
    about = read(on, "the cat sat on the mat .", folder, 6)
    assert about["work"]["state"] == "done"
    of = on.now.answers.atlas[1]
    assert of.describe()["starts"] == [0, *range(7, 12)]
    model = regard.models.load(folder).model
    words = {word: i for i, word in enumerate(["[UNK]", "the", "cat", "sat", "on", "mat", "."])}
    ids = torch.tensor([[words[str(key).strip()] for key in of.keys or []]])
    assert ids.shape == (1, 12)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = model(ids, output_attentions=True).attentions[1][0]
    for head in range(2):
        torch.testing.assert_close(
            of.weights(head, range(12), range(12)), want[head], atol=1e-5, rtol=1e-4
        )


def test_an_encoder_decoder_has_three_kinds_of_maps(translator: str) -> None:
    on = session(translator)
    assert read(on, "The cat sat.", translator, 7)["work"]["state"] == "done"
    maps = {m.name: m for m in on.now.answers.atlas.maps}
    assert list(maps) == ["encoder.0.attention", "decoder.0.own", "decoder.0.memory"]
    source, own, memory = maps.values()
    reader = regard.models.load(translator)
    assert source.keys == source.queries == memory.keys == reader.read("The cat sat.")
    assert own.keys == own.queries
    assert own.keys is not None
    assert memory.queries is not None
    assert own.keys[0] == "<text>"
    # What is written is what is given next.
    assert list(own.keys[1:]) == list(memory.queries[:-1])
    assert len(memory.queries) == memory.shape[1]


def test_the_command_names_both_texts_too(translator: str) -> None:
    found = subject_of(["The", "cat"], translator)
    memory = found.atlas().maps[2]
    assert memory.keys == regard.models.load(translator).read("The cat")
    assert len(memory.queries or []) == memory.shape[1]
    assert (found.told.text, found.told.model) == ("The cat", translator)


@pytest.mark.parametrize("tokens", [1, 20])
def test_the_terminal_names_both_texts(
    tokens: int, translator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = regard.models.load(translator)
    target = " ".join(["mat"] * tokens)
    monkeypatch.setattr(type(reader), "translation", lambda self, text, most: (target, True))
    subject = subject_of(["The cat sat on the mat."], translator)
    console = Console(width=120, record=True, file=StringIO())
    show(look(subject, ViewOptions(layer="decoder.0.memory")), console)
    said = console.export_text()
    # Rows are what was written, columns what was read.
    assert len(re.findall(r"^mat ", said, re.MULTILINE)) == tokens
    assert "who looks at '<text>'" in said
    assert f"wrote: {target}\n" in said


def test_a_token_of_two_texts_is_found_where_it_stands(
    translator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(regard.models.load(translator))
    monkeypatch.setattr(kind, "translation", lambda self, text, most: ("mat cat", True))
    subject = subject_of(["The cat sat"], translator)
    for token, place, view in (
        ("mat", (0, None), "token=0"),
        ("sat", (None, 2), "token=2&direction=seen"),
        ("cat", (1, 1), "token=1"),
        (None, (2, 3), ""),
    ):
        wanted = ViewOptions(layer="decoder.0.memory", head="1", token=token)
        this = look(subject, wanted)
        assert this.place == place
        assert first_view(subject, subject.atlas(), wanted).endswith(view)
        console = Console(width=120, record=True, file=StringIO())
        show(this, console)
        said = console.export_text()
        query, key = place
        assert ("looks at, in percent" in said) == (query is not None)
        assert ("who looks at" in said) == (key is not None)
    with pytest.raises(RegardError, match=r"not in the text[\s\S]*from 1 to 4"):
        look(subject, ViewOptions(layer="decoder.0.memory", token="dog"))


def test_writing_that_is_cut_has_no_end() -> None:
    on = session()
    text = "Where did you come from? I do not know where you are from, said the woman."
    for most, ends in ((3, False), (100, True)):
        assert read(on, text, "regard-king-james", most)["work"]["state"] == "done"
        of = next(m for m in on.now.answers.atlas.maps if m.name == "decoder.1.memory")
        assert of.queries is not None
        assert len(of.queries) == of.shape[1]
        assert ("<text>" in of.queries) == ends
        assert ends or len(of.queries) == 3


def test_a_picture_names_both_texts(translator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.view.pictures.subject_picture import drawn

    kind = type(regard.models.load(translator))
    monkeypatch.setattr(kind, "translation", lambda self, text, most: ("mat cat", True))
    subject = subject_of(["The cat"], translator)
    axes = drawn(look(subject, ViewOptions(layer="decoder.0.memory"))).axes[0]
    rows = [label.get_text() for label in axes.get_yticklabels()]
    columns = [label.get_text() for label in axes.get_xticklabels()]
    assert (rows, columns) == (["mat", "cat", "<text>"], ["The", "cat", "<text>"])
    with pytest.raises(RegardError, match="arcs are drawn over one text"):
        drawn(look(subject, ViewOptions(layer="decoder.0.memory", token="cat")))


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"text": " \n", "model": "spelling"}, "there is nothing to read"),
        ({"model": "spelling"}, "there is nothing to read"),
        ({"text": 7, "model": "spelling"}, "there is nothing to read"),
        ({"text": "a", "model": "/etc"}, "there is no such model here"),
        ({"text": "a", "model": ["spelling"]}, "there is no such model here"),
        ({"text": "a", "model": "spelling", "tokens": -1}, "0 to 2000"),
        ({"text": "a", "model": "spelling", "tokens": True}, "0 to 2000"),
        ({"text": "a", "model": "spelling", "tokens": "9"}, "0 to 2000"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once(asked: dict[str, Any], says: str) -> None:
    on = session()
    with pytest.raises(RegardError, match=says):
        on.read(asked)
    assert on.about()["work"]["state"] == "idle"


@pytest.mark.parametrize(
    ("text", "tokens", "says"),
    [
        (TEXT * 20, 0, "the text is longer than the model can read"),
        (TEXT, 60, "ask for fewer new tokens"),
    ],
)
def test_what_a_model_cannot_read_is_explained_and_nothing_is_lost(
    text: str, tokens: int, says: str, causal: str
) -> None:
    on = session(causal)
    about = read(on, text, causal, tokens)
    assert about["work"]["state"] == "failed"
    assert says in about["work"]["error"]
    assert about["edition"] == 1
    assert on.now.answers.atlas.model == "Toy"


def test_a_model_that_is_gone_is_explained(tmp_path: Path) -> None:
    on = session(str(tmp_path / "gone"))
    about = read(on, TEXT, str(tmp_path / "gone"))
    assert "there is no such model" in about["work"]["error"]


def test_a_card_that_names_other_layers_is_no_harm(causal: str, tmp_path: Path) -> None:
    other = tiny_models.causal(tmp_path / "other")
    card = {"heads": {"induction": [{"layer": 99, "head": 3, "score": 0.7}]}}
    (tmp_path / "other" / "card.json").write_text(json.dumps(card))
    about = read(session(other), TEXT, other)
    assert (about["work"]["state"], about["heads"]) == ("done", [])


def test_words_are_counted_before_they_take_memory() -> None:
    said = read(session(), "a " * 60_000, "spelling")["work"]["error"]
    assert "60,000 words" in said
    assert "50,000 at most" in said


def test_spelling_does_not_write() -> None:
    assert "cannot generate text" in read(session(), "to be", "spelling", 3)["work"]["error"]


def test_whatever_a_model_raises_is_told_and_logged(
    causal: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sessions, "load", broken)
    about = read(session(causal), TEXT, causal)
    assert about["work"]["state"] == "failed"
    assert "RuntimeError: out of memory" in about["work"]["error"]
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("regard.view.web.background_work", "ERROR")
    assert "in broken\n" in caplog.text, "where it was raised"


def test_reading_tells_how_far_it_is_and_is_stopped(
    causal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "load", lambda name: tiny_models.slow(name, 0.01))
    on = session(causal)
    on.read({"text": TEXT, "model": causal, "tokens": 20})
    with pytest.raises(RegardError, match="another text is being read"):
        on.read({"text": TEXT, "model": "spelling"})
    told: list[tuple[str, int, int]] = []
    while not (told and told[-1][0] == "writing" and told[-1][1] >= 2):
        state = on.work.state()
        assert state["state"] == "running"
        told.append((state["doing"], state["done"], state["total"]))
        time.sleep(0.002)
    kinds = list(dict.fromkeys(doing for doing, _, _ in told))
    assert [kind for kind in kinds if kind in ("reading", "writing")] == ["reading", "writing"]
    far = [done / total for doing, done, total in told if doing == "reading"]
    assert far == sorted(far)
    assert told[-1][2] == 20
    on.work.stop()
    assert on.work.state()["stopping"] or on.work.state()["state"] == "stopped"
    on.work.wait(5)
    assert on.work.state()["state"] == "stopped"
    assert on.now.number == 1
    # Numbers of texts that were stopped or refused are not given again.
    assert read(on, "to be", "spelling")["edition"] == on.now.number > 2


def test_the_text_before_and_the_model_before_are_freed(
    causal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "KEPT", 1)
    other = tiny_models.causal(tmp_path / "other")
    on = session(causal)
    on.models[other] = "another"
    read(on, TEXT, causal)
    k = weakref.ref(on.now.answers.atlas[0].traces[0].inputs.k)
    assert on._reader is not None
    model = weakref.ref(on._reader.model)
    read(on, "A king", causal)
    gc.collect()
    assert k() is None
    assert model() is not None
    read(on, "A king", other)
    gc.collect()
    assert model() is None


def test_models_that_are_there_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_models, "EMBEDDED", tmp_path)
    assert list(known_models("spelling"))[-1] == "spelling"
    assert "regard-small" not in known_models()
    assert "owner/name" in known_models("owner/name")
    (tmp_path / "regard-small").mkdir()
    (tmp_path / "regard-small" / "model.safetensors").touch()
    assert next(iter(known_models())) == "regard-small"


def test_a_long_text_is_not_sent_back() -> None:
    on = Session(Atlas.of(seen(5)), TextInfo("x" * 30_000, "spelling"))
    assert on.about()["text"] == ""


def test_work_goes_on_after_it_failed(caplog: pytest.LogCaptureFixture) -> None:
    work = Work()
    going = threading.Event()

    def fails(tell: Tell) -> None:
        going.wait(5)
        raise RegardError("no")

    work.start(fails)
    going.set()
    work.wait(5)
    assert work.state()["error"] == "no"
    assert not caplog.records, "what is refused needs no traceback"
    work.start(lambda tell: torch.zeros(1))
    work.wait(5)
    assert work.state()["state"] == "done"
    assert "error" not in work.state()


def test_some_texts_are_kept_and_not_long_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    on = session()
    for nth in range(6):
        read(on, "to be or not"[: 4 + nth], "spelling")
    assert [on.edition(str(number)) is not None for number in range(1, 8)] == [
        *(False, False, False),
        *(True, True, True, True),
    ]
    assert on.edition("x") is None
    assert on.edition(None) is on.now
    monkeypatch.setattr(sessions, "ROWS", 4)
    read(on, "one two three", "spelling")
    read(on, "one two three", "spelling")
    assert [number for number in range(1, 12) if on.edition(str(number))] == [8, 9]


def test_a_translator_is_first_shown_by_where_it_looks_in_the_other_text(translator: str) -> None:
    subject = subject_of(["The cat sat."], translator, Spelling(), lambda *_: None)
    found = look(subject, ViewOptions())
    assert found.chosen is not None
    assert found.wanted.layer == "2"
    assert found.chosen.queries != found.chosen.keys


def test_each_thing_that_heads_do_has_a_head_of_its_own(causal: str) -> None:
    reader = load(causal)
    both = [{"layer": 0, "head": 1, "score": 0.9}, {"layer": 1, "head": 2, "score": 0.3}]
    reader.card["heads"].update(induction=both, first=both)
    found = {kind: (path, head) for kind, path, head in known_heads(reader)}
    assert found["induction"] == ("blocks.0.attention", 1)
    assert found["first"] == ("blocks.1.attention", 2)


def test_an_example_and_a_text_beside_another_are_told_apart() -> None:
    on = session()
    beside = on.beside({"text": "one two three", "model": "spelling"})
    assert on.work.wait(20)
    on.read({"example": "spelling"})
    assert on.work.wait(20)
    assert on.now.number != beside
    about = on.about(str(on.now.number))
    assert about["edition"] == on.now.number
    assert on.edition(str(beside)) is not on.edition(str(on.now.number))


def test_work_begins_as_soon_as_the_last_has_told_its_end() -> None:
    """Its thread may be slow to end: whoever read that it had stopped was told that it was not."""
    ends = threading.Event()

    class Lingering(Work):
        def _run(self, job: Callable[[Tell], None]) -> None:
            super()._run(job)
            ends.wait(5)

    work = Lingering()
    for _ in range(2):
        work.start(lambda tell: torch.zeros(1))
        until = time.monotonic() + 5
        while work.state()["state"] == "running" and time.monotonic() < until:
            time.sleep(0.01)
        assert work.state()["state"] == "done"
        assert not work.wait(0)
    ends.set()
    assert work.wait(5)
