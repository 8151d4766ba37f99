"""What a user may choose: the layout of the ranks, the sharding of tables, and the sparse optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

TABLE_SHARDINGS = ("auto", "table_wise", "row_wise", "column_wise")
TABLE_STRATEGIES = ("v1", "v2", "v3")
TABLE_EXCHANGES = ("fp32", "fp16", "bf16")
PRECISIONS = ("fp32", "bf16")
COLLECTIVES = ("default", "auto", "copy_engine")
PAYLOADS = ("none", "fp8", "lowprec")
WINDOW_COPIES = ("read", "written")
WINDOW_BARRIERS = ("streams", "kernels")
MEMORY_POLICIES = ("keep", "full", "uniform", "regions")
MEMORY_ENGINES = ("eager", "operators", "compile")
MEMORY_QUANTISERS = ("none", "fp8", "mx4", "compiler")
MEMORY_INSIDE = ("none", "exact", "fp8")


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad:
    """The sparse optimizer: one second moment per row (Duchi et al. 2011, one accumulator per embedding vector).

    For a row with gradient g [D] (summed over its occurrences in the global batch, of the loss averaged over ranks):

        v <- v + mean(g^2);    w <- w - lr * g / (sqrt(v) + eps)

    It runs inside the backward pass, fused with the table's gradient; a row that the batch does not touch is unchanged.
    """

    lr: float
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ValueError(f"RowWiseAdagrad.lr must be >= 0, got {self.lr!r}")
        if not self.eps > 0:
            raise ValueError(f"RowWiseAdagrad.eps must be > 0, got {self.eps!r}")


@dataclass(frozen=True, kw_only=True)
class SparseSGD:
    """The sparse optimizer without state: w <- w - lr g, inside the backward pass like RowWiseAdagrad."""

    lr: float

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ValueError(f"SparseSGD.lr must be >= 0, got {self.lr!r}")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What is kept of the activations between forward and backward; the default is plain autograd.

    Attributes:
        policy: "keep" everything; recompute in "full" what lies between the regions' inputs; or recompute what is
            cheapest so that the regions keep within a budget, the same share of each ("uniform") or given out by
            seconds saved per byte ("regions"). The latter two measure during the first two steps.
        budget: share of the bytes that a region keeps without recomputation; "regions" gives it out unevenly, at no
            higher a peak than the same share of every region would have.
        budget_gib: what the regions may hold at any time, in GiB, instead; 0: `budget` holds.
        engine: "eager" computes single results again from what is kept anyway, or whole regions; "operators" runs
            regions again under a dispatch mode that hands out the results of operators that were kept, whatever they
            are, at some cost for the host; "compile" compiles each region, and torch's partitioner keeps to its budget.
        recompute_min_kib: the eager engine keeps smaller tensors.
        regions: patterns of the units that are regions.
        inside: what kernels of the backward pass write on their way instead of its being kept, where the model's
            modules can (those with an attribute `inside`): "none"; "exact": normed rows and gated products, which only
            the gradients of weights read; "fp8": these, and a gate's kernel writes E4M3 of what it reads, which is kept
            in its place, and of queries and keys only what attention reads is. Then gradients become approximate. A
            plan takes what it costs and spares into account. On a CUDA device with "keep" alone: plans with both were
            seen to give wrong gradients there.
        quantise: "none"; "fp8": large floating-point tensors are stored as FP8 (or by the quantiser handed to
            `parallelize`) and dequantised for the operator that needs them; "mx4": the same in four bits (MXFP4); or,
            for compiled regions, "compiler": FP8 by torch's own pass, fused with what is around it, which knows no
            names. Gradients become approximate.
        quantise_block: elements per scale of FP8; 0: one scale per row (512 elements of it, where they divide it).
        quantise_min_kib: smaller tensors are left alone.
        exclude: patterns of module names or classes, case ignored, inside which nothing is quantised or moved.
        include: the same of modules inside those whose tensors are treated like others again: a linear layer after a
            norm reads what the norm wrote, not what it needs.
        offload_min_mib: tensors from this size on wait in host memory; 0: none.
        plan_file: where the plan is kept: read when it exists, else written.
    """

    policy: str = "keep"
    budget: float = 1.0
    budget_gib: float = 0.0
    engine: str = "eager"
    recompute_min_kib: float = 1024.0
    regions: tuple[str, ...] = ("*",)
    inside: str = "none"
    quantise: str = "none"
    quantise_block: int = 0
    quantise_min_kib: float = 1024.0
    exclude: tuple[str, ...] = ("*norm*", "*attention*")
    include: tuple[str, ...] = ("linear",)
    offload_min_mib: float = 0.0
    plan_file: str = ""

    def __post_init__(self) -> None:
        for key, allowed in (
            ("policy", MEMORY_POLICIES),
            ("engine", MEMORY_ENGINES),
            ("quantise", MEMORY_QUANTISERS),
            ("inside", MEMORY_INSIDE),
        ):
            if getattr(self, key) not in allowed:
                raise ValueError(f"MemoryConfig.{key} must be one of {', '.join(allowed)}, got {getattr(self, key)!r}")
        if self.quantise == "compiler" and self.engine != "compile":
            raise ValueError('MemoryConfig.quantise = "compiler" needs engine = "compile"; others work with all')
        if self.inside != "none" and self.engine != "eager":
            raise ValueError(
                f'MemoryConfig.inside = "{self.inside}" needs engine = "eager", got "{self.engine}": others look at '
                "every operator"
            )
        if not 0 <= self.budget <= 1:
            raise ValueError(f"MemoryConfig.budget must be in [0, 1], got {self.budget!r}")
        for key in ("budget_gib", "recompute_min_kib", "quantise_block", "quantise_min_kib", "offload_min_mib"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"MemoryConfig.{key} must be >= 0, got {getattr(self, key)!r}")

    @property
    def asked(self) -> str:
        """What a plan was made for: it does not fit another budget."""
        budget = f"{self.budget_gib:g} GiB" if self.budget_gib else f"{self.budget:g} of the bytes"
        inside = "" if self.inside == "none" else f", {self.inside} inside"
        return f"{self.engine}, {self.policy}, {budget}{inside}"

    @property
    def plans(self) -> bool:
        """Whether regions are measured and a plan is made."""
        return self.policy != "keep" or self.inside != "none"

    @property
    def works(self) -> bool:
        """Whether it asks for anything."""
        asked = (self.policy, self.engine, self.quantise, self.inside)
        return asked != ("keep", "eager", "none", "none") or self.offload_min_mib > 0


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Which collectives move parameters, gradients and the tables of "v3"; `ParallelModel.why()` says what came of it.

    Attributes:
        all_gather: "default" (NCCL or gloo); "copy_engine" (inside a host of cards that reach one another's memory,
            copies that need no SM; elsewhere the default, which is said once); "auto" (the same without a word).
        reduce_scatter: "default"; "auto" (in the switches where the fabric reduces, else the default); "copy_engine"
            (copies without SMs, and each rank sums its own part).
        reduce_scatter_ctas: at most so many of NCCL's thread blocks for the reduce-scatter, each of which takes an SM
            from the backward pass; 0: NCCL decides.
        all_gather_ctas: the same for all-gathers that go through NCCL, such as those that leave the host.
        payload: how parameters travel in all-gathers: as they are ("none"), or as E4M3 with a scale per 128 elements
            ("fp8"); every rank then computes with what was unpacked. With "lowprec", layers of low precision get their
            weights as they use them, in FP8 with scales, by the `lowprec` that `parallelize` is handed, and all else
            travels as it is. Without use where nothing is gathered.
        windows: how many windows of each size the copies take in turn; at least `prefetch` + 2.
        copies: whether ranks "read" parameters from the others' windows, or have them "written" there by the others.
        barriers: how ranks meet at windows: by their "streams", which write and await numbers in one another's memory
            and take no SM, or by torch's "kernels" of one block.
    """

    all_gather: str = "default"
    reduce_scatter: str = "default"
    reduce_scatter_ctas: int = 0
    all_gather_ctas: int = 0
    payload: str = "none"
    windows: int = 4
    copies: str = "read"
    barriers: str = "streams"

    def __post_init__(self) -> None:
        for key in ("all_gather", "reduce_scatter"):
            if getattr(self, key) not in COLLECTIVES:
                raise ValueError(
                    f"CommConfig.{key} must be one of {', '.join(COLLECTIVES)}, got {getattr(self, key)!r}"
                )
        for key, allowed in (("payload", PAYLOADS), ("copies", WINDOW_COPIES), ("barriers", WINDOW_BARRIERS)):
            if getattr(self, key) not in allowed:
                raise ValueError(f"CommConfig.{key} must be one of {', '.join(allowed)}, got {getattr(self, key)!r}")
        for key in ("reduce_scatter_ctas", "all_gather_ctas"):
            if getattr(self, key) < 0:
                raise ValueError(f"CommConfig.{key} must be >= 0, got {getattr(self, key)}")
        if self.windows < 2:
            raise ValueError(f"CommConfig.windows must be >= 2, got {self.windows}")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a model is laid out over the ranks.

    Attributes:
        shard_group: how many neighbouring ranks share one copy of the dense parameters (the "shard" axis of the mesh);
            the other axis, "replicate", holds world / shard_group copies. 0 means the whole world (no replicas).
        table_sharding: "table_wise" (a table lives on one rank), "row_wise" (blocks of rows), "column_wise" (blocks of
            columns) or "auto" (the planner chooses between table-wise and row-wise by cost). Tables are spread over
            the whole world, whatever shard_group is. Column-wise keeps one AdaGrad moment per row and block of columns,
            so it alone does not compute what a single process computes.
        table_seed: seed of the tables' initial values.
        table_std: standard deviation of the tables' initial values (uniform); None means uniform in +-1/sqrt(rows).
        table_memory: share of the memory that the planner may give to tables.
        table_strategy: how copies of tables are kept. "v1": every table exists once, over the whole world. "v2": each
            of table_copies groups of ranks trains a full copy on its part of the batch; copies and moments are averaged
            every table_sync_every steps (inexact unless the optimizer is SGD and the interval 1). "v3": as one copy
            over the whole world and exact, but a batch's ids and embeddings travel only inside a group; a rank keeps
            1 / table_copies of its group's shard, which is put together for a lookup and freed.
        table_copies: how many groups; 1 for "v1".
        table_copies_inside: whether the ranks that hold the same shard are neighbours (on the fast links), or the ranks
            that hold one copy together are.
        table_sync_every: steps between the averages of "v2".
        table_moment_scaling: "v2" divides the AdaGrad moment by table_copies before its root.
        experts: size of the expert axis, "ep": neighbouring ranks that hold different experts of an ensemble. It
            divides shard_group.
        table_exchange: precision in which embeddings and their gradients travel between ranks: "fp32", "fp16" or
            "bf16". The latter halve the bytes of the all-to-alls; results are rounded.
        prefetch: units whose parameters are gathered ahead of their turn, in forward and backward; the model's units
            must be named in the order of its forward. 0 leaves it to FSDP2, which gathers the next one as soon as the
            host has come so far.
        reduce_every_part: in a step of several parts, dense gradients are reduced in every part instead of the last. A
            rank then holds the sum of its shard only (4 bytes a parameter less), for a reduction a part.
        memory: what is kept of activations.
        comm: which collectives move what.
        batch_size: samples per rank, which the planner uses to estimate cost; it does not change results.
    """

    shard_group: int = 0
    table_sharding: str = "auto"
    table_seed: int = 0
    table_std: float | None = None
    table_memory: float = 0.7
    batch_size: int = 512
    table_strategy: str = "v1"
    table_copies: int = 1
    table_copies_inside: bool = True
    table_sync_every: int = 1
    table_moment_scaling: bool = True
    experts: int = 1
    table_exchange: str = "fp32"
    prefetch: int = 0
    reduce_every_part: bool = False
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    comm: CommConfig = field(default_factory=CommConfig)

    def __post_init__(self) -> None:
        if self.table_strategy not in TABLE_STRATEGIES:
            raise ValueError(
                f"ParallelConfig.table_strategy must be one of {', '.join(TABLE_STRATEGIES)}, "
                f"got {self.table_strategy!r}"
            )
        if self.table_exchange not in TABLE_EXCHANGES:
            raise ValueError(
                f"ParallelConfig.table_exchange must be one of {', '.join(TABLE_EXCHANGES)}, "
                f"got {self.table_exchange!r}"
            )
        if self.prefetch < 0:
            raise ValueError(f"ParallelConfig.prefetch must be >= 0, got {self.prefetch}")
        if self.table_copies < 1 or self.table_sync_every < 1 or self.experts < 1:
            raise ValueError(
                "ParallelConfig.table_copies, table_sync_every and experts must be >= 1, got "
                f"{self.table_copies}, {self.table_sync_every} and {self.experts}"
            )
        if (self.table_copies > 1) != (self.table_strategy != "v1"):
            raise ValueError(
                f'ParallelConfig.table_copies = {self.table_copies} and table_strategy = "{self.table_strategy}": '
                '"v1" has one copy, "v2" and "v3" have more'
            )
        if self.shard_group < 0:
            raise ValueError(f"ParallelConfig.shard_group must be >= 0 (0: the whole world), got {self.shard_group}")
        if self.table_sharding not in TABLE_SHARDINGS:
            raise ValueError(
                f"ParallelConfig.table_sharding must be one of {', '.join(TABLE_SHARDINGS)}, "
                f"got {self.table_sharding!r}"
            )
        if self.table_std is not None and not self.table_std > 0:
            raise ValueError(f"ParallelConfig.table_std must be > 0 or None, got {self.table_std!r}")
        if not 0 < self.table_memory < 1:
            raise ValueError(f"ParallelConfig.table_memory must be in (0, 1), got {self.table_memory!r}")
        if self.batch_size < 1:
            raise ValueError(f"ParallelConfig.batch_size must be >= 1, got {self.batch_size}")
