"""KV caches that keep what is looked at, for models of transformers; on the fused path.

>>> from regard import caches
>>> caches.PerHead(caches.HeavyHitters(256, recent=32))
PerHead(policy=HeavyHitters(budget=256, recent=32), floor=0.2)
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from regard.caches.policies import HeavyHitters, PerHead, Policy, WindowVotes
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.caches.evicting_cache import EvictingCache
    from regard.caches.press import ReceivedPress

__all__ = ["EvictingCache", "HeavyHitters", "PerHead", "Policy", "ReceivedPress", "WindowVotes"]

# What needs other packages is imported when it is asked for.
_LATER = {"EvictingCache": "evicting_cache", "ReceivedPress": "press"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        if find_spec("transformers") is None:
            raise RegardError(
                f"{name} is for models of transformers, which is not installed",
                do="pip install 'regard[huggingface]'",
            )
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
