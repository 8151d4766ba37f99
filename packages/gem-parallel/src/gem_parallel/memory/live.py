"""What lies in memory while a region runs backward: what it saved and is still needed, and what comes on top.

A region's backward pass needs more than what was kept for it: gradients of activations, of which an attention or a
feed-forward layer has several at a time, and what kernels need for themselves. A budget that forgets them does not
hold. So a region's backward is run once while it is measured, and looked at whenever it takes a saved tensor. From what
is seen then follows the most that it needs however much of it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from gem_parallel.memory.recompute import EagerMode


class Meter(EagerMode):
    """Bytes that are allocated inside, beside those that were there before.

    The device's allocator knows them on a card, what kernels allocate for themselves included. Elsewhere operators are
    watched, and what one of them needs while it runs is not seen.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._card = device if device.type == "cuda" else None
        self._new: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bound = 0  # bytes of these, some of which may be gone
        self._most = self._before = 0

    def __enter__(self) -> Meter:
        if self._card is not None:
            torch.cuda.reset_peak_memory_stats(self._card)
            self._before = torch.cuda.memory_allocated(self._card)
            return self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._card is None:
            super().__exit__(*error)

    def take(self) -> int:
        """The most since this was asked last. On a card what was there before and is freed inside counts against it."""
        if self._card is not None:
            most = torch.cuda.max_memory_allocated(self._card) - self._before
            torch.cuda.reset_peak_memory_stats(self._card)
            return most
        most, self._most = self._most, self._now()
        return most

    @property
    def frees(self) -> bool:
        """Whether what is freed inside counts."""
        return self._card is not None

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._new[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self._bound += storage.nbytes()
        if self._bound > self._most:
            self._most = max(self._most, self._now())
        return out

    def _now(self) -> int:
        self._new = {key: found for key, found in self._new.items() if not found[0].expired()}
        self._bound = sum(nbytes for _, nbytes in self._new.values())
        return self._bound


@dataclass
class Saved:
    """One tensor that autograd saved, in whatever form.

    Attributes:
        nbytes: that are kept of it.
        whole: bytes of the storage while it is whole.
        names: of the results that it can be had from, None among them where something saves it that has none.
        until: how many moments of the backward pass it is there for; it has not been freed while this is None.
    """

    nbytes: int
    whole: int
    storage: StorageWeakRef
    names: set[str | None] = field(default_factory=set)
    until: int | None = None

    @property
    def only(self) -> str | None:
        """The one result without which nothing would keep it."""
        return next(iter(self.names)) if len(self.names) == 1 else None


@dataclass(frozen=True, kw_only=True)
class Moment:
    """From where backward takes a saved tensor, to where it takes the next one.

    Attributes:
        at: which tensor it is, counted as they were saved.
        beyond: the most bytes beside those that were saved and not yet freed.
    """

    at: int
    beyond: int


class Backward:
    """A region's backward pass, watched.

    Attributes:
        moments: in their order.
        ahead: the most that a second forward pass needs.
        results: which of the region's results it keeps itself.
        packing_s, packing_host_s: of the device and of the host, to pack all that is packed and to unpack it.
    """

    def __init__(self, saved: Collection[Saved]) -> None:
        self.saved = saved
        self.moments: list[Moment] = []
        self.ahead = 0
        self.results: tuple[int, ...] = ()
        self.packing_s = self.packing_host_s = 0.0
        self._meter: Meter | None = None
        self._whole = self._live = self._at = self._read = 0

    def run(self, out: list[torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
        """Backward from `out`, which is emptied: who comes after the region lets go of it before."""
        edges = [torch.autograd.graph.get_gradient_edge(t) for t in out]
        like = [(t.shape, t.dtype, t.device) for t in out]
        out.clear()
        with Meter(like[0][2]) as self._meter:
            self._whole = self._live = self._alive()
            upstream = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in like]
            self._at, self._read = 1 << 62, 0
            torch.autograd.grad(edges, leaves, upstream, allow_unused=True)
            self._end()
        self._meter = None

    def takes(self, at: int, unpacked: int) -> None:
        """A saved tensor is taken; `unpacked` bytes are a copy of it that is made for that, if it is kept packed."""
        if self._meter is None:
            return
        self._end()
        live = self._alive()
        if live < self._live:
            self._read = 0  # an operator is done, and with it the copies that it was given
        self._live, self._at = live, at
        self._read += unpacked

    def _end(self) -> None:
        assert self._meter is not None
        freed = self._whole - self._live if self._meter.frees else 0
        self.moments.append(Moment(at=self._at, beyond=max(self._meter.take() + freed, 0) + self._read))

    def _alive(self) -> int:
        found = 0
        for saved in self.saved:
            if saved.until is None:
                if saved.storage.expired():
                    saved.until = len(self.moments)
                else:
                    found += saved.whole
        return found

    def most(
        self, without: Collection[str] = (), computed: Callable[[int], int] = lambda at: 0, *, whole: bool = False
    ) -> int:
        """The most bytes that the backward pass needs where the results `without` are not kept, and `computed` says how
        many bytes of them are there again at a moment; with nothing packed, if it is `whole`.
        """
        steps = [0] * (len(self.moments) + 1)
        for saved in self.saved:
            if saved.only is None or saved.only not in without:
                nbytes = saved.whole if whole else saved.nbytes
                steps[0] += nbytes
                if saved.until is not None:
                    steps[min(saved.until, len(self.moments))] -= nbytes
        kept = accumulate(steps)
        return max((k + computed(m.at) + m.beyond for k, m in zip(kept, self.moments, strict=False)), default=0)
