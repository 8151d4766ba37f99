"""Global memory with bounds and owners, and a program's shared memory with views."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, Protocol

import torch
import triton.language as tl
from torch import Tensor

from gem_kernels.simulator.faults import Fault
from gem_kernels.simulator.order import Clock, History
from gem_kernels.simulator.values import FLOATS, LAYOUT, STORED, Type, Unusable, Value, cast, itemsize

LIMIT = 232_448  # bytes of shared memory that a program may have on Hopper
NEVER = 1 << 60  # the moment of what is not known to be done before the launch is


class Writer:
    """Who reads or writes global memory: a partition of a program, at a moment of its."""

    def __init__(self, program: int, axis: int, moment: int, clock: Clock, who: str, where: str) -> None:
        self.program, self.axis, self.moment, self.clock = program, axis, moment, clock
        self.who, self.where = who, where

    def __str__(self) -> str:
        return f"program {self.program} ({self.who}) at {self.where}"


class Memory:
    """The storage of a tensor that a launch was given. `unit`: bytes of a number, whose owner is remembered."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage = tensor.untyped_storage()
        self.size = self.storage.nbytes()
        self.unit = tensor.element_size()
        self.flats: dict[torch.dtype, Tensor] = {}
        self.writers: list[Writer] = []
        slots = self.size // self.unit
        self.written, self.read, self.read_too = (torch.full((slots,), -1, dtype=torch.int32) for _ in range(3))
        self.programs = torch.full((1,), -1, dtype=torch.int32)  # of each writer
        self.atomics: dict[int, tuple[int, int]] = {}

    def flat(self, dtype: torch.dtype) -> Tensor:
        """All of it as one line of `dtype`."""
        if dtype not in self.flats:
            usable = self.size // dtype.itemsize
            self.flats[dtype] = torch.empty(0, dtype=dtype).set_(self.storage, 0, (usable,))  # type: ignore[call-overload]
        return self.flats[dtype]

    def check(self, at: Tensor, size: int, what: str) -> None:
        """Raise unless numbers of `size` bytes at the byte offsets `at` [N] are inside and aligned."""
        if at.numel() == 0:
            return
        low, high = int(at.min()), int(at.max())
        if low < 0 or high + size > self.size:
            raise Fault("bounds", f"{what} at bytes {low} to {high + size} of a tensor of {self.size} bytes")
        if bool((at % size).any()):
            raise Fault("bounds", f"{what} of {size} bytes at a byte offset that is no multiple of it")

    def _units(self, at: Tensor, size: int) -> Tensor:
        first = at // self.unit
        if size <= self.unit:
            return first
        return (first[:, None] + torch.arange(size // self.unit)).flatten()

    def _number(self, writer: Writer) -> int:
        self.writers.append(writer)
        n = len(self.writers)
        if n > len(self.programs):
            self.programs = torch.cat([self.programs, torch.full((n,), -1, dtype=torch.int32)])
        self.programs[n - 1] = writer.program
        return n - 1

    def _conflict(self, found: Tensor, writer: Writer, what: str) -> None:
        for n in found.unique().tolist():
            if n < 0:
                continue
            old = self.writers[n]
            if old.program != writer.program or writer.clock.get(old.axis, 0) < old.moment:
                raise Fault("race", f"global memory is {what} by {writer}, and in the same launch by {old}")

    def note(self, at: Tensor, size: int, writer: Writer, *, writes: bool) -> None:
        """Remember an access, and raise if another of this launch is not ordered with it."""
        if at.numel() == 0:
            return
        units = self._units(at, size)
        n = self._number(writer)
        self._conflict(self.written[units], writer, "written" if writes else "read")
        if writes:
            for readers in (self.read, self.read_too):
                self._conflict(readers[units], writer, "written")
            for offset, last in self.atomics.items():
                if last != (writer.program, writer.axis) and bool((at == offset).any()):
                    raise Fault("race", f"global memory that programs add to is written by {writer}, not the last one")
            self.written[units] = n
            return
        old = self.read[units]
        other = (old >= 0) & (self.programs[old.long()] != writer.program)
        self.read_too[units] = torch.where(other, old, self.read_too[units])
        self.read[units] = n

    def gather(self, at: Tensor, dtype: Any) -> Tensor:
        """Numbers at byte offsets [N]."""
        found = self.flat(STORED[dtype])[at // itemsize(dtype)]
        return found if dtype in FLOATS or dtype is tl.int1 else found.to(torch.int64)

    def scatter(self, at: Tensor, data: Tensor, dtype: Any) -> None:
        """The reverse; of several numbers for one place any may stay, as on a GPU."""
        self.flat(STORED[dtype])[at // itemsize(dtype)] = data.to(STORED[dtype])


class User(Protocol):
    """Who loads from views and stores to them."""

    def touch(self, view: View, *, writes: bool) -> Iterator[None]:
        """An access of a partition: its turn to be interrupted, and to be checked."""


class Buffer:
    """One allocation of shared memory, full of NaN until it is written."""

    def __init__(self, name: str, size: int, offset: int, user: User) -> None:
        self.name, self.size, self.offset, self.user = name, size, offset, user
        self.bytes = torch.full((size,), 255, dtype=torch.uint8)
        self.written = torch.zeros(size, dtype=torch.bool)
        self.history = History(name)


class View:
    """Some of a buffer, as numbers of one type in one order."""

    def __init__(self, buffer: Buffer, dtype: Any, tensor: Tensor) -> None:
        self.buffer, self.dtype, self.tensor = buffer, dtype, tensor
        self.layout = LAYOUT

    @classmethod
    def of(cls, buffer: Buffer, dtype: Any, shape: Sequence[int], first: int = 0) -> View:
        """`shape` numbers from byte `first` on."""
        size = torch.Size(shape).numel() * itemsize(dtype)
        if first + size > buffer.size:
            raise Fault("bounds", f"{list(shape)} of {dtype} at byte {first} leave {buffer.name}")
        return cls(buffer, dtype, buffer.bytes[first : first + size].view(STORED[dtype]).view(tuple(shape)))

    @property
    def shape(self) -> tuple[int, ...]:
        """As of a tensor."""
        return tuple(self.tensor.shape)

    @property
    def type(self) -> Type:
        """What kernels ask for."""
        return Type(self.shape, self.dtype)

    @property
    def first(self) -> int:
        """The first byte in the buffer."""
        return int(self.tensor.storage_offset()) * itemsize(self.dtype)

    @property
    def last(self) -> int:
        """Behind the last byte."""
        far = sum((n - 1) * s for n, s in zip(self.tensor.shape, self.tensor.stride(), strict=True))
        return self.first + (far + 1) * itemsize(self.dtype)

    def index(self, i: Any) -> View:
        """One of the first dimension."""
        n = int(i)
        if not 0 <= n < self.shape[0]:
            return Outside(Fault("bounds", f"index {n} of {self.shape[0]} in {self.buffer.name}"))
        return View(self.buffer, self.dtype, self.tensor[n])

    def slice(self, start: Any, length: Any, dim: int = 0) -> View:
        """Some of a dimension."""
        if not 0 <= int(start) <= int(start) + int(length) <= self.shape[dim]:
            raise Fault("bounds", f"slice {int(start)} + {int(length)} of {self.shape[dim]} in {self.buffer.name}")
        return View(self.buffer, self.dtype, self.tensor.narrow(dim, int(start), int(length)))

    def permute(self, order: Sequence[int]) -> View:
        """Dimensions in another order."""
        return View(self.buffer, self.dtype, self.tensor.permute(tuple(order)))

    def reshape(self, shape: Sequence[int]) -> View:
        """Other dimensions over the same bytes."""
        return View(self.buffer, self.dtype, self.tensor.view(tuple(int(n) for n in shape)))

    def _reinterpret(self, dtype: Any, shape: Sequence[int], _layout: Any) -> View:
        return View.of(self.buffer, dtype, [int(n) for n in shape], self.first)

    def _keep_alive(self) -> None: ...

    def load(self, _layout: Any = None) -> Generator[None, None, Value]:
        """By threads."""
        if not self.is_written:
            return Unusable(self.shape, self.dtype, self.unwritten())
        yield from self.buffer.user.touch(self, writes=False)
        return Value(self.read(), self.dtype)

    def store(self, x: Value) -> Iterator[None]:
        """By threads."""
        if x.shape != self.shape:
            raise Fault("bounds", f"a tile {x.shape} is stored to a buffer {self.shape}")
        yield from self.buffer.user.touch(self, writes=True)
        self.write(torch.as_tensor(cast(x, self.dtype).data))

    def read(self) -> Tensor:
        """What is there, as numbers to compute with."""
        data = self.tensor.clone()
        return data if self.dtype in FLOATS else data.to(torch.int64)

    def write(self, data: Tensor) -> None:
        """Put it there, and remember that something is there."""
        self.tensor.copy_(data.to(STORED[self.dtype]))
        self.buffer.written[self.first : self.last] = True

    @property
    def is_written(self) -> bool:
        """Whether somebody has written all of it, or is about to."""
        return bool(self.buffer.written[self.first : self.last].all())

    def unwritten(self) -> Fault:
        """What to raise of it where it is not."""
        return Fault("uninitialised", f"{self.buffer.name} is read from byte {self.first} on, which nobody has written")


class Outside(View):
    """A view beyond a buffer's end: nothing is wrong until it is used."""

    def __init__(self, because: Fault) -> None:
        self.because = because

    def __getattr__(self, _name: str) -> Any:
        raise self.because


class Descriptor:
    """A TMA descriptor: boxes of a tensor, 0 where a box leaves it."""

    def __init__(self, host: Any, memory: Memory) -> None:
        base = host.base
        self.memory, self.block = memory, tuple(int(n) for n in host.block_shape)
        self.dtype = next(kind for kind, dtype in STORED.items() if dtype == base.dtype)
        self.sizes, self.strides = tuple(map(int, host.shape)), tuple(map(int, host.strides))
        self.offset = base.storage_offset()
        self.layout = LAYOUT
        size = base.element_size()
        if base.data_ptr() % 16 or any(s * size % 16 for s in self.strides[:-1]) or self.strides[-1] != 1:
            raise Fault("bounds", f"a descriptor needs lines at multiples of 16 bytes; got strides {self.strides}")
        if any(not 1 <= n <= 256 for n in self.block) or self.block[-1] * size % 16:
            raise Fault("bounds", f"boxes of {self.block} cannot be described")
        reach = self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)) + 1
        if min(self.sizes) > 0 and reach * size > memory.size:
            raise Fault("bounds", f"a descriptor of {self.sizes} reaches byte {reach * size} of {memory.size}")

    @property
    def block_type(self) -> Type:
        """What one box is."""
        return Type(self.block, self.dtype)

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of one box."""
        return self.block

    def _box(self, coordinates: Sequence[Any]) -> tuple[tuple[slice, ...], Tensor, Tensor] | None:
        """Which part of a box lies in the tensor, that part of the tensor, and its byte offsets; None if none does."""
        at = [int(c) for c in coordinates]
        if len(at) != len(self.block):
            raise Fault("unsupported", f"{len(at)} coordinates for boxes of {self.block}")
        low = [max(0, -c) for c in at]
        high = [min(b, n - c) for b, n, c in zip(self.block, self.sizes, at, strict=True)]
        if any(h <= lo for lo, h in zip(low, high, strict=True)):
            return None
        start = self.offset + sum((c + lo) * s for c, lo, s in zip(at, low, self.strides, strict=True))
        shape = [h - lo for lo, h in zip(low, high, strict=True)]
        part = torch.as_strided(self.memory.flat(STORED[self.dtype]), shape, self.strides, start)
        offsets = torch.full((1,) * len(shape), start, dtype=torch.int64)
        for d, (n, s) in enumerate(zip(shape, self.strides, strict=True)):
            offsets = offsets + (torch.arange(n) * s).view([-1 if i == d else 1 for i in range(len(shape))])
        inside = tuple(slice(lo, h) for lo, h in zip(low, high, strict=True))
        return inside, part, offsets.flatten() * itemsize(self.dtype)

    def load(self, coordinates: Sequence[Any], writer: Writer) -> Tensor:
        """A box, 0 outside the tensor."""
        box = torch.zeros(self.block, dtype=STORED[self.dtype])
        found = self._box(coordinates)
        if found is not None:
            inside, part, at = found
            self.memory.note(at, itemsize(self.dtype), writer, writes=False)
            box[inside] = part
        return box

    def claim(self, coordinates: Sequence[Any], writer: Writer) -> None:
        """A box is going to be stored: from now on nobody else may touch its place."""
        found = self._box(coordinates)
        if found is not None:
            self.memory.note(found[2], itemsize(self.dtype), writer, writes=True)

    def store(self, coordinates: Sequence[Any], data: Tensor) -> None:
        """What of a box lies in the tensor."""
        found = self._box(coordinates)
        if found is not None:
            found[1].copy_(data.view(self.block)[found[0]])


def offsets(pointer: Value) -> Tensor:
    """The byte offsets of a pointer or a tile of pointers, [N]."""
    return torch.as_tensor(pointer.data, dtype=torch.int64).reshape(-1)


def spread(x: Any, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """x as `dtype`, broadcast to a shape and made flat."""
    kept = FLOATS.get(dtype, torch.bool if dtype is tl.int1 else torch.int64)
    return torch.as_tensor(cast(x, dtype).data, dtype=kept).broadcast_to(shape).reshape(-1)
