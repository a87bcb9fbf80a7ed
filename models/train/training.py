"""One way to train: AdamW, a warm-up and a cosine, a budget of steps or minutes, and checkpoints.

Everything random is drawn from the seed and the number of the step, so that a run that was stopped
and resumed is the run that was not.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard import RegardError


def options(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """What every training script can be told."""
    parser.add_argument("--minutes", type=float, help="as many steps as fit into so much time")
    parser.add_argument("--steps", type=int, help="exactly so many steps; the same run again")
    parser.add_argument("--batch", type=int, help="sequences a step")
    parser.add_argument("--rate", type=float, help="the highest learning rate")
    parser.add_argument("--warmup", type=int, default=100, help="steps until it is reached")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", help="cpu or cuda; cuda where there is one unless said")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--every", type=int, default=100, help="steps between lines of progress")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, help="the folder the model is written to")
    parser.set_defaults(**defaults)


class Training:
    """A model being trained, from the options above."""

    def __init__(self, model: nn.Module, given: argparse.Namespace) -> None:
        if (given.steps is None) == (given.minutes is None):
            raise RegardError(
                "a budget is needed", accepted="--steps N or --minutes M, one of the two"
            )
        self.model, self.given = model, given
        self.device = next(model.parameters()).device
        self.checkpoint: Path = given.out / "checkpoint.pt"
        self.steps: int | None = given.steps
        self.done = 0
        self.seconds = 0.0
        wide = [p for p in model.parameters() if p.ndim > 1]
        narrow = [p for p in model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "weight_decay": 0.0}],
            lr=given.rate, betas=(0.9, 0.95), fused=self.device.type == "cuda",
        )  # fmt: skip
        if given.resume and self.checkpoint.exists():
            self._resume()

    def run(
        self, loss_of: Callable[[int], Tensor], validate: Callable[[], dict[str, float]]
    ) -> None:
        """Train until the budget is spent. `loss_of` draws the batch of a step."""
        start = last = time.monotonic()
        given, total = self.given, torch.zeros((), device=self.device)
        half = max(given.warmup // 2, self.done)
        since = start
        while self.steps is None or self.done < self.steps:
            if self.done == half:
                self._wait()
                since = time.monotonic()
            torch.manual_seed(given.seed * 1_000_003 + self.done)
            total += self._step(loss_of)
            self.done += 1
            if self.steps is None and self.done >= given.warmup and self.done > half:
                self._wait()
                now = time.monotonic()
                pace = (now - since) / (self.done - half)
                # A twentieth is left for validation and checkpoints.
                left = 0.95 * given.minutes * 60 - (now - start)
                self.steps = self.done + max(1, int(left / pace))
                print(f"{1 / pace:.1f} steps a second: {self.steps} steps fit", flush=True)
            if self.done % given.every == 0:
                mean, now = float(total) / given.every, time.monotonic()
                rate, total = self.rate(), torch.zeros_like(total)
                speed = given.every / (now - last)
                print(f"{self.done:6d}  loss {mean:.4f}  rate {rate:.2e}  {speed:.1f} steps/s  "
                      f"{now - start:.0f} s", flush=True)  # fmt: skip
                last = now
            if self.done % given.save_every == 0:
                self._keep()
                print(f"{self.done:6d}  held out: {_said(validate())}", flush=True)
            late = given.minutes is not None and time.monotonic() - start > 66 * given.minutes
            if late and self.steps is not None and self.done < self.steps:
                print(f"out of time after {self.done} of {self.steps} steps", flush=True)
                break
        self.seconds += time.monotonic() - start
        self._keep()

    def finish(self) -> None:
        """Drop the checkpoint, if nothing is left to go on with."""
        if self.done == self.steps:
            self.checkpoint.unlink(missing_ok=True)

    def rate(self) -> float:
        """The learning rate of the step to come: up in a line, down along a cosine to a
        twentieth."""
        given = self.given
        if self.done < given.warmup or self.steps is None:
            return float(given.rate * min(1.0, (self.done + 1) / given.warmup))
        share = (self.done - given.warmup) / max(1, self.steps - given.warmup)
        return float(given.rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))))

    def facts(self) -> dict[str, Any]:
        """What the card says of the training."""
        device = self.device.type
        if device == "cuda":
            device = torch.cuda.get_device_name()
        return {
            "steps": self.done,
            "batch": self.given.batch,
            "rate": self.given.rate,
            "seed": self.given.seed,
            "minutes": round(self.seconds / 60, 2),
            "machine": f"{device}, torch {torch.__version__}, Python {platform.python_version()}",
        }

    def _step(self, loss_of: Callable[[int], Tensor]) -> Tensor:
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        with autocast(self.device):
            loss = loss_of(self.done)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _keep(self) -> None:
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                 "done": self.done, "steps": self.steps, "seconds": self.seconds}  # fmt: skip
        half = self.checkpoint.with_suffix(".half")
        torch.save(state, half)
        os.replace(half, self.checkpoint)

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done, self.seconds = state["done"], state["seconds"]
        self.steps = self.steps or state["steps"]
        print(f"resumed after {self.done} steps", flush=True)


def autocast(device: torch.device) -> Any:
    """bfloat16 on CUDA; elsewhere nothing."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def device_of(given: argparse.Namespace) -> torch.device:
    return torch.device(given.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _said(losses: dict[str, float]) -> str:
    return ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
