"""Collectives: the choice for any machine, windows read by the others, payloads, what is exposed."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from gem_parallel import CommConfig, Exposed, ParallelConfig, RowWiseAdagrad, SparseSGD, parallelize
from gem_parallel.comm import apply
from gem_parallel.comm.apply import Collectives
from gem_parallel.comm.choice import Capabilities, choose_all_gather, choose_reduce_scatter
from gem_parallel.comm.fsdp import CopyEngineAllGather, GroupAllGather, GroupReduceScatter, limited_group
from gem_parallel.comm.payload import Fp8Payload
from gem_parallel.comm.tables import CopyEngineTableGather
from gem_parallel.comm.windows import Ring, _stream_value
from gem_parallel.selfcheck import compare
from gem_parallel.testing import UNITS, FileWindow, SmallModel, pretend_cards, relative_error, run_ranks, small_batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HOPPER = Capabilities(device="cuda", major=9, size=8, peers=True, nccl=(2, 29, 7), symmetric=True)


def other(**changes):
    return Capabilities(**{**HOPPER.__dict__, **changes})


# --- the choice


@pytest.mark.parametrize(
    ("has", "how", "reason"),
    [
        (HOPPER, "copy engine", "needs torch >= 2.12"),
        (other(nccl_windows=True), "nccl windows", "NCCL 2.29.7 copies by engine"),
        (other(nccl_windows=True, nccl=(2, 27, 5)), "copy engine", "peers' windows are read"),
        (other(device="cpu"), "default", "the device is cpu"),
        (other(size=1), "default", "a group of one"),
        (other(major=8), "default", "the card is sm_8x"),
        (other(one_host=False, size=64), "default", "the group of 64 leaves the host"),
        (other(peers=False), "default", "do not reach one another's memory"),
        (other(symmetric=False), "default", "no symmetric memory"),
    ],
)
def test_the_all_gather_follows_the_machine(has, how, reason):
    for asked in ("auto", "copy_engine"):
        choice = choose_all_gather(CommConfig(all_gather=asked), has)
        assert choice.how == how
        assert reason in str(choice)
        assert choice.refused == (asked == "copy_engine" and how == "default")
    assert choose_all_gather(CommConfig(), has).how == "default"


def test_where_copies_cannot_go_nccl_can_be_throttled():
    far = other(one_host=False, size=64)
    choice = choose_all_gather(CommConfig(all_gather="auto", all_gather_ctas=4), far)
    assert choice.how == "few CTAs"
    assert "leaves the host" in str(choice)
    assert choose_all_gather(CommConfig(all_gather_ctas=4), other(device="cpu")).how == "default"
    assert choose_all_gather(CommConfig(all_gather="auto", all_gather_ctas=4), HOPPER).how == "copy engine"


def test_tables_are_read_from_windows_also_where_nccl_has_its_own():
    assert choose_all_gather(CommConfig(all_gather="auto"), other(nccl_windows=True), "tables' all-gather").how == (
        "copy engine"
    )


@pytest.mark.parametrize(
    ("asked", "has", "how"),
    [
        ({}, other(multicast=True), "default"),
        ({"reduce_scatter": "auto"}, other(multicast=True), "in switch"),
        ({"reduce_scatter": "auto"}, HOPPER, "default"),
        ({"reduce_scatter": "auto", "reduce_scatter_ctas": 4}, HOPPER, "few CTAs"),
        ({"reduce_scatter_ctas": 4}, HOPPER, "few CTAs"),
        ({"reduce_scatter_ctas": 4}, other(device="cpu"), "default"),
        ({"reduce_scatter": "copy_engine"}, HOPPER, "copy engine"),
        ({"reduce_scatter": "copy_engine"}, other(peers=False), "default"),
    ],
)
def test_the_reduce_scatter_follows_the_machine(asked, has, how):
    choice = choose_reduce_scatter(CommConfig(**asked), has)
    assert choice.how == how
    assert choice.reasons
    wanted = bool(asked.get("reduce_scatter_ctas")) or asked.get("reduce_scatter") == "copy_engine"
    assert choice.refused == (wanted and how == "default")


def test_settings_that_cannot_be():
    for wrong in (
        {"all_gather": "fast"},
        {"reduce_scatter": "sharp"},
        {"reduce_scatter_ctas": -1},
        {"all_gather_ctas": -1},
        {"windows": 1},
        {"copies": "pulled"},
        {"barriers": "host"},
    ):
        with pytest.raises(ValueError, match=f"CommConfig.{next(iter(wrong))}"):
            CommConfig(**wrong)


# --- windows, on files that all ranks map


def through_windows(runtime, folder, config, more):
    pretend_cards(folder)
    errors, parallel = compare(runtime, config, steps=6, **more)
    return errors, parallel.why(), sum(ring.nbytes for ring in parallel.collectives.rings)


BOTH = CommConfig(all_gather="copy_engine", reduce_scatter="copy_engine")


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (ParallelConfig(comm=BOTH, prefetch=1, table_sharding="row_wise"), {}),
        (
            ParallelConfig(comm=BOTH, experts=2, table_strategy="v3", table_copies=2, table_sharding="row_wise"),
            {"experts": 2},
        ),
        (
            ParallelConfig(comm=BOTH, table_strategy="v3", table_copies=2, table_sharding="row_wise"),
            {"sparse": SparseSGD(lr=0.05)},
        ),
    ],
    ids=["v1", "v3 and experts", "v3 sgd"],
)  # fmt: skip
def test_training_through_windows_equals_one_process(tmp_path, config, more):
    for errors, why, nbytes in run_ranks(2, __file__, "through_windows", tmp_path, tmp_path / "windows", config, more):
        assert max(errors.values()) < 1e-5
        assert "parameters' all-gather     copy engine" in why
        assert "gradients' reduce-scatter  copy engine" in why
        assert nbytes > 0
        assert ("tables' all-gather         copy engine" in why) == (config.table_strategy == "v3")


def in_turn(runtime, folder):
    """A ring of two windows: what happens to the third, and what is read when ranks run at different speeds."""
    FileWindow.folder = str(folder)
    os.makedirs(folder, exist_ok=True)
    group = dist.group.WORLD
    ring = Ring(group, 2, FileWindow)
    gathers = [CopyEngineAllGather(ring, pushes=pushes) for pushes in (False, True)]
    found = []
    for step in range(7):
        gather = gathers[step % 2]
        out = gather.allocate((runtime.world * 5,), dtype=torch.float32, device=torch.device("cpu"))
        mine = out[5 * runtime.rank : 5 * runtime.rank + 5]
        mine.fill_(100.0 * step + runtime.rank)
        gather(out, mine, group)
        found.append(out.clone())
        del out, mine
    gather = gathers[0]
    held = [gather.allocate((10,), dtype=torch.float32, device=torch.device("cpu")) for _ in range(2)]
    with pytest.raises(RuntimeError, match="all 2 windows of 48 bytes are in use"):
        gather.allocate((10,), dtype=torch.float32, device=torch.device("cpu"))
    view = held[0][3:]
    held.clear()
    with pytest.raises(RuntimeError, match="in use"):  # a view holds its window, too
        ring.take((10,), torch.float32, torch.device("cpu"))
    del view
    return found


def test_windows_are_taken_in_turn(tmp_path):
    for found in run_ranks(2, __file__, "in_turn", tmp_path, tmp_path / "windows"):
        for step, out in enumerate(found):
            assert out.tolist() == [100.0 * step] * 5 + [100.0 * step + 1] * 5


def fractions(runtime, folder):
    FileWindow.folder = str(folder)
    os.makedirs(folder, exist_ok=True)
    gather = CopyEngineTableGather(dist.group.WORLD, FileWindow)
    fraction = gather.place(torch.full((3, 4), float(runtime.rank)))
    results = []
    for _ in range(2):
        whole = torch.full((runtime.world * 12,), torch.nan)
        gather.start(whole, fraction).wait()
        results.append(whole)
        fraction.add_(10)
    return results


def test_owners_write_where_the_others_read(tmp_path):
    for first, second in run_ranks(2, __file__, "fractions", tmp_path, tmp_path / "windows"):
        assert first.tolist() == [0.0] * 12 + [1.0] * 12
        assert second.tolist() == [10.0] * 12 + [11.0] * 12


# --- a group of its own, and the fallback


def fallback(runtime):
    """(errors, warnings, why) where nothing of what is asked for can be had."""
    comm = CommConfig(all_gather="copy_engine", reduce_scatter_ctas=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors, parallel = compare(runtime, ParallelConfig(comm=comm, table_sharding="row_wise"), steps=3)
    said = [str(w.message) for w in caught if "because" in str(w.message)]
    group = limited_group(dist.group.WORLD, 2)
    out = torch.empty(2)
    GroupReduceScatter(group)(out, torch.arange(4.0), None, op=dist.ReduceOp.SUM)
    whole = torch.empty(2)
    GroupAllGather(group)(whole, torch.tensor([float(runtime.rank)]), None)
    return errors, said, parallel.why(), out, whole


def test_a_fallback_is_said_once_and_explained(tmp_path):
    for rank, (errors, said, why, out, whole) in enumerate(run_ranks(2, __file__, "fallback", tmp_path)):
        assert max(errors.values()) < 1e-5
        assert said == [
            "parameters' all-gather: default, because no copy engine: the device is cpu",
            "gradients' reduce-scatter: default, because CTAs are limited in NCCL only, not on cpu",
        ]
        assert "no copy engine: the device is cpu" in why
        assert whole.tolist() == [0.0, 1.0]
        assert out.tolist() == [[0.0, 2.0], [4.0, 6.0]][rank]


# --- payloads


class BrokenWindow:
    def __init__(self, nbytes, group, device, **options):
        if dist.get_rank() == 1:
            raise RuntimeError("no fabric\nhandle")

    def barrier(self):
        pass


def without_windows(runtime, folder):
    pretend_cards(folder)
    apply.CudaWindow = BrokenWindow
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        errors, parallel = compare(runtime, ParallelConfig(comm=BOTH, table_sharding="row_wise"), steps=2)
    return errors, [str(w.message) for w in caught if "because" in str(w.message)], parallel.why()


def test_a_window_that_cannot_be_made_on_one_rank_is_given_up_on_all(tmp_path):
    for errors, said, why in run_ranks(2, __file__, "without_windows", tmp_path, tmp_path / "windows"):
        assert max(errors.values()) < 1e-5
        reason = "no copy engine: a window could not be made: RuntimeError: no fabric handle"
        assert said == [
            f"parameters' all-gather: default, because {reason}",
            f"gradients' reduce-scatter: default, because {reason}",
        ]
        assert why.count(reason) == 2


class RoundToBf16:
    """A payload of which one process can compute the same: rounding knows no shards."""

    def nbytes(self, elements, dtype):
        return 2 * elements

    def pack(self, shard, out):
        out.copy_(shard.to(torch.bfloat16).view(torch.uint8))

    def unpack(self, packed, out):
        out.copy_(packed.view(torch.bfloat16))


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Sequential(nn.Linear(11, 9), nn.Tanh()), nn.Linear(9, 3))


def with_a_payload(runtime, payload, folder):
    """Parameters after 20 steps of SGD, and the bytes of an all-gather in and out."""
    if folder:
        pretend_cards(folder)
    model = layers()
    mesh = init_device_mesh("cpu", (runtime.world,), mesh_dim_names=("shard",))
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    collectives = Collectives(CommConfig(all_gather="copy_engine" if folder else "default"), runtime)
    collectives.install(model.modules(), payload)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(20):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))[4 * runtime.rank : 4 * runtime.rank + 4]
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.full_tensor() for name, p in model.named_parameters()}, collectives.why()


def with_rounding(runtime, folder):
    return with_a_payload(runtime, RoundToBf16(), folder)


@pytest.mark.parametrize("windows", [False, True], ids=["gloo", "windows"])
def test_a_payload_gives_what_one_process_computes_with_packed_weights(tmp_path, windows):
    model = layers()
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    for step in range(20):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        rounded = {name: p + (p.to(torch.bfloat16).float() - p).detach() for name, p in params.items()}
        torch.func.functional_call(model, rounded, (x,)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = str(tmp_path / "windows") if windows else ""
    for state, why in run_ranks(2, __file__, "with_rounding", tmp_path, folder):
        assert f"RoundToBf16 over {'copy engine' if windows else 'default'}" in why
        for name, param in params.items():
            assert relative_error(state[name], param.detach()) < 1e-5


@pytest.mark.parametrize("elements", [1, 100, 128, 129, 1000])
def test_the_fp8_payload(elements):
    payload = Fp8Payload(block=32)
    shard = torch.randn(elements, generator=torch.Generator().manual_seed(elements))
    packed = torch.full((payload.nbytes(elements, torch.float32),), 255, dtype=torch.uint8)
    out = torch.full_like(shard, torch.nan)
    payload.pack(shard, packed)
    payload.unpack(packed, out)
    assert ((out - shard).abs() <= shard.abs() / 16 + shard.abs().max() / 448).all()
    assert len(packed) <= elements + 4 * (elements // 32 + 1) + 32 + 16
    with pytest.raises(ValueError, match=r"Fp8Payload\.block"):
        Fp8Payload(block=3)


def fp8_training(runtime):
    state, _ = with_a_payload(runtime, Fp8Payload(block=16), "")
    plain, _ = with_a_payload(runtime, None, "")
    return state, plain


def test_fp8_parameters_train_near_the_exact_ones_and_alike_on_all_ranks(tmp_path):
    (first, plain), (second, _) = run_ranks(2, __file__, "fp8_training", tmp_path)
    for name in plain:
        assert torch.equal(first[name], second[name])
        assert 0 < relative_error(first[name], plain[name]) < 0.05


# --- what is exposed


def exposed(runtime):
    model = SmallModel()
    config = ParallelConfig(table_sharding="row_wise", prefetch=1)
    parallel = parallelize(model, model.roles(), config, runtime, sparse=RowWiseAdagrad(lr=0.05), units=UNITS)
    batch = small_batch(0, 16).part(runtime.rank, runtime.world)
    with Exposed(parallel.module) as meter:
        (parallel(batch) - batch.target).square().mean().backward()
    inside = meter.seconds()
    (parallel(batch) - batch.target).square().mean().backward()
    return inside, meter.seconds(), str(meter)


def test_the_exposed_communication_of_every_unit(tmp_path):
    for inside, after, text in run_ranks(2, __file__, "exposed", tmp_path):
        assert set(inside) == {"(root)", *UNITS}
        assert inside == after  # outside, nothing is measured
        for unit in UNITS:
            assert inside[unit]["forward"] > 0
            assert inside[unit]["reduce"] > 0
        assert sum(row["backward"] for row in inside.values()) > 0
        assert "exposed, ms" in text


# --- on cards


def cards(n):
    return pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.device_count() < n, reason=f"needs {n} CUDA devices"
    )


def on_cards(runtime):
    """Windows of torch's symmetric memory: the least and the largest number of every rank's part in eight gathers."""
    # Windows need no multicast, which torch sets up beside them unless told, and which not every host's switches do.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    ring = Ring(dist.group.WORLD, 2)
    ways = [{}, {"pushes": True}, {"lanes": 2}, {"pushes": True, "lanes": 1}]
    gathers = [CopyEngineAllGather(ring, **way) for way in ways]
    found = []
    for step in range(8):
        gather = gathers[step % len(gathers)]
        out = gather.allocate((1000 * runtime.world,), dtype=torch.bfloat16, device=runtime.device)
        mine = out[1000 * runtime.rank : 1000 * (runtime.rank + 1)]
        mine.fill_(step + 10 * runtime.rank)
        gather(out, mine, dist.group.WORLD)
        # Not means: a card multiplies the sum by 1 / n in float32, and 3000 / 1000 is no longer 3.
        found.append([(float(part.min()), float(part.max())) for part in out.view(runtime.world, -1)])
        del out, mine
    return found


@pytest.mark.gpu
@cards(1)
def test_a_window_on_one_card(tmp_path):
    (found,) = run_ranks(1, __file__, "on_cards", tmp_path, device="cuda")
    assert found == [[(step, step)] for step in range(8)]


@pytest.mark.gpu
@cards(1)
def test_a_stream_waits_for_a_number_that_another_writes():
    """Here one host gives the signal behind the wait, which no barrier does (docs/notes/parallel.md): whatever makes it
    wait for the card in between would be for ever. So nothing is launched or allocated for the first time there."""
    pad, order = torch.zeros(4, dtype=torch.int32, device="cuda"), torch.zeros(2, device="cuda")
    first, second = order[:1], order[1:]
    waits, writes = torch.cuda.Stream(), torch.cuda.Stream()
    address = pad.data_ptr() + 4

    def both(number):
        with torch.cuda.stream(waits):
            if number:
                _stream_value("cuStreamWaitValue32_v2", waits.cuda_stream, address, number)
            torch.add(first, 1, out=second)  # 2 when the other stream came first
        with torch.cuda.stream(writes):
            torch.cuda._sleep(20_000_000)
            first.fill_(1)
            _stream_value("cuStreamWriteValue32_v2", writes.cuda_stream, address, number)

    both(0)
    torch.cuda.synchronize()
    order.zero_()
    torch.cuda.synchronize()
    both(7)
    torch.cuda.synchronize()
    assert order.tolist() == [1, 2]
    assert pad.tolist() == [0, 7, 0, 0]


@pytest.mark.gpu
@cards(2)
def test_windows_on_two_cards(tmp_path):
    for found in run_ranks(2, __file__, "on_cards", tmp_path, device="cuda"):
        assert found == [[(step, step), (10 + step, 10 + step)] for step in range(8)]


def trained_on_cards(runtime, config, more):
    errors, parallel = compare(runtime, config, steps=6, **more)
    return errors, parallel.why()


@pytest.mark.gpu
@cards(2)
@pytest.mark.parametrize(
    "config",
    [
        ParallelConfig(comm=BOTH, prefetch=1, table_sharding="row_wise"),
        ParallelConfig(comm=BOTH, table_strategy="v3", table_copies=2, table_sharding="row_wise"),
        ParallelConfig(comm=CommConfig(reduce_scatter_ctas=2), table_sharding="row_wise"),
    ],
    ids=["copy engine", "copy engine v3", "two CTAs"],
)
def test_training_on_two_cards_equals_one_process(tmp_path, config):
    for errors, why in run_ranks(2, __file__, "trained_on_cards", tmp_path, config, {}, device="cuda"):
        assert max(errors.values()) < 1e-5
        assert ("few CTAs" if config.comm.reduce_scatter_ctas else "copy engine") in why
