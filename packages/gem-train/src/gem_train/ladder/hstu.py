"""A peer of the whole model: HSTU layers of as many FLOPs, written plainly with what torch has.

    U, V, Q, K = split(silu(W norm(X)))        X' = X + W_o (norm(attention(Q, K, V)) * U)

after HSTU (Zhai et al., 2024), with torch's varlen_attn (FlashAttention-2, a softmax) for its attention, each layer
through torch.compile, on the lengths of the same batches. There are no tables, features or heads: the peer does less
beside its layers than the model does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from gem_model.flops import visible_pairs
from torch import Tensor, nn

from gem_train.data import divided
from gem_train.instruments import TRAINING_FLOPS, forward_flops, memory_in_use
from gem_train.measuring.bench import batches, compiling
from gem_train.trainer import Trainer


class HstuLayer(nn.Module):
    """One layer; [T, d] -> [T, d]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.out_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.uvqk, self.out = nn.Linear(width, 4 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, offsets: Tensor, max_len: int) -> Tensor:
        """Tokens of sequences with int32 offsets [B + 1]."""
        from torch.nn.attention.varlen import varlen_attn

        u, v, q, k = F.silu(self.uvqk(self.norm(x))).chunk(4, dim=1)
        q, k, v = (t.unflatten(1, (self.heads, -1)).contiguous() for t in (q, k, v))
        seen: Any = varlen_attn(q, k, v, offsets, offsets, max_len, max_len)
        seen = seen[0] if isinstance(seen, tuple) else seen
        return x + self.out(self.out_norm(seen.flatten(1)) * u)  # type: ignore[no-any-return]


def layer_flops(width: int, lengths: list[int]) -> int:
    """Of one layer's forward pass: two for each multiply-add of the products, on visible pairs."""
    pairs = sum(visible_pairs(n, causal=False, window=None) for n in lengths)
    return sum(lengths) * 2 * 5 * width * width + 4 * width * pairs


def time_hstu(
    trainer: Trainer,
    fill: Mapping[str, int],
    *,
    steps: int,
    warm_up: int,
    compiled: bool,
    ready: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """A row of the ladder: seconds of a step of as many training FLOPs as the model's, by the FLOPs of whole layers.

    `ready` is called before the first timed step.
    """
    device, config = trainer.runtime.device, trainer.config
    batch = next(batches(trainer, fill, 1))
    width, heads = config.model.width, config.model.heads
    lengths = [n for s in batch.sequences.values() for n in s.offsets.diff().tolist()]
    one, goal = layer_flops(width, lengths), forward_flops(trainer.parts, batch)
    layers = nn.ModuleList(HstuLayer(width, heads) for _ in range(max(1, round(goal / one)))).to(device)
    if compiled:
        torch._dynamo.reset()
        for layer in layers:
            layer.compile(**compiling())
    optimizer = torch.optim.AdamW(layers.parameters(), fused=device.type == "cuda")
    parts = divided(batch, config.optim.accumulate)

    def step() -> None:
        for part in parts:
            for sequence in part.sequences.values():
                offsets = sequence.offsets.to(device, torch.int32)
                x = torch.randn(int(sequence.offsets[-1]), width, device=device)
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=trainer.parts.precision == "bf16"):
                    for layer in layers:
                        x = layer(x, offsets, sequence.max_len)
                x.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for i in range(warm_up + steps):
        if i == warm_up:
            ready()
        began = time.perf_counter()
        step()
        if i >= warm_up:
            seconds.append(time.perf_counter() - began)
    flops = TRAINING_FLOPS * goal
    taken = statistics.median(seconds) * goal / (one * len(layers))
    peak = trainer.parts.peak.peak
    return {
        "operators": {"hstu_layers": len(layers)},
        "compiled": compiled,
        "samples_per_s": config.data.batch_size / taken,
        "step_ms": taken * 1e3,
        "data_wait_ms": 0.0,
        "tflops": flops / taken / 1e12,
        "mfu": None if peak is None else flops / taken / peak,
        "memory_gib": memory_in_use(device) / 2**30,
        "local_tflops": None,
        "local_mfu": None,
        "ne": None,
    }
