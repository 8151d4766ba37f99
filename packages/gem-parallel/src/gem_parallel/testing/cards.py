"""Processes without a card that act as if they had what a host of Hopper cards has."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gem_parallel.comm import apply
from gem_parallel.comm.choice import Capabilities


class FileWindow:
    """Stands for a window of symmetric memory (`gem_parallel.comm.windows.Window`): the same reads, writes and
    barriers, in files that all ranks of a host map.
    """

    folder = ""
    made = 0

    def __init__(self, nbytes: int, group: Any, device: torch.device, **options: Any) -> None:
        assert options.keys() <= {"kernels", "watch"}
        ranks = dist.get_process_group_ranks(group)
        FileWindow.made += 1
        names = [f"{FileWindow.folder}/{'-'.join(map(str, ranks))}-{FileWindow.made}-{rank}" for rank in ranks]
        own = names[ranks.index(dist.get_rank())]
        self.local = torch.from_file(own, shared=True, size=nbytes, dtype=torch.uint8)
        self.group, self.place = group, torch.tensor([FileWindow.made, 0])
        dist.barrier(group)
        self._all = [torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8) for name in names]

    def peer(self, rank: int) -> torch.Tensor:
        """See Window."""
        return self._all[rank]

    def barrier(self) -> None:
        """See Window; that all have come to the same barrier of the same window is checked."""
        self.place[1] += 1
        places = [torch.empty_like(self.place) for _ in self._all]
        dist.all_gather(places, self.place, self.group)
        if any(not torch.equal(place, self.place) for place in places):
            raise AssertionError(f"ranks are at different windows and barriers: {[place.tolist() for place in places]}")


def pretend_cards(folder: str | Path) -> None:
    """Let this process's groups have what a host of Hopper cards has, with files in `folder` for their memory."""
    os.makedirs(folder, exist_ok=True)
    FileWindow.folder = str(folder)
    apply.CudaWindow = FileWindow  # type: ignore[misc, assignment]

    def capabilities(self: apply.Collectives, group: Any) -> Capabilities:
        size = dist.get_world_size(group)
        return Capabilities(device="cuda", major=9, size=size, peers=True, nccl=(2, 29, 7), symmetric=True)

    apply.Collectives.capabilities = capabilities  # type: ignore[method-assign]
