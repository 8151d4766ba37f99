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

SOFT = 3.0  # standard deviations


class Reader(nn.Module):
    """logits = W MLP(LN [s(wide) || rows]), [B, K]: wide are the dense features and the evidence, rows those of X.

    The MLP is of Linear, GELU and dropout, with ``config.reader`` hidden units. s(x) = x / (1 + |x| / 3): a feature
    that is seldom set is many standard deviations large when it is, and would make all others small in the norm.
    """

    def __init__(self, config: GemConfig, inputs: ModelInputs, *, n_wide: int) -> None:
        super().__init__()
        size = n_wide + len(inputs.sparse) * inputs.table_dim
        self.norm = nn.LayerNorm(size)
        self.hidden = nn.ModuleList()
        for units in config.reader:
            self.hidden.append(nn.Linear(size, units))
            size = units
        self.out = nn.Linear(size, len(inputs.tasks), bias=False)
        self.dropout = Dropout(config.reader_dropout)

    def forward(self, wide: Tensor, rows: Tensor) -> Tensor:
        """What reaches the logits linearly, [B, n_wide], and the features' rows side by side, [B, S D] -> [B, K]."""
        x = self.norm(torch.cat((wide / (1.0 + wide.abs() / SOFT), self.dropout(rows).to(wide.dtype)), dim=1))
        for linear in self.hidden:
            x = self.dropout(F.gelu(linear(x)))
        logits: Tensor = self.out(x)
        return logits
