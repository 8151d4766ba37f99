"""What sequential baselines share: the candidate as the last event of its history, read where it stands.

`B` samples, `T` events, `d` width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gem_model.baselines.base import Baseline, BaselineConfig, at_least_one
from gem_model.batch import BatchLike
from gem_model.config import ModelInputs, Source
from gem_model.history import History
from gem_model.names import ByName, key


@dataclass(frozen=True, kw_only=True)
class SequentialConfig(BaselineConfig):
    """``layers`` layers of ``heads`` heads over each history."""

    layers: int = 2
    heads: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one("layers", self.layers)
        at_least_one("heads", self.heads)
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(f"width {self.width} must be a multiple of twice the heads, {2 * self.heads}")


def append(history: History, last: Tensor) -> History:
    """Put one token [B, d] behind each history, at the moment of the request: rank 0, age 0."""
    offsets, batch = history.offsets, last.shape[0]
    samples = torch.arange(batch, device=last.device)
    total = history.tokens.shape[0]
    sample = torch.repeat_interleave(samples, offsets.diff(), output_size=total)
    places = torch.cat((torch.arange(total, device=last.device) + sample, offsets[1:] + samples))

    def join(events: Tensor, others: Tensor) -> Tensor:
        both = torch.cat((events, others))
        return torch.empty_like(both).index_copy(0, places, both)

    return replace(
        history,
        tokens=join(history.tokens, last.to(history.tokens.dtype)),
        rank=join(history.rank, torch.zeros_like(samples)),
        age=join(history.age, history.age.new_zeros(batch)),
        offsets=offsets + torch.arange(batch + 1, device=offsets.device),
        max_len=history.max_len + 1,
    )


class SequentialBaseline(Baseline):
    """logits = MLP([features || state of every source]); a state is what the tower says at the candidate's place.

    Histories hold the outcomes of past events in the events' own tokens. The tower is causal, so no event sees the
    candidate, while the candidate, which stands last, sees all of them. A source that shares no column with the
    candidate is asked by a learned token.
    """

    def __init__(
        self, config: SequentialConfig, inputs: ModelInputs, *, device: torch.device | str | None = None
    ) -> None:
        super().__init__(config, inputs, device=device)
        with self.place:
            self.ask = nn.ParameterDict(
                {
                    key(s.name): nn.Parameter(torch.empty(config.width))
                    for s in inputs.sources
                    if not inputs.candidate_columns(s)
                }
            )
            self.towers = ByName({s.name: self.tower(config, s) for s in inputs.sources})
        self.finish((self.features.n_tokens + len(inputs.sources)) * config.width)

    def tower(self, config: SequentialConfig, source: Source) -> nn.Module:
        """The network of one source: History -> tokens [T, d]."""
        raise NotImplementedError

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw every parameter but the tables' again, and forget the dense features' statistics."""
        super().reset_parameters()
        for token in self.ask.values():
            token.normal_()

    def forward(self, batch: BatchLike) -> Tensor:
        """Logits [B, K] float32."""
        rows = self.tables(batch)
        dense = self.dense(batch)
        x = self.dropout(self.features(rows, dense))
        tokens = [x]
        for source, tower in self.towers.items():
            if key(source) in self.ask:
                last = self.ask[key(source)].expand(x.shape[0], -1)
            else:
                last = self.candidate(source, rows, batch)[:, 0]
            history = append(self.history(source, rows, batch), last)
            tokens.append(tower(history)[history.offsets[1:] - 1][:, None])
        return self.top(torch.cat(tokens, dim=1).flatten(1), dense)

    def units(self) -> list[str]:
        """The towers, then the top."""
        return [f"towers.{key(source)}" for source in self.towers] + ["top"]
