"""The choices of `choice` put to work on a sharded model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from gem_parallel.comm.choice import Capabilities, Choice, choose_all_gather, choose_reduce_scatter, detect
from gem_parallel.comm.fsdp import (
    CopyEngineAllGather,
    CopyEngineReduceScatter,
    GroupAllGather,
    GroupReduceScatter,
    Payload,
    PayloadAllGather,
    PlainAllGather,
    limited_group,
)
from gem_parallel.comm.tables import CopyEngineTableGather, DefaultTableGather, TableGather
from gem_parallel.comm.watch import Watch
from gem_parallel.comm.windows import CudaWindow, Make, Ring
from gem_parallel.config import CommConfig
from gem_parallel.dense.units import param_groups
from gem_parallel.runtime import Runtime


class Collectives:
    """Chooses for every process group that shards parameters, installs, and remembers why."""

    def __init__(self, config: CommConfig, runtime: Runtime) -> None:
        self.config, self.runtime = config, runtime
        self.choices: list[Choice] = []
        self.rings: list[Ring] = []
        kernels = config.barriers == "kernels"
        self._make: Make = partial(CudaWindow, kernels=kernels, watch=Watch(runtime.timeout_s))
        self._hosts = [host for host, _ in runtime.peers] or [""]
        self._groups: dict[int, tuple[Any, Any]] = {}  # (all-gather, reduce-scatter) by process group

    def capabilities(self, group: Any) -> Capabilities:
        """What a group has; a test may say otherwise."""
        return detect(group, device=self.runtime.device.type, hosts=self._hosts)

    def _tried(self, group: Any) -> Capabilities:
        """The same, after a small window has been made where windows are wanted; all ranks hear of a failure."""
        has = self.capabilities(group)
        wanted = choose_all_gather(self.config, has).how == "copy engine"
        wanted |= choose_reduce_scatter(self.config, has).how == "copy engine"
        error = ""
        if wanted:
            try:
                self._make(16, group, self.runtime.device).barrier()
            except Exception as caught:  # the driver's, the allocator's or NCCL's
                error = f"{type(caught).__name__}: {' '.join(str(caught).split())[:200]}"
        errors = [found for found in self.runtime.gather(error, "a first window") if found]
        return replace(has, broken=errors[0]) if errors else has

    def install(self, units: Iterable[nn.Module], payload: Payload | None = None) -> None:
        """Give every FSDP unit its collectives. Called by all ranks together, before the first step."""
        for unit in units:
            if not isinstance(unit, FSDPModule):
                continue
            for group in param_groups(unit):
                self._install(unit, group._all_gather_process_group, payload)

    def _install(self, unit: FSDPModule, group: Any, payload: Payload | None) -> None:
        if id(group) not in self._groups:
            self._groups[id(group)] = self._make_pair(group, payload)
        gather, reduce = self._groups[id(group)]
        if gather == "nccl windows":
            unit.set_symm_mem_for_comm("NCCL")  # type: ignore[attr-defined]
        elif gather is not None:
            unit.set_custom_all_gather(gather)
        if reduce == "in switch":
            unit.set_allocate_memory_from_process_group_for_comm(True)
        elif reduce is not None:
            unit.set_custom_reduce_scatter(reduce)
            unit.set_force_sum_reduction_for_comms(True)

    def _make_pair(self, group: Any, payload: Payload | None) -> tuple[Any, Any]:
        has = self._tried(group)
        gather, reduce = choose_all_gather(self.config, has), choose_reduce_scatter(self.config, has)
        how: Any = None
        if gather.how == "copy engine":
            how = CopyEngineAllGather(self._ring(group), pushes=self.config.copies == "written")
        elif gather.how == "few CTAs":
            how = GroupAllGather(limited_group(group, self.config.all_gather_ctas))
        elif gather.how == "nccl windows" and payload is None:
            how = "nccl windows"
        if payload is not None:
            carrier: AllGather = how or PlainAllGather()
            under = "default" if type(carrier) is PlainAllGather else gather.how
            how = PayloadAllGather(payload, carrier)
            gather = Choice(
                what=gather.what,
                how=f"{type(payload).__name__} over {under}",
                reasons=("a payload was handed in", *gather.reasons),
                refused=gather.refused,
            )
        back: Any = None
        if reduce.how == "copy engine":
            back = CopyEngineReduceScatter(self._ring(group))
        elif reduce.how == "few CTAs":
            back = GroupReduceScatter(limited_group(group, self.config.reduce_scatter_ctas))
        elif reduce.how == "in switch":
            back = "in switch"
            if how is not None:  # FSDP does not combine its two ways to allocate buffers
                back = None
                reduce = Choice(
                    what=reduce.what,
                    how="default",
                    reasons=("NCCL may still reduce in the switches; buffers are ordinary beside another all-gather",),
                )
        self.add(gather)
        self.add(reduce)
        return how, back

    def table_gather(self, group: Any) -> Callable[[], TableGather]:
        """What gathers the tables of "v3" over `group`: a maker, called once for every kernel."""
        choice = choose_all_gather(self.config, self._tried(group), "tables' all-gather")
        self.add(choice)
        if choice.how == "copy engine":
            return lambda: CopyEngineTableGather(group, self._make)
        return lambda: DefaultTableGather(group)

    def _ring(self, group: Any) -> Ring:
        ring = Ring(group, self.config.windows, self._make)
        self.rings.append(ring)
        return ring

    def add(self, choice: Choice) -> None:
        """Remember a choice; say once when it is not what was asked for."""
        if choice in self.choices:
            return
        self.choices.append(choice)
        if choice.refused:
            warnings.warn(f"{choice.what}: {choice.how}, because {'; '.join(choice.reasons)}", stacklevel=4)

    def why(self) -> str:
        """Every choice with its reasons."""
        return "\n".join(map(str, self.choices)) or "no collectives: nothing is sharded"
