"""How a tensor is kept for backward: as it is, quantised, in host memory; decided tensor by tensor.

The same object serves plain autograd (as `torch.autograd.graph.saved_tensors_hooks`), selective recomputation and the
inputs of recomputed regions.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from gem_parallel.memory.offload import HostCopy, HostStore
from gem_parallel.memory.quantise import Quantiser
from gem_parallel.memory.recipes import EXACT, name_of, sort_of

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_WEIGHT_DEPTH = 10  # views, copies and casts between a parameter and what an operator saves of it
NARROW = 16  # numbers of a row, below which they are what is known of the row, and not a vector with noise to average


class _Kept:
    """A tensor in its small form."""

    __slots__ = ("__weakref__", "host", "packed", "stream")

    def __init__(self, packed: Any, host: HostCopy | None, stream: Any) -> None:
        self.packed, self.host = packed, host
        self.stream = stream  # of a card, on which it was packed


class Keeper:
    """Packs what is worth it.

    Quantised or offloaded are floating-point activations of at least `min_bytes` (`offload_bytes`). Left alone are
    parameters, views and casts of them, buffers (`leave`), tensors that repeat themselves in memory (expanded ones),
    and everything inside `exactly()`. One tensor that several operators save is packed once.

    Kernels need some numbers exactly, and these are not quantised, whatever their size:

    - vectors and rows of fewer than NARROW numbers: a position, a time, a statistic of a norm, the log-sum-exp of an
      attention's heads. It enters as exp(s - LSE), so that the 6% by which E4M3 may round it are a factor of its own
      for each row of probabilities;
    - results that `recipes.EXACT` names, of any width;
    - of what autograd saves, what no gradient flows through: masks, statistics that operators keep for themselves, data
      and weights that a function has put together. Not where a compiler decides what is saved (`compiled`): it saves
      everything as such.
    """

    def __init__(
        self, quantiser: Quantiser | None, *, min_bytes: int, offload_bytes: int = 0, compiled: bool = False
    ) -> None:
        self.quantiser = quantiser
        self.min_bytes = min_bytes
        self.compiled = compiled
        self.offload_bytes = offload_bytes  # 0: never
        sizes = [size for size in (min_bytes if quantiser else 0, offload_bytes) if size]
        self._least = min(sizes, default=1 << 62)
        self.host = HostStore()
        self.leave: set[int] = set()  # storages that are no activations
        self.seen = self.saved = 0  # bytes that came to be packed, bytes that remained of them on the device
        self._exact = False
        self._whole: dict[int, StorageWeakRef] = {}  # kept as they are: a small form would come on top of them
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Kept]]] = {}

    @property
    def works(self) -> bool:
        """Whether anything would be packed."""
        return self.quantiser is not None or self.offload_bytes > 0

    @contextmanager
    def exactly(self, exact: bool = True) -> Iterator[None]:
        """Nothing is packed inside; `exact` = False takes that back."""
        before, self._exact = self._exact, exact
        try:
            yield
        finally:
            self._exact = before

    def pack_saved(self, tensor: torch.Tensor) -> Any:
        """The same for a tensor that autograd saves."""
        return self.pack(tensor, rounds=self._flows(tensor))

    def pack(self, tensor: torch.Tensor, *, rounds: bool = True) -> Any:
        """What is kept instead of `tensor`; itself when it is left alone. It is quantised only if it `rounds`."""
        if not self._eligible(tensor):
            return tensor
        whole = self._whole.get(tensor.untyped_storage()._cdata)
        moves = 0 < self.offload_bytes <= tensor.nbytes
        if self._exact or not (moves or rounds):
            storage = tensor.untyped_storage()
            self._whole[storage._cdata] = StorageWeakRef(storage)
            return tensor
        if whole is not None and not whole.expired():
            return tensor
        storage = tensor.untyped_storage()
        key = (
            storage._cdata,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )
        known = self._known.get(key)
        if known is not None and not known[0].expired():  # else the address belongs to another tensor by now
            kept = known[1]()
            if kept is not None:
                return kept
        kept = self._small(tensor.detach(), quantises=rounds and self._quantises(tensor))
        self._known[key] = (StorageWeakRef(storage), weakref.ref(kept, lambda _: self._known.pop(key, None)))
        return kept

    def begin(self, leave: set[int]) -> None:
        """A step begins; storages in `leave` are no activations."""
        self.leave = leave
        self._whole = {key: storage for key, storage in self._whole.items() if not storage.expired()}

    def size_saved(self, tensor: torch.Tensor) -> int:
        """The same of `pack_saved`."""
        return self.size(tensor, rounds=self._flows(tensor))

    def size(self, tensor: torch.Tensor, *, rounds: bool = True) -> int:
        """Bytes that stay on the device when `tensor` is packed, for a plan."""
        if self._exact or not self._eligible(tensor):
            return tensor.nbytes
        if 0 < self.offload_bytes <= tensor.nbytes:
            return 0
        if not (rounds and self._quantises(tensor)):
            return tensor.nbytes
        return int(tensor.numel() * getattr(self.quantiser, "bits", 8.0) / 8)

    def unpack(self, kept: Any) -> torch.Tensor:
        """The tensor again: a copy that nothing but the caller holds, unless it was left alone."""
        if not isinstance(kept, _Kept):
            tensor: torch.Tensor = kept
            return tensor
        packed = kept.packed
        if kept.host is not None:
            moved = kept.host.take()
            if packed is None:
                return moved[0]
            packed = packed.with_tensors(*moved)
        elif kept.stream is not None:
            here = torch.cuda.current_stream(kept.stream.device)
            if (
                here != kept.stream
            ):  # the model runs in branches: the memory is not to be reused before this one is done
                for tensor in packed.tensors():
                    tensor.record_stream(here)
        assert self.quantiser is not None
        return self.quantiser.unpack(packed)

    def _small(self, tensor: torch.Tensor, *, quantises: bool) -> _Kept:
        self.seen += tensor.nbytes
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        packed = self.quantiser.pack(tensor) if self.quantiser is not None and quantises else None
        if not self.offload_bytes or tensor.nbytes < self.offload_bytes:
            assert packed is not None
            self.saved += int(packed.nbytes)
            return _Kept(packed, None, stream if hasattr(packed, "tensors") else None)
        if packed is None:
            return _Kept(None, self.host.put((tensor,)), None)
        if not hasattr(packed, "with_tensors"):
            raise TypeError(
                f"{type(self.quantiser).__name__} packs into {type(packed).__name__}, which has no tensors() and "
                "with_tensors(); what is to wait in host memory needs them"
            )
        return _Kept(packed.with_tensors(*(None for _ in packed.tensors())), self.host.put(packed.tensors()), None)

    def _flows(self, tensor: torch.Tensor) -> bool:
        return self.compiled or tensor.requires_grad

    def _quantises(self, tensor: torch.Tensor) -> bool:
        return (
            self.quantiser is not None
            and tensor.dim() > 1
            and tensor.shape[-1] >= NARROW
            and tensor.nbytes >= self.min_bytes
            and (tensor.grad_fn is None or tensor.output_nr not in EXACT.get(sort_of(tensor.grad_fn), ()))
        )

    def _eligible(self, tensor: torch.Tensor) -> bool:
        return (  # most are small, and this is asked of all
            tensor.numel() * tensor.element_size() >= self._least
            and type(tensor) is torch.Tensor
            and tensor.dtype in _FLOATS
            and tensor.layout is torch.strided
            and tensor.nbytes <= tensor.untyped_storage().nbytes()
            and tensor.untyped_storage()._cdata not in self.leave
            and not is_weight(tensor)
            and (0 < self.offload_bytes <= tensor.nbytes or self._quantises(tensor))
        )


def is_weight(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a parameter seen through views and casts (such as autocast's), or made of parameters alone:
    by a cast of many at once, or by folding one into another.
    """
    return isinstance(tensor._base, nn.Parameter) or _of_weights(tensor.grad_fn, _WEIGHT_DEPTH)


def _of_weights(function: Any, depth: int) -> bool:
    if function is None or not depth:
        return False
    if hasattr(function, "variable"):  # AccumulateGrad
        return isinstance(function.variable, nn.Parameter)
    parents = [parent for parent, _ in function.next_functions]
    if len(parents) < 2 and not name_of(function).startswith(_SHAPING):
        return False
    return bool(parents) and all(_of_weights(parent, depth - 1) for parent in parents)


_SHAPING = (
    "TBackward",
    "Transpose",
    "View",
    "ToCopy",
    "Permute",
    "Unsafe",
    "Reshape",
    "Slice",
    "Select",
    "Alias",
    "Clone",
    "Expand",
    "Squeeze",
    "Unsqueeze",
)
