"""An HSTU layer as the tower's layer, in place of feed-forward network and attention (Zhai et al. 2024).

"Actions Speak Louder than Words: Trillion-Parameter Sequential Transducers for Generative Recommendations".

`B` samples, `T` events of all samples, `d` width, `H` heads, `D` head dim, `C` CLS tokens.
"""

from __future__ import annotations

import torch.nn.functional as F
from gem_kernels import gdpa, rotary_heads
from gem_kernels.nn import NormLinear
from torch import Tensor, nn

from gem_model.config import GemConfig
from gem_model.history import History, answers, askers, turns
from gem_model.sequence import HeadNorms


class HSTULayer(nn.Module):
    """U, Q, K, V = SiLU(W_1 LN(S));  A = SiLU(Q K^T / sqrt(D));  S' = S + W_2 (LN(A V) * U).

    The CLS tokens, the candidate and those that X_sum is added to, have U and Q by a map of their own and ask every
    event. Rank and age rotate Q and K, where the paper adds a bias to the scores; the paper divides A by the longest
    length, which the norm takes out again. With ``events_attend=False`` the events stay as they are.
    """

    def __init__(self, config: GemConfig, *, events_attend: bool = True) -> None:
        super().__init__()
        self.heads, self.width = config.heads, config.width
        self.window, self.causal, self.rotary = config.window, config.causal, config.rotary
        self.events_attend = events_attend
        self.up = NormLinear(config.width, (4 if events_attend else 2) * config.width, norm="layer")
        self.cls_up = NormLinear(config.width, 2 * config.width, norm="layer")
        self.norms = HeadNorms(config)
        self.norm = nn.LayerNorm(config.width)
        self.out = nn.Linear(config.width, config.width)

    def with_seats(self, history: History, cls: Tensor) -> History:
        """Events and CLS tokens ask apart: nothing to be known."""
        return history

    def forward(self, history: History, cls: Tensor, x_sum: Tensor) -> tuple[History, Tensor]:
        """History of [T, d] tokens, CLS [B, C, d] and X_sum [B, n_sum, d] -> history and CLS."""
        history = history.settled()
        packed, weights = F.silu(self.up(history.tokens)), self.norms.weights
        rotated = turns(history, self.rotary)
        if self.events_attend:
            u, qkv = packed.split((self.width, 3 * self.width), dim=1)
            q, k, v = rotary_heads(qkv.contiguous(), self.heads, weights, turns=rotated)
            window = None if self.window is None else (self.window, self.window)
            told = self._told(q, k, v, history.offsets, history, history.max_len, causal=self.causal, window=window)
            history = history.plus(self.out(self.norm(told) * u), None)
        else:
            k, v = rotary_heads(packed, self.heads, weights[1:], turns=rotated)
        history.meet()  # X_sum, for which the events need not wait
        cls = cls + F.pad(x_sum, (0, 0, 0, cls.shape[1] - x_sum.shape[1]))
        asking, offsets, most = askers(cls, history)
        u, q = F.silu(self.cls_up(asking.flatten(0, 1))).split((self.width, self.width), dim=1)
        q = self.norms.q(q.unflatten(1, (self.heads, -1))).to(k.dtype)
        told = self.out(self.norm(self._told(q, k, v, offsets, history, most)) * u).view(cls.shape)
        return history, cls + answers(told, history)

    def _told(
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
        """SiLU(Q K^T / sqrt(D)) V of [Tq, H, D] queries on the history's keys, [Tq, d]."""
        sizes = (q_offsets, history.offsets, max_q, history.max_len)
        return gdpa(q, k, v, *sizes, activation="silu", causal=causal, window=window).flatten(1)
