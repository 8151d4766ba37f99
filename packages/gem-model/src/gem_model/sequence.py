"""The tower of one history: a personalised feed-forward network, then self-attention; the CLS tokens attend beside it.

`B` samples, `T` events of all samples, `d` width, `H` heads, `D` head dim, `C` CLS tokens, `P` personal key/value
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from gem_kernels import gdpa, jagged_attention, rope
from gem_kernels.nn import NormLinear, RMSNorm
from torch import Tensor, nn

from gem_model.batch import SequenceLike
from gem_model.config import GemConfig
from gem_model.interaction import TokenMix

ROPE_BASE = 10_000.0
ROTE_BASE = 100.0  # log time runs from 0 to about 15, not to 10,000: a smaller base keeps every frequency useful


@dataclass(frozen=True, kw_only=True)
class History:
    """The events of one source on their way through the layers."""

    tokens: Tensor  # [T, d]
    offsets: Tensor  # [B + 1]
    max_len: int
    rank: Tensor  # [T] int64: 1 for the latest event of a sample, 2 for the one before
    age: Tensor  # [T] float32: log(1 + dt / time_scale) from the event to the request

    def with_tokens(self, tokens: Tensor) -> History:
        """The same events, other tokens."""
        return replace(self, tokens=tokens)


def uniform_offsets(batch: int, count: int, device: torch.device) -> Tensor:
    """Offsets of ``count`` >= 1 tokens in each of B samples, [B + 1]: 0, count, 2 count, ..., B count."""
    return torch.arange(0, batch * count + 1, count, device=device)


def place_events(sequence: SequenceLike, request_time: Tensor, time_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Where each event stands, without waiting for the device.

    Returns:
        rank [T] int64: 1 for a sample's latest event, 2 for the one before it.
        age [T] float32: log(1 + dt / time_scale), dt from the event to the request; 0 where an event is later than
            that.
        gap [T] float32: the same of the time since the sample's previous event; 0 for its first.
    """
    offsets, time = sequence.offsets, sequence.time
    total = time.shape[0]
    index = torch.arange(total, device=time.device)
    sample = torch.repeat_interleave(
        torch.arange(offsets.shape[0] - 1, device=time.device), offsets.diff(), output_size=total
    )
    elapsed = request_time[sample] - time
    since = torch.where(index == offsets[sample], 0, time - time.roll(1))
    age, gap = (torch.log1p(t.clamp(min=0).float() / time_scale) for t in (elapsed, since))
    return offsets[sample + 1] - index, age, gap


class HeadNorms(nn.Module):
    """RMS norms of the heads of q and k, or nothing: what keeps their scores within sqrt(D) (QK-norm)."""

    def __init__(self, config: GemConfig) -> None:
        super().__init__()
        self.q = RMSNorm(config.head_dim) if config.qk_norm else nn.Identity()
        self.k = RMSNorm(config.head_dim) if config.qk_norm else nn.Identity()

    def events(self, qk: Tensor) -> Tensor:
        """q and k side by side, or k alone: [T, 2 or 1, H, D] -> the same."""
        if isinstance(self.k, nn.Identity):
            return qk
        *q, k = qk.unbind(1)
        return torch.stack([*(self.q(t) for t in q), self.k(k)], dim=1)


class PersonalisedFFN(nn.Module):
    """S' = S + SwiGLU(Norm S) + GDPA(W_q Norm S; K, V of X_sum): InterFormer's PFFN in Kunlun's GDPA form.

    The second term is a feed-forward network act(n K^T) V whose weights K, V in R^{P x d} each sample makes from its
    own non-sequence tokens, so that events are transformed in the light of the user and the candidate.
    """

    def __init__(self, config: GemConfig) -> None:
        super().__init__()
        self.hidden, self.heads = config.ff_hidden, config.heads
        self.personal, self.activation = config.pffn_tokens, config.activation
        self.splits = [self.hidden, self.hidden, config.width if self.personal else 0]
        self.up = NormLinear(config.width, sum(self.splits), norm="layer")  # gate, up and q at once
        self.down = nn.Linear(self.hidden, config.width)
        if self.personal:
            self.mix = TokenMix(config.n_sum, self.personal)
            self.kv = nn.Linear(config.width, 2 * config.width)
            self.out = nn.Linear(config.width, config.width)
            self.norms = HeadNorms(config)

    def forward(self, history: History, x_sum: Tensor) -> Tensor:
        """Tokens [T, d]; x_sum [B, n_sum, d]."""
        gate, up, q = self.up(history.tokens).split(self.splits, dim=1)
        tokens = history.tokens + self.down(F.silu(gate) * up)
        if not self.personal:
            return tokens
        q = self.norms.q(q.unflatten(1, (self.heads, -1)))  # [T, H, D]
        k, v = self.kv(self.mix(x_sum)).flatten(0, 1).unflatten(1, (2, self.heads, -1)).unbind(1)  # [B P, H, D]
        k_offsets = uniform_offsets(x_sum.shape[0], self.personal, x_sum.device)
        o = gdpa(
            q,
            self.norms.k(k),
            v,
            history.offsets,
            k_offsets,
            history.max_len,
            self.personal,
            activation=self.activation,
        )
        return tokens + self.out(o.flatten(1))


class HistoryAttention(nn.Module):
    """[CLS || S]' = [CLS || S] + MHA([CLS || S]): events attend to events, CLS tokens to every event.

    The CLS tokens stand before the sequence and share its keys and values, but live in their own [B, C, d] tensor: the
    jagged one is then never copied, and a window on the events does not narrow what the CLS tokens see. They hold the
    candidate, so this is also where target attention happens. They ask from the moment of the request: rank 0, age 0,
    which rotates by nothing. With ``events_attend=False`` (Kunlun's computation skip) the events stay as they are.
    """

    def __init__(self, config: GemConfig, *, events_attend: bool) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.window, self.causal = config.window, config.causal
        self.rotary, self.attention, self.activation = config.rotary, config.attention, config.activation
        self.events_attend = events_attend
        self.qkv = NormLinear(config.width, (3 if events_attend else 2) * config.width, norm="layer")
        self.cls_q = NormLinear(config.width, config.width, norm="layer")
        self.norms = HeadNorms(config)
        # GDPA's sum over the events grows with their number; the norm takes that out. Softmax is an average already.
        self.out_norm = nn.LayerNorm(config.width) if config.attention == "gdpa" else None
        self.out = nn.Linear(config.width, config.width)

    def forward(self, history: History, cls: Tensor) -> tuple[Tensor, Tensor]:
        """Events [T, d] and CLS tokens [B, C, d] -> the same shapes."""
        batch, count = cls.shape[:2]
        tokens = history.tokens
        projected = self.qkv(tokens).unflatten(1, (-1, self.heads, self.head_dim))  # [T, 3 or 2, H, D]
        qk, v = projected.split([projected.shape[1] - 1, 1], dim=1)
        *q_events, k = self._rotate(self.norms.events(qk), history).unbind(1)
        v = v.squeeze(1)
        if self.events_attend:
            window = None if self.window is None else (self.window, self.window)
            seen = self._attend(
                q_events[0], k, v, history.offsets, history, history.max_len, causal=self.causal, window=window
            )
            tokens = tokens + self.out(seen)
        q = self.norms.q(self.cls_q(cls).view(batch * count, self.heads, self.head_dim)).to(k.dtype)
        told = self._attend(q, k, v, uniform_offsets(batch, count, cls.device), history, count)
        return tokens, cls + self.out(told).view(cls.shape)

    def _rotate(self, x: Tensor, history: History) -> Tensor:
        """Rotate [T, 2 or 1, H, D] by rank, by age, or half of the heads by each."""
        if self.rotary == "none":
            return x

        def by(place: Tensor, x: Tensor, base: float) -> Tensor:
            return rope(x.flatten(1, 2), None, base=base, positions=place).view(x.shape)

        if self.rotary == "position":
            return by(history.rank, x, ROPE_BASE)
        if self.rotary == "time":
            return by(history.age, x, ROTE_BASE)
        ranked, aged = x.split((self.heads // 2, self.heads - self.heads // 2), dim=2)
        return torch.cat((by(history.rank, ranked, ROPE_BASE), by(history.age, aged, ROTE_BASE)), dim=2)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor,
        history: History,
        max_q: int,
        *,
        causal: bool = False,
        window: tuple[int, int] | None = None,
    ) -> Tensor:
        """[Tq, H, D] queries on the history's keys -> [Tq, d]."""
        args = (q, k, v, q_offsets, history.offsets, max_q, history.max_len)
        if self.attention == "softmax":
            out = jagged_attention(*args, causal=causal, window=window)
            assert isinstance(out, Tensor)
            return out.flatten(1)
        assert self.out_norm is not None
        return self.out_norm(gdpa(*args, activation=self.activation, causal=causal, window=window).flatten(1))


class SequenceLayer(nn.Module):
    """One layer of one tower: S' = MHA(PFFN(X_sum, S)), with the CLS tokens beside S."""

    def __init__(self, config: GemConfig, *, events_attend: bool = True) -> None:
        super().__init__()
        self.ffn = PersonalisedFFN(config)
        self.attention = HistoryAttention(config, events_attend=events_attend)

    def forward(self, history: History, cls: Tensor, x_sum: Tensor) -> tuple[History, Tensor]:
        """History of [T, d] tokens, CLS [B, C, d] and X_sum [B, n_sum, d] -> history and CLS."""
        history = history.with_tokens(self.ffn(history, x_sum))
        tokens, cls = self.attention(history, cls)
        return history.with_tokens(tokens), cls
