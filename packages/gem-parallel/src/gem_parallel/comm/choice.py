"""The choice of a collective from what a machine and torch can do; pure, so that any machine can be asked about."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

from gem_parallel.config import CommConfig

COPY_ENGINE_NCCL = (2, 28)  # from here NCCL's all-gather can run without SMs


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What one process group has.

    Attributes:
        device: "cuda" or "cpu".
        major: the card's compute capability.
        size: ranks of the group.
        one_host: whether all of them share a host.
        peers: whether their cards reach one another's memory.
        multicast: whether the fabric reduces in its switches (NVLink SHARP), and the environment lets it.
        nccl: NCCL's version.
        symmetric: whether this torch has symmetric memory.
        broken: why a window could not be made although nothing seemed to be missing.
        nccl_windows: whether FSDP can gather through NCCL's own copy-engine path (`set_symm_mem_for_comm`), for which
            the process group must have been made with the zero-CTA policy.
    """

    device: str
    major: int = 0
    size: int = 1
    one_host: bool = True
    peers: bool = False
    multicast: bool = False
    nccl: tuple[int, ...] = ()
    symmetric: bool = False
    broken: str = ""
    nccl_windows: bool = False


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What moves a kind of data.

    Attributes:
        what: "parameters' all-gather", ...
        how: the implementation.
        reasons: why it, and why not the others.
        refused: whether something else had been asked for.
    """

    what: str
    how: str
    reasons: tuple[str, ...] = field(default=())
    refused: bool = False

    def __str__(self) -> str:
        return "\n".join([f"{self.what:26} {self.how}", *(f"{'':26} - {reason}" for reason in self.reasons)])


def choose_all_gather(config: CommConfig, has: Capabilities, what: str = "parameters' all-gather") -> Choice:
    """The all-gather of parameters or tables: "nccl windows", "copy engine", "few CTAs" or "default"."""
    why = 'all_gather = "default"'
    missing = "" if config.all_gather == "default" else _misses_copy_engine(has)
    if missing or config.all_gather == "default":
        why = f"no copy engine: {missing}" if missing else why
        asked = bool(missing) and config.all_gather == "copy_engine"
        if config.all_gather_ctas and has.device == "cuda" and what.startswith("parameters"):
            few = f"a process group of its own with at most {config.all_gather_ctas} CTAs"
            return Choice(what=what, how="few CTAs", reasons=(why, few), refused=asked)
        return Choice(what=what, how="default", reasons=(why,), refused=asked)
    reasons = [f"{has.size} ranks of one host reach one another's memory (sm_{has.major}0): no SM is needed to copy"]
    if has.nccl_windows and has.nccl >= COPY_ENGINE_NCCL and what.startswith("parameters"):
        return Choice(
            what=what,
            how="nccl windows",
            reasons=(*reasons, f"NCCL {_dots(has.nccl)} copies by engine: its group has the zero-CTA policy"),
        )
    reasons.append(
        f"peers' windows are {config.copies} by copies on the gathering stream, ranks meet by {config.barriers}; "
        "NCCL's own path "
        + ("is for parameters only" if has.nccl_windows else "needs torch >= 2.12 and a group with the zero-CTA policy")
    )
    return Choice(what=what, how="copy engine", reasons=tuple(reasons))


def choose_reduce_scatter(config: CommConfig, has: Capabilities) -> Choice:
    """The reduce-scatter of gradients: "in switch", "copy engine", "few CTAs" or "default"."""
    what = "gradients' reduce-scatter"
    if config.reduce_scatter == "copy_engine":
        missing = _misses_copy_engine(has)
        if not missing:
            return Choice(
                what=what,
                how="copy engine",
                reasons=("asked for: pieces are copied by engine, and each rank sums its own in the order of ranks",),
            )
        return Choice(what=what, how="default", reasons=(f"no copy engine: {missing}",), refused=True)
    if has.multicast and config.reduce_scatter == "auto" and has.size > 1:
        return Choice(
            what=what,
            how="in switch",
            reasons=("the fabric reduces in its switches (NVLink SHARP); buffers come from the process group",),
        )
    if config.reduce_scatter_ctas:
        if has.device != "cuda":
            return Choice(
                what=what, how="default", reasons=(f"CTAs are limited in NCCL only, not on {has.device}",), refused=True
            )
        return Choice(
            what=what,
            how="few CTAs",
            reasons=(f"a process group of its own with at most {config.reduce_scatter_ctas} CTAs",),
        )
    why = 'reduce_scatter = "default"' if config.reduce_scatter == "default" else _no_switch(has)
    return Choice(what=what, how="default", reasons=(why,))


def _misses_copy_engine(has: Capabilities) -> str:
    """What is missing for copies between the group's cards, or nothing."""
    if has.device != "cuda":
        return f"the device is {has.device}"
    if has.size == 1:
        return "a group of one has nothing to gather"
    if has.major < 9:
        return f"made for Hopper and later, the card is sm_{has.major}x"
    if not has.one_host:
        return f"the group of {has.size} leaves the host; keep shard_group inside one NVLink domain"
    if not has.peers:
        return "the cards do not reach one another's memory"
    if not has.symmetric:
        return "this torch has no symmetric memory"
    return f"a window could not be made: {has.broken}" if has.broken else ""


def _no_switch(has: Capabilities) -> str:
    return "a group of one" if has.size == 1 else "no reduction in the switches (no multicast, or switched off)"


def _dots(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def detect(group: Any, *, device: str, hosts: list[str]) -> Capabilities:
    """What `group` (a process group) has here.

    Args:
        device: of the runtime.
        hosts: the host name of every rank of the world.
    """
    import torch
    import torch.distributed as dist

    ranks = dist.get_process_group_ranks(group)
    one_host = len({hosts[rank] for rank in ranks}) == 1
    if device != "cuda":
        return Capabilities(device=device, size=len(ranks), one_host=one_host)
    mine, count = torch.cuda.current_device(), torch.cuda.device_count()
    peers = (
        one_host
        and count >= len(ranks)
        and all(torch.cuda.can_device_access_peer(mine, i) for i in range(count) if i != mine)
    )
    nccl: Any = torch.cuda.nccl.version()
    from torch.distributed.fsdp import FSDPModule

    options = getattr(group, "_get_backend", lambda _: None)(torch.device("cuda"))
    return Capabilities(
        device=device,
        major=torch.cuda.get_device_capability()[0],
        size=len(ranks),
        one_host=one_host,
        peers=peers,
        multicast=one_host and len(ranks) > 1 and _has_multicast(mine),
        nccl=tuple(int(part) for part in nccl),
        symmetric=_has_symmetric_memory(),
        nccl_windows=hasattr(FSDPModule, "set_symm_mem_for_comm") and _is_zero_cta(options),
    )


def _has_symmetric_memory() -> bool:
    try:
        import torch.distributed._symmetric_memory as symmetric
    except ImportError:
        return False
    return hasattr(symmetric, "empty") and hasattr(symmetric, "rendezvous")


def _has_multicast(device: int) -> bool:
    """Whether the driver and the environment let switches reduce."""
    if os.environ.get("NCCL_NVLS_ENABLE") == "0" or os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1":
        return False
    import torch
    from torch._C._distributed_c10d import _SymmetricMemory

    try:
        return bool(_SymmetricMemory.has_multicast_support(torch._C._autograd.DeviceType.CUDA, device))
    except (AttributeError, RuntimeError):
        return False


def _is_zero_cta(backend: Any) -> bool:
    if re.fullmatch(r"2|.*ZERO.*", os.environ.get("NCCL_CTA_POLICY", "")):
        return True
    try:
        return int(backend.options.config.cta_policy) == 2
    except (AttributeError, TypeError, ValueError):
        return False
