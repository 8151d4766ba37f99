"""Evidence: what became of the events most like the candidate. A regression on the history, with learned similarity.

Attention inside the towers mixes what an event was about with what came of it, which is flexible and, with few samples,
learns users by heart. Here the two are kept apart: the weights see only what the candidate has as well (the item, its
kind) and the time, the values are what it does not have yet (the outcome). This is target attention (DIN, Zhou et al.
2018) in the form of Nadaraya and Watson's kernel regression, in which running rates, a user's recent mood and
item-to-item affinity are special cases that a few parameters reach.

`B` samples, `T` events of one source, `H` heads, `D` dims of a head's key, `V` dims of its value.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from gem_kernels import jagged_attention
from torch import Tensor, nn

from gem_model.batch import BatchLike
from gem_model.config import PLACES, GemConfig, ModelInputs, Source
from gem_model.dropout import Dropout
from gem_model.embed import Rows, pick
from gem_model.sequence import History, uniform_offsets

SHY = 0.6  # of the usual size of q and k: at first an event's weight depends more on its time than on its kind
LOUD = 4.0  # of the usual size of v: a table's rows start far smaller than 1, and what an outcome says should not


class Evidence(nn.Module):
    """Of each head h and sample: o_h = sum_t w_t v_t in R^V, over the events t of one source, w the attention to them.

    With c the columns that the candidate and the events share, e_t the same of event t, y_t its other columns, a_t =
    log(1 + age / time_scale) and r_t = log(rank)::

        s_t = (W_q c + b) . W_k e_t / sqrt(D - 3) + p . [a_t, r_t, a_t r_t]
        w_t = exp(s_t) / (exp(sink) + sum_u exp(s_u))
        v_t = W_v [y_t || a_t / 10, r_t / 10]

    The sink is learned: where few events are like the candidate, o_h shrinks towards zero, as an estimate of few
    observations should.
    """

    def __init__(self, source: Source, config: GemConfig, inputs: ModelInputs) -> None:
        super().__init__()
        self.source = source.name
        self.heads, self.dim, self.value_dim = config.evidence_heads, config.evidence_dim, config.evidence_values
        ids, floats = dict(inputs.candidate_columns(source)), inputs.candidate_floats(source)
        self.shared, self.shared_floats = ids, floats
        self.outcomes = [column for column, _ in source.ids if column not in ids]
        self.outcome_floats = [column for column, _ in source.floats if column not in floats]
        known, rest = inputs.evidence_widths(source)
        content = self.heads * (self.dim - PLACES)
        self.q = nn.Linear(known, content)
        self.k = nn.Linear(known, content, bias=False)
        self.v = nn.Linear(rest, self.heads * self.value_dim, bias=False)
        self.place = nn.Parameter(torch.empty(self.heads, PLACES))
        self.sink = nn.Parameter(torch.empty(self.heads))
        self.dropout = Dropout(config.reader_dropout)

    def forward(self, rows: Rows, batch: BatchLike, history: History) -> Tensor:
        """[B, H, V]; zero where the history is empty."""
        sequence = pick(batch.sequences, self.source, "sequence")
        events = [rows.events[self.source, column] for column in self.shared]
        events += [pick(sequence.floats, c, f"float column in sequence {self.source!r}:") for c in self.shared_floats]
        e = torch.cat(events, dim=1)  # [T, known]
        candidate = [rows.pooled[feature] for feature in self.shared.values()]
        candidate += [batch.dense[:, start : start + size] for start, size in self.shared_floats.values()]
        c = torch.cat(candidate, dim=1)  # [B, known]
        near = torch.stack((history.age, history.rank.float().log()), dim=1)  # [T, 2]
        y = [rows.events[self.source, column] for column in self.outcomes]
        y += [pick(sequence.floats, c, f"float column in sequence {self.source!r}:") for c in self.outcome_floats]

        k = self.k(self.dropout(e)).unflatten(1, (self.heads, -1))  # [T, H, D - 3]
        place = torch.cat((near, near.prod(dim=1, keepdim=True)), dim=1)[:, None].expand(-1, self.heads, -1)
        k = torch.cat((k, place.to(k.dtype)), dim=2)
        q = self.q(self.dropout(c)).unflatten(1, (self.heads, -1)) / math.sqrt(self.dim - PLACES)
        q = torch.cat((q, self.place.to(q.dtype).expand(q.shape[0], -1, -1)), dim=2)  # [B, H, D]
        v = self.v(torch.cat((*y, 0.1 * near), dim=1)).unflatten(1, (self.heads, -1))
        v = F.pad(v, (0, self.dim - self.value_dim))  # the kernels' keys and values have one size
        told = jagged_attention(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            uniform_offsets(q.shape[0], 1, q.device),
            history.offsets,
            1,
            history.max_len,
            scale=1.0,
            return_lse=True,
        )
        assert isinstance(told, tuple)
        out, lse = told
        share = torch.sigmoid(lse.float() - self.sink)  # of all the weight, what the events have
        return out[..., : self.value_dim].float() * share[..., None]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Heads start with different memories: from all of the history to the last few events."""
        for linear, size in ((self.q, SHY), (self.k, SHY), (self.v, LOUD)):
            nn.init.normal_(linear.weight, std=size / math.sqrt(linear.in_features))
            if linear.bias is not None:
                linear.bias.zero_()
        self.place.zero_()
        self.place[:, 0] = torch.linspace(0.0, -2.0, self.heads)
        self.sink.zero_()


class EvidenceTokens(nn.Module):
    """Each head's answer as a token: x_h = Norm(W_h o_h + b_h), [B, n, V] -> [B, n, d]."""

    def __init__(self, count: int, config: GemConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, config.evidence_values, config.width))
        self.bias = nn.Parameter(torch.empty(count, config.width))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, o: Tensor) -> Tensor:
        """[B, n, V] -> [B, n, d]."""
        return self.norm(torch.einsum("bnv,nvd->bnd", o, self.weight.to(o.dtype)) + self.bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The bias gives the norm a scale to measure the answer against."""
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(self.weight.shape[1]))
        self.bias.normal_()
        self.norm.reset_parameters()
