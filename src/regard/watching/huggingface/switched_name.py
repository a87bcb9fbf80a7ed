"""The name of an attention implementation in a config that is switched for the time of a run."""

from __future__ import annotations

from typing import Any


class SwitchedName(str):
    """regard's name, which does not travel: copies of the config, and files, get the name that the
    config had. Another thread may save a model while it runs.

    >>> import copy
    >>> copy.deepcopy({"implementation": SwitchedName("regard", "sdpa")})
    {'implementation': 'sdpa'}
    """

    own: str | None

    def __new__(cls, name: str, own: str | None) -> SwitchedName:
        made = super().__new__(cls, name)
        made.own = own
        return made

    def __deepcopy__(self, memo: Any) -> str | None:
        return self.own

    def __reduce__(self) -> Any:
        return (type(None), ()) if self.own is None else (str, (self.own,))
