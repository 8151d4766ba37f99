"""What each parameter is, for whoever lays the model out over devices."""

from __future__ import annotations

from typing import Literal

from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection

Role = Literal["dense", "expert", "table"]


def roles(model: nn.Module) -> dict[str, Role]:
    """Every parameter's name -> "table" (rows of a TorchRec collection) or "dense"; "expert" is an interaction expert.

    Ask before TorchRec or FSDP replace modules: afterwards names and classes are others.
    """
    collections = tuple(
        f"{name}." if name else ""
        for name, module in model.named_modules()
        if isinstance(module, (EmbeddingCollection, EmbeddingBagCollection))
    )
    return {
        name: "table" if collections and name.startswith(collections) else "dense"
        for name, _ in model.named_parameters()
    }
