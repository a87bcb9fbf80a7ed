"""Models of transformers: padded batches, an encoder, and a text longer than the model reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from regard import models
from regard.scanning import Job, Options, scan
from tests.models.test_recording import write

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
