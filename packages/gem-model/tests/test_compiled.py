"""torch.compile takes the whole model as one graph, tables and jagged histories included."""

import pytest
import torch
from gem_model import GEM, preset
from gem_model.testing import example_inputs, random_batch


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"evidence_heads": 2, "qk_norm": True}, {"sequence_layer": "hstu"}])
def test_one_graph_serves_batches_of_any_lengths(changes):
    torch.manual_seed(0)
    inputs = example_inputs()
    model = GEM(preset("tiny", **changes), inputs)
    torch.compiler.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for seed, samples in ((0, 16), (1, 11)):
        batch = random_batch(inputs, samples, seed=seed)
        found = []
        for run in (compiled, model):
            model.zero_grad()
            logits = run(batch)
            model.loss(logits, batch).backward()
            found.append((logits.detach(), {n: p.grad for n, p in model.named_parameters()}))
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)
    assert len(graphs) == 1
    torch.compiler.reset()
