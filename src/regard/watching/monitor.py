"""Monitoring training: what every head does, window by window, and what to do about it."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, distributed, nn

from regard.errors import RegardError, RegardWarning
from regard.traces import Trace
from regard.watching.qk_clip import Kind, QKClip
from regard.watching.reports import Heads, Report
from regard.watching.rules import RULES, Judge, Rule
from regard.watching.statistics import Statistics
from regard.watching.telemetry import Telemetry
from regard.watching.watcher import Watch
from regard.watching.writers import writers


class Monitor:
    """Reports what the attention of a model does while it is trained.

    Call `step()` after each step of the optimiser. At every `look`-th step the model is watched; at
    every `every`-th what was seen becomes a `Report`, which goes where `to` says and is held
    against `rules`. Between the steps that are looked at, the model runs as if there were no
    monitor. Runs without gradients, such as evaluations, are never looked at.

    - `look`: 10, or 1 with `qk_clip`, which needs every step.
    - `to`: a path that ends in .jsonl, a folder for TensorBoard, a SummaryWriter, "wandb" or a run
      of it, "mlflow", a function of a report, or a list of these.
    - `rules`: from `regard.watching.rules`; a layer that breaks one is told again after `quiet`
      windows.
    - `qk_clip`: a largest logit, or a `QKClip`. Heads that pass it are scaled down after each step.
    - `layers`: paths of modules (`*` matches anything).
    - `group`: the processes that hold the same model, all of them by default, if
      torch.distributed runs. Each needs its monitor. Numbers are those of all; rank 0 writes.

    >>> import torch, regard
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.TransformerEncoderLayer(16, 4, dropout=0.0, batch_first=True)
    >>> optimiser = torch.optim.Adam(model.parameters())
    >>> reports = []
    >>> with regard.Monitor(model, every=4, look=2, to=reports.append) as monitor:
    ...     for _ in range(8):
    ...         model(torch.randn(2, 5, 16)).square().mean().backward()
    ...         optimiser.step()
    ...         optimiser.zero_grad()
    ...         _ = monitor.step()
    >>> [(report.step, report.looks) for report in reports]
    [(4, 2), (8, 2)]
    >>> heads = reports[-1].layers["self_attn"]
    >>> len(heads), all(0.8 < share < 1 for share in heads.entropy)
    (4, True)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 50,
        look: int | None = None,
        to: Any = None,
        rules: Sequence[Rule] = RULES,
        quiet: int = 20,
        qk_clip: float | QKClip | None = None,
        layers: Sequence[str] | None = None,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        if look is None:
            look = min(10, every) if qk_clip is None else 1
        _check(model, every, look, quiet)
        self.model, self.every, self.look = model, every, look
        self.qk_clip = QKClip(qk_clip) if isinstance(qk_clip, int | float) else qk_clip
        self.steps = self._label = 0
        self._judge = Judge(rules, quiet)
        self.history: deque[Report] = deque(maxlen=max(self._judge.memory, 100))
        """The last reports, newest last."""
        self._ranks = _Ranks(group)
        self._writers = writers(to) if self._ranks.first else []
        self._window = _Window()
        self._watch = _Look(model, layers)
        self._checked = self._closed = False
        self._watch.attach()

    def step(self, step: int | None = None) -> Report | None:
        """A step of training is done. Gives the report if it ended a window.

        Say which `step` it was if they are counted elsewhere, as in a run that is continued."""
        if self._closed:
            raise RegardError("this monitor is closed", do="make a new one")
        self.steps += 1
        self._label = self.steps if step is None else step
        if self._watch.attached:
            self._take()
        report = self._end_window() if self.steps % self.every == 0 else None
        wanted = self.steps % self.look == 0
        if wanted and not self._watch.attached:
            self._watch.attach()
        if not wanted and self._watch.attached:
            self._watch.detach()
        if report is not None:
            self._tell(report)
        return report

    def close(self) -> None:
        """Report what is left, and leave the model as it was."""
        if self._closed:
            return
        self._closed = True
        self._watch.detach()
        try:
            if self._window.looks:
                self._tell(self._end_window())
        finally:
            for writer in self._writers:
                writer.close()

    def for_huggingface(self) -> Any:
        """A callback for the Trainer of transformers: `Trainer(..., callbacks=[...])`."""
        from regard.watching.callbacks import huggingface_callback

        return huggingface_callback(self)

    def for_lightning(self) -> Any:
        """A callback for Lightning's Trainer: `Trainer(callbacks=[...])`."""
        from regard.watching.callbacks import lightning_callback

        return lightning_callback(self)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def _take(self) -> None:
        """Add what the step showed to the window, and clip."""
        found, kinds = self._watch.taken()
        if not self._checked and self._watch.ran:
            self._checked = True
            self._watch.refuse_gaps()
        if not found:
            return
        clipped = {} if self.qk_clip is None else self._clip(self.qk_clip, found, kinds)
        self._window.add(found, clipped)

    def _clip(
        self, clip: QKClip, found: Mapping[str, Telemetry], kinds: Mapping[str, Kind]
    ) -> dict[str, Tensor]:
        wanted = {path: t.statistics.max_logit for path, t in found.items() if clip.wants(path)}
        largest = self._ranks.largest(wanted)
        modules = dict(self.model.named_modules())
        return {
            path: clip.clip(path, modules[path], kinds[path], logit)
            for path, logit in largest.items()
        }

    def _end_window(self) -> Report:
        window, self._window = self._window, _Window()
        report = Report(self._label, window.looks, window.heads(self._ranks))
        if not window.looks:
            return report
        self.history.append(report)
        self._found = self._judge.findings(list(self.history))
        report = replace(report, findings=tuple(finding for _, finding in self._found))
        self.history[-1] = report
        return report

    def _tell(self, report: Report) -> None:
        """Written first, so that what ends a run is in its records."""
        for writer in self._writers:
            writer.write(report)
        if not report.findings:
            return
        for rule, finding in self._found:
            if rule.action == "raise":
                self._watch.detach()
                raise RegardError(str(finding))
            if self._ranks.first:
                warnings.warn(RegardWarning(str(finding)), stacklevel=3)


class _Look(Watch):
    """Watches steps of training, and takes more of each call than plain watching pays for."""

    def __init__(self, model: nn.Module, layers: Sequence[str] | None) -> None:
        super().__init__(model, layers, None, "statistics", 1)
        self._found: dict[str, Telemetry] = {}
        self._kinds: dict[str, Kind] = {}

    def taken(self) -> tuple[dict[str, Telemetry], dict[str, Kind]]:
        """What was found since it was asked last, and the kinds of calls."""
        found, self._found = self._found, {}
        return found, self._kinds

    @property
    def attached(self) -> bool:
        return bool(self._hooks)

    @property
    def ran(self) -> bool:
        return bool(self._ran)

    def refuse_gaps(self) -> None:
        self._refuse_gaps()

    def _due(self) -> bool:
        return torch.is_grad_enabled()

    def _take(self, path: str, trace: Trace) -> None:
        self.seen.layer(path)
        found = Telemetry.of(trace, Statistics.of(trace))
        self._found[path] = self._found[path] + found if path in self._found else found
        if path not in self._kinds:
            self._kinds[path] = Kind.of(trace)


class _Window:
    """Sums since the last report, where the model is."""

    def __init__(self) -> None:
        self.looks = 0
        self._found: dict[str, Telemetry] = {}
        self._clipped: dict[str, Tensor] = {}

    def add(self, found: Mapping[str, Telemetry], clipped: Mapping[str, Tensor]) -> None:
        self.looks += 1
        for path, new in found.items():
            self._found[path] = self._found[path] + new if path in self._found else new
            times = clipped.get(path, torch.zeros_like(new.room))
            self._clipped[path] = self._clipped[path] + times if path in self._clipped else times

    def heads(self, ranks: _Ranks) -> dict[str, Heads]:
        """Of each layer; the only time that the device is waited for."""
        found = ranks.summed(self._found)
        rows = {
            path: torch.cat([t.stacked(), self._clipped[path][None]]) for path, t in found.items()
        }
        return {
            path: Heads.of(Telemetry.read(here[:-1]), here[-1])
            for path, here in _on_host(rows).items()
        }


@dataclass(frozen=True)
class _Ranks:
    """The processes that train copies of the model."""

    group: distributed.ProcessGroup | None

    @property
    def many(self) -> bool:
        running = distributed.is_available() and distributed.is_initialized()
        return running and distributed.get_world_size(self.group) > 1

    @property
    def first(self) -> bool:
        return not self.many or distributed.get_rank(self.group) == 0

    def largest(self, logits: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The largest of all ranks, so that all clip alike and stay equal."""
        return self._reduced(logits, distributed.ReduceOp.MAX) if self.many else dict(logits)

    def summed(self, found: Mapping[str, Telemetry]) -> dict[str, Telemetry]:
        if not self.many:
            return dict(found)
        largest = self.largest({path: t.statistics.max_logit for path, t in found.items()})
        stacked = {path: t.stacked().flatten() for path, t in found.items()}
        sums = self._reduced(stacked, distributed.ReduceOp.SUM)
        whole = {
            path: Telemetry.read(t.view(-1, len(found[path].room))) for path, t in sums.items()
        }
        return {
            path: replace(t, statistics=replace(t.statistics, max_logit=largest[path]))
            for path, t in whole.items()
        }

    def _reduced(self, parts: Mapping[str, Tensor], how: Any) -> dict[str, Tensor]:
        names = sorted(parts)
        whole = torch.cat([parts[name] for name in names])
        distributed.all_reduce(whole, how, self.group)
        each = whole.split([len(parts[name]) for name in names])
        return dict(zip(names, each, strict=True))


def _on_host(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU, made with one wait for each device."""
    there: dict[torch.device, list[str]] = {}
    for name, t in parts.items():
        there.setdefault(t.device, []).append(name)
    found: dict[str, Tensor] = {}
    for names in there.values():
        flat = torch.cat([parts[name].double().flatten() for name in names]).cpu()
        each = flat.split([parts[name].numel() for name in names])
        found |= {n: t.view_as(parts[n]) for n, t in zip(names, each, strict=True)}
    return {name: found[name] for name in parts}


def _check(model: nn.Module, every: int, look: int, quiet: int) -> None:
    if not isinstance(model, nn.Module):
        raise RegardError(
            "Monitor looks at a model", got=type(model).__name__, accepted="a torch.nn.Module"
        )
    if every < 1 or quiet < 1:
        raise RegardError(
            "every= counts steps and quiet= windows",
            got=f"every={every}, quiet={quiet}",
            accepted="1 or more",
        )
    if not 1 <= look <= every:
        raise RegardError(
            "look= says at which steps of a window to look: every so many",
            got=f"look={look}, every={every}",
            accepted=f"1 to {every}",
        )
