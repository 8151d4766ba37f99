"""What each parameter is, for whoever lays the model out over devices."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection

from gem_model.dhen import Ensemble

Role = Literal["dense", "expert", "table"]


def roles(model: nn.Module) -> dict[str, Role]:
    """Every parameter's name -> what it is: "table" (rows of a TorchRec collection), "expert" (a part of an interaction
    expert of :class:`gem_model.dhen.Ensemble`, called ``<ensemble>.experts.<i>.<...>``) or "dense".

    Ask before TorchRec or FSDP replace modules: afterwards names and classes are others.
    """
    tables = _inside(model, EmbeddingCollection, EmbeddingBagCollection)
    experts = _inside(model, Ensemble)

    def role(name: str) -> Role:
        if tables and name.startswith(tables):
            return "table"
        return "expert" if experts and name.startswith(experts) else "dense"

    return {name: role(name) for name, _ in model.named_parameters()}


def _inside(model: nn.Module, *kinds: type[nn.Module]) -> tuple[str, ...]:
    """How the names of parameters inside modules of these classes begin."""
    return tuple(f"{name}." if name else "" for name, module in model.named_modules() if isinstance(module, kinds))
