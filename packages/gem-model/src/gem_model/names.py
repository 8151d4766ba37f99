"""Names of users' columns, sources and tasks as keys of torch's modules, whatever they are.

Torch refuses keys that are attributes of its containers ("type", "keys", "items") or hold a dot, and TorchRec reads "@"
in them. Escaped are only such names, so that usual ones are what a checkpoint shows.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping

from torch import nn

ESCAPED = {"%": "%25", ".": "%2E", "/": "%2F", "@": "%40"}


def key(name: str) -> str:
    """The key of a name; different names have different keys, and none has a dot.

    "country" -> "country", "a.b" -> "a%2Eb", "type" -> "%type".
    """
    escaped = "".join(ESCAPED.get(c, c) for c in name)
    held = any(hasattr(kind, escaped) for kind in (nn.ModuleDict, nn.ParameterDict))
    taken = held or escaped.startswith("_") or escaped == "training"
    return f"%{escaped}" if taken else escaped  # "%" alone, without a code, begins no other name's key


class ByName(nn.ModuleDict):
    """A ModuleDict whose keys may be any names; its items come under the names that were given."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._names = list(modules)
        for name, module in modules.items():
            self.add_module(key(name), module)

    def __getitem__(self, name: str) -> nn.Module:
        return super().__getitem__(key(name))

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def keys(self) -> KeysView[str]:
        """The names, in the order in which they were given."""
        return dict.fromkeys(self._names).keys()

    def items(self) -> ItemsView[str, nn.Module]:
        """(name, module) pairs."""
        return dict(zip(self._names, self.values(), strict=True)).items()
