"""Initial values of embedding tables that depend on the table and the element alone, never on the layout."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import nn

_CHUNK = 1 << 22  # elements hashed at a time: 32 MiB of int64 per temporary
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def init_tables(module: nn.Module, seed: int, std: float | None = None) -> list[str]:
    """Fill every embedding table under `module` (sharded or not) with uniform(-bound, bound).

    Element (r, c) of table t with R rows and C columns is a function of (seed, t, r C + c) alone: the 64-bit finaliser
    of SplitMix64 (Steele, Lea and Flood 2014) applied twice to a counter, its upper 24 bits as an odd integer
    k in (-2^24, 2^24), times bound / 2^24. The numbers are bitwise equal for every world size, sharding and device.

    Args:
        module: a model before or after `parallelize`.
        seed: any integer.
        std: standard deviation, bound = sqrt(3) std; None means bound = 1 / sqrt(R).

    Returns:
        the names of the tables' parameters that were filled.
    """
    from gem_parallel.shards import global_shape, local_shards

    filled = []
    for name, tensor in named_tables(module):
        rows, cols = global_shape(tensor)
        bound = 1.0 / math.sqrt(rows) if std is None else math.sqrt(3.0) * std
        key = _key(seed, name.split(".")[-2])
        with torch.no_grad():
            for block, (row, col) in local_shards(tensor):
                _fill(block.detach(), row, col, cols, key, bound)
        filled.append(name)
    return filled


def named_tables(module: nn.Module) -> list[tuple[str, Any]]:
    """(name, weight [rows, dim]) of every embedding table; a sharded one is a ShardedTensor or DTensor."""
    from torchrec.distributed.types import ShardedModule
    from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface

    kinds = (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface)
    tables = []
    for prefix, child in module.named_modules():
        # a sharded module implements state_dict, not the interface's class
        if isinstance(child, kinds) or (isinstance(child, ShardedModule) and _holds_tables(child)):
            for name, weight in child.state_dict().items():
                if name.endswith(".weight"):
                    tables.append((f"{prefix}.{name}" if prefix else name, weight))
    return tables


def _holds_tables(module: nn.Module) -> bool:
    return hasattr(module, "embedding_bags") or hasattr(module, "embeddings")


def _key(seed: int, table: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{table}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _fill(block: torch.Tensor, row: int, col: int, cols: int, key: int, bound: float) -> None:
    """Write the values of the block [h, w] whose corner is (row, col) in a table of `cols` columns."""
    height, width = block.shape
    if block.numel() == 0:
        return
    step = max(1, _CHUNK // width)
    columns = torch.arange(col, col + width, dtype=torch.int64, device=block.device)
    for begin in range(0, height, step):
        end = min(begin + step, height)
        counter = torch.arange(row + begin, row + end, dtype=torch.int64, device=block.device)[:, None] * cols + columns
        bits = _mix(_mix(counter.bitwise_xor_(key)).add_(key))
        odd = (bits >> 40).bitwise_and_((1 << 24) - 1).mul_(2).sub_((1 << 24) - 1)
        block[begin:end].copy_(odd.to(torch.float32).mul_(bound / (1 << 24)))


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser, a bijection of 64-bit integers; int64 wraps, the mask makes the shift a logical one."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))).mul_(_MIX_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))).mul_(_MIX_2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))
