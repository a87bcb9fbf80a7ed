"""What word vectors know, after a few seconds of reading."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from regard import RegardError, cli
from regard.lab import words
from regard.lab.apparatus.experiments import Result, seeded
from regard.lab.word_vectors import published
from regard.lab.word_vectors.questions import BIBLE, TODAY
from regard.lab.word_vectors.skip_gram import pairs
from regard.lab.word_vectors.vector_files import read


@pytest.fixture(scope="module")
def result() -> Result:
    return words.run(width=32, window=4, epochs=2)


def test_words_of_a_kind_are_beside_each_other(result: Any) -> None:
    kin = result.numbers["kin"]
    assert kin["related"] > kin["chance"] + 0.3


def test_attention_moves_words_towards_their_sense(result: Any) -> None:
    senses = result.numbers["senses"]
    gained = [words._lean(one, "after") - words._lean(one, "before") for one in senses]
    assert len(gained) == 2 * len(BIBLE.senses)
    assert sum(g > 0 for g in gained) >= 6
    assert sum(gained) / len(gained) > 0.03
    for one in senses:
        assert one["weights"][one["word"]] == 0
        assert not set(one["sense"]) & set(one["sentence"].split())


def test_queen_is_nearer_by_the_sum_than_by_its_parts(result: Any) -> None:
    queen = result.numbers["analogies"][0]
    assert queen["asked"] == "man : king = woman : queen"
    assert queen["rank"] < 100
    assert queen["rank"] < queen["rank_alone"]


def test_the_verdict_is_that_of_the_ranks(result: Any) -> None:
    assert result.checks[1].holds == (result.numbers["analogies"][0]["rank"] == 1)
    assert result.json()


def test_ranks_leave_out_what_they_are_told_to() -> None:
    toy = words.Vectors(["a", "b", "c"], torch.tensor([[1.0, 0], [0.8, 0.6], [0, 1]]), 3)
    assert toy.nearest(toy["a"], 2) == ["a", "b"]
    assert toy.rank("b", toy["a"]) == 2
    assert toy.rank("b", toy["a"], without=["a"]) == 1
    assert toy.rank("c", toy["a"]) == 3


def test_pairs_lie_within_the_window_and_every_neighbour_is_one() -> None:
    with seeded(0):
        found = [pair for some in pairs(torch.arange(50), 3) for pair in zip(*some, strict=True)]
    apart = [abs(int(a) - int(b)) for a, b in found]
    assert set(apart) == {1, 2, 3}
    # Neighbours side by side are always drawn, from both sides; farther ones less often.
    assert apart.count(1) == 2 * 49
    assert apart.count(1) > apart.count(2) > apart.count(3)


def test_words_and_arrows_are_drawn_at_their_places(result: Any) -> None:
    from regard.view.pictures.lab_picture import panel_picture

    panel = next(panel for panel in result.panels if panel.title == "Men and women")
    (axes,) = panel_picture(result, panel).axes
    drawn = {text.get_text(): text.xy for text in axes.texts if text.get_text()}
    assert set(drawn) == {word for pair in words.COUPLES for word in pair}
    assert drawn["queen"] == pytest.approx(result.numbers["plane"]["queen"])
    assert sum(not text.get_text() for text in axes.texts) == len(words.COUPLES)


def everyday() -> dict[str, list[float]]:
    """A vector for each word of the questions in today's English: a wheel of genders and crowns."""
    told = [w for said in TODAY.senses.values() for sense in said.values() for w in sense]
    told += [w for said in TODAY.senses.values() for text in said for w in text.split()]
    told += [w for asked in TODAY.analogies for w in asked]
    told += [*words.KINDS, *(w for pair in (*words.COUPLES, *words.KIN) for w in pair)]
    random = torch.Generator().manual_seed(0)
    rows = {word: torch.randn(16, generator=random) for word in told}
    rows["queen"] = rows["king"] - rows["man"] + rows["woman"]
    return {word: row.tolist() for word, row in rows.items()}


@pytest.mark.parametrize("form", ["glove", "word2vec", "gz"])
def test_own_vectors_are_asked_instead(form: str, tmp_path: Path) -> None:
    rows = everyday()
    lines = [f"{word} {' '.join(map(str, row))}" for word, row in rows.items()]
    if form == "word2vec":
        lines.insert(0, f"{len(rows)} 16")
    data = ("\n".join(lines) + "\n").encode()
    path = tmp_path / "vectors"
    path.write_bytes(gzip.compress(data) if form == "gz" else data)
    found = words.run(vectors=path)
    assert found.numbers["vocabulary"] == len(rows)
    assert found.numbers["analogies"][0]["rank"] == 1
    assert found.settings == {"seed": 0, "vectors": "vectors"}
    assert [one["word"] for one in found.numbers["senses"]][::2] == list(TODAY.senses)
    table = torch.tensor(list(rows.values()))
    table = torch.nn.functional.normalize(table - table.mean(0), dim=1)
    assert read(path)["bank"].tolist() == pytest.approx(table[list(rows).index("bank")].tolist())
    assert found.json()


WRONG = {
    "a line of words": (b"king 1 2\nthe quick brown fox\n", "line 2: brown fox"),
    "another width": (b"king 1 2\nqueen 1 2 3\n", "line 2: 3 numbers, 2 before"),
    "no numbers": (b"king\n", "line 1: no numbers"),
    "not a number": (b"king 1 nan\n", "line 1: 1 nan"),
    "nothing": (b"", "no vectors in the file"),
    "binary": (b"3 2\nking \xff\xfe\x80", "write them as text first"),
    "a broken archive": (gzip.compress(b"king 1 2\n" * 99)[:20], "cannot be read"),
    "few words": (b"king 1 2\nqueen 2 1\n", "2 words without bank, battle"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_hold_no_vectors_are_refused(name: str, tmp_path: Path) -> None:
    data, said = WRONG[name]
    (tmp_path / "own.txt").write_bytes(data)
    with pytest.raises(RegardError, match=said):
        words.run(vectors=tmp_path / "own.txt")


def test_the_command_takes_vectors_for_words_alone(tmp_path: Path) -> None:
    asked = ["lab", "words", "--vectors", str(tmp_path / "none.txt"), "-o", str(tmp_path)]
    done = CliRunner().invoke(cli.app, asked)
    assert done.exit_code == 2
    assert "No such file" in done.output
    done = CliRunner().invoke(cli.app, ["lab", "scaling", "--vectors", "glove"])
    assert done.exit_code == 2
    assert "regard lab words --vectors FILE" in done.output


def test_published_vectors_come_from_the_very_file_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        'a "]" word': [0.5] * 102,
        **{word: [*row, *[0.0] * 86] for word, row in everyday().items()},
    }
    text = json.dumps({"words": [], "vectors": rows, "unkVector": []}, separators=(",", ":"))
    path = tmp_path / "regard" / "packages" / published.FILE
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:gz") as packed:
        entry = tarfile.TarInfo(published.DATA)
        entry.size = len(text.encode())
        packed.addfile(entry, io.BytesIO(text.encode()))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RegardError, match="put that file into"):
        published.glove()
    monkeypatch.setattr(published, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(published, "PIECE", 1000)
    found = published.glove()
    assert found.names == list(rows)
    assert found.rows.shape == (len(rows), 100)
    assert words.run(vectors="glove").numbers["analogies"][0]["rank"] == 1
