"""Monitors inside other people's training loops: the real ones, where they are installed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import RegardError
from tests.watching.test_watch import hooks, model, x


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_trainer_of_transformers(tmp_path: Path, checkpointing: bool) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    m = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    reports: list[regard.monitoring.Report] = []
    monitor = regard.Monitor(m, every=2, look=2, to=[tmp_path / "run.jsonl", reports.append])
    trainer = transformers.Trainer(
        m,
        transformers.TrainingArguments(
            str(tmp_path / "out"), max_steps=5, per_device_train_batch_size=2, report_to=[],
            gradient_accumulation_steps=2, gradient_checkpointing=checkpointing, eval_steps=2,
            eval_strategy="steps", save_steps=2, disable_tqdm=True, use_cpu=True,
        ),
        train_dataset=rows,
        eval_dataset=rows[:4],
        callbacks=[monitor.for_huggingface()],
    )  # fmt: skip
    trainer.train()
    assert [report.step for report in reports] == [2, 4, 5]
    assert [report.looks for report in reports] == [1, 1, 1]
    assert list(reports[0].layers) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert len((tmp_path / "run.jsonl").read_text().splitlines()) == 3
    # One is of transformers, so that inputs to checkpoints want gradients.
    assert hooks(m) == int(checkpointing)
    assert m.config._attn_implementation == "sdpa"
    saved = json.loads((tmp_path / "out" / "checkpoint-2" / "config.json").read_text())
    assert "regard" not in json.dumps(saved)


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = model(is_causal=True)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            return self.inner(batch).square().mean()

        def validation_step(self, batch: Tensor, index: int) -> None:
            self.inner(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    m = Module()
    reports: list[regard.monitoring.Report] = []
    monitor = regard.Monitor(m.inner, every=2, look=1, to=reports.append)
    rows: Any = torch.utils.data.DataLoader(x(20, 7, 16), batch_size=2)
    lightning.Trainer(
        max_epochs=1, accumulate_grad_batches=2, callbacks=[monitor.for_lightning()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, default_root_dir=tmp_path, devices=1,
    ).fit(m, rows, rows)  # fmt: skip
    assert [report.step for report in reports] == [2, 4, 5]
    assert [report.looks for report in reports] == [2, 2, 1]
    assert hooks(m) == 0


def test_loops_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    m: nn.Module = model()
    with regard.Monitor(m) as monitor:
        with pytest.raises(RegardError, match=r"pip install 'regard\[huggingface\]'"):
            monitor.for_huggingface()
        with pytest.raises(RegardError, match="pip install lightning"):
            monitor.for_lightning()
