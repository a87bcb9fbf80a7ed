"""Models of transformers: padded batches, an encoder, and a text longer than the model reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from regard import RegardError, models
from regard.scanning import Job, Options, scan
from tests.models.test_recorded_text import write

TEXTS = [
    "the cat sat on the mat .",
    "the mat",
    "the cat . the cat sat . " * 8,
    "cat on mat on cat .",
]


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "BertModel"])
def test_padding_changes_nothing(kind: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model", kind)
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    job = Job(str(folder), (str(path),), str(tmp_path / "out"), Options(shards=2), device="cpu")
    found = scan(job)
    assert found is not None
    assert (found.texts, found.cut) == (4, 1)
    reader: Any = models.load(str(folder), device="cpu")
    rows: dict[str, list[torch.Tensor]] = {}
    for text in TEXTS:
        with torch.no_grad():
            seen = reader.run(" ".join(text.split()[:32]))
        for layer in seen:
            p = seen[layer].traces[0].weights()[0].double()
            places = torch.arange(p.shape[-1])
            away = (p * (places[:, None] - places).abs()).sum(-1)
            spread = -torch.special.xlogy(p, p).sum(-1)
            rows.setdefault(layer, []).append(torch.stack([p[..., 0], away, spread]))
    for layer, several in rows.items():
        right = torch.cat(several, -1).mean(-1)
        for head in (h for h in found if h.path == layer):
            mine = [head["first"], head["distance"], head["entropy"]]
            assert mine == pytest.approx(right[:, head.head].tolist(), rel=1e-5)


def test_a_text_is_extreme_once_where_a_layer_runs_several_times(tmp_path: Path) -> None:
    sizes = {"embedding_size": 16, "num_hidden_layers": 3}
    folder = write(tmp_path / "model", "AlbertModel", **sizes)
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(f"{text} the cat sat on the mat ." for text in TEXTS))
    options = Options(("entropy",), shards=2)
    found = scan(Job(str(folder), (str(path),), str(tmp_path / "out"), options, device="cpu"))
    assert found is not None
    assert len(found.paths) == 1
    reader: Any = models.load(str(folder), device="cpu")
    best: dict[int, list[float]] = {0: [], 1: []}
    for text in path.read_text().splitlines():
        with torch.no_grad():
            traces = reader.run(" ".join(text.split()[:32]))[found.paths[0]].traces
        for head in best:
            best[head].append(max(float(trace.entropy[0, head].max()) for trace in traces))
    for head, values in best.items():
        mine = [e for e in found.extremes if (e.head, e.end) == (head, "most")]
        right = sorted(range(4), key=lambda text: -values[text])[:3]
        assert len({e.text for e in mine}) == 3
        assert [e.value for e in mine] == pytest.approx([values[text] for text in right], rel=1e-5)


@pytest.mark.parametrize("changed", ["rotation", "normalizer"])
def test_weights_that_are_used_otherwise_are_another_model(changed: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "model")
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS))
    options = Options(("entropy",), shards=1)
    job = Job(str(folder), (str(path),), str(tmp_path / "out"), options, device="cpu")
    scan(job)
    moved = folder.rename(tmp_path / "moved")
    job = replace(job, model=str(moved))
    scan(job)
    file = moved / ("config.json" if changed == "rotation" else "tokenizer.json")
    said = json.loads(file.read_text())
    if changed == "rotation":
        said["rope_parameters"]["rope_theta"] = 100.0
    else:
        said["normalizer"] = {"type": "Lowercase"}
    file.write_text(json.dumps(said))
    named = "configuration: " if changed == "rotation" else "tokenizer: "
    with pytest.raises(RegardError, match=named):
        scan(job)
