"""The interleaved layer: non-sequence tokens and histories inform each other (InterFormer, Zeng et al. 2024).

`B` samples, `N` non-sequence tokens, `d` width, `C` CLS tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from gem_kernels import most_recent, sigmoid_gate
from gem_kernels.nn import LayerNorm
from torch import Tensor, nn

from gem_model.casting import cast_once
from gem_model.config import GemConfig
from gem_model.dhen import DHEN
from gem_model.dropout import Dropout
from gem_model.history import History
from gem_model.hstu import HSTULayer
from gem_model.interaction import TokenMix, Wukong
from gem_model.lanes import along
from gem_model.names import ByName
from gem_model.pooling import make_pool, pool
from gem_model.projection import project, unaligned, with_bias, working_dtype
from gem_model.sequence import SequenceLayer


class Gating(nn.Module):
    """Gating(X) = sigmoid(MLP(X)) * X, token by token: lets a summary drop what does not matter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, n, d] -> [B, n, d]."""
        logits, bias = project(self.linear, x)
        if logits.dtype != x.dtype:  # float32 tokens under autocast
            return torch.sigmoid(with_bias(logits, bias)) * x
        return sigmoid_gate(x, logits, bias=bias)


class Summary(nn.Module):
    """X_sum = Gating(MLP(X)): N tokens to n_sum, mixing tokens first, then dims."""

    def __init__(self, n_tokens: int, config: GemConfig) -> None:
        super().__init__()
        self.mix = TokenMix(n_tokens, config.n_sum)
        self.mlp = nn.Sequential(nn.Linear(config.width, config.width), nn.GELU())
        self.gating = Gating(config.width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, N, d] -> [B, n_sum, d]."""
        mixed = self.mix(x)
        return self.gating(mixed + self.mlp(mixed))


class Tower(nn.Module):
    """One source's part of a layer: its sequence layer, then S_sum = Gating([CLS || PMA(S) || K most recent]).

    A tower of another width than the model's has two projections: ``enter`` for X_sum, ``leave`` for S_sum.

    Attributes:
        inside: what kernels of the backward pass write on their way instead of its being kept: "none"; "exact", the
            operands of products (gem_kernels.LateProduct); "fp8", these, and gates are kept in E4M3, written by the
            kernel that reads them, and of q and k what attention reads. May be set from outside at any time.
    """

    inside: str

    def __init__(self, config: GemConfig, width: int, *, events_attend: bool = True, last: bool = True) -> None:
        super().__init__()
        same = config.width == width
        self.enter = nn.Identity() if same else nn.Linear(width, config.width)
        self.leave = nn.Identity() if same else nn.Linear(config.width, width)
        self.recent, self.inside = config.recent, "none"
        layer = HSTULayer if config.sequence_layer == "hstu" else SequenceLayer
        self.sequence = layer(config, events_attend=events_attend)
        self.pma = make_pool(config)
        ffn = None if last else getattr(self.sequence, "ffn", None)  # the next tower is alike
        self.bare_eps = None if ffn is None else float(ffn.up.norm.eps)
        self.norm = LayerNorm(config.width)
        self.gating = Gating(config.width)

    def forward(self, history: History, cls: Tensor, x_sum: Tensor) -> tuple[History, Tensor, Tensor]:
        """X_sum as it has entered -> history, CLS tokens [B, C, d], S_sum [B, C + pma_queries + recent, model's d]."""
        history = replace(self.sequence.with_seats(history, cls), inside=self.inside)  # type: ignore[operator]
        history, cls = self.sequence(history, cls, x_sum)
        parts = [cls]
        if self.pma is not None:
            pooled, history, latest = pool(self.pma, history, self.recent, self.bare_eps)
            parts += [pooled] if latest is None else [pooled, latest]
        else:
            history = history.settled()
            if self.recent:
                parts.append(most_recent(history.tokens, history.offsets, self.recent))
        if history.requests is not None:
            parts[1:] = [history.requests.each(part) for part in parts[1:]]
        return history, cls, self.leave(self.gating(self.norm(_together(parts))))


def interaction(n_in: int, config: GemConfig) -> nn.Module:
    """[B, N, d] -> [B, n_tokens, d]: an ensemble of the experts that the configuration names, or a Wukong layer."""
    if config.experts:
        return DHEN(n_in, config)
    return Wukong(
        n_in,
        config.n_tokens,
        config.width,
        n_fm=config.interaction_fm,
        rank=config.interaction_rank,
        hidden=config.interaction_hidden * config.width,
    )


class InterFormerLayer(nn.Module):
    """X_sum from X; each tower's S' and S_sum in the light of X_sum; X' = Interaction([X || S_sum of every source]).

    The paper forms X' from S before its update; here the update comes first, so that the last layer's is not wasted.
    """

    def __init__(self, index: int, n_in: int, cls_tokens: dict[str, int], config: GemConfig) -> None:
        super().__init__()
        self.first = index == 0
        events_attend = config.events_attend(index)
        self.sources = list(cls_tokens)
        self.summary = Summary(n_in, config) if cls_tokens else None
        depth = {tower.source: config.layers if tower.layers is None else tower.layers for tower in config.towers}
        self.towers = ByName(
            {
                source: Tower(
                    config.of(source),
                    config.width,
                    events_attend=events_attend,
                    last=index + 1 >= depth.get(source, config.layers),
                )
                for source in cls_tokens
            }
        )
        self.interaction = interaction(
            n_in + sum(c + config.pma_queries + config.recent for c in cls_tokens.values()), config
        )
        self.dropout = Dropout(config.dropout)

    def forward(
        self, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, History], dict[str, Tensor]]:
        """X [B, N, d], histories and CLS tokens [B, C, d] by source -> the same.

        The first layer gets the candidate's token of each source, [B, 1 or 0, d], and prepends X_sum: these are the CLS
        tokens.
        """
        with cast_once(self, x):
            return self._forward(x, histories, cls)

    def _forward(
        self, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, History], dict[str, Tensor]]:
        tokens, found = [x], []
        histories, cls = dict(histories), dict(cls)
        if self.summary is not None:
            x_sum = self.summary(x)
            for source in self.sources:
                tower = self.towers[source]
                entered = tower.enter(x_sum)  # type: ignore[operator]
                if self.first:
                    cls[source] = torch.cat((entered, cls[source]), dim=1)
                history, lane = histories[source], histories[source].lane
                if lane is not None:
                    history = replace(history, arrival=lane.takes(entered, *([cls[source]] if self.first else [])))
                with along(lane):
                    histories[source], cls[source], s_sum = tower(history, cls[source], entered)
                found.append((lane, s_sum))
            tokens += [s_sum if lane is None else lane.gives(s_sum) for lane, s_sum in found]
        return self.dropout(self.interaction(_together(tokens, align=True))), histories, cls


def _together(tokens: list[Tensor], *, align: bool = False) -> Tensor:
    """[B, n, d] tensors as one; under autocast in its dtype, which is what reads them. Aligned: see `unaligned`."""
    tokens = [t.to(working_dtype(t)) for t in tokens]
    first, extra = tokens[0], unaligned(sum(t.shape[1] for t in tokens), tokens[0]) if align else 0
    return torch.cat([*tokens, *([first.new_zeros(first.shape[0], extra, first.shape[2])] if extra else [])], dim=1)
