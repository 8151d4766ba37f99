"""Batches to the device ahead of their use: pinned, one copy each, on a stream of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable

import torch

from gem_data.batches.batch import JaggedBatch
from gem_data.batches.pack import pack


def to_device(
    batches: Iterable[JaggedBatch], device: torch.device | str, *, depth: int = 1
) -> Generator[JaggedBatch, None, None]:
    """The same batches on `device`, the copies of the next `depth` under way while one is used.

    On a CUDA device each batch travels as one pinned buffer on a side stream; the current stream waits for the copy
    before it is given out, and its memory is not reused before the work on it is done. Elsewhere it is a plain move.
    """
    device = torch.device(device)
    if device.type != "cuda":
        for batch in batches:
            yield batch.to(device)
        return
    if depth < 1:
        raise ValueError(f"depth must be 1 or more, not {depth}")
    side = torch.cuda.Stream(device)
    flying: deque[tuple[JaggedBatch, torch.Tensor, torch.cuda.Event, object]] = deque()

    def land() -> JaggedBatch:
        batch, buffer, copied, _ = flying.popleft()
        current = torch.cuda.current_stream(device)
        current.wait_event(copied)
        buffer.record_stream(current)
        return batch

    for batch in batches:
        pinned = pack(batch).pin_memory()
        with torch.cuda.stream(side):
            packed = pinned.to(device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(side)
        flying.append((packed.unpack(), packed.buffer, copied, pinned))  # keeps the pinned buffer until it has landed
        if len(flying) > depth:
            yield land()
    while flying:
        yield land()
