import pytest
from gem_model import GEM, preset
from gem_model.flops import batch_flops
from gem_model.presets import PRESETS, workload
from gem_model.roles import roles


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_workload_that_it_takes(name):
    work = workload(name)
    lengths = work.lengths()
    assert {s: max(n) for s, n in lengths.items()} == work.longest
    for values in lengths.values():
        assert len(values) == work.batch
        assert abs(sum(values) / work.batch - (max(values) + 1) / 2) < 0.5  # half-filled
    few = {s: n[:: max(1, len(n) // 8)] for s, n in lengths.items()}
    assert batch_flops(preset(name), work.inputs, few) > 0


def test_the_sizes_are_what_the_names_promise():
    counts = {}
    for name in PRESETS:
        model = GEM(preset(name), workload(name).inputs, device="meta")
        role, counts[name] = roles(model), {"dense": 0, "expert": 0, "table": 0}
        for parameter, values in model.named_parameters():
            counts[name][role[parameter]] += values.numel()
    totals = [sum(counts[name].values()) for name in PRESETS]
    assert totals == sorted(totals)
    assert totals[-1] > 1e12
    assert counts["gem-1t"]["expert"] > 1e11
    assert workload("large").batch == 1024
    assert workload("large").longest == {"impressions": 2048, "searches": 1024}


def test_unknown_names_are_answered_with_known_ones():
    with pytest.raises(ValueError, match="did you mean 'large'"):
        workload("larg")
