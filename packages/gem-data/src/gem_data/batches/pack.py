"""A batch as one buffer: one copy to send it to another process, to pin it, or to move it to a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from gem_data.batches.batch import JaggedBatch

ALIGN = 64  # bytes: every tensor begins at a multiple


class Packed:
    """The tensors of a batch end to end in `buffer` [bytes] uint8, and how to find them again (`layout`)."""

    def __init__(self, buffer: Tensor, layout: Any) -> None:
        self.buffer, self.layout = buffer, layout

    def pin_memory(self, device: Any = None) -> Packed:
        """In page-locked memory."""
        return Packed(self.buffer.pin_memory(), self.layout)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Packed:
        """On `device`, in one copy."""
        return Packed(self.buffer.to(device, non_blocking=non_blocking), self.layout)

    def unpack(self) -> JaggedBatch:
        """The batch, as views of the buffer."""

        def view(where: tuple[int, torch.dtype, tuple[int, ...]]) -> Tensor:
            begin, dtype, shape = where
            count = 1
            for size in shape:
                count *= size
            return self.buffer[begin : begin + count * dtype.itemsize].view(dtype).view(shape)

        return _restored(self.layout, view)


def pack(batch: JaggedBatch) -> Packed:
    """The batch in one buffer (on the CPU). Each tensor once, also where several samples' offsets are the same one."""
    tensors: list[Tensor] = []
    at, size = {}, 0

    def place(tensor: Tensor) -> tuple[int, torch.dtype, tuple[int, ...]]:
        nonlocal size
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() == 0:
            return (0, tensor.dtype, tuple(tensor.shape))
        if key not in at:
            at[key] = size
            tensors.append(tensor)
            size += -(-tensor.numel() * tensor.element_size() // ALIGN) * ALIGN
        return (at[key], tensor.dtype, tuple(tensor.shape))

    layout = _described(batch, place)
    buffer = torch.empty(max(size, ALIGN), dtype=torch.uint8)
    for tensor, begin in zip(tensors, at.values(), strict=True):
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        buffer[begin : begin + raw.numel()].copy_(raw)
    return Packed(buffer, layout)


def _described(value: Any, place: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return ("tensor", place(value))
    if isinstance(value, dict):
        return ("dict", {k: _described(v, place) for k, v in value.items()})
    if is_dataclass(value) and not isinstance(value, type):
        return (type(value), {f.name: _described(getattr(value, f.name), place) for f in fields(value)})
    return ("plain", value)


def _restored(layout: Any, view: Callable[[Any], Tensor]) -> Any:
    kind, content = layout
    if kind == "tensor":
        return view(content)
    if kind == "dict":
        return {k: _restored(v, view) for k, v in content.items()}
    if kind == "plain":
        return content
    return kind(**{k: _restored(v, view) for k, v in content.items()})
