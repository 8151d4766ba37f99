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
        numerics_every: every so many steps the first rank measures how well each operand of the converted layers is
            represented, for numerics.jsonl and the report; 0 for never.
    """

    recipe: str = "none"
    keep: tuple[str, ...] | None = None
    min_size: int | None = None
    numerics_every: int = 0

    def __post_init__(self) -> None:
        if self.numerics_every < 0:
            raise ValueError(f"lowprec.numerics_every must not be negative, got {self.numerics_every}")
