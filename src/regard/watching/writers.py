"""Where reports go: JSON lines, TensorBoard, Weights & Biases, MLflow, or any function."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from regard.errors import RegardError
from regard.watching.reports import Report


@runtime_checkable
class Writer(Protocol):
    """What takes the report of each window."""

    def write(self, report: Report) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """A file with one JSON object per window, every number of every head in it. Each line is whole
    on disk before training goes on; a run that is continued adds to the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise RegardError(
                "reports cannot be written there",
                got=str(error),
                accepted="a path in a folder that exists and can be written to",
            ) from None

    def write(self, report: Report) -> None:
        self._file.write(json.dumps(report.record(), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Curves per layer in TensorBoard; of every head too with `heads=True`.

    Takes a folder, or a SummaryWriter, which is then left open."""

    def __init__(self, to: Any, *, heads: bool = False) -> None:
        self.heads, self._own = heads, isinstance(to, (str, os.PathLike))
        if self._own:
            _needed("tensorboard")
            to = importlib.import_module("torch.utils.tensorboard").SummaryWriter(os.fspath(to))
        self._writer: Any = to

    def write(self, report: Report) -> None:
        for name, value in report.scalars(heads=self.heads).items():
            self._writer.add_scalar(name, value, report.step)
        for finding in report.findings:
            self._writer.add_text(f"attention/{finding.rule}", str(finding), report.step)

    def close(self) -> None:
        if self._own:
            self._writer.close()


class WeightsAndBiases:
    """Curves per layer in a run of Weights & Biases: the one given, or the current one.

    The step is logged as `attention/step` beside the numbers, and is their axis: the run's own
    counter belongs to whoever logs the loss."""

    def __init__(self, run: Any = None, *, heads: bool = False) -> None:
        self.heads = heads
        self._run: Any = _needed("wandb").run if run is None else run
        if self._run is None:
            raise RegardError(
                "there is no current run of Weights & Biases",
                accepted="a run",
                do="call wandb.init() first, or give the run: to=run",
            )
        self._run.define_metric("attention/*", step_metric="attention/step")

    def write(self, report: Report) -> None:
        self._run.log(report.scalars(heads=self.heads) | {"attention/step": report.step})
        for finding in report.findings:
            self._run.alert(title=f"{finding.rule} at step {finding.step}", text=str(finding))

    def close(self) -> None:
        pass


class MLflow:
    """Curves per layer in MLflow: in the run of that id, or in the active one."""

    def __init__(self, run_id: str | None = None, *, heads: bool = False) -> None:
        self.heads, self._mlflow, self._run_id = heads, _needed("mlflow"), run_id

    def write(self, report: Report) -> None:
        numbers = {_mlflow_name(n): v for n, v in report.scalars(heads=self.heads).items()}
        self._mlflow.log_metrics(numbers, step=report.step, run_id=self._run_id)

    def close(self) -> None:
        pass


class Function:
    """Calls a function with each report."""

    def __init__(self, call: Callable[[Report], Any]) -> None:
        self.write = call

    def close(self) -> None:
        pass


def writers(to: Any) -> list[Writer]:
    """Writers from whatever `to=` is given."""
    if to is None:
        return []
    if isinstance(to, Sequence) and not isinstance(to, str | bytes):
        return [writer for one in to for writer in writers(one)]
    return [_writer(to)]


def _writer(to: Any) -> Writer:
    if isinstance(to, (str, os.PathLike)):
        kind = Path(to).suffix
        if to == "wandb":
            return WeightsAndBiases()
        if to == "mlflow":
            return MLflow()
        if kind in (".jsonl", ""):
            return JsonLines(to) if kind else TensorBoard(to)
    elif isinstance(to, Writer) and not isinstance(to, type):
        return to
    elif hasattr(to, "add_scalar"):
        return TensorBoard(to)
    elif hasattr(to, "define_metric") and hasattr(to, "log"):
        return WeightsAndBiases(to)
    elif callable(to):
        return Function(to)
    raise RegardError(
        "to= says where reports go",
        got=repr(to),
        accepted='a path that ends in .jsonl, a folder or SummaryWriter for TensorBoard, "wandb" '
        'or a run of it, "mlflow", a function of a report, or a list of these',
    )


def _mlflow_name(name: str) -> str:
    """MLflow takes letters, digits and _ - . / : and blanks."""
    return "".join(c if c.isalnum() or c in "_-./: " else "_" for c in name)


def _needed(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise RegardError(
            f"reports cannot go there: {package} is not installed",
            accepted="a path that ends in .jsonl needs no package",
            do=f"pip install {package}",
        ) from None
