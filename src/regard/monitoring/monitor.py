"""Monitoring training: what every head does, window by window, and what to do about it."""

from __future__ import annotations

import html
import operator
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, distributed, nn

from regard.errors import RegardError, RegardWarning
from regard.monitoring.callbacks import huggingface_callback, lightning_callback
from regard.monitoring.projections import refuse_flat, reshard
from regard.monitoring.qk_clip import Layer, QKClip, clip_layers, patterns
from regard.monitoring.ranks import Ranks
from regard.monitoring.reports import Report
from regard.monitoring.rules import RULES, Judge, Rule
from regard.monitoring.telemetry import Readings
from regard.monitoring.training_watch import LOOKING, TrainingWatch
from regard.monitoring.troubles import Troubles
from regard.monitoring.window import Paths, Window
from regard.monitoring.writers import Outlets, writers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Monitor:
    """Reports what the attention of a model does while it is trained.

    Call `step()` after each step of the optimiser. At every `look`-th step the model is watched; at
    every `every`-th what was seen becomes a `Report`, which is checked by `rules` and written to
    `to`. Between the steps that are looked at, the model runs as if there were no
    monitor. Runs without gradients, such as evaluations, are never looked at.

    - `look`: 10, or 1 with `qk_clip`, which needs every step.
    - `to`: a path that ends in .jsonl, a folder for TensorBoard, a SummaryWriter, "wandb" or a run
      of it, "mlflow", a function of a report, or a list of these.
    - `rules`: from `regard.monitoring.rules`. A head that breaks one is reported once, and again
      after it recovered or when it is twice as far beyond the threshold; a layer once in `quiet`
      windows at most.
    - `qk_clip`: a largest logit, or a `QKClip`. Heads that pass it are scaled down after each step.
    - `layers`: paths of modules (`*` matches anything).
    - `group`: the processes that train the model together, or a mesh of them; all of them by
      default, if torch.distributed runs. Each needs its own monitor. Numbers are those of all
      ranks; the first writes.
    - `on_error`: what an error of looking, clipping or writing does. "warn" warns once of each
      kind, and training goes on as without a monitor; "raise" ends the run. A rule with
      `action="raise"` ends it either way, and so does what can be refused before anything runs.
    - `logits`: also the least logit, and the standard deviation of logits under any mask, bias and
      score: one more pass over the pairs in one step of a window. Without it there is the standard
      deviation alone, where the mask is a band and logits are scaled products.

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
        layers: str | Sequence[str] | None = None,
        group: distributed.ProcessGroup | DeviceMesh | None = None,
        on_error: Literal["warn", "raise"] = "warn",
        logits: bool = False,
    ) -> None:
        _check_model(model)
        self.model, self.every = model, _steps("every", every)
        self.qk_clip = _clip(qk_clip)
        if look is None:
            look = min(10, self.every) if self.qk_clip is None else 1
        self.look = _steps("look", look)
        _check(self.every, self.look, on_error, logits)
        self.steps = self._label = 0
        self._judge = Judge(_rules(rules), _steps("quiet", quiet))
        self.history: deque[Report] = deque(maxlen=max(self._judge.memory, 100))
        """The last reports, newest last."""
        self._troubles = Troubles(raises=on_error == "raise")
        self._ranks = Ranks(_group(group))
        self._window = Window()
        self._looked = 0
        """Steps of this window that were looked at: the same on all ranks."""
        self._watch = TrainingWatch(
            model, patterns(layers), self._troubles, self._ranks, walks=logits
        )
        self._refuse_clipping()
        self._outlets = Outlets(writers(to) if self._ranks.first else [], self._troubles)
        self._checked = self._closed = False
        self._due = True
        """Whether the step that runs is looked at, on every rank."""
        try:
            self._watch.attach()
        except BaseException:
            self._outlets.drop()
            raise

    def step(self, step: int | None = None) -> Report | None:
        """Call it after each step of training. Returns the report if the step ended a window.

        Pass the number of the `step` if it is counted elsewhere, as in a resumed run."""
        if self._closed:
            with self._troubles.during("counting steps"):
                raise RegardError("this monitor is closed", do="make a new one")
            self._troubles.tell(2)
            return None
        self.steps += 1
        self._label = self.steps
        with self._troubles.during("counting steps"):
            self._label = _label(self.steps, step)
        if self._due:
            with self._troubles.during(LOOKING):
                self._take()
        report = None
        if self.steps % self.every == 0:
            with self._troubles.during("making a report"):
                report = self._end_window()
        self._due = self.steps % self.look == 0
        self._watch.measures = self._looked == 0
        with self._troubles.during(LOOKING):
            # Anew after a report, for modules that took the place of others.
            if self._watch.attached and (report is not None or not self._due):
                self._watch.detach()
            if self._due and not self._watch.attached:
                self._watch.attach()
        if report is not None:
            self._outlets.write(report)
        self._troubles.tell(2)
        if report is not None:
            self._tell(report, 2)
        return report

    def close(self) -> None:
        """Report what is left, and leave the model as it was."""
        self._close()

    def _close(self, *, broken: bool = False) -> None:
        """Warnings point at who called `close` or was in the `with`. A rank that is `broken` asks
        the others for nothing: they may be anywhere."""
        if self._closed:
            return
        report = None
        try:
            self._let_go()
            left = self._looked and not broken if self._ranks.many else self._window.looks
            if left:
                with self._troubles.during("making a report"):
                    report = self._end_window()
            if report is not None:
                self._outlets.write(report)
        finally:
            # Again, because an interrupt may have come in the middle of it.
            self._closed = True
            try:
                self._let_go()
            finally:
                self._outlets.close()
        self._troubles.tell(3)
        if report is not None:
            self._tell(report, 3)

    def for_huggingface(self) -> Any:
        """A callback for the Trainer of transformers: `Trainer(..., callbacks=[...])`."""
        return huggingface_callback(self)

    def for_lightning(self) -> Any:
        """A callback for Lightning's Trainer: `Trainer(callbacks=[...])`."""
        return lightning_callback(self)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._close(broken=error is not None)

    def __repr__(self) -> str:
        return f"{self._state()}\n{self.history[-1]!r}" if self.history else self._state()

    def _repr_html_(self) -> str:
        """The last report, where a notebook asks for the monitor."""
        state = f"<p>{html.escape(self._state())}</p>"
        return state + (self.history[-1]._repr_html_() if self.history else "")

    def _state(self) -> str:
        clip = "" if self.qk_clip is None else f", qk_clip={self.qk_clip.threshold:g}"
        closed = ", closed" if self._closed else ""
        return (
            f"Monitor({type(self.model).__name__}, step {self.steps}, looks every {self.look}, "
            f"reports every {self.every}{clip}{closed})"
        )

    def _refuse_clipping(self) -> None:
        if self.qk_clip is not None:
            refuse_flat(self.model)
            for path, module in self.model.named_modules():
                if self._watch.wants(path):
                    self.qk_clip.refuse(path, module)

    def _take(self) -> None:
        """Add what the step showed to the window, and clip."""
        seen, spreads = self._watch.taken(), self._watch.taken_spreads()
        self._looked += 1
        # With others, whatever was seen here: nobody may wait for this rank.
        if seen or self._ranks.many:
            clipped = {} if self.qk_clip is None else self._clip(self.qk_clip, seen)
            self._window.add(seen, clipped, spreads)
        # What is missing because looking failed is no gap, and was noted. Of several ranks some may
        # hold a part of the model that does not attend.
        empty = self._ranks.many and not self._watch.attends
        if not self._checked and self._watch.ran and not self._troubles.fresh and not empty:
            self._checked = True
            self._watch.refuse_gaps()

    def _clip(self, clip: QKClip, found: Mapping[Paths, Readings]) -> dict[str, Tensor]:
        largest: dict[str, Tensor] = {}
        for paths, readings in found.items():
            for path, logit in zip(paths, readings.max_logit, strict=True):
                more = path in largest
                largest[path] = torch.maximum(largest[path], logit) if more else logit
        largest = self._ranks.largest(largest)
        reshard(self.model)
        clipped: dict[str, Tensor] = {}
        frozen: list[str] = []
        kinds = self._ranks.kinds
        layers = {
            path: Layer(
                self.model.get_submodule(path), kinds[path], self._ranks.whole_layer(path, logit)
            )
            for path, logit in largest.items()
            if clip.wants(path) and self._ranks.owns(path, self.model)
        }
        times = clip_layers(clip, layers, lambda: self._troubles.during("clipping"))
        for path, now in times.items():
            if now is None:
                frozen.append(path or "(model)")
            elif path in self._ranks.held:
                clipped[path] = now
        if frozen:
            some = ", ".join(frozen[:3]) + (f" and {len(frozen) - 3} more" * (len(frozen) > 3))
            self._troubles.remark(
                "frozen", f"QK-clip leaves alone what is frozen: the projections of {some}"
            )
        return clipped

    def _end_window(self) -> Report:
        window, self._window, self._looked = self._window, Window(), 0
        looks, heads = window.heads(self._ranks)
        report = Report(self._label, looks, heads)
        if not looks:
            return report
        self.history.append(report)
        self._found = self._judge.findings(
            list(self.history), lambda: self._troubles.during("judging a report")
        )
        report = replace(report, findings=tuple(finding for _, finding in self._found))
        self.history[-1] = report
        return report

    def _let_go(self) -> None:
        with self._troubles.during(LOOKING):
            self._watch.detach()

    def _tell(self, report: Report, stacklevel: int) -> None:
        """After it is written, so that what ends a run is in its records."""
        if not report.findings:
            return
        for rule, finding in self._found:
            if rule.action == "raise":
                self._watch.detach()
                raise RegardError(str(finding))
            if self._ranks.first:
                warnings.warn(RegardWarning(str(finding)), stacklevel=stacklevel + 1)


def _check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise RegardError(
            "Monitor looks at a model", got=type(model).__name__, accepted="a torch.nn.Module"
        )


def _steps(name: str, given: Any) -> int:
    counts = {"every": "steps", "look": "steps", "quiet": "windows"}[name]
    try:
        number = None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = None
    if number is None or number < 1:
        raise RegardError(
            f"{name}= counts {counts}",
            got=f"{name}={given!r}",
            accepted="a whole number, 1 or more",
        )
    return number


def _label(steps: int, step: Any) -> int:
    try:
        return steps if step is None else operator.index(step)
    except TypeError:
        raise RegardError(
            "step= is the number of the step", got=repr(step), accepted="a whole number"
        ) from None


def _clip(given: Any) -> QKClip | None:
    if given is None or isinstance(given, QKClip):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        return QKClip(given)
    raise RegardError(
        "qk_clip= is the largest logit that heads may have",
        got=repr(given),
        accepted="a number above 0, often 100; a QKClip; or None",
    )


def _rules(given: Any) -> list[Rule]:
    listed = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    wrong = [rule for rule in listed if not isinstance(rule, Rule)]
    if isinstance(given, Rule) or wrong:
        raise RegardError(
            "rules= are thresholds that heads are held against",
            got=repr(given),
            accepted="a list of rules from regard.monitoring.rules, made with their thresholds: "
            "[LogitExplosion(above=50)]; or () for none",
        )
    return listed


def _group(given: Any) -> distributed.ProcessGroup | None:
    """A group, or that of a mesh."""
    if given is None:
        return None
    if distributed.is_available():
        if isinstance(given, distributed.ProcessGroup):
            return given
        mesh: Any = sys.modules.get("torch.distributed.device_mesh")
        if mesh is not None and isinstance(given, mesh.DeviceMesh) and given.ndim == 1:
            group: distributed.ProcessGroup = given.get_group()
            return group
    raise RegardError(
        "group= are the processes that train the model together",
        got=repr(given),
        accepted="a group of torch.distributed (new_group), a DeviceMesh of one dimension "
        '(mesh["dp"]), or None for all',
    )


def _check(every: int, look: int, on_error: Any, logits: Any) -> None:
    if look > every:
        raise RegardError(
            "look= says at which steps of a window to look: every so many",
            got=f"look={look}, every={every}",
            accepted=f"1 to {every}",
        )
    if on_error not in ("warn", "raise"):
        raise RegardError(
            "on_error= says what an error of the monitor does",
            got=repr(on_error),
            accepted='"warn" or "raise"',
        )
    if not isinstance(logits, bool):
        raise RegardError(
            "logits= turns one more pass for the least logit and the standard deviation on",
            got=repr(logits),
            accepted="True or False",
        )
