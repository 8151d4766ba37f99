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
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from gem_kernels import jagged_attention
from torch import Tensor, nn

from gem_model.batch import BatchLike
from gem_model.config import PLACES, GemConfig, ModelInputs, Source
from gem_model.dropout import Dropout
from gem_model.embed import Rows, pick, sum_pool
from gem_model.history import History, answers, askers

SHY = 0.6  # of the usual size of q and k: at first an event's weight depends more on its time than on its kind
FEW = 10.0  # events after which a user's vector is no longer mostly held back
LOUD = 4.0  # of the usual size of v: a table's rows start far smaller than 1, and what an outcome says should not


class Comparison(nn.Module):
    """What is compared: the columns that the candidate has as well, and those that say what came of an event."""

    def __init__(self, source: Source, config: GemConfig, inputs: ModelInputs) -> None:
        super().__init__()
        self.source = source.name
        ids, floats = dict(inputs.candidate_columns(source)), inputs.candidate_floats(source)
        self.shared, self.shared_floats = ids, floats
        self.outcomes = [column for column, _ in source.ids if column not in ids]
        self.outcome_floats = [column for column, _ in source.floats if column not in floats]
        self.known, self.rest = inputs.evidence_widths(source)
        self.dropout = Dropout(config.reader_dropout)

    def sides(self, rows: Rows, batch: BatchLike, history: History) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Events e [T, known] and the candidate c [B, known], with dropout; outcomes y [T, rest]; [a_t, r_t] [T, 2]."""
        sequence = pick(batch.sequences, self.source, "sequence")

        def floats(columns: Iterable[str]) -> list[Tensor]:
            return [pick(sequence.floats, c, f"float column in sequence {self.source!r}:") for c in columns]

        events = [rows.events[self.source, column] for column in self.shared]
        candidate = [rows.pooled[feature] for feature in self.shared.values()]
        candidate += [batch.dense[:, start : start + size] for start, size in self.shared_floats.values()]
        outcomes = [rows.events[self.source, column] for column in self.outcomes] + floats(self.outcome_floats)
        near = torch.stack((history.age, history.rank.float().log()), dim=1)
        e = self.dropout(torch.cat((*events, *floats(self.shared_floats)), dim=1))
        return e, self.dropout(torch.cat(candidate, dim=1)), torch.cat((*outcomes, 0.1 * near), dim=1), near


class Evidence(Comparison):
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
        super().__init__(source, config, inputs)
        self.heads, self.dim, self.value_dim = config.evidence_heads, config.evidence_dim, config.evidence_values
        content = self.heads * (self.dim - PLACES)
        self.q = nn.Linear(self.known, content)
        self.k = nn.Linear(self.known, content, bias=False)
        self.v = nn.Linear(self.rest, self.heads * self.value_dim, bias=False)
        self.place = nn.Parameter(torch.empty(self.heads, PLACES))
        self.sink = nn.Parameter(torch.empty(self.heads))

    def forward(self, rows: Rows, batch: BatchLike, history: History) -> Tensor:
        """[B, H, V]; zero where the history is empty."""
        e, c, y, near = self.sides(rows, batch, history)
        k = self.k(e).unflatten(1, (self.heads, -1))  # [T, H, D - 3]
        place = torch.cat((near, near.prod(dim=1, keepdim=True)), dim=1)[:, None].expand(-1, self.heads, -1)
        k = torch.cat((k, place.to(k.dtype)), dim=2)
        q = self.q(c).unflatten(1, (self.heads, -1)) / math.sqrt(self.dim - PLACES)
        q = torch.cat((q, self.place.to(q.dtype).expand(q.shape[0], -1, -1)), dim=2)  # [B, H, D]
        v = self.v(y).unflatten(1, (self.heads, -1))
        v = F.pad(v, (0, self.dim - self.value_dim))  # the kernels' keys and values have one size
        asking, offsets, most = askers(q[:, None], history)
        told = jagged_attention(
            asking[:, 0].contiguous(),
            k.contiguous(),
            v.contiguous(),
            offsets,
            history.offsets,
            most,
            history.max_len,
            scale=1.0,
            return_lse=True,
        )
        assert isinstance(told, tuple)
        out, lse = told
        share = torch.sigmoid(lse.float() - self.sink)  # of all the weight, what the events have
        return answers(out[..., : self.value_dim].float() * share[..., None], history)

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


class Affinity(Comparison):
    """Of each factor group h: how the candidate agrees with what the events were worth, with a sign.

    With e_t, c, y_t and r_t as in :class:`Evidence`, omega_t = exp(d r_t) = rank^d and D dims::

        u = sum_t omega_t (w_v . y_t) (W_k e_t + b_k) / sqrt(c_0 + sum_t omega_t)
        o_h = (W_q c + b_q) . u / sqrt(D)

    Attention's weights are never negative, so an event unlike the candidate can only be passed over; here it speaks
    against it. u is a user vector made of the films that were rated, as in asymmetric SVD (Koren 2008), so that those
    whom training has never seen have one, too.
    """

    def __init__(self, source: Source, config: GemConfig, inputs: ModelInputs) -> None:
        super().__init__(source, config, inputs)
        self.heads, self.dim = config.affinity_heads, config.evidence_dim
        self.q = nn.Linear(self.known, self.heads * self.dim)
        self.k = nn.Linear(self.known, self.heads * self.dim)
        self.v = nn.Linear(self.rest, self.heads, bias=False)
        self.decay = nn.Parameter(torch.empty(self.heads))

    def forward(self, rows: Rows, batch: BatchLike, history: History) -> Tensor:
        """[B, H] float32; zero where the history is empty."""
        e, c, y, near = self.sides(rows, batch, history)
        k = self.k(e).unflatten(1, (self.heads, -1)).float()  # [T, H, D]
        q = self.q(c).unflatten(1, (self.heads, -1)).float()
        omega = torch.exp(near[:, 1:] * self.decay)  # [T, H]
        worth = omega * self.v(y).float()
        total = sum_pool(torch.cat(((k * worth[..., None]).flatten(1), omega), dim=1), history.offsets)
        u, weight = total.split((self.heads * self.dim, self.heads), dim=1)
        u = u.unflatten(1, (self.heads, -1)) / torch.sqrt(FEW + weight)[..., None]
        if history.requests is not None:
            u = history.requests.each(u)
        return (q * u).sum(dim=2) / math.sqrt(self.dim)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As in evidence: from all of the history to the last few events."""
        for linear, size in ((self.q, 0.8), (self.k, 0.8), (self.v, 2.0)):
            nn.init.normal_(linear.weight, std=size / math.sqrt(linear.in_features))
            if linear.bias is not None:
                linear.bias.zero_()
        self.decay.copy_(torch.linspace(0.0, -1.5, self.heads))


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
