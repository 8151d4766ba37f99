"""Which precision the linear layers run in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LowprecConfig:
    """A built-in recipe of gem_lowprec and what is changed of it.

    Args:
        recipe: its name; "none" leaves the model as it is.
        keep: name patterns of the layers that stay as they are; None keeps the recipe's own.
        min_size: smaller layers stay as they are; None keeps the recipe's own.
    """

    recipe: str = "none"
    keep: tuple[str, ...] | None = None
    min_size: int | None = None
