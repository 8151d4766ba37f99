"""The reader: logits from evidence by a small network of its own, which the rest of the model corrects.

Tokens, towers and interactions are flexible and, with few samples, learn by heart what a small network on the evidence
generalises. So the two are separate paths to the logits: this one is short and has few parameters, and the long one's
last map starts at zero (:class:`gem_model.heads.Heads`): at first it is not heard, and what it adds must pay.

`B` samples, `D` dim of the tables, `S` sparse features, `K` tasks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_model.config import GemConfig, ModelInputs
from gem_model.dropout import Dropout


class Reader(nn.Module):
    """logits = W MLP(LN [wide || content]), [B, K]; the MLP: Linear, GELU, dropout with ``config.reader`` hidden units.

    Content is what the candidate is, with dropout: the rows of its features and the float columns that events have, too
    (the kinds of a film), as they are and not standardised: a kind that is seldom set would be many standard deviations
    large when it is, and make all else small in the norm. Wide are the other dense features and the evidence.
    """

    def __init__(self, config: GemConfig, inputs: ModelInputs, *, n_wide: int) -> None:
        super().__init__()
        shared = {span for source in inputs.sources for span in inputs.candidate_floats(source).values()}
        self.shared = sorted((start, start + size) for start, size in shared)
        self.rest = gaps(self.shared, n_wide)
        size = n_wide + len(inputs.sparse) * inputs.table_dim
        self.norm = nn.LayerNorm(size)
        self.hidden = nn.ModuleList()
        for units in config.reader:
            self.hidden.append(nn.Linear(size, units))
            size = units
        self.out = nn.Linear(size, len(inputs.tasks), bias=False)
        self.dropout = Dropout(config.reader_dropout)

    def forward(self, wide: Tensor, rows: Tensor, dense: Tensor) -> Tensor:
        """What reaches the logits linearly, [B, n_wide], the features' rows side by side, [B, S D], and the dense
        features as they came, [B, F] -> [B, K].
        """
        content = torch.cat((rows, *(dense[:, a:b] for a, b in self.shared)), dim=1)
        x = torch.cat((*(wide[:, a:b] for a, b in self.rest), self.dropout(content).to(wide.dtype)), dim=1)
        x = self.norm(x)
        for linear in self.hidden:
            x = self.dropout(F.gelu(linear(x)))
        logits: Tensor = self.out(x)
        return logits


def gaps(spans: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """What of [0, end) the sorted spans leave out."""
    edges = [0, *(edge for span in spans for edge in span), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
