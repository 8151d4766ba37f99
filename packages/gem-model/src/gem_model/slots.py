"""Ids without bound in tables of bounded size: each table's rows go to the ids that come most and latest.

The managed collision of TorchRec (zero-collision hashing): a map from ids, any int64, to rows, kept beside the table
and learned in training. An id without a row of its own shares the last one. Every ``interval`` batches the ids with the
fewest and oldest visits give their rows to more frequent ones, which begin as fresh rows do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec import JaggedTensor
from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule

from gem_model.config import Table
from gem_model.names import ByName

INTERVAL = 16  # batches between two evictions


class Slots(nn.Module):
    """The maps of all managed tables: ids to rows, [N] int64 -> [N] int64.

    Each rank would learn a map of its own, so that a managed table needs a world of one.

    Args:
        tables: the managed tables.
        users: for each of them, the keys of the columns that look into it.
        device: where the maps are kept.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        users: Mapping[str, Sequence[str]],
        *,
        device: torch.device,
        interval: int = INTERVAL,
    ) -> None:
        super().__init__()
        if device.type == "meta":
            raise ValueError('managed tables cannot be made on "meta": their maps hold no parameters to fill later')
        self.users = {t.name: list(users[t.name]) for t in tables}
        self.maps = ByName(
            {
                t.name: MCHManagedCollisionModule(
                    zch_size=t.rows,
                    device=device,
                    eviction_policy=DistanceLFU_EvictionPolicy(),
                    eviction_interval=interval,
                )
                for t in tables
            }
        )

    def forward(self, columns: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
        """{key: (ids [N], offsets [B + 1])} -> the same with rows in place of the ids of managed tables."""
        found = dict(columns)
        for table, keys in self.users.items():
            ids = torch.cat([columns[k][0] for k in keys])
            if not ids.numel():
                continue  # which TorchRec's map does not take
            named = {table: JaggedTensor(values=ids, lengths=torch.tensor([ids.numel()], device=ids.device))}
            rows = self.maps[table](named)[table].values()
            for k, part in zip(keys, rows.split([columns[k][0].numel() for k in keys]), strict=True):
                found[k] = (part, columns[k][1])
        return found

    def evicted(self) -> dict[str, Tensor]:
        """By table, the rows that got another id since this was last asked."""
        found = {table: module.evict() for table, module in self.maps.items()}  # type: ignore[operator]
        return {table: rows for table, rows in found.items() if rows is not None and rows.numel()}
