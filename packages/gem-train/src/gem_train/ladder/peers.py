"""Other people's operators in the places of ours: what the first rungs of the ladder run on.

    attention   padded    torch's scaled_dot_product_attention over the padded batch, padded keys masked
                varlen    torch.nn.attention.varlen.varlen_attn (FlashAttention-2), CUDA, 16 bit
                kernel    gem_kernels.jagged_attention, on the backend that its dispatch chooses
                fp8       gem_lowprec.low_precision_attention between events, as `kernel` for few queries
    ffn         padded    the personalised FFN's act(Q K^T) V as two batched products over the padded batch
                kernel    gem_kernels.gdpa
    rope        torch     the rotary embedding in plain PyTorch
                kernel    gem_kernels.rope
    norm        torch     torch.nn.LayerNorm after a sum, torch's rms_norm of heads and of what is pooled
                dispatch  gem_kernels.layer_norm, which adds the residual, on the backend that its dispatch chooses
                kernel    the same on its Triton kernel
    stream      autocast  tokens stay in the dtype in which autocast leaves torch's norms, float32
                half      in autocast's own
    parts       torch     packed projections taken apart, gated, normed and rotated one by one
                kernel    gem_kernels.gated_heads and rotary_heads, which leaves nothing for `rope` to do
    queries     apart     CLS tokens ask the history in a call of their own
                together  their queries stand among the events': one call, where all see the whole history (with
                          `parts` of kernel, which puts them there)

The modules of a model keep their parameters and get another class, by name, so that a rung is a real alternative of
the same function. `block` is different: events attend inside blocks of 64, which is another function.

Shapes: `B` samples, `T` events, `H` heads, `D` head dim, `L` longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from gem_kernels import LateProduct, block_attention, jagged, jagged_attention, layer_norm, most_recent, rope
from gem_kernels.gdpa.activations import ACTIVATIONS
from gem_kernels.nn import PMA, LayerNorm, RMSNorm
from gem_lowprec import low_precision_attention
from gem_model.history import History, turns, uniform_offsets
from gem_model.layers import Layers
from gem_model.projection import with_bias
from gem_model.sequence import HistoryAttention, PersonalisedFFN, SequenceLayer
from torch import Tensor, nn

Attention = Literal["padded", "varlen", "kernel", "fp8"]
Ffn = Literal["padded", "kernel"]
Rotary = Literal["torch", "kernel"]
Norm = Literal["torch", "dispatch", "kernel"]
Stream = Literal["autocast", "half"]
Parts = Literal["torch", "kernel"]
Queries = Literal["apart", "together"]


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Which implementation each place of a model takes; the defaults are what the model does by itself."""

    attention: Attention = "kernel"
    ffn: Ffn = "kernel"
    rope: Rotary = "kernel"
    norm: Norm = "dispatch"
    stream: Stream = "half"
    parts: Parts = "kernel"
    queries: Queries = "together"
    block: int | None = None

    def __post_init__(self) -> None:
        kinds = (
            ("attention", Attention), ("ffn", Ffn), ("rope", Rotary), ("norm", Norm), ("stream", Stream),
            ("parts", Parts), ("queries", Queries),
        )  # fmt: skip
        for name, kind in kinds:
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(get_args(kind))}")


def install(model: nn.Module, operators: Operators) -> dict[str, list[str]]:
    """Put `operators` into every place of `model`; returns the names of the modules by kind. Can be repeated.

    Raises ValueError where nothing was found to replace: a rung that changes nothing must not be taken for one.
    """
    found: dict[str, list[str]] = {"attention": [], "ffn": [], "pooling": [], "norm": [], "rms": [], "stream": []}
    for name, module in model.named_modules():
        if isinstance(module, Layers) and module.replay is not None:
            module.replay.forget()  # graphs would go on with the operators that they were captured with
        for kind, (plain, peer) in PLACES.items():
            if type(module) in (plain, peer):
                module.__class__ = peer
                module.operators = operators  # type: ignore[assignment]
                found[kind].append(name)
    if not any(found.values()):
        raise ValueError("the model has no attention, personalised FFN, pooling or norm of gem_model and gem_kernels")
    return found


# The operators.


def padded_sdpa(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, max_q: int, max_k: int,
    *, causal: bool = False, window: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """`jagged_attention` by torch on padded tensors: [Tq, H, D] -> [Tq, H, D]; a query without keys gets 0."""
    batch = k_offsets.numel() - 1
    if max_k == 0:
        return q.new_zeros((batch * q.shape[0] if q_offsets is None else q.shape[0], *q.shape[1:]))
    at_k = jagged.dense_index(k_offsets, k.shape[0], max_k)
    keys, values = (jagged.pad(x, at_k, batch, max_k).transpose(1, 2) for x in (k, v))  # [B, H, Lk, D]
    if q_offsets is None:
        queries, at_q = q.transpose(0, 1).expand(batch, -1, -1, -1), None
    else:
        at_q = jagged.dense_index(q_offsets, q.shape[0], max_q)
        queries = jagged.pad(q, at_q, batch, max_q).transpose(1, 2)
    lengths = k_offsets.diff()
    place = torch.arange(max_k, device=q.device)
    # A sample without keys sees one key of zeros, whose value is zero: 0 instead of 0 / 0.
    mask = (place < lengths.clamp(min=1)[:, None])[:, None, None]  # [B, 1, 1, Lk]
    if causal or window is not None:
        assert q_offsets is not None
        apart = place - torch.arange(max_q, device=q.device)[:, None]  # key - query, for equal lengths
        left, right = window or (max_k, max_k)
        mask = mask & (apart >= -left) & (apart <= (0 if causal else right))
        mask = mask | ((apart == 0) & (place[:, None] >= lengths[:, None, None, None]))  # padded queries see one key
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask).transpose(1, 2)  # [B, Lq, H, D]
    return out.flatten(0, 1) if at_q is None else jagged.unpad(out, at_q)


def torch_varlen(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, max_q: int, max_k: int,
    *, causal: bool = False, window: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """`jagged_attention` by torch's varlen_attn. Raises ValueError with a window or causal, which differ by version."""
    from torch.nn.attention.varlen import varlen_attn

    if causal or window is not None:
        raise ValueError("torch's varlen_attn is compared without a window and without causal")
    if q_offsets is None:
        batch, count = k_offsets.numel() - 1, q.shape[0]
        q, q_offsets = q.repeat(batch, 1, 1), uniform_offsets(batch, count, q.device)
    q, k, v = (x.contiguous() for x in (q, k, v))
    out: Any = varlen_attn(q, k, v, q_offsets.int(), k_offsets.int(), max_q, max_k)
    return out[0] if isinstance(out, tuple) else out


def fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor | None, k_offsets: Tensor, max_q: int, max_k: int,
    *, causal: bool = False, window: tuple[int, int] | None = None,
) -> Tensor:  # fmt: skip
    """`jagged_attention` with E4M3 operands where queries are many enough to be worth quantising the keys for."""
    args = (q, k, v, q_offsets, k_offsets, max_q, max_k)
    attend = jagged_attention if q_offsets is None or max_q < FEW_QUERIES else low_precision_attention
    out = attend(*args, causal=causal, window=window)
    assert isinstance(out, Tensor)
    return out


def padded_gdpa(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, max_q: int, personal: int, activation: str
) -> Tensor:
    """act(Q K^T / sqrt(D)) V with `personal` keys in every sample, [Tq, H, D], k and v [B P, H, D]."""
    at = jagged.dense_index(q_offsets, q.shape[0], max_q)
    queries = jagged.pad(q, at, q_offsets.numel() - 1, max_q).transpose(1, 2)  # [B, H, L, D]
    keys, values = (x.unflatten(0, (-1, personal)).transpose(1, 2) for x in (k, v))  # [B, H, P, D]
    scores = ACTIVATIONS[activation](queries @ keys.transpose(2, 3) * q.shape[-1] ** -0.5)
    return jagged.unpad((scores @ values).transpose(1, 2), at)


ATTENTION: dict[str, Callable[..., Any]] = {
    "padded": padded_sdpa,
    "varlen": torch_varlen,
    "kernel": jagged_attention,
    "fp8": fp8_attention,
}
FEW_QUERIES = 128  # CLS tokens and learned queries: reading the keys is all that they cost


# The modules.


class PeerAttention(HistoryAttention):
    """`HistoryAttention` on chosen operators."""

    operators: Operators

    @property
    def together(self) -> bool:
        """As `HistoryAttention.together`."""
        ours = self.operators
        asked = ours.queries == "together" and ours.parts == "kernel" and ours.block is None
        return asked and super().together

    def _parts(
        self, packed: Tensor, bias: Tensor | None, history: History
    ) -> tuple[Tensor | None, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        if self.operators.parts == "kernel":
            return super()._parts(packed, bias, history)
        packed = with_bias(packed, bias)
        *turning, v = packed.unflatten(1, (-1, self.heads, self.head_dim)).unbind(1)
        norms = [self.norms.q, self.norms.k][-len(turning) :]
        *q, k = self._rotate(torch.stack([norm(x) for norm, x in zip(norms, turning, strict=True)], dim=1), history)
        return q[0] if q else None, (k, v), (k, v)

    def _rotate(self, x: Tensor, history: History) -> tuple[Tensor, ...]:
        """Rotate [T, 2 or 1, H, D] as the model does, the heads of all places at once."""
        places = turns(history, self.rotary)
        first = x.shape[2] // len(places) if places else 0
        parts = x.split((first, x.shape[2] - first), dim=2) if len(places) == 2 else [x]
        backend = "reference" if self.operators.rope == "torch" else None
        turned = [
            rope(part.flatten(1, 2), None, base=turn.base, positions=turn.positions, backend=backend).view(part.shape)
            for part, turn in zip(parts, places, strict=False)
        ]
        return (torch.cat(turned, dim=2) if turned else x).unbind(1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, history: History, max_q: int,
        *, causal: bool = False, window: tuple[int, int] | None = None,
    ) -> Tensor:  # fmt: skip
        ours = self.operators
        if ours.block is not None and q_offsets is history.offsets:  # events to events, not CLS tokens to events
            activation = None if self.attention == "softmax" else self.activation
            out = block_attention(q, k, v, history.offsets, block=ours.block, activation=activation).flatten(1)
            return out if self.out_norm is None else self.out_norm(out)
        if self.attention != "softmax":
            return super()._attend(q, k, v, q_offsets, history, max_q, causal=causal, window=window)
        attend = ATTENTION[ours.attention]
        return attend(
            q, k, v, q_offsets, history.offsets, max_q, history.max_len, causal=causal, window=window
        ).flatten(1)  # fmt: skip


class PeerFFN(PersonalisedFFN):
    """`PersonalisedFFN` on chosen operators."""

    operators: Operators

    @property
    def _fuses(self) -> bool:
        return self.operators.parts == "kernel" and super()._fuses

    def _parts(
        self, packed: Tensor, bias: Tensor | None, late: LateProduct | None = None, small: bool = False
    ) -> tuple[Tensor, Tensor]:
        if self.operators.parts == "kernel":
            return super()._parts(packed, bias, late, small)
        gate, up, q = with_bias(packed, bias).split(self.splits, dim=1)
        q = q.unflatten(1, (self.heads, -1))
        return F.silu(gate) * up, self.norms.q(q) if self.personal else q

    def _personal(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        if self.operators.parts == "kernel":
            return super()._personal(packed)
        k, v = packed.unflatten(1, (2, self.heads, -1)).unbind(1)
        return self.norms.k(k), v

    def _transform(self, q: Tensor, k: Tensor, v: Tensor, history: History) -> Tensor:
        if self.operators.ffn == "kernel":
            return super()._transform(q, k, v, history)
        return padded_gdpa(q, k, v, history.offsets, history.max_len, self.personal, self.activation)


class PeerPooling(PMA):
    """`PMA` on chosen operators."""

    operators: Operators

    def pooled(self, kv: Tensor, offsets: Tensor, max_len: int) -> Tensor:
        """As `PMA.pooled`."""
        if self.activation is not None or self.operators.attention in ("kernel", "fp8"):  # few queries: see `fp8`
            return super().pooled(kv, offsets, max_len)
        k, v = kv.unflatten(-1, (-1, self.head_dim)).split(self.heads, dim=1)
        q = self.queries.to(k.dtype)
        out = ATTENTION[self.operators.attention](q, k, v, None, offsets, q.shape[0], max_len)
        return self.out(out.flatten(1)).unflatten(0, (-1, q.shape[0]))  # type: ignore[no-any-return]


class PeerNorm(LayerNorm):
    """`gem_kernels.nn.LayerNorm` on a chosen implementation."""

    operators: Operators

    def forward(self, x: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Any:
        """As `LayerNorm.forward`."""
        if self.operators.norm == "torch":
            total = x if residual is None else x + with_bias(residual, residual_bias)
            normal = nn.LayerNorm.forward(self, total)
            return normal if residual is None else (normal, total)
        return layer_norm(
            x,
            self.weight,
            self.bias,
            eps=self.eps,
            residual=residual,
            residual_bias=residual_bias,
            backend="triton" if self.operators.norm == "kernel" else None,
        )

    def rows(
        self, x: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None,
        offsets: Tensor | None = None, recent: int = 0, places: Tensor | None = None, others: Tensor | None = None,
        product: LateProduct | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """As `LayerNorm.rows`."""
        if self.operators.norm != "torch":
            return super().rows(x, residual, residual_bias, offsets, recent, places, others, product)
        return plain_rows(self, x, residual, residual_bias, offsets, recent, places)


class PeerRms(RMSNorm):
    """`gem_kernels.nn.RMSNorm` on a chosen implementation."""

    operators: Operators

    def forward(self, x: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None) -> Any:
        """As `RMSNorm.forward`."""
        if self.operators.norm != "torch":
            return super().forward(x, residual, residual_bias)
        total = x if residual is None else x + with_bias(residual, residual_bias)
        normal = F.rms_norm(total, (self.dim,), self.weight.to(total.dtype), self.eps)
        return normal if residual is None else (normal, total)

    def rows(
        self, x: Tensor, residual: Tensor | None = None, residual_bias: Tensor | None = None,
        offsets: Tensor | None = None, recent: int = 0, places: Tensor | None = None, others: Tensor | None = None,
        product: LateProduct | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """As `RMSNorm.rows`."""
        if self.operators.norm != "torch":
            return super().rows(x, residual, residual_bias, offsets, recent, places, others, product)
        return plain_rows(self, x, residual, residual_bias, offsets, recent, places)

    def rows_twice(
        self, x: Tensor, residual: Tensor, residual_bias: Tensor | None, offsets: Tensor, recent: int, places: Tensor,
        others: Tensor, bare_eps: float, product: LateProduct | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """As `RMSNorm.rows_twice`."""
        if self.operators.norm != "torch":
            return super().rows_twice(x, residual, residual_bias, offsets, recent, places, others, bare_eps, product)
        return *plain_rows(self, x, residual, residual_bias, offsets, recent, places), None


def plain_rows(
    norm: nn.Module, x: Tensor, residual: Tensor | None, residual_bias: Tensor | None, offsets: Tensor | None,
    recent: int, places: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """`gem_kernels.norm_rows` by the norm as it is called and by indices."""
    if residual is not None and places is not None:
        residual = residual.index_select(0, places)
    y, total = (norm(x), x) if residual is None else norm(x, residual, residual_bias)
    if not recent:
        return y, total, None
    assert offsets is not None
    return y, total, most_recent(total, offsets, recent)


class PeerLayer(SequenceLayer):
    """`SequenceLayer` with another dtype of its tokens."""

    operators: Operators

    def _stream(self, tokens: Tensor) -> Tensor:
        return super()._stream(tokens) if self.operators.stream == "half" else tokens


PLACES: dict[str, tuple[type[nn.Module], Any]] = {
    "attention": (HistoryAttention, PeerAttention),
    "ffn": (PersonalisedFFN, PeerFFN),
    "pooling": (PMA, PeerPooling),
    "norm": (LayerNorm, PeerNorm),
    "rms": (RMSNorm, PeerRms),
    "stream": (SequenceLayer, PeerLayer),
}
