"""Where reports go: JSON lines, TensorBoard, Weights & Biases, MLflow, or any function."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from regard.errors import RegardError
from regard.monitoring.reports import Report
from regard.monitoring.writers.json_lines import JsonLines

__all__ = ["JsonLines", "MLflow", "TensorBoard", "WeightsAndBiases", "Writer", "writers"]


@runtime_checkable
class Writer(Protocol):
    """What takes the report of each window."""

    def write(self, report: Report) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Curves per layer in TensorBoard; of every head too with `heads=True`.

    Takes a folder, or a SummaryWriter, which is then left open. In a folder, a window is written
    before training goes on; after an error the next one begins a new file, since TensorBoard's
    own writer never writes again."""

    def __init__(self, to: Any, *, heads: bool = False) -> None:
        self.heads = heads
        self._folder = os.fspath(to) if isinstance(to, (str, os.PathLike)) else None
        self._writer: Any = to if self._folder is None else self._opened()

    def write(self, report: Report) -> None:
        if self._writer is None:
            self._writer = self._opened()
        try:
            for name, value in report.scalars(heads=self.heads).items():
                self._writer.add_scalar(name, value, report.step)
            for finding in report.findings:
                self._writer.add_text(f"attention/{finding.rule}", str(finding), report.step)
            if self._folder is not None:
                # It writes in a thread of its own, and would tell of an error windows later.
                self._writer.flush()
        except Exception:
            self._drop()
            raise

    def close(self) -> None:
        if self._folder is not None and self._writer is not None:
            try:
                self._writer.close()
            finally:
                self._drop()

    def _opened(self) -> Any:
        _needed("tensorboard")
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter(self._folder)

    def _drop(self) -> None:
        """End the threads of a writer of our own; its `close` does not if it fails."""
        if self._folder is not None:
            writer, self._writer = self._writer, None
            for each in (writer.all_writers or {}).values():
                with suppress(Exception):
                    each.close()


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
        found: list[Writer] = []
        try:
            for one in to:
                found += writers(one)
        except BaseException:
            for writer in found:
                if writer not in to:
                    with suppress(Exception):
                        writer.close()
            raise
        return found
    return [_writer(to)]


def _writer(to: Any) -> Writer:
    if isinstance(to, (str, os.PathLike)):
        kind = Path(to).suffix
        if to == "wandb":
            return WeightsAndBiases()
        if to == "mlflow":
            return MLflow()
        if kind == ".jsonl":
            return JsonLines(to)
        # lr0.001 and v1.2 are folders: no file's kind is a number.
        if not kind or kind[1:].isdigit() or os.path.isdir(to):
            return TensorBoard(to)
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
