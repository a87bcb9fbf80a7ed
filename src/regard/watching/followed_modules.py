"""The modules of a model that tell a watch when they run."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from torch import nn

from regard.watching.module_calls import follow, leave_alone
from regard.watching.pytorch import spare, stop_sparing


class FollowedModules:
    """Those that are followed, until they are left alone."""

    def __init__(self) -> None:
        self._followed: list[nn.Module] = []
        self._spared: list[nn.Module] = []
        """Those of PyTorch's own during which no mode asks."""
        self.paths: dict[int, str] = {}
        """Of those that are followed, by identity."""

    def __bool__(self) -> bool:
        return bool(self._followed)

    def follow(
        self,
        modules: Iterable[tuple[str, nn.Module]],
        watch: Any,
        *,
        silent: Callable[[nn.Module], bool],
        scripted: Callable[[str, nn.Module], bool],
        islands: Container[str],
        asks: bool,
    ) -> None:
        """Follow all modules of a model but those that never attend (`silent`) or cannot be
        followed. Where a mode `asks`, it need not during such; those that are `islands` tell it."""
        for path, module in modules:
            if path and path not in islands and silent(module):
                if asks:
                    self._spare(module)
            elif not scripted(path, module):
                self._followed.append(module)
                self.paths[id(module)] = path
                follow(module, watch, path)

    def _spare(self, module: nn.Module) -> None:
        # Noted before it is done: an interrupt may come in between.
        self._spared.append(module)
        if not spare(module):
            self._spared.pop()

    def leave_alone(self, watch: Any) -> None:
        for module in self._followed:
            leave_alone(module, watch)
        self._followed.clear()
        for module in self._spared:
            stop_sparing(module)
        self._spared.clear()
        self.paths.clear()
