"""The engine: regions of a model whose activations are kept by plan. The first steps measure, the others follow.

While it measures, every region recomputes everything, so that the measurement itself fits where the plan will.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from gem_parallel.config import MEMORY_INSIDE, MemoryConfig
from gem_parallel.dense.containers import register_dataclasses
from gem_parallel.memory import compiled, worth
from gem_parallel.memory.again import Saving
from gem_parallel.memory.clock import longer
from gem_parallel.memory.keeper import Keeper
from gem_parallel.memory.mx4 import Mx4Quantiser
from gem_parallel.memory.plan import MemoryPlan, make_plan
from gem_parallel.memory.profile import (
    DEVICE_LEAST_S,
    Curve,
    Point,
    Recorder,
    bytes_of,
    count_saved,
    curve,
    device_seconds,
    hold_back,
    host_cost,
    is_on_card,
    plain_tensors,
    tensor_bytes,
    with_host,
)
from gem_parallel.memory.quantise import Fp8Quantiser, Quantiser
from gem_parallel.memory.recompute import Function, recompute

CALLS = ("forward", "rows", "rows_twice")  # of a module: gem-kernels' norms are asked for more than their result
PLAIN = Keeper(None, min_bytes=0)  # packs nothing
# Gradients of plans that compute results again beside what backward kernels write were off by 0.7 to 4% on a card, in
# CUDA graphs, though neither alone is, nor both together on a CPU: docs/notes/activation-memory.md.
MIXED_ON_CARDS = False
MEASURED_STEPS = 2  # of which the last one counts: the first compiles kernels


class Regions:
    """Made by `parallelize` when ParallelConfig.memory asks for it; wraps the regions' forwards in place.

    Args:
        model: holds the regions.
        names: of its modules; those inside others of them are left to them.
        config: what to do.
        quantiser: replaces the plain FP8 or MXFP4 one.
        agree: makes all ranks follow one plan (a region that exchanges activations must be run again by all or none).
        curves: measured before with the same model, batch and way to store; they are not measured again.

    Attributes:
        made: is told the plan when it has been made.
        launched: whether the host launches what is computed again, so that a plan reckons with its time; not where the
            regions are captured in CUDA graphs, once `measuring` is over.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        config: MemoryConfig,
        *,
        quantiser: Quantiser | None = None,
        agree: Callable[[MemoryPlan], MemoryPlan] = lambda plan: plan,
        curves: Mapping[str, Curve] | None = None,
    ) -> None:
        self.config = config
        self.plan: MemoryPlan | None = None
        self.made: Callable[[MemoryPlan], None] = lambda plan: None
        self.launched = True
        self.curves: dict[str, Curve] = dict(curves or {})
        chosen = [name for name in names if any(fnmatchcase(name, pattern) for pattern in config.regions)]
        outer = [name for name in chosen if not any(name.startswith(f"{other}.") for other in chosen)]
        if not outer:
            raise ValueError(
                f"MemoryConfig.regions = {config.regions} matches none of the model's units {list(names)}; without "
                "regions there is nothing to plan"
            )
        self.names = tuple(outer)
        if quantiser is None:
            quantiser = Mx4Quantiser() if config.quantise == "mx4" else Fp8Quantiser(block=config.quantise_block)
        self.keeper = Keeper(
            quantiser if config.quantise in ("fp8", "mx4") else None,
            min_bytes=int(config.quantise_min_kib * 1024),
            offload_bytes=int(config.offload_min_mib * (1 << 20)),
            compiled=config.engine == "compile",
        )
        self._pass_kib = config.quantise_min_kib if config.quantise == "compiler" else None
        self._least = int(config.recompute_min_kib * 1024)
        self._agree = agree
        self._model = model
        self._before: list[tuple[nn.Module, str, Any]] = []  # wrapped methods, and what modules had of their own there
        self._steps = MEASURED_STEPS if curves else 0
        self._points: dict[str, Point] = {}
        self._compiled: dict[str, dict[float, Function]] = {}
        self._kinds: dict[str, Curve] = {}
        self._elsewhere: dict[int, StorageWeakRef] = {}  # what measured regions keep of their results
        mixed = config.inside != "none" and config.policy in ("uniform", "regions")
        if mixed and not MIXED_ON_CARDS and any(p.is_cuda for p in model.parameters()):
            raise ValueError(
                f"MemoryConfig.inside is {config.inside!r} and policy {config.policy!r}: on a CUDA device inside goes "
                'with policy "keep" alone, because gradients of plans with both were seen wrong there'
            )
        self._insides = {name: _with_insides(model.get_submodule(name)) for name in outer}
        if config.inside != "none" and not any(self._insides.values()):
            warnings.warn(
                f"MemoryConfig.inside is {config.inside!r}, but no module of the regions {outer} has an attribute "
                "`inside`: their backward kernels write nothing but gradients",
                stacklevel=2,
            )
        if self.keeper.works:
            self._exclude(config.exclude, config.include)
        for name in outer:
            module = model.get_submodule(name)
            self._wrap(module, _Region(self, name, module))
        if not config.plans:
            self._points = dict.fromkeys(outer, Point(kept=0, seconds=0.0, names=None))
        elif config.policy == "full" and config.engine != "compile":
            self._points = dict.fromkeys(outer, Point(kept=0, seconds=0.0, names=()))
        elif config.plan_file and os.path.exists(config.plan_file):
            self._follow(MemoryPlan.read(config.plan_file), config.plan_file)
            assert self.plan is not None
            if self.plan.asked != config.asked:
                raise ValueError(
                    f"{config.plan_file} was made for {self.plan.asked!r}, and {config.asked!r} is asked for: remove "
                    "the file to measure again"
                )

    def begin(self) -> None:
        """Called before a training forward of the model; makes the plan when enough has been measured."""
        self.keeper.begin({b.untyped_storage()._cdata for b in self._model.buffers() if type(b) is torch.Tensor})
        if self._points:
            return
        if self._steps == MEASURED_STEPS:
            self._make()
        self._steps += 1

    @property
    def measuring(self) -> bool:
        """Whether the plan is still to be made."""
        return not self._points

    def _make(self) -> None:
        silent = [name for name in self.names if name not in self.curves]
        if silent:
            raise RuntimeError(f"regions {silent} were not called in {MEASURED_STEPS} training steps")
        config = self.config
        limit = int(config.budget_gib * (1 << 30)) if config.budget_gib else None
        curves = [self.curves[name] for name in self.names]
        plan = self._agree(
            make_plan(
                curves,
                policy=config.policy,
                engine=config.engine,
                share=config.budget,
                limit=limit,
                asked=config.asked,
            )
        )
        if plan.peak > plan.budget and config.policy != "full":
            warnings.warn(
                f"the activation budget of {plan.budget / 2**20:.1f} MiB is below the {plan.peak / 2**20:.1f} MiB that "
                "the regions hold at least; recomputed is all but what costs no memory at the peak",
                stacklevel=2,
            )
        self._follow(plan, "the plan")
        if config.plan_file:
            temporary = f"{config.plan_file}.{os.getpid()}"
            plan.write(temporary)
            os.replace(temporary, config.plan_file)
        self.made(plan)

    def _follow(self, plan: MemoryPlan, where: str) -> None:
        got = {row.region: row.point for row in plan.regions}
        if set(got) != set(self.names) or plan.engine != self.config.engine:
            raise ValueError(
                f"{where} is for the regions {sorted(got)} and engine {plan.engine!r}; the model has "
                f"{sorted(self.names)} and {self.config.engine!r}: remove the file to measure again"
            )
        self.plan, self._points = plan, got

    def _exclude(self, exclude: Sequence[str], include: Sequence[str]) -> None:
        inside: list[str] = []
        for name, module in self._model.named_modules():
            own = (name.lower(), type(module).__name__.lower())

            def fits(patterns: Sequence[str], own: tuple[str, str] = own) -> bool:
                return any(fnmatchcase(text, pattern.lower()) for text in own for pattern in patterns)

            if any(name.startswith(prefix) for prefix in inside) and fits(include):
                self._keep_in(module, exact=False)
            elif fits(exclude):
                inside.append(f"{name}.")
                self._keep_in(module)

    def _keep_in(self, module: nn.Module, *, exact: bool = True) -> None:
        for name in CALLS:
            if hasattr(module, name):
                self._wrap(module, _Exact(self.keeper, getattr(module, name), exact=exact), name)

    def _wrap(self, module: nn.Module, function: Any, name: str = "forward") -> None:
        self._before.append((module, name, module.__dict__.get(name)))
        setattr(module, name, function)

    def close(self) -> None:
        """Give the modules back the methods that they had."""
        for module, name, before in reversed(self._before):
            if before is None:
                del module.__dict__[name]
            else:
                setattr(module, name, before)
        self._before.clear()

    def run(self, name: str, module: nn.Module, function: Function, args: Any, kwargs: Any) -> Any:
        """One call of a region in training."""
        register_dataclasses((args, kwargs))  # whose tensors are inputs like others
        if self.measuring:
            return self._measure(name, module, function, args, kwargs)
        point = self._points[name]
        if self.config.engine == "compile":
            function = self._compiled_for(name, function, point.budget)
        keeper = self.keeper if point.packs else PLAIN
        if point.names is not None:
            return recompute(function, args, kwargs, frozenset(point.names), keeper)
        with self._inside(name, point.inside):
            if point.again:
                with Saving(frozenset(point.again), keeper, least=self._least, module=module).hooks():
                    return function(*args, **kwargs)
            if not keeper.works:
                return function(*args, **kwargs)
            with torch.autograd.graph.saved_tensors_hooks(keeper.pack_saved, keeper.unpack):
                return function(*args, **kwargs)

    def _ways(self) -> tuple[str, ...]:
        """What is tried of `inside`: a plan may want less of it, so that other results can be had again."""
        asked = self.config.inside
        ways = MEMORY_INSIDE[1 : MEMORY_INSIDE.index(asked) + 1]
        return ways[-1:] if self.config.policy == "keep" else ways

    @contextmanager
    def _inside(self, name: str, what: str) -> Iterator[None]:
        """What backward kernels of a region write on their way, for a forward pass."""
        modules = self._insides[name]
        before = [module.inside for module in modules]
        for module in modules:
            module.inside = what  # type: ignore[assignment]
        try:
            yield
        finally:
            for module, was in zip(modules, before, strict=True):
                module.inside = was

    def _compiled_for(self, name: str, function: Function, budget: float) -> Function:
        known = self._compiled.setdefault(name, {})
        if budget not in known:
            known[budget] = compiled.compile_region(function, budget, quantise_kib=self._pass_kib)
        return known[budget]

    def _measure(self, name: str, module: nn.Module, function: Function, args: Any, kwargs: Any) -> Any:
        counts = self._steps == MEASURED_STEPS
        if self.config.engine == "compile":
            if counts:
                self._measure_compiled(name, module, function, args, kwargs)
            return checkpoint(function, *args, use_reentrant=False, **kwargs)
        if self.config.engine == "eager":
            kept = self._measure_results(name, module, function, args, kwargs) if counts else ()
            out = checkpoint(function, *args, use_reentrant=False, **kwargs)
            for storage in (t.untyped_storage() for i, t in enumerate(plain_tensors(out)) if i in kept):
                self._elsewhere[storage._cdata] = StorageWeakRef(storage)  # it lives as long as whoever reads it
            return out
        size = self.keeper.size if self.keeper.works else bytes_of
        recorder = Recorder(size=size)
        size_saved = self.keeper.size_saved if self.keeper.works else bytes_of
        saved = unpacked = count_saved(function, args, kwargs, module, size_saved) if counts else 0
        if counts and self.keeper.works:
            unpacked = count_saved(function, args, kwargs, module)
        if counts and is_on_card(args, kwargs):
            hold_back()
        out = checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (recorder, nullcontext()), **kwargs)
        costs = recorder.costs()
        if counts:
            inputs, card = tensor_bytes((args, kwargs), size), is_on_card(args, kwargs)
            found = curve(name, costs, inputs, saved, unpacked, least_s=DEVICE_LEAST_S if card else 0.0)
            self.curves[name] = with_host(found, host_cost(function, args, kwargs)) if card else found
        return out

    def _measure_results(
        self, name: str, module: nn.Module, function: Function, args: Any, kwargs: Any
    ) -> tuple[int, ...]:  # fmt: skip
        """The curve of a region whose results are computed again one by one; which of its results it keeps itself."""
        elsewhere = {key for key, storage in self._elsewhere.items() if not storage.expired()}
        results: tuple[int, ...] = ()
        card = is_on_card(args, kwargs)
        host_s = host_cost(function, args, kwargs).forward_s
        forward_s = device_seconds(function, args, kwargs) if card else host_s
        before = hold_back if card else _nothing
        took = {"none": 0.0}  # what writing on the way takes, by what is written
        if self._insides[name]:
            for what in self._ways():

                def switched(on: bool, what: str = what) -> AbstractContextManager[None]:
                    return self._inside(name, what if on else "none")

                took[what] = longer(function, args, kwargs, module, switched, before)
        keepers = (PLAIN, self.keeper) if self.keeper.works else (PLAIN,)
        wholes: dict[str, int] = {}  # bytes of all, unpacked
        found = []
        for keeper, inside in itertools.product(keepers, took):
            with self._inside(name, inside):
                saved, costs, backward = worth.watch(
                    function, args, kwargs, module, keeper, least=self._least, before=before, elsewhere=elsewhere
                )
            wholes.setdefault(inside, saved)
            results = results or backward.results
            found.append(
                worth.curve(
                    name,
                    costs,
                    inputs=tensor_bytes((args, kwargs), keeper.size if keeper.works else bytes_of),
                    saved=saved,
                    unpacked=wholes[inside],
                    forward_s=forward_s,
                    host_s=host_s if card and self.launched else None,
                    backward=backward,
                    inside=inside,
                    inside_s=took[inside],
                    packs=keeper is self.keeper or not self.keeper.works,
                )
            )
        plain, least = found[0], found[-1]  # that keeps all as it is, and that packs and writes whatever is asked for
        if self.config.policy == "keep":
            self.curves[name] = replace(plain, points=(least.points[-1], plain.points[-1]))
        elif self.keeper.offload_bytes:  # what is moved to the host takes time that is not measured: all of it is, then
            self.curves[name] = least
        else:
            self.curves[name] = worth.merged(*found)
        return results

    def _measure_compiled(self, name: str, module: nn.Module, function: Function, args: Any, kwargs: Any) -> None:
        """The curve of a compiled region; equal modules with equal inputs are compiled and measured once."""
        shapes = [tuple(p.shape) for p in module.parameters()]
        inputs = [(tuple(t.shape), t.dtype) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        kind = repr((type(module), shapes, inputs))
        if kind not in self._kinds:
            self._kinds[kind], self._compiled[name] = compiled.measure(
                name, function, args, kwargs, module, quantise_kib=self._pass_kib
            )
        self.curves[name] = replace(self._kinds[kind], region=name)


def _nothing() -> None:
    pass


def _with_insides(module: nn.Module) -> list[Any]:
    """Its modules whose backward kernels can write what would be kept."""
    return [part for part in module.modules() if isinstance(getattr(part, "inside", None), str)]


class _Region:
    """The forward of a region."""

    def __init__(self, regions: Regions, name: str, module: nn.Module) -> None:
        self.regions, self.name, self.module, self.function = regions, name, module, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.module.training or not torch.is_grad_enabled():
            return self.function(*args, **kwargs)
        return self.regions.run(self.name, self.module, self.function, args, kwargs)


class _Exact:
    """The forward of a module whose tensors are kept as they are (or, inside one, like others again)."""

    def __init__(self, keeper: Keeper, function: Function, *, exact: bool = True) -> None:
        self.keeper, self.function, self.exact = keeper, function, exact

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.keeper.exactly(self.exact):
            return self.function(*args, **kwargs)
