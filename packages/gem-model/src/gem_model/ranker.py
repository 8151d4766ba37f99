"""What every model here has: tables, standardised dense features, a loss, and the calls by which others drive it.

`B` samples, `T` events of one source, `N` non-sequence tokens, `d` width, `F` dense features, `K` tasks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from gem_model.batch import BatchLike
from gem_model.config import ModelInputs
from gem_model.dropout import Dropout
from gem_model.embed import EventEncoder, FeatureEncoder, Rows, Tables, Widths, pick
from gem_model.heads import log_loss
from gem_model.history import History, place_events
from gem_model.names import ByName
from gem_model.sharing import Requests

DENSE_LIMIT = 8.0  # standard deviations; beyond them a dense feature is clipped


class Ranker(nn.Module):
    """A model of batches: ``model(batch)`` -> logits [B, K] float32. Holds the tables and the dense statistics.

    Args:
        inputs: what the batches hold.
        device: where parameters are made; "meta" makes none, to be filled by ``to_empty`` and ``reset_parameters``.
    """

    dense_mean: Tensor
    dense_std: Tensor
    shares = False  # whether samples may share histories (gem_model.sharing)
    auxiliary: Tensor | None = None  # what the last forward pass in training adds to the loss, a scalar

    def __init__(self, inputs: ModelInputs, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.inputs = inputs
        self.place = torch.device(device or "cpu")
        with self.place:
            self.tables = Tables(inputs, device=self.place, shares=self.shares)
            if inputs.dense:
                self.register_buffer("dense_mean", torch.zeros(inputs.dense))
                self.register_buffer("dense_std", torch.ones(inputs.dense))

    def loss(self, logits: Tensor, batch: BatchLike) -> Tensor:
        """The mean over the tasks of their masked, weighted mean log losses (:func:`gem_model.heads.log_loss`), and in
        training what the forward pass adds to it.
        """
        loss = log_loss(logits, batch.labels, batch.label_mask, batch.weights)
        return loss if self.auxiliary is None or not self.training else loss + self.auxiliary

    def units(self) -> list[str]:
        """Names of the submodules that FSDP shards one by one, in the order in which they run."""
        raise NotImplementedError

    def init_bias(self, rates: Sequence[float] | Tensor) -> None:
        """Start every task at its base rate, b_k = log(r_k / (1 - r_k)); ValueError unless each lies in (0, 1)."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Draw every parameter but the tables' again, and forget the dense features' statistics."""
        if self.inputs.dense:
            self.dense_mean.zero_()
            self.dense_std.fill_(1.0)

    @torch.no_grad()
    def init_dense(self, mean: Tensor, std: Tensor) -> None:
        """Set the statistics [F] by which dense features are standardised; a std of 0 (a constant) counts as 1.

        Raises:
            ValueError: when there are no dense features, or not F finite numbers with std >= 0.
        """
        count = self.inputs.dense
        for name, value in (("mean", mean), ("std", std)):
            if value.shape != (count,) or count == 0 or not bool(torch.isfinite(value).all()):
                raise ValueError(f"expected {count} finite numbers as {name} of the dense features, got {value}")
        if bool((std < 0).any()):
            raise ValueError(f"a standard deviation cannot be negative, got {std}")
        self.dense_mean.copy_(mean)
        self.dense_std.copy_(torch.where(std > 0, std, 1.0))

    def dense(self, batch: BatchLike) -> Tensor | None:
        """(x - mean) / std clipped to 8 standard deviations, [B, F]; None where the inputs have no dense feature."""
        if not self.inputs.dense:
            return None
        if batch.dense.dim() != 2 or batch.dense.shape[1] != self.inputs.dense:
            raise ValueError(f"expected dense features [B, {self.inputs.dense}], got {tuple(batch.dense.shape)}")
        return ((batch.dense - self.dense_mean) / self.dense_std).clamp(-DENSE_LIMIT, DENSE_LIMIT)


class TokenConfig(Widths, Protocol):
    """What a configuration says of tokens."""

    @property
    def time_scale(self) -> float:
        """Seconds; below it, time gaps look alike."""

    @property
    def dropout(self) -> float:
        """Probability, on tokens."""


class TokenRanker(Ranker):
    """A ranker that reads features, events and the candidate as tokens.

    ``towers`` says the width of each source's tokens, and nothing of a source whose events are not to be tokens;
    without it, all have the width of ``config``. ``buckets`` are those of the dense features.
    """

    def __init__(
        self,
        config: TokenConfig,
        inputs: ModelInputs,
        *,
        towers: Mapping[str, Widths] | None = None,
        buckets: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(inputs, device=device)
        self.time_scale = config.time_scale
        with self.place:
            self.features = FeatureEncoder(config, inputs, buckets=buckets)
            widths = dict.fromkeys([s.name for s in inputs.sources], config) if towers is None else towers
            self.events = ByName(
                {s.name: EventEncoder(s, widths[s.name], inputs) for s in inputs.sources if s.name in widths}
            )
            self.dropout = Dropout(config.dropout)

    def history(self, source: str, rows: Rows, batch: BatchLike) -> History:
        """The events of one source as tokens [T, d], with where they stand; [T, 0] where they are not to be tokens."""
        sequence = pick(batch.sequences, source, "sequence")
        of, time, requests = getattr(batch, "requests", None), batch.time, None
        if of is not None:
            requests = Requests.number(of, sequence.offsets.shape[0] - 1)
            time = requests.first(time)
        rank, age, gap = place_events(sequence, time, self.time_scale)
        if source in self.events:
            tokens = self.dropout(self.events[source](rows, sequence, age, gap))
        else:
            tokens = age.new_zeros(age.shape[0], 0)
        size = sequence.max_len
        return History(tokens=tokens, offsets=sequence.offsets, max_len=size, rank=rank, age=age, requests=requests)

    def candidate(self, source: str, rows: Rows, batch: BatchLike) -> Tensor:
        """The candidate as an event of the source, [B, 1, d]; [B, 0, d] where it shares no column with it."""
        encoder = self.events[source]
        assert isinstance(encoder, EventEncoder)
        candidate = encoder.candidate(rows, batch.dense)
        return (
            batch.dense.new_zeros(batch.time.shape[0], 0, encoder.linear.out_features)
            if candidate is None
            else self.dropout(candidate)[:, None]
        )
