"""Models watched while they run: by PyTorch's functions, FlexAttention's and Hugging Face's."""

from regard.watching.choices import Keep
from regard.watching.graph_breaks import uncompiled
from regard.watching.tokens import spelled
from regard.watching.watcher import Watch, watch

__all__ = ["Keep", "Watch", "spelled", "uncompiled", "watch"]
