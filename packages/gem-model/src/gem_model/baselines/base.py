"""What the neural baselines share: features, histories and the candidate as tokens, and a plain network on top.

`B` samples, `N` tokens, `d` width, `F` dense features, `K` tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gem_model.batch import BatchLike
from gem_model.config import ModelInputs
from gem_model.dropout import Dropout
from gem_model.embed import sum_pool
from gem_model.heads import float32, rate_logits
from gem_model.init import HEAD_INIT, initialise
from gem_model.ranker import TokenRanker


@dataclass(frozen=True, kw_only=True)
class BaselineConfig:
    """The sizes that every neural baseline has.

    Args:
        width: d, the size of every token.
        hidden: hidden units of the network on top, layer by layer.
        n_dense: tokens that the dense features become.
        time_scale: seconds; below it, time gaps look alike.
        dropout: probability, on tokens and in the network on top.
    """

    width: int = 32
    hidden: tuple[int, ...] = (128, 64)
    n_dense: int = 1
    time_scale: float = 60.0
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name, value in (("width", self.width), ("n_dense", self.n_dense), *(("hidden", h) for h in self.hidden)):
            at_least_one(name, value)
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")
        if self.time_scale <= 0:
            raise ValueError(f"time_scale must be a positive number of seconds, got {self.time_scale}")


def at_least_one(name: str, value: int) -> None:
    """ValueError unless ``value`` is a positive int."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {value!r}")


class Top(nn.Module):
    """logits = W MLP(x) + U dense + b in float32, MLP of Linear, ReLU and dropout; all tasks share the MLP.

    The papers have no U. Here every baseline gets it, as GEM's heads do, so that none is below a logistic regression
    for want of a linear path.
    """

    def __init__(self, n_in: int, config: BaselineConfig, inputs: ModelInputs) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for size in config.hidden:
            layers += [nn.Linear(n_in, size), nn.ReLU(), Dropout(config.dropout)]
            n_in = size
        self.mlp = nn.Sequential(*layers)
        self.out = nn.Linear(n_in, len(inputs.tasks))
        self.wide = nn.Linear(inputs.dense, len(inputs.tasks), bias=False) if inputs.dense else None

    @torch.no_grad()
    def start_small(self) -> None:
        """The first logits are the bias with a little noise."""
        self.out.weight.mul_(HEAD_INIT)
        if self.wide is not None:
            self.wide.weight.zero_()

    def forward(self, x: Tensor, dense: Tensor | None) -> Tensor:
        """[B, n_in] and standardised dense features [B, F] -> [B, K] float32."""
        x = self.mlp(x)
        with float32(x.device.type):
            logits: Tensor = self.out(x.float())
            if self.wide is not None:
                assert dense is not None
                logits = logits + self.wide(dense.float())
        return logits


class Baseline(TokenRanker):
    """A ranker with a ``top``; subclasses make their layers in ``__init__`` and end it with ``self.finish(n_in)``."""

    top: Top

    def __init__(
        self, config: BaselineConfig, inputs: ModelInputs, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__(config, inputs, device=device)
        self.config = config

    def finish(self, n_in: int) -> None:
        """Make the top for ``n_in`` numbers a sample and draw all parameters."""
        with self.place:
            self.top = Top(n_in, self.config, self.inputs)
        if self.place.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every parameter but the tables' again, and forget the dense features' statistics."""
        super().reset_parameters()
        initialise(self, layers=1)
        self.top.start_small()

    def units(self) -> list[str]:
        """The top alone: what is below is small."""
        return ["top"]

    @torch.no_grad()
    def init_bias(self, rates: Sequence[float] | Tensor) -> None:
        """As :meth:`gem_model.GEM.init_bias`."""
        values = torch.tensor(rate_logits(rates, self.inputs.tasks))
        self.top.out.bias.copy_(values)


class FieldBaseline(Baseline):
    """A baseline without sequence layers: ``fields`` are the features, each history's mean, the candidate as an event.

    The mean of the history's events (item, outcome, time) is what models of fields make of a history; the candidate's
    token lies in the same space, so that a product of the two tells how well they match.
    """

    def __init__(
        self, config: BaselineConfig, inputs: ModelInputs, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__(config, inputs, device=device)
        self.n_fields = self.features.n_tokens + sum(1 + bool(inputs.candidate_columns(s)) for s in inputs.sources)

    def fields(self, batch: BatchLike) -> tuple[Tensor, Tensor | None]:
        """Tokens [B, N, d] and standardised dense features [B, F]."""
        rows = self.tables(batch)
        dense = self.dense(batch)
        x = self.dropout(self.features(rows, dense))
        tokens = [x]
        for source in self.events:
            history = self.history(source, rows, batch)
            count = history.offsets.diff().clamp(min=1)[:, None]
            mean = sum_pool(history.tokens, history.offsets) / count
            tokens += [mean[:, None], self.candidate(source, rows, batch)]
        return torch.cat(tokens, dim=1), dense
