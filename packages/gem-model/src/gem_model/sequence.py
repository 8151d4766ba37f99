"""The tower of one history: a personalised feed-forward network, then self-attention; the CLS tokens attend beside it.

`B` samples, `T` events of all samples, `d` width, `H` heads, `D` head dim, `C` CLS tokens, `P` personal key/value
tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from gem_kernels import (
    Among,
    GatedDown,
    LateProduct,
    block_attention,
    gated_heads,
    gdpa,
    jagged_attention,
    project_gated,
    project_rotary,
    rotary_heads,
)
from gem_kernels.nn import NormLinear, RMSNorm
from gem_kernels.project_gated import watched
from torch import Tensor, nn

from gem_model.config import GemConfig
from gem_model.history import History, Seats, answers, askers, read, read_parts, rows_for, turns, uniform_offsets
from gem_model.interaction import TokenMix
from gem_model.projection import late_product, plain, project, project_apart, project_both, working_dtype


class HeadNorms(nn.Module):
    """RMS norms of the heads of q and k, or nothing: what keeps their scores within sqrt(D) (QK-norm)."""

    def __init__(self, config: GemConfig) -> None:
        super().__init__()
        self.q = RMSNorm(config.head_dim) if config.qk_norm else nn.Identity()
        self.k = RMSNorm(config.head_dim) if config.qk_norm else nn.Identity()

    @property
    def weights(self) -> tuple[Tensor | None, Tensor | None]:
        """Of q and of k, [D] each, for kernels that norm in passing."""
        q, k = (norm.weight if isinstance(norm, RMSNorm) else None for norm in (self.q, self.k))
        return q, k


class PersonalisedFFN(nn.Module):
    """SwiGLU(Norm S) + GDPA(W_q Norm S; K, V of X_sum), to be added to S: InterFormer's PFFN in Kunlun's GDPA form.

    The second term is a feed-forward network act(n K^T) V whose weights K, V in R^{P x d} each sample makes from its
    own non-sequence tokens, so that events are transformed in the light of the user and the candidate.

    Attributes:
        fused: both products at the gate are made with the gate in their registers (gem_kernels.project_gated), where
            nothing wants them apart: no hook, no precision recipe, no plan of what is kept.
    """

    fused = True

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

    def forward(self, history: History, x_sum: Tensor) -> History:
        """Tokens [T, d]; x_sum [B, n_sum, d]."""
        given = rows_for(self.up, history) if self._fuses else None
        if given is not None:
            return self._fused(*given, x_sum)
        packed, bias, history = read(self.up, history)
        late = None if history.inside == "none" else late_product(self.down, packed)
        hidden, q = self._parts(packed, bias, late, history.inside == "fp8")
        history.meet()  # X_sum, for which what precedes need not wait
        if not self.personal:
            return history.plus(*project(self.down, hidden, late))
        told = self._told(q, history, x_sum)
        return history.plus(*project_both(self.down, hidden, self.out, told, late))

    @property
    def _fuses(self) -> bool:
        if not self.fused or watched() or not plain(self.down) or self.down.bias is None:
            return False
        return not self.personal or (plain(self.out) and self.out.bias is not None)

    def _fused(self, x: Tensor, weight: Tensor, bias: Tensor, history: History, x_sum: Tensor) -> History:
        """The same of the rows x [T, d] that `up` multiplies."""
        down, dtype = GatedDown(), working_dtype(x)
        gain = self.norms.weights[0] if self.personal else None
        x, weight = x.to(dtype), weight.to(dtype)
        hidden, q = project_gated(x, weight, self.hidden, self.heads, gain, bias=bias, down=down)
        history.meet()  # X_sum, for which what precedes need not wait
        last = self.down.weight.to(dtype)
        others: tuple[Tensor, ...] = ()
        added: Tensor = self.down.bias
        if self.personal:
            others = (self._told(q, history, x_sum).to(dtype), self.out.weight.to(dtype))
            added = added + self.out.bias
        return history.plus(down(hidden, last, added.detach().to(dtype), *others), added)

    def _told(self, q: Tensor, history: History, x_sum: Tensor) -> Tensor:
        """What the sample tells its events, [T, d]."""
        k, v = self._personal(self._packed(x_sum))  # [B P, H, D]
        return self._transform(q, k, v, history).flatten(1)

    def _packed(self, x_sum: Tensor) -> Tensor:
        """W_kv (M X_sum) + b, [B P, 2 d]. M maps tokens and W_kv dims, so either may come first: W_kv does, on the
        fewer tokens.
        """
        if plain(self.kv) and self.kv.bias is not None:
            return self.mix(F.linear(x_sum, self.kv.weight), self.kv.bias).flatten(0, 1)  # type: ignore[no-any-return]
        return self.kv(self.mix(x_sum).flatten(0, 1))  # type: ignore[no-any-return]

    def _parts(
        self, packed: Tensor, bias: Tensor | None, late: LateProduct | None = None, small: bool = False
    ) -> tuple[Tensor, Tensor]:
        """SwiGLU's product [T, hidden] and the normed queries [T, H, D]; `late`, `small`: see `gated_heads`."""
        weight = self.norms.weights[0] if self.personal else None
        return gated_heads(packed, self.hidden, self.heads, weight, bias=bias, product=late, small=small)

    def _personal(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Normed keys and the values, [B P, H, D], of their projections side by side."""
        k, v = rotary_heads(packed, self.heads, self.norms.weights[1:])
        return k, v

    def _transform(self, q: Tensor, k: Tensor, v: Tensor, history: History) -> Tensor:
        """act(q K^T) V of each event with its sample's keys and values, [T, H, D]."""
        k_offsets = uniform_offsets(history.offsets.shape[0] - 1, self.personal, q.device)
        sizes = (history.max_len, self.personal)
        return gdpa(q, k, v, history.offsets, k_offsets, *sizes, activation=self.activation)


class HistoryAttention(nn.Module):
    """MHA([CLS || S]), to be added to [CLS || S]: events attend to events, CLS tokens to every event.

    The CLS tokens stand before the sequence and share its keys and values, but live in their own [B, C, d] tensor: the
    jagged one is then never copied, and a window on the events does not narrow what the CLS tokens see. They hold the
    candidate, so this is also where target attention happens. They ask from the moment of the request: rank 0, age 0,
    which rotates by nothing. With ``events_attend=False`` (Kunlun's computation skip) the events stay as they are.
    Where all see the whole history, the queries alone are put together (`together`): one call, one gradient of keys and
    values.

    Attributes:
        fused: where they are, and nothing wants them apart, their projection is made with the heads' norms and rotation
            in its registers (gem_kernels.project_rotary).
    """

    fused = True

    def __init__(self, config: GemConfig, *, events_attend: bool) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        self.window, self.block, self.causal = config.window, config.block, config.causal
        self.rotary, self.attention, self.activation = config.rotary, config.attention, config.activation
        self.events_attend = events_attend
        self.qkv = NormLinear(config.width, (3 if events_attend else 2) * config.width, norm="layer")
        self.cls_q = NormLinear(config.width, config.width, norm="layer")
        self.norms = HeadNorms(config)
        # GDPA's sum over the events grows with their number; the norm takes that out. Softmax is an average already.
        self.out_norm = nn.LayerNorm(config.width) if config.attention == "gdpa" else None
        self.out = nn.Linear(config.width, config.width)

    def forward(self, history: History, cls: Tensor) -> tuple[History, Tensor]:
        """Events [T, d] and CLS tokens [B, C, d] -> the same shapes."""
        if self.together and history.requests is None:
            given = rows_for(self.qkv, history) if self.fused and not watched() else None
            if given is not None:
                return self._fused(*given, cls)
            width = self.heads * self.head_dim
            parts, bias, history = read_parts(self.qkv, history, (2 * width, width) if history.inside == "fp8" else ())
            return self._together(parts, bias, history, cls)
        packed, bias, history = read(self.qkv, history)
        q_events, (k, v), (k_again, v_again) = self._parts(packed, bias, history)
        if q_events is not None:
            seen = self._seen(q_events, k, v, history)
            history = history.plus(*project(self.out, seen))
        asking, offsets, most = askers(cls, history)
        q = self._asked(asking, k.dtype)
        told = self.out(self._attend(q, k_again, v_again, offsets, history, most)).view(cls.shape)
        return history, cls + answers(told, history)

    @property
    def together(self) -> bool:
        """Whether events and CLS tokens ask in one call: where all of them see the whole history. With a precision
        recipe the norms behind it know of no seats, and taking the rows apart would cost what one call saves.
        """
        alike = self.window is None and self.block is None and not self.causal
        return self.events_attend and alike and type(self.out) is nn.Linear

    def with_seats(self, history: History, cls: Tensor) -> History:
        """The history with what one call for events and CLS tokens needs to know of it; the same for all layers."""
        count = cls.shape[1]
        if (
            not self.together
            or history.requests is not None
            or (history.seats is not None and history.seats.count == count)
        ):
            return history
        return replace(history, seats=Seats.of(history.offsets, history.tokens.shape[0], count))

    def _together(
        self, parts: tuple[Tensor, ...], bias: Tensor | None, history: History, cls: Tensor
    ) -> tuple[History, Tensor]:
        """The CLS tokens' queries stand among the events': keys and values are read once and get one gradient. Parts
        are [q || k || v], or [q || k] and v: then neither is kept but as they are after that.
        """
        packed, *values = parts
        history, how = self._seated(history, cls, packed.dtype)
        heads = rotary_heads(
            packed, self.heads, self.norms.weights, bias=bias, values=values[0] if values else None, **how
        )
        return self._all(heads, history, cls)

    def _fused(
        self, x: Tensor, weight: Tensor, bias: Tensor, history: History, cls: Tensor
    ) -> tuple[History, Tensor]:  # fmt: skip
        """The same of the rows x [T, d] that `qkv` multiplies."""
        dtype = working_dtype(x)
        history, how = self._seated(history, cls, dtype)
        x, weight = x.to(dtype), weight.to(dtype)
        return self._all(
            project_rotary(x, weight, self.heads, self.norms.weights, bias=bias, **how), history, cls
        )  # fmt: skip

    def _seated(self, history: History, cls: Tensor, dtype: torch.dtype) -> tuple[History, dict[str, Any]]:
        """The history with seats, and how its heads turn and who stands among its queries."""
        history = self.with_seats(history, cls)
        assert history.seats is not None
        among = Among(rows=self._asked(cls, dtype), places=history.seats.events, others=history.seats.cls)
        return history, {"turns": turns(history, self.rotary), "among": among}

    def _all(self, heads: tuple[Tensor, ...], history: History, cls: Tensor) -> tuple[History, Tensor]:
        """What events and CLS tokens see: q of both, k and v."""
        q, k, v = heads
        seats, count = history.seats, cls.shape[1]
        assert seats is not None
        seen = self._attend(q, k, v, seats.offsets, history, history.max_len + count)
        more, out_bias, told = project_apart(self.out, seen, seats.cls)
        return history.plus(more, out_bias, seats), cls + told.view(cls.shape)

    def _asked(self, cls: Tensor, dtype: torch.dtype) -> Tensor:
        """The CLS tokens' queries, [B C, H, D]."""
        return self.norms.q(self.cls_q(cls).view(-1, self.heads, self.head_dim)).to(dtype)  # type: ignore[no-any-return]

    def _parts(
        self, packed: Tensor, bias: Tensor | None, history: History
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The events' queries, or None where they don't ask; keys and values [T, H, D], for them and for the CLS
        tokens.
        """
        rotated, weights = turns(history, self.rotary), self.norms.weights
        if self.events_attend:
            q, k, v, *again = rotary_heads(packed, self.heads, weights, turns=rotated, readers=2, bias=bias)
            return q, (k, v), (again[0], again[1])
        k, v = rotary_heads(packed, self.heads, weights[1:], turns=rotated, bias=bias)
        return None, (k, v), (k, v)

    def _seen(self, q: Tensor, k: Tensor, v: Tensor, history: History) -> Tensor:
        """What the events see of one another, [T, d]."""
        if self.block is None:
            window = None if self.window is None else (self.window, self.window)
            return self._attend(q, k, v, history.offsets, history, history.max_len, causal=self.causal, window=window)
        activation = None if self.attention == "softmax" else self.activation
        out = block_attention(q, k, v, history.offsets, block=self.block, activation=activation).flatten(1)
        return out if self.out_norm is None else self.out_norm(out)  # type: ignore[no-any-return]

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
    """One layer of one tower: S' = S + MHA(S + PFFN(X_sum, S)), with the CLS tokens beside S.

    Under autocast the tokens are of its dtype from the first layer on, also between the blocks: what the blocks add is,
    and a float32 sum costs twice the memory traffic.
    """

    def __init__(self, config: GemConfig, *, events_attend: bool = True) -> None:
        super().__init__()
        self.ffn = PersonalisedFFN(config)
        self.attention = HistoryAttention(config, events_attend=events_attend)

    def with_seats(self, history: History, cls: Tensor) -> History:
        """See `HistoryAttention.with_seats`."""
        return self.attention.with_seats(history, cls)  # type: ignore[operator, union-attr, no-any-return]

    def forward(self, history: History, cls: Tensor, x_sum: Tensor) -> tuple[History, Tensor]:
        """History of [T, d] tokens, CLS [B, C, d] and X_sum [B, n_sum, d] -> history and CLS."""
        history = replace(history, tokens=self._stream(history.tokens))
        if history.requests is not None:
            x_sum = history.requests.mean(x_sum)
        return self.attention(self.ffn(history, x_sum), cls)  # type: ignore[no-any-return]

    def _stream(self, tokens: Tensor) -> Tensor:
        return tokens.to(working_dtype(tokens))
