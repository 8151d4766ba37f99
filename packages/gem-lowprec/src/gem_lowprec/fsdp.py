"""FSDP2 all-gathers that carry FP8: each rank quantises its shard, and one byte per element plus scales travel.

A shard can be quantised alone where its rows are whole blocks: block-wise FP8 (128 x 128) and square MXFP8 (32 x 32)
then give each rank the very bits that it would get from gathering first and quantising afterwards. The wire carries
1 + 4 / 128^2 or 1 + 1 / 32^2 bytes per element instead of the 2 of BF16 or the 4 of float32.

`quantize_gathers` comes after `fully_shard`. The parameters stay what FSDP made of them, float32 DTensors of plain
storage: optimizers, gradient clipping, `state_dict` and checkpoints see the master weights, under their own names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from gem_lowprec.gemm import spec_for
from gem_lowprec.linear import LowPrecisionLinear, Products
from gem_lowprec.quantize import QTensor, QuantSpec, quantize
from gem_lowprec.table import render
from gem_lowprec.weight import QuantizedWeight

PAYLOADS = ("fp8_block", "mxfp8_square")  # precisions whose weight has square blocks


@dataclass(frozen=True, kw_only=True)
class Gather:
    """One layer's weight [out, in]: what a rank sends for it, and why.

    `payload` is the quantisation that travels, or None where the weight is gathered as it is. `nbytes` is what one
    rank sends (data and scales of its shard), `bf16_nbytes` the same in BF16; both 0 where nothing is quantised.
    """

    name: str
    shape: tuple[int, int]
    payload: QuantSpec | None
    nbytes: int
    bf16_nbytes: int
    why: str


@dataclass(frozen=True, kw_only=True)
class Gathers:
    """What `quantize_gathers` did or would do; `print(gathers)` shows the table."""

    rows: tuple[Gather, ...]

    @property
    def ratio(self) -> float:
        """Bytes on the wire over those of BF16, summed over the quantised weights; 1 if there are none."""
        bf16 = sum(r.bf16_nbytes for r in self.rows)
        return sum(r.nbytes for r in self.rows) / bf16 if bf16 else 1.0

    def __str__(self) -> str:
        quantised = sum(r.payload is not None for r in self.rows)
        head = f"{quantised} of {len(self.rows)} weights gathered quantised, {self.ratio:.4f} of BF16's bytes"
        cells = [(r.name, f"{r.shape[0]}x{r.shape[1]}", str(r.payload or "-"), r.why) for r in self.rows]
        return head + "\n" + render(("layer", "out x in", "payload", "why"), cells)


class _Shard(Tensor):
    """A shard [n, K] of a weight that FSDP2 asks what to gather, and what to make of it.

    It shares the storage of the tensor that it was made from and every operation on it gives plain tensors, so that it
    behaves, saves and copies as the plain tensor does. FSDP2 only looks for the two methods.
    """

    spec: QuantSpec
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(shard: Tensor, spec: QuantSpec) -> _Shard:
        self = torch.Tensor._make_subclass(_Shard, shard)
        self.spec = spec
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shard:
        copy = _Shard.of(self.as_subclass(Tensor).clone(), self.spec)
        memo[id(self)] = copy
        return copy

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...], module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, Tensor], tuple[torch.Size]]:  # fmt: skip
        """(data, scales) as bytes, which every backend carries; gloo knows no float8."""
        # Rounded first to the dtype of a plain gather: the layers must not see other numbers for being sent fewer.
        shard = self.as_subclass(Tensor).to(mp_policy.param_dtype or self.dtype)
        q = quantize(shard, self.spec)
        return (q.data.view(torch.uint8), q.scale.contiguous().view(torch.uint8)), (outer_size,)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, Tensor], metadata: tuple[torch.Size], param_dtype: torch.dtype, *,
        out: Tensor | None = None,
    ) -> tuple[QuantizedWeight, tuple[Tensor, ...]] | None:  # fmt: skip
        """The gathered bytes as a weight. Later gathers refill the same storage, so there is nothing to do for `out`.

        FSDP2 frees the gathered bytes with its own buffers, hence no inner tensors are named for it.
        """
        if out is not None:
            assert isinstance(out, QuantizedWeight)
            return None
        data, scale = outputs
        kind = torch.float8_e8m0fnu if self.spec.scale == "e8m0" else torch.float32
        q = QTensor(
            data=data.view(self.spec.element.dtype), scale=scale.view(kind), spec=self.spec, dim=-1, shape=metadata[0],
            dtype=param_dtype,
        )  # fmt: skip
        return QuantizedWeight(q), ()


def quantize_gathers(model: nn.Module) -> Gathers:
    """Let FSDP2 gather the weights of the converted layers of `model` quantised, wherever that changes no number.

    Call it after `convert` and `fully_shard`, before the first forward. A weight travels quantised if forward and
    dgrad are both "fp8_block" or both "mxfp8_square" without a Hadamard transform there (all uses of the weight then
    want the same bits) and every rank's rows are whole blocks; the returned table says why the others do not.
    Works on 1-D (shard) and 2-D (replicate, shard) meshes and with `MixedPrecisionPolicy`, whose `param_dtype` the
    weight is rounded to before it is quantised, as a plain gather would do. `load_state_dict`, also with
    `assign=True`, keeps it; moving the sharded model to another device or dtype does not. `fully_shard(...,
    reshard_after_forward=<int>)` cannot be combined with it: FSDP2 keeps only plain tensors on a smaller mesh.
    `gem_lowprec.watch` does not see these weights, as no layer quantises them. Inputs of less than a layer's
    `min_tokens` go through a plain product (see `LowPrecisionLinear`), which reads the rounded weight then.

    Raises ValueError for a model without an FSDP2 module or without a converted layer.
    """
    if not any(isinstance(m, FSDPModule) for m in model.modules()):
        raise ValueError("no module of the model is sharded; call fully_shard before quantize_gathers")
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, LowPrecisionLinear)]
    if not layers:
        raise ValueError("the model has no converted layer; call convert before fully_shard and quantize_gathers")
    uses = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)
    rows = []
    for name, layer in layers:
        shape = (layer.out_features, layer.in_features)
        why = _why_not(layer, uses[id(layer.weight)])
        if why is not None:
            rows.append(Gather(name=name, shape=shape, payload=None, nbytes=0, bf16_nbytes=0, why=why))
            continue
        spec = spec_for(layer.products.forward, second=True)
        assert spec is not None
        assert isinstance(layer.weight, DTensor)
        _attach(layer.weight, spec)
        layer.register_load_state_dict_post_hook(_keep)
        shard = layer.weight._local_tensor
        nbytes, bf16 = payload_nbytes((*shard.shape,), spec), 2 * shard.numel()
        why = f"{nbytes / bf16:.4f} of BF16"
        if layer.min_tokens:
            why += f"; inputs of less than {layer.min_tokens} tokens meet the rounded weight in a plain product"
        rows.append(Gather(name=name, shape=shape, payload=spec, nbytes=nbytes, bf16_nbytes=bf16, why=why))
    return Gathers(rows=tuple(rows))


def plan_gathers(model: nn.Module, ranks: int) -> Gathers:
    """What `quantize_gathers` would do were the converted `model` sharded over `ranks`, from its shapes alone.

    Sizes in bytes are of one rank. Nothing is changed, and weights without memory ("meta") do. Raises ValueError for
    less than one rank.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    rows = []
    for name, layer in model.named_modules():
        if not isinstance(layer, LowPrecisionLinear):
            continue
        n, k = shape = (layer.out_features, layer.in_features)
        why, spec = _unfit(layer.products), spec_for(layer.products.forward, second=True)
        if why is None and spec is not None:
            why = _no_blocks(n, ranks, spec)
        if why is not None or spec is None:
            rows.append(Gather(name=name, shape=shape, payload=None, nbytes=0, bf16_nbytes=0, why=why or ""))
            continue
        nbytes, bf16 = payload_nbytes((n // ranks, k), spec), 2 * (n // ranks) * k
        why = f"{nbytes / bf16:.4f} of BF16"
        rows.append(Gather(name=name, shape=shape, payload=spec, nbytes=nbytes, bf16_nbytes=bf16, why=why))
    return Gathers(rows=tuple(rows))


def payload_nbytes(shape: tuple[int, ...], spec: QuantSpec) -> int:
    """Bytes of data and scales of a shard [n, K] of whole blocks."""
    (n, k), (rows, cols) = shape, spec.block
    assert rows is not None
    assert cols is not None
    return n * k + -(-n // rows) * -(-k // cols) * (1 if spec.scale == "e8m0" else 4)


def _why_not(layer: LowPrecisionLinear, uses: int) -> str | None:
    """Why a layer's weight is gathered as it is; None if it can be quantised before."""
    why = _unfit(layer.products)
    if why is not None:
        return why
    weight, spec = layer.weight, spec_for(layer.products.forward, second=True)
    assert spec is not None
    if not isinstance(weight, DTensor):
        return "the weight is not sharded"
    if uses > 1:
        return "other modules share the weight"
    *replicated, shard = weight.placements
    if shard != Shard(0) or any(not p.is_replicate() for p in replicated):
        return f"placements {weight.placements} are not rows on the last mesh axis alone"
    if weight._local_tensor.device.type != weight.device_mesh.device_type:
        return "the shard is offloaded"
    ranks = weight.device_mesh.size(-1)
    if ranks == 1:
        return "one rank holds all rows, nothing is gathered"
    return _no_blocks(weight.shape[0], ranks, spec)


def _no_blocks(rows: int, ranks: int, spec: QuantSpec) -> str | None:
    """Why every rank's rows are not whole blocks."""
    block = spec.block[0] or 1
    return f"{rows} rows over {ranks} ranks are not whole blocks of {block}" if rows % (ranks * block) else None


def _unfit(products: Products) -> str | None:
    """Why the layer's products cannot all use one quantised weight."""
    if products.forward not in PAYLOADS:
        return f"forward {products.forward} has no square blocks"
    if products.dgrad != products.forward:
        return f"dgrad {products.dgrad} wants the weight otherwise than forward {products.forward}"
    if products.hadamard and {"forward", "dgrad"} & set(products.hadamard_in):
        return "the Hadamard transform needs the weight before quantisation"
    return None


def _attach(weight: DTensor, spec: QuantSpec) -> None:
    weight._local_tensor = _Shard.of(weight._local_tensor, spec)


def _keep(layer: nn.Module, incompatible: object) -> None:
    """After load_state_dict(assign=True) the parameter is a new one."""
    assert isinstance(layer, LowPrecisionLinear)
    weight, spec = layer.weight, spec_for(layer.products.forward, second=True)
    if isinstance(weight, DTensor) and not isinstance(weight._local_tensor, _Shard) and spec is not None:
        _attach(weight, spec)
