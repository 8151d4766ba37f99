"""GEM: a ranking model that reads histories and features together, layer by layer.

    ids ----> Tables ----> events of each source ----> S ---.        .---> S' ... (History, [T, d] jagged)
                 \\                                           layer 1
                  `------> features, candidate ------> X ---'        `---> X' ... ([B, N, d]) ---> Heads ---> logits

In each layer (interformer.py) the non-sequence tokens X are summarised for the histories, each history is transformed
in their light and summarised for them, and all of it interacts (interaction.py). `B` samples, `T` events of one source,
`N` non-sequence tokens, `d` width, `K` tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gem_model.batch import BatchLike
from gem_model.config import GemConfig, ModelInputs
from gem_model.dropout import Dropout
from gem_model.embed import EventEncoder, FeatureEncoder, Rows, Tables, pick
from gem_model.heads import Heads, log_loss
from gem_model.init import initialise
from gem_model.interformer import InterFormerLayer
from gem_model.sequence import History, place_events


class GEM(nn.Module):
    """The model: ``GEM(config, inputs)(batch)`` -> logits [B, K] float32.

    Args:
        config: the model's shape.
        inputs: what the batches hold.
        device: where parameters are made; "meta" makes none, to be filled by ``to_empty`` and ``reset_parameters``.

    Sources: Meta's GEM post for the whole; InterFormer (2024) for the interleaving; Kunlun for the personalised FFN and
    ROTE; Wukong (2024) for the interaction.
    """

    def __init__(self, config: GemConfig, inputs: ModelInputs, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.config, self.inputs = config, inputs
        place = torch.device(device or "cpu")
        with place:
            self.tables = Tables(inputs, device=place)
            self.features = FeatureEncoder(config, inputs)
            self.events = nn.ModuleDict({s.name: EventEncoder(s, config, inputs) for s in inputs.sources})
            cls_tokens = {s.name: config.n_sum + bool(inputs.candidate_columns(s)) for s in inputs.sources}
            self.layers = nn.ModuleList(
                InterFormerLayer(i, config.n_tokens if i else self.features.n_tokens, cls_tokens, config)
                for i in range(config.layers)
            )
            self.heads = Heads(config.n_tokens, config, inputs)
            self.dropout = Dropout(config.dropout)
        if place.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every parameter but the tables' again, and forget the dense features' statistics."""
        initialise(self, layers=self.config.layers)
        if self.inputs.dense:
            self.features.dense_mean.zero_()
            self.features.dense_std.fill_(1.0)

    def forward(self, batch: BatchLike) -> Tensor:
        """Logits [B, K] float32.

        Raises:
            ValueError: naming what the batch lacks, or has in the wrong shape.
        """
        rows = self.tables(batch)
        dense = self._dense(batch)
        x = self.dropout(self.features(rows, dense))
        histories = {source: self._history(source, rows, batch) for source in self.events}
        cls = {source: self._candidate(source, rows, x) for source in self.events}
        for layer in self.layers:
            x, histories, cls = layer(x, histories, cls)
        return self.heads(x, dense)

    def loss(self, logits: Tensor, batch: BatchLike) -> Tensor:
        """The mean over the tasks of their masked, weighted mean log losses: see :func:`gem_model.heads.log_loss`."""
        return log_loss(logits, batch.labels, batch.label_mask, batch.weights)

    def units(self) -> list[str]:
        """Names of the submodules that FSDP shards one by one, in the order in which they run."""
        return [f"layers.{i}" for i in range(self.config.layers)] + ["heads"]

    def init_bias(self, rates: Sequence[float] | Tensor) -> None:
        """Start every task at its base rate: see :meth:`gem_model.heads.Heads.init_bias`."""
        self.heads.init_bias(rates)

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
        self.features.dense_mean.copy_(mean)
        self.features.dense_std.copy_(torch.where(std > 0, std, 1.0))

    def _dense(self, batch: BatchLike) -> Tensor | None:
        if not self.inputs.dense:
            return None
        if batch.dense.dim() != 2 or batch.dense.shape[1] != self.inputs.dense:
            raise ValueError(f"expected dense features [B, {self.inputs.dense}], got {tuple(batch.dense.shape)}")
        return self.features.standardise(batch.dense)

    def _history(self, source: str, rows: Rows, batch: BatchLike) -> History:
        sequence = pick(batch.sequences, source, "sequence")
        rank, age, gap = place_events(sequence, batch.time, self.config.time_scale)
        tokens = self.dropout(self.events[source](rows, sequence, age, gap))
        return History(tokens=tokens, offsets=sequence.offsets, max_len=sequence.max_len, rank=rank, age=age)

    def _candidate(self, source: str, rows: Rows, x: Tensor) -> Tensor:
        """The candidate as an event of the source, [B, 1, d]; [B, 0, d] where it shares no column with it."""
        encoder = self.events[source]
        assert isinstance(encoder, EventEncoder)
        candidate = encoder.candidate(rows)
        return x[:, :0] if candidate is None else self.dropout(candidate)[:, None]
