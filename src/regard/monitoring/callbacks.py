"""Monitors as callbacks of other people's training loops."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, runtime_checkable

from regard.errors import RegardError


@runtime_checkable
class Stepped(Protocol):
    """What is told of each step of training, and of its end."""

    def step(self, step: int | None = None) -> Any: ...

    def close(self) -> Any: ...


def huggingface_callback(monitor: Stepped) -> Any:
    """A `TrainerCallback` of transformers."""
    base: Any = _needed("'regard[huggingface]'", ["transformers"]).TrainerCallback

    class MonitorCallback(base):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            monitor.step(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            monitor.close()

    return MonitorCallback()


def lightning_callback(monitor: Stepped) -> Any:
    """A `Callback` of Lightning."""
    base: Any = _needed("lightning", ["lightning.pytorch", "pytorch_lightning"]).Callback

    class MonitorCallback(base):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.done = trainer.global_step

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            # Batches that only accumulate gradients do not move the step.
            if trainer.global_step > self.done:
                self.done = trainer.global_step
                monitor.step(self.done)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            monitor.close()

        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            monitor.close()

    return MonitorCallback()


def _needed(wanted: str, modules: list[str]) -> Any:
    for name in modules:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    package = modules[0].partition(".")[0]
    raise RegardError(f"{package} is not installed", do=f"pip install {wanted}")
