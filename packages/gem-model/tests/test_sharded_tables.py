"""GEM inside TorchRec's DistributedModelParallel, in a world of one, equals GEM alone."""

import copy

import pytest
import torch
import torch.distributed as dist
from gem_model import GEM, preset
from gem_model.roles import roles
from gem_model.testing import example_inputs, random_batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

LR = 0.5


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sharded_equals_unsharded(world_of_one):
    inputs = example_inputs()
    torch.manual_seed(0)
    alone = GEM(preset("tiny"), inputs).eval()
    model = copy.deepcopy(alone)
    kinds = roles(model)
    tables = [p for n, p in model.named_parameters() if kinds[n] == "table"]
    apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": LR})
    sharders = [EmbeddingCollectionSharder(), EmbeddingBagCollectionSharder()]
    fused = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, local_world_size=1, compute_device="cpu"),
        constraints={table.name: fused for table in inputs.tables},
    )
    parallel = DistributedModelParallel(
        model,
        device=torch.device("cpu"),
        plan=planner.plan(model, sharders),
        sharders=sharders,
        init_data_parallel=False,
    )
    # DistributedModelParallel draws the tables anew
    state = parallel.state_dict()
    rows = dict(alone.named_parameters())
    for name, kind in kinds.items():
        if kind == "table":
            state[name].local_shards()[0].tensor.copy_(rows[name].detach())

    for lengths in (None, {"ratings": [0] * 6, "views": [0] * 6}):
        batch = random_batch(inputs, 6, seed=1, lengths=lengths)
        alone.zero_grad()
        expected = alone(batch)
        alone.loss(expected, batch).backward()
        logits = parallel(batch)
        torch.testing.assert_close(logits, expected)
        parallel.zero_grad()
        model.loss(logits, batch).backward()  # the fused optimizer updates the tables here
        dense = dict(parallel.named_parameters())
        for name, p in alone.named_parameters():
            if kinds[name] == "table":
                with torch.no_grad():
                    p -= LR * p.grad
                torch.testing.assert_close(state[name].local_shards()[0].tensor, p.detach(), msg=name)
            else:
                torch.testing.assert_close(dense[name].grad, p.grad, msg=name)
