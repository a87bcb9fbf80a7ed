"""A scan says what plain code over all texts says, and says it again to the last bit."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import regard
from regard import RegardError, cli, models
from regard.scanning import Corpus, Job, Options, Scan, Scanner, merge, scan, settle
from regard.scanning.scales import SCALES
from regard.scanning.scan_table import QUANTILES
from tests.scanning.children import alone, killed, started
from tests.scanning.conftest import LONGEST, TEXTS, everything, unlike


class Plain:
    """Every row of one head, of one text after the other, from whole n×n weights."""

    def __init__(self, model: Path) -> None:
        reader: Any = models.load(str(model), device="cpu")
        self.rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self.roles: dict[tuple[int, int], dict[str, list[float]]] = {}
        self.tokens = 0
        for number, text in enumerate(filter(None, TEXTS)):
            ids = [0, *reader.encode(text)][:LONGEST]
            self.tokens += len(ids)
            seen = reader.run(reader.tokenizer.decode(ids[1:]))
            for layer, found in enumerate(seen.values()):
                weights, logits = found.traces[0].weights()[0], found.traces[0].logits()[0]
                for head in range(2):
                    self._add((layer, head), number, ids, weights[head].double(), logits[head])
                    out = found.traces[0].out[0, head].double()
                    mine = self.rows[layer, head][-len(ids) :]
                    for row, norm in zip(mine, out.square().sum(-1).sqrt().tolist(), strict=True):
                        row["norm"] = norm

    def _add(
        self, who: tuple[int, int], text: int, ids: list[int], p: Tensor, logits: Tensor
    ) -> None:
        rows = self.rows.setdefault(who, [])
        roles = self.roles.setdefault(who, {"previous": [], "duplicate": [], "induction": []})
        for i in range(len(ids)):
            seen = p[i, : i + 1].tolist()
            rows.append(
                {
                    "text": text,
                    "place": i,
                    "entropy": float(-torch.special.xlogy(p[i], p[i]).sum()),
                    "max_logit": float(logits[i, : i + 1].max()),
                    "first": seen[0],
                    "distance": sum(w * (i - j) for j, w in enumerate(seen)),
                }
            )
            if i:
                roles["previous"].append(seen[i - 1])
            same = [j for j in range(i) if ids[j] == ids[i]]
            after = [j + 1 for j in same if j + 1 < i]
            for name, places in (("duplicate", same), ("induction", after)):
                if places:
                    roles[name].append(sum(seen[j] for j in places))


@pytest.fixture(scope="module")
def plain(model: Path) -> Plain:
    return Plain(model)


@pytest.fixture
def found(job: Job) -> Scan:
    scanned = scan(job)
    assert scanned is not None
    return scanned


def test_the_numbers_are_those_of_plain_code(found: Scan, plain: Plain) -> None:
    assert (found.texts, found.tokens, found.cut, found.empty) == (7, plain.tokens, 1, 0)
    assert len(found) == len(plain.rows) == 4
    for (layer, head), rows in plain.rows.items():
        mine = found.at(layer, head)
        assert (mine.rows, mine.broken) == (len(rows), 0)
        for name, told in mine.statistics.items():
            values = torch.tensor([row[name] for row in rows], dtype=torch.float64)
            for said, right in (
                (told.mean, values.mean()),
                (told.deviation, values.std(correction=0)),
                (told.least, values.min()),
                (told.most, values.max()),
            ):
                assert said == pytest.approx(float(right), rel=1e-5, abs=2e-6), name
            for share in QUANTILES:
                right = values.quantile(share, interpolation="lower")
                above = values.quantile(share, interpolation="higher")
                room = 1.01 * SCALES[name].width_at(float(above)) + 1e-6
                assert float(right) - room <= told.quantiles[share] <= float(above) + room, name
        for name, several in plain.roles[layer, head].items():
            right = sum(several) / len(several)
            assert mine.roles[name] == pytest.approx(right, rel=1e-5), name


def test_the_extremes_are_those_of_plain_code(found: Scan, plain: Plain) -> None:
    for (layer, head), rows in plain.rows.items():
        free = [row for row in rows if row["place"] >= 7]
        for name in SCALES:
            for end, sign in (("most", 1), ("least", -1)):
                best: dict[int, float] = {}
                for row in free:
                    value = sign * row[name]
                    best[row["text"]] = max(value, best.get(row["text"], -1e9))
                right = sorted(best.values(), reverse=True)[:3]
                mine = [
                    e
                    for e in found.extremes
                    if (e.layer, e.head, e.statistic, e.end) == (layer, head, name, end)
                ]
                assert [sign * e.value for e in mine] == pytest.approx(right, rel=1e-4, abs=2e-6)
                for e in mine:
                    (row,) = [r for r in rows if (r["text"], r["place"]) == (e.text, e.place)]
                    assert row[name] == pytest.approx(e.value, rel=1e-4, abs=2e-6)


def test_killed_while_it_writes_it_goes_on_and_gives_the_same_bytes(
    job: Job, tmp_path: Path
) -> None:
    whole = replace(job, folder=str(tmp_path / "whole"))
    alone(whole)

    process = started(killed, job)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    there = {name for name in everything(job.folder) if not name.startswith("shards/.")}
    assert there == {
        "manifest.json",
        "shards/000000.safetensors",
        "shards/000001.safetensors",
    }
    kept = (Path(job.folder) / "shards/000001.safetensors").stat().st_mtime_ns
    alone(job)
    assert unlike(job.folder, whole.folder) == []
    assert (Path(job.folder) / "shards/000001.safetensors").stat().st_mtime_ns == kept


@pytest.mark.parametrize("harm", ["cut short", "changed", "renamed", "empty"])
def test_a_shard_that_is_not_whole_is_noticed_and_made_again(job: Job, harm: str) -> None:
    scan(job)
    right = Path(job.folder).with_name("right")
    shutil.copytree(job.folder, right)
    path = Path(job.folder) / "shards/000002.safetensors"
    data = bytearray(path.read_bytes())
    if harm == "changed":
        data[-100] ^= 1
    elif harm == "renamed":
        data = bytearray(path.with_name("000001.safetensors").read_bytes())
    path.write_bytes(data if harm in ("changed", "renamed") else data[: len(data) // 2])
    if harm == "empty":
        path.write_bytes(b"")
    (Path(job.folder) / "heads.jsonl").unlink()
    scan(job)
    assert unlike(job.folder, right) == []


def test_whether_small_numbers_are_flushed_changes_nothing(job: Job, tmp_path: Path) -> None:
    scan(job)
    other = replace(job, folder=str(tmp_path / "flushed"))
    torch.set_flush_denormal(True)
    try:
        scan(other)
        assert not torch.tensor(1e-40).mul(1.0)
    finally:
        torch.set_flush_denormal(False)
    assert unlike(job.folder, other.folder) == []


def test_other_settings_are_refused(job: Job, tmp_path: Path) -> None:
    scan(job)
    before = everything(job.folder)
    with pytest.raises(RegardError) as refused:
        scan(replace(job, options=Options(("entropy",), shards=3, threads=1)))
    said = str(refused.value)
    assert "the folder holds a scan of other settings" in said
    assert "shards: 4 there, 3 now" in said
    assert "observe: ['entropy', 'max_logit', 'first', 'distance', 'norm', 'roles'] there" in said
    assert "weights" not in said
    other = tmp_path / "other.txt"
    other.write_text("\n".join(TEXTS).replace("king", "queen") + "\n")
    with pytest.raises(RegardError, match=r"texts: [0-9a-f]{12}… there, [0-9a-f]{12}… now"):
        scan(replace(job, texts=(str(other),)))
    assert everything(job.folder) == before
    # Threads are those that the scan was begun with, where nobody says otherwise.
    torch.set_num_threads(2)
    try:
        scan(replace(job, options=Options(shards=4)))
    finally:
        torch.set_num_threads(1)
    with pytest.raises(RegardError, match="holds something else than a scan"):
        scan(replace(job, folder=str(Path(job.model))))


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_weights_that_are_used_otherwise_are_another_model(
    file: str, job: Job, tmp_path: Path
) -> None:
    """As many numbers in other heads, or as many tokens merged in another order."""
    folder = shutil.copytree(job.model, tmp_path / "model")
    job = replace(job, model=str(folder), options=Options(("entropy",), shards=2, threads=1))
    scan(job)
    said = json.loads((folder / file).read_text())
    if file == "config.json":
        said["heads"] = 4
    else:
        said["model"]["merges"].reverse()
    (folder / file).write_text(json.dumps(said))
    with pytest.raises(RegardError, match="the folder holds a scan of other settings") as refused:
        scan(job)
    named = {"config.json": "configuration: ", "tokenizer.json": "tokenizer: "}[file]
    assert named in str(refused.value)
    assert "weights: " not in str(refused.value)


def test_less_is_observed_where_less_is_asked(job: Job, plain: Plain) -> None:
    options = Options(("max_logit",), shards=2, layers=("blocks.1.*",), max_tokens=20)
    few = scan(replace(job, options=options))
    assert few is not None
    assert few.paths == ("blocks.1.attention",)
    assert (few.statistics, few.roles) == (("max_logit",), ())
    right = [row["max_logit"] for row in plain.rows[1, 0] if row["place"] < 20]
    assert few[0]["max_logit"] == pytest.approx(sum(right) / len(right), rel=1e-5)
    with pytest.raises(RegardError, match="observe names what is observed"):
        Options(("received",))


def test_the_command_writes_tables_a_picture_and_how_to_see_more(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["scan", "--model", job.model, "--texts", job.texts[0], "-o", job.folder]
    result = CliRunner().invoke(cli.app, [*args, "--shards", "2", "--observe", "max_logit,roles"])
    assert result.exit_code == 0, result.output
    # Lines are wrapped where a path is long.
    said = " ".join(result.stdout.split())
    assert "4 heads of 2 layers, 7 texts" in said
    assert "of 1 texts only the beginning was read" in said
    assert not result.stderr
    folder = Path(job.folder)
    heads = [json.loads(line) for line in (folder / "heads.jsonl").read_text().splitlines()]
    assert [(head["layer"], head["head"]) for head in heads] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert "largest logit" in (folder / "heads.svg").read_text()
    first = json.loads((folder / "extremes.jsonl").read_text().splitlines()[0])
    text = (folder / f"texts/{first['text']:06d}.txt").read_text()
    assert text
    assert TEXTS[first["line"] - 1].startswith(text)
    monkeypatch.chdir(folder)
    words = shlex.split(first["view"])
    assert words[0] == "regard"
    opened = CliRunner().invoke(cli.app, [*words[1:], "--plain"])
    assert opened.exit_code == 0, opened.output


def test_texts_come_in_lines_of_json_folders_and_patterns(job: Job, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    lines = [json.dumps({"text": text, "id": i}) for i, text in enumerate(filter(None, TEXTS))]
    (folder / "a.jsonl").write_text("\n".join(lines[:3]) + "\n\n")
    (folder / "b.jsonl").write_text("\n".join(lines[3:]))
    scan(job)
    for name in (str(folder), str(folder / "*.jsonl")):
        other = replace(job, texts=(name,), folder=str(tmp_path / "json"))
        scan(other)
        right, mine = (everything(one.folder)["heads.jsonl"] for one in (job, other))
        assert mine == right
    (folder / "b.jsonl").write_text('{"words": "none"}\n')
    with pytest.raises(RegardError, match=r"line 1 of .*b\.jsonl"):
        scan(replace(job, texts=(str(folder),), folder=str(tmp_path / "broken")))


class Letters:
    """A tokenizer: a letter is a token."""

    def __call__(self, text: str, verbose: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 64 for letter in text]}

    def get_vocab(self) -> dict[str, int]:
        return {chr(64 + i): i for i in range(64)}


class Unmasked(torch.nn.Module):
    """Every token looks at every other, at padding as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, 8)
        self.block = regard.nn.EncoderBlock(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.block(self.embedding(ids))
        return out


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("some.txt", b"a b\n\nc \xff d\n", "line 3"),
        ("some.jsonl", b'{"text": "a"}\n{"words": "b"}\n', "line 2"),
        ("some.jsonl", b'{"text": "a"}\n{"text": 1}\n', "'text' is a int"),
        ("some.jsonl", b'{"text": "a"}\n{"text": "half \\ud800"}\n', "surrogates not allowed"),
        ("some.JSONL", b'{"text": "a"}\n{"words": "b"}\n', "line 2"),
    ],
)
def test_lines_that_are_no_texts_are_refused_before_anything_is_written(
    name: str, content: bytes, says: str, job: Job, tmp_path: Path
) -> None:
    path, out = tmp_path / name, tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(RegardError, match="a text cannot be read") as refused:
        scan(replace(job, texts=(str(path),), folder=str(out)))
    assert says in str(refused.value)
    assert not out.exists()


def test_endings_of_files_may_be_capital(tmp_path: Path) -> None:
    (tmp_path / "A.TXT").write_text("first\n")
    (tmp_path / "B.Jsonl").write_text('{"text": "second"}\n')
    corpus = Corpus([str(tmp_path)])
    assert list(corpus.texts(range(2))) == ["first", "second"]


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    for name, content in (("a.txt", "first\nsecond\n"), ("b.jsonl", '{"text": "third"}\n')):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
    corpus = Corpus([str(tmp_path)])
    assert list(corpus.texts(range(3))) == ["first", "second", "third"]


def test_texts_whose_rows_look_at_padding_are_read_apart(texts: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Unmasked().eval()
    reader = models.Reader("unmasked", model, Letters(), models.Card({}), None)
    corpus, options = Corpus([str(texts)]), Options(("first", "entropy"), shards=2)
    scanner = Scanner(reader, corpus, tmp_path / "out", options)
    settle(scanner.folder, scanner.settings)
    for shard in range(2):
        scanner.scan_shard(shard)
    found = merge(scanner)
    firsts = []
    for text in filter(None, TEXTS):
        with torch.no_grad(), regard.watch(model, keep="traces") as seen:
            model(torch.tensor([Letters()(text, False)["input_ids"]]))
        firsts.append(next(iter(seen.values())).traces[0].weights()[0, :, :, 0])
    right = torch.cat(firsts, -1).double().mean(-1).tolist()
    assert [head["first"] for head in found] == pytest.approx(right, rel=1e-5)
