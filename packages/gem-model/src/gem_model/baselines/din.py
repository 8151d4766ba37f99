"""A small DIN (Deep Interest Network, Zhou et al. 2018): what target attention alone achieves.

`B` samples, `T` events of one source, `D` dim of the tables, `K` tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gem_model.batch import BatchLike
from gem_model.config import ModelInputs, Source
from gem_model.dropout import Dropout
from gem_model.embed import Rows, pick, sum_pool
from gem_model.heads import float32, rate_logits
from gem_model.history import place_events
from gem_model.init import HEAD_INIT
from gem_model.ranker import Ranker


@dataclass(frozen=True, kw_only=True)
class DinConfig:
    """Hidden units of the attention MLP and of the MLP on top; ``time_scale`` in seconds."""

    attention: int = 36
    hidden: tuple[int, ...] = (64, 32)
    time_scale: float = 60.0
    dropout: float = 0.1


class Interest(nn.Module):
    """sum_t a(h_t, c) h_t over a sample's events h_t, with a an MLP of [h, c, h - c, h * c] where they share columns.

    As in the paper, the weights are not normalised: many matching events are a strong interest. A source that has no
    column in common with the candidate gives the mean of its events.
    """

    def __init__(self, source: Source, config: DinConfig, inputs: ModelInputs) -> None:
        super().__init__()
        self.source, self.time_scale = source.name, config.time_scale
        self.id_columns = [column for column, _ in source.ids]
        self.float_columns = [column for column, _ in source.floats]
        self.shared = dict(inputs.candidate_columns(source))
        self.width = source.event_width(inputs.table_dim)
        shared = len(self.shared) * inputs.table_dim
        self.attention = None
        if shared:
            self.attention = nn.Sequential(
                nn.Linear(self.width + 3 * shared, config.attention), nn.PReLU(), nn.Linear(config.attention, 1)
            )

    def forward(self, rows: Rows, batch: BatchLike) -> Tensor:
        """[B, width of an event]."""
        sequence = pick(batch.sequences, self.source, "sequence")
        offsets = sequence.offsets
        _, age, gap = place_events(sequence, batch.time, self.time_scale)
        ids = {column: rows.events[self.source, column] for column in self.id_columns}
        floats = [sequence.floats[column] for column in self.float_columns]
        events = torch.cat([*ids.values(), *floats, 0.1 * torch.stack((age, gap), dim=1)], dim=1)  # [T, width]
        if self.attention is None:
            return sum_pool(events, offsets) / offsets.diff().clamp(min=1)[:, None]
        h = torch.cat([ids[column] for column in self.shared], dim=1)
        candidate = torch.cat([rows.pooled[feature] for feature in self.shared.values()], dim=1)  # [B, m D]
        c = torch.repeat_interleave(candidate, offsets.diff(), dim=0, output_size=h.shape[0])
        weight = self.attention(torch.cat((events, c, h - c, h * c), dim=1))  # [T, 1]
        return sum_pool(weight * events, offsets)


class DIN(Ranker):
    """``DIN(DinConfig(), inputs)(batch)`` -> logits [B, K]: an MLP of interests, sparse features and dense features.

    The sum of the interests grows with the history, so a LayerNorm stands before the MLP, where the paper has its Dice
    units with batch statistics. As every baseline here it has a linear path from the dense features, too.
    """

    def __init__(self, config: DinConfig, inputs: ModelInputs, *, device: torch.device | str | None = None) -> None:
        super().__init__(inputs, device=device)
        self.config = config
        with self.place:
            self.interests = nn.ModuleList(Interest(s, config, inputs) for s in inputs.sources)
            sizes = [
                sum(s.event_width(inputs.table_dim) for s in inputs.sources)
                + len(inputs.sparse) * inputs.table_dim
                + inputs.dense
            ]
            layers: list[nn.Module] = [nn.LayerNorm(sizes[0])]
            for size in config.hidden:
                layers += [nn.Linear(sizes[-1], size), nn.PReLU(), Dropout(config.dropout)]
                sizes.append(size)
            self.mlp = nn.Sequential(*layers)
            self.out = nn.Linear(sizes[-1], len(inputs.tasks))
            self.wide = nn.Linear(inputs.dense, len(inputs.tasks), bias=False) if inputs.dense else None
        if self.place.type != "meta":
            self._start_small()

    def reset_parameters(self) -> None:
        """Draw every parameter but the tables' again, and forget the dense features' statistics."""
        super().reset_parameters()
        for module in (*self.interests.modules(), *self.mlp.modules(), self.out):
            if isinstance(module, (nn.Linear, nn.PReLU, nn.LayerNorm)):
                module.reset_parameters()
        self._start_small()

    @torch.no_grad()
    def _start_small(self) -> None:
        """The first logits are the bias with a little noise."""
        self.out.weight.mul_(HEAD_INIT)
        if self.wide is not None:
            self.wide.weight.zero_()

    def forward(self, batch: BatchLike) -> Tensor:
        """Logits [B, K] float32."""
        rows = self.tables(batch)
        parts = [interest(rows, batch) for interest in self.interests]
        parts += [rows.pooled[feature] for feature, _ in self.inputs.sparse]
        dense = self.dense(batch)
        if dense is not None:
            parts.append(dense)
        x = self.mlp(torch.cat(parts, dim=1))
        with float32(x.device.type):
            logits: Tensor = self.out(x.float())
            if self.wide is not None:
                assert dense is not None
                logits = logits + self.wide(dense.float())
        return logits

    def units(self) -> list[str]:
        """The MLP alone: what is below is small."""
        return ["mlp"]

    @torch.no_grad()
    def init_bias(self, rates: Sequence[float] | Tensor) -> None:
        """As :meth:`gem_model.GEM.init_bias`."""
        self.out.bias.copy_(torch.tensor(rate_logits(rates, self.inputs.tasks)))
