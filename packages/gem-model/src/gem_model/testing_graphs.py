"""A stand-in for CUDA graphs on a CPU: a recorder whose passes are run again from addresses, like a graph's kernels.

What a graph does not hold is what goes wrong with it: it knows addresses alone, of memory that others may have given
back, moved or written since. So here a pass is recorded as a list of operators (and kernels in Triton's interpreter)
with the addresses that they read and write, and run again from these. All that a pass allocates lies in one pool, where
memory that its last owner has let go of is the next allocation's, in the order of recording, as CUDA's is.

Running a pass again, an error is raised where it

* reads or writes memory outside the pool that has been freed since it was recorded, or lies elsewhere now;
* asked on the host for what a tensor holds (`.item()`), or for a shape that depends on it: a capture can't.

Whatever is free in the pool is filled with NaN (integers: -1), at the start of a pass and where it becomes free, and so
is what was allocated and not written: what reads it is not finite.

What it does not show: streams (everything stands in line), races inside of a kernel, and kernels of the card alone.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from gem_kernels import checks, interpreter, jagged, operator, stream
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten

from gem_model.layers import Inputs
from gem_model.recorder import Again, Run
from gem_model.replay import Room, Rooms, at_capacity
from gem_model.sequence import History

ALIGNMENT = 512  # bytes
POISON = 0xFF  # in every byte: NaN in all floating-point formats but those of 8 bits, -1 in integers
SYNCS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim")
UNWRITTEN = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")


class DanglingPointer(RuntimeError):
    """A recorded pass uses memory that is not there any more."""


class HostAsked(RuntimeError):
    """A pass that is being recorded wants to know what a tensor holds."""


@dataclass
class Block:
    """A piece of the pool."""

    memory: Tensor  # uint8
    owner: StorageWeakRef | None = None  # the storage of the tensors in it; None where it is free

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.memory.data_ptr()

    def poison(self) -> None:
        """Fill it with what nobody should read."""
        self.memory.fill_(POISON)


@dataclass
class Pool:
    """Memory that is given out again as soon as nobody holds it."""

    blocks: list[Block] = field(default_factory=list)  # by address

    def let_go(self) -> list[Block]:
        """The blocks that nobody has held any more since the last call; they are free now."""
        expired = torch.UntypedStorage._expired  # StorageWeakRef's own way there takes ten times as long
        found = [b for b in self.blocks if b.owner is not None and expired(b.owner.cdata)]
        for block in found:
            block.owner = None
            block.poison()
        return found

    @property
    def free(self) -> list[Block]:
        """Those that nobody holds."""
        return [b for b in self.blocks if b.owner is None]

    def take(self, like: Tensor) -> tuple[Tensor, Block]:
        """The same tensor in a block, and that."""
        kept = like.untyped_storage()
        size = kept.nbytes()
        able = [b for b in self.free if size <= b.memory.numel() <= max(2 * size, ALIGNMENT)]
        block = min(able, key=lambda b: b.memory.numel(), default=None)
        if block is None:
            block = Block(torch.empty(-(-size // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8))
            bisect.insort(self.blocks, block, key=lambda b: b.address)
        storage = _storage(block.address, size)
        block.memory[:size].copy_(torch.empty(0, dtype=torch.uint8).set_(kept, 0, (size,), (1,)))  # type: ignore[call-overload]
        block.owner = StorageWeakRef(storage)
        return _tensor(storage, like), block

    def holds(self, address: int) -> bool:
        """Whether it is in one of the blocks."""
        i = bisect.bisect(self.blocks, address, key=lambda b: b.address) - 1
        return i >= 0 and address < self.blocks[i].address + self.blocks[i].memory.numel()


@dataclass(frozen=True)
class Place:
    """A tensor as a recorded pass knows it: an address, a shape, and outside the pool whose memory that is."""

    like: Tensor  # on "meta": dtype, shape and strides
    address: int
    size: int  # bytes of the storage
    outside: StorageWeakRef | None

    def tensor(self, who: str) -> Tensor:
        """What is there now. Raises DanglingPointer, naming who asks."""
        if self.outside is not None:
            if self.outside.expired():
                raise DanglingPointer(f"{who} uses {self.described} that has been freed since it was recorded")
            now = torch.UntypedStorage._new_with_weak_ptr(self.outside.cdata)
            if now is None or now.data_ptr() != self.address or now.nbytes() < self.size:
                raise DanglingPointer(f"{who} uses {self.described} that lies elsewhere now")
        return _tensor(_storage(self.address, self.size), self.like)

    @property
    def described(self) -> str:
        """The tensor in words."""
        return f"a tensor {tuple(self.like.shape)} {self.like.dtype}"


@dataclass
class Pass:
    """What was recorded: functions without arguments, to be called in this order."""

    name: str
    unowned: list[Block]  # of the pool, when the recording began
    steps: list[Callable[[], None]] = field(default_factory=list)
    outside: dict[int, Place] = field(default_factory=dict)  # by address, what it uses that is not in the pool

    def run(self) -> None:
        """Do it all again."""
        for block in self.unowned:
            block.poison()
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # operators as they were chosen while recording
            for step in self.steps:
                step()


class CpuGraphs:
    """A recorder for :class:`gem_model.replay.Replay` and :class:`gem_model.replay_sharded.ShardedReplay`; see the
    module.

    Attributes:
        passes: what has been recorded, for whoever counts.
    """

    def __init__(self) -> None:
        self.pool = Pool()
        self.passes: list[Pass] = []
        self._left: list[Pool] = []  # that are gone, in which somebody may still hold something

    def __call__(self, run: Run, name: str) -> tuple[list[Tensor], Again]:
        """See `gem_model.recorder.Recorder`."""
        self.pool.let_go()
        recorded = Pass(name, self.pool.free)
        with _Recording(self.pool, recorded), _as_on_a_card(), interpreter.handed_to(_kernel):
            made = run()
        self.passes.append(recorded)
        return made, recorded.run

    def forget(self) -> None:
        """See `gem_model.recorder.Recorder`: who runs a pass all the same reads NaN."""
        for block in self.pool.blocks:
            block.poison()
        self._left.append(self.pool)
        self.pool = Pool()
        self.passes.clear()


class OneByOne(Rooms):
    """What a replay is to be compared with: the layers in the same rooms, their operators launched one by one."""

    def capture(self, room: Room, inputs: Inputs) -> Room:
        """See `Rooms`: there is nothing to capture."""
        return room

    def __call__(self, x: Tensor, histories: dict[str, History], cls: dict[str, Tensor]) -> Tensor:
        """See `Rooms`."""
        histories = {source: histories[source] for source in cls}
        room = self.graph(x, histories, cls)
        if room is None:
            return self.layers.through(x, histories, cls)
        with _as_on_a_card():
            return self.layers.through(*at_capacity(x, histories, cls, room))[: x.shape[0]]


class _Recording(TorchDispatchMode):
    """Puts what operators make into the pool, and them on the list."""

    def __init__(self, pool: Pool, recorded: Pass) -> None:
        super().__init__()
        self.pool, self.recorded = pool, recorded
        self.off = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.off:
            return func(*args, **kwargs)
        self.let_go()
        if func._schema.name in SYNCS:
            raise HostAsked(f"{func} in the {self.recorded.name}: a capture cannot wait for what a tensor holds")
        flat, form = tree_flatten((args, kwargs))
        given = [t for t in flat if _is_memory(t)]
        held = self.places(flat)
        known = {t.untyped_storage()._cdata for t in given}
        out = func(*args, **kwargs)
        outputs, spec = tree_flatten(out)
        new = [
            i
            for i, t in enumerate(outputs)
            if _is_memory(t) and t.untyped_storage().nbytes() and t.untyped_storage()._cdata not in known
        ]
        memory = {outputs[i].untyped_storage()._cdata for i in new}
        assert len(memory) == len(new), f"{func} returns tensors that share memory"
        for i in new:
            outputs[i], block = self.pool.take(outputs[i])
            if func._schema.name in UNWRITTEN:
                block.poison()
                self.recorded.steps.append(block.poison)
                return spec.unflatten(outputs)
        if new or func._schema.is_mutable:
            targets = {i: self.place(outputs[i]) for i in new}
            self.step(func, f"{func}", held, form, targets)
        return spec.unflatten(outputs)

    def place(self, t: Tensor) -> Place:
        """Where a tensor lies."""
        storage = t.untyped_storage()
        inside = self.pool.holds(storage.data_ptr())
        outside = None if inside or not storage.nbytes() else StorageWeakRef(storage)
        place = Place(_shape_of(t), storage.data_ptr(), storage.nbytes(), outside)
        if outside is not None:
            self.recorded.outside.setdefault(place.address, place)
        return place

    def places(self, flat: list[Any]) -> list[Any]:
        """Arguments, places instead of tensors."""
        return [self.place(t) if _is_memory(t) else t for t in flat]

    def step(self, func: Any, what: str, held: list[Any], form: Any, targets: dict[int, Place]) -> None:
        """Puts on the list: call `func` on what lies at these places, and put what it makes where it was put."""
        who = f"{what} in the {self.recorded.name}"

        def again() -> None:
            args, kwargs = form.unflatten([p.tensor(who) if isinstance(p, Place) else p for p in held])
            found = tree_flatten(func(*args, **kwargs))[0]
            for i, target in targets.items():
                target.tensor(who).copy_(found[i])

        self.recorded.steps.append(again)

    def let_go(self) -> None:
        """Notes what has become free."""
        self.recorded.steps += [block.poison for block in self.pool.let_go()]

    def launch(self, original: Callable[..., Any], executor: Any, args: Any, kwargs: Any) -> Any:
        """A kernel in the interpreter."""
        if self.off:
            return original(executor, *args, **kwargs)
        self.let_go()
        flat, form = tree_flatten((args, kwargs))
        run = functools.partial(original, executor)
        self.step(run, executor.fn.__name__, self.places(flat), form, {})
        self.off = True
        try:
            return original(executor, *args, **kwargs)
        finally:
            self.off = False


@contextlib.contextmanager
def _as_on_a_card() -> Iterator[None]:
    """Within the block nothing is read on the host because that is free on a CPU, and operators go the way that they go
    where no mode looks on.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(jagged, "longest", lambda offsets, max_len: max_len))
        stack.enter_context(patch.object(checks, "_check_values", lambda *_: None))
        for module in (operator, stream):
            stack.enter_context(patch.object(module, "_get_current_dispatch_mode", lambda: None))
        yield


def _kernel(run: Callable[..., Any], launch: Any, arguments: Any, options: Any) -> Any:
    """A launch in Triton's interpreter is recorded, too."""
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, _Recording):
        return run(launch, *arguments, **options)
    return mode.launch(run, launch, arguments, options)


def _is_memory(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == "cpu"  # and not "meta"


def _shape_of(t: Tensor) -> Tensor:
    size = t.untyped_storage().nbytes()
    whole = torch.empty(size // t.element_size(), dtype=t.dtype, device="meta")
    return torch.as_strided(whole, t.shape, t.stride(), t.storage_offset())


def _storage(address: int, size: int) -> Any:
    """Memory at an address, which is nobody's."""
    return torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), size)


def _tensor(storage: Any, like: Tensor) -> Tensor:
    made = torch.empty(0, dtype=like.dtype)
    return made.set_(storage, like.storage_offset(), like.shape, like.stride())  # type: ignore[call-overload, no-any-return]
