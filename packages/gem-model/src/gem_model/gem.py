"""GEM: a ranking model that reads histories and features together, layer by layer.

    ids ----> Tables ----> events of each source ----> S ---.        .---> S' ... (History, [T, d] jagged)
                 \\                                           layer 1
                  `------> features, candidate ------> X ---'        `---> X' ... ([B, N, d]) ---> Heads ---> logits
                              evidence of each source --^--------- Reader -------------------------^

What became of events like the candidate (evidence.py) joins X before the first layer, and may have a short way of its
own to the logits (reader.py). In each layer (interformer.py) the non-sequence tokens X are summarised for the
histories, each history is transformed in their light and summarised for them, and all of it interacts (interaction.py).
`B` samples, `T` events of one source, `N` non-sequence tokens, `d` width, `K` tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_model.batch import BatchLike
from gem_model.config import GemConfig, ModelInputs
from gem_model.distillation import Distillation, untaught
from gem_model.evidence import Affinity, Evidence, EvidenceTokens
from gem_model.heads import Heads
from gem_model.init import initialise
from gem_model.interformer import InterFormerLayer
from gem_model.layers import Layers
from gem_model.names import ByName
from gem_model.ranker import TokenRanker


class GEM(TokenRanker):
    """The model: ``GEM(config, inputs)(batch)`` -> logits [B, K] float32.

    Args:
        config: the model's shape.
        inputs: what the batches hold.
        device: where parameters are made; "meta" makes none, to be filled by ``to_empty`` and ``reset_parameters``.

    Sources: Meta's GEM post for the whole; InterFormer (2024) for the interleaving; Kunlun for the personalised FFN and
    ROTE; Wukong (2024) and DHEN (2022) for the interaction.
    """

    shares = True

    def __init__(self, config: GemConfig, inputs: ModelInputs, *, device: torch.device | str | None = None) -> None:
        inputs = untaught(config, inputs)
        names = [s.name for s in inputs.sources]
        towers = {name: config.of(name) for name in config.sources_of(0, names)}
        super().__init__(config, inputs, towers=towers, buckets=config.dense_buckets, device=device)
        self.config = config
        asked = [s for s in inputs.sources if config.evidence_heads and inputs.candidate_columns(s)]
        n_evidence = len(asked) * config.evidence_heads
        with self.place:
            self.evidence = ByName({s.name: Evidence(s, config, inputs) for s in asked})
            self.evidence_tokens = EvidenceTokens(n_evidence, config) if asked else None
            cls_tokens = {s.name: config.n_sum + bool(inputs.candidate_columns(s)) for s in inputs.sources}
            self.layers = Layers(
                InterFormerLayer(
                    i,
                    config.n_tokens if i else self.features.n_tokens + n_evidence,
                    {name: cls_tokens[name] for name in config.sources_of(i, names)},
                    config,
                )
                for i in range(config.layers)
            )
            compared = [s for s in inputs.sources if config.affinity_heads and inputs.candidate_columns(s)]
            self.affinity = ByName({s.name: Affinity(s, config, inputs) for s in compared})
            n_wide = inputs.dense + n_evidence * config.evidence_values + len(compared) * config.affinity_heads
            self.heads = Heads(config.n_tokens, config, inputs, n_wide=n_wide)
            self.distillation = Distillation(config, inputs) if config.teachers else None
        if self.place.type != "meta":
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every parameter but the tables' again, and forget the dense features' statistics."""
        super().reset_parameters()
        initialise(self, layers=self.config.layers)

    def forward(self, batch: BatchLike) -> Tensor:
        """Logits [B, K] float32.

        Raises:
            ValueError: naming what the batch lacks, or has in the wrong shape.
        """
        rows = self.tables(batch)
        dense = self.dense(batch)
        if dense is not None and self.distillation is not None:
            dense = dense.index_fill(1, torch.tensor(self.distillation.places, device=dense.device), 0.0)
        wide = [] if dense is None else [dense]
        x = self.dropout(self.features(rows, dense))
        histories = {s.name: self.history(s.name, rows, batch) for s in self.inputs.sources}
        if self.evidence_tokens is not None:
            told = [module(rows, batch, histories[source]) for source, module in self.evidence.items()]
            evidence = torch.cat(told, dim=1)  # [B, heads of all sources, evidence_values]
            x = torch.cat((x, self.evidence_tokens(evidence).to(x.dtype)), dim=1)
            wide.append(evidence.flatten(1))
        wide += [module(rows, batch, histories[source]) for source, module in self.affinity.items()]
        cls = {source: self.candidate(source, rows, batch) for source in self.events}
        x = self.layers(x, histories, cls)
        self.auxiliary = None
        if self.distillation is not None and self.training:
            self.auxiliary = self.distillation(x, batch)
        content = None
        if self.heads.reader is not None:
            pooled = [rows.pooled[f] for f, _ in self.inputs.sparse]
            content = torch.cat([x.new_zeros(x.shape[0], 0), *pooled], dim=1), batch.dense
        return self.heads(x, torch.cat(wide, dim=1) if wide else None, content)

    def units(self) -> list[str]:
        """Names of the submodules that FSDP shards one by one, in the order in which they run."""
        return [f"layers.{i}" for i in range(self.config.layers)] + ["heads"]

    def init_bias(self, rates: Sequence[float] | Tensor) -> None:
        """Start every task at its base rate: see :meth:`gem_model.heads.Heads.init_bias`."""
        self.heads.init_bias(rates)
