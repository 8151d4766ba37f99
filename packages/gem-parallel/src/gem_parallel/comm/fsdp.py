"""Collectives for FSDP2's hooks: all-gathers by copy engine and of small payloads, reduce-scatters with few SMs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from gem_parallel.comm.windows import Ring, pull, push


class Payload(Protocol):
    """How parameters travel: the shard of a unit, flat, as bytes.

    The size of the bytes follows from the number of elements and the dtype alone, so that all ranks agree on it.
    """

    def nbytes(self, elements: int, dtype: torch.dtype) -> int:
        """Bytes of a packed shard."""

    def pack(self, shard: torch.Tensor, out: torch.Tensor) -> None:
        """Write shard [n] into out, uint8 [nbytes]."""

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """Write what uint8 [nbytes] holds into out [n]."""


class PlainAllGather(AllGather):
    """torch's own."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """output [size n] from every rank's input [n]."""
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class GroupAllGather(PlainAllGather):
    """On a process group of its own: one with fewer CTAs."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """output [size n] from every rank's input [n]."""
        return super().__call__(output_tensor, input_tensor, self.group, async_op)


class CopyEngineAllGather(AllGather):
    """Every rank reads the others' windows, or writes into them; no SM moves data.

    FSDP writes a unit's shard into its place of the output, which lies in a window: that is what the others read.

    Args:
        ring: gives the windows.
        pushes: ranks write into the others' windows instead.
        lanes: how many copies are under way at once, on streams of their own; 0: one after the other on FSDP's.
    """

    def __init__(self, ring: Ring, *, pushes: bool = False, lanes: int = 0) -> None:
        self.ring, self.pushes = ring, pushes
        self._lanes = [torch.cuda.Stream(priority=-1) for _ in range(lanes)]

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The next window."""
        return self.ring.take(tuple(int(s) for s in size), dtype, device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        """output [size n], in a window, of which this rank's part is input."""
        own = output_tensor.view(-1).chunk(dist.get_world_size(group))[dist.get_rank(group)]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor.view(-1))
        window, nbytes = self.ring.window(output_tensor), input_tensor.nbytes
        if self.pushes:
            push(window, output_tensor, nbytes, group, lanes=self._lanes)
        else:
            pull(window, output_tensor, nbytes, group, whole=True, lanes=self._lanes)


class PayloadAllGather(AllGather):
    """Shards travel packed, by another all-gather. All ranks, the owner included, compute with what was unpacked."""

    def __init__(self, payload: Payload, carrier: AllGather) -> None:
        self.payload, self.carrier = payload, carrier

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory for what is unpacked."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        """output [size n] from every rank's input [n]."""
        shard = input_tensor.view(-1)
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        nbytes = self.payload.nbytes(shard.numel(), shard.dtype)
        packed = self.carrier.allocate((size * nbytes,), dtype=torch.uint8, device=shard.device)
        mine = packed[rank * nbytes : (rank + 1) * nbytes]
        self.payload.pack(shard, mine)
        self.carrier(output_tensor=packed, input_tensor=mine, group=group)
        for part, out in zip(packed.chunk(size), output_tensor.view(-1).chunk(size), strict=True):
            self.payload.unpack(part, out)


class GroupReduceScatter(ReduceScatter):
    """On a process group of its own: one with fewer CTAs, which leaves SMs to the backward pass."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """output [n] reduced from every rank's input [size n]."""
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=self.group, async_op=async_op)


class CopyEngineReduceScatter(ReduceScatter):
    """Pieces are read from the others' windows; each rank sums its own, in the order of ranks."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self._input = 0  # elements of the input that awaits its output

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The next window for an input; ordinary memory for the output, which becomes the gradient.

        FSDP asks for the input, then for its output, a group's size smaller.
        """
        shape = tuple(int(s) for s in size)
        if self._input and math.prod(shape) * dist.get_world_size(self.ring.group) == self._input:
            self._input = 0
            return torch.empty(shape, dtype=dtype, device=device)
        self._input = math.prod(shape)
        return self.ring.take(shape, dtype, device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """output [n] reduced from every rank's input [size n]; sums and means only."""
        kind = getattr(op, "op", op) if not isinstance(op, dist.ReduceOp.RedOpType) else op
        if kind not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"CopyEngineReduceScatter sums and averages, got {op}")
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        window, nbytes = self.ring.window(input_tensor), output_tensor.nbytes
        pieces = torch.empty((size, output_tensor.numel()), dtype=output_tensor.dtype, device=output_tensor.device)
        window.barrier()
        for step in range(size):
            other = (rank + step) % size
            part = window.peer(other)[rank * nbytes : (rank + 1) * nbytes]
            pieces[other].view(torch.uint8).copy_(part)
        window.barrier()
        torch.sum(pieces, 0, out=output_tensor.view(-1))
        if kind == dist.ReduceOp.AVG:
            output_tensor.div_(size)


def limited_group(group: Any, ctas: int) -> Any:
    """A process group of the same ranks; with NCCL, at most `ctas` CTAs work for it. Called by all ranks of `group`."""
    ranks = dist.get_process_group_ranks(group)
    options: Any = None
    if dist.get_backend(group) == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = ctas
    return dist.new_group(ranks, pg_options=options, use_local_synchronization=True)
