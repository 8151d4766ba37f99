"""Products that add, that are aligned, that leave a bias to others: each against its formula in float64."""

import pytest
import torch
from gem_kernels.nn import NormLinear
from gem_model import embed, interaction, interformer, preset, projection
from gem_model.dhen import DHEN
from gem_model.interaction import TokenMix, Wukong
from gem_model.projection import linear_of, project, project_apart, project_bare, project_both, taken, with_bias
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


@pytest.fixture
def always_aligned(monkeypatch):
    """What a GPU does with 16-bit numbers, here with any."""
    for module in (projection, interaction, interformer):
        monkeypatch.setattr(module, "unaligned", lambda count, _: -count % 8)


def randomised(module, std=0.4):
    torch.manual_seed(0)
    for p in module.parameters():
        nn.init.normal_(p, std=std)
    return module.double()


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, requires_grad=True)


def same_with_gradients(ours, theirs, *leaves):
    torch.testing.assert_close(ours, theirs)
    probe = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad((y * probe).sum(), leaves) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def pair():
    return randomised(nn.ModuleList([nn.Linear(5, 4), nn.Linear(3, 4)]))


def test_two_projections_and_their_sum():
    first, second = pair()
    x, y = normal(7, 5, seed=1), normal(7, 3, seed=2)
    ours, bias = project_both(first, x, second, y)
    theirs = x @ first.weight.T + first.bias + y @ second.weight.T + second.bias
    same_with_gradients(with_bias(ours, bias), theirs, x, y, *first.parameters(), *second.parameters())


def test_two_projections_under_autocast_and_as_torch_counts_them():
    first, second = pair().float()
    x, y = normal(64, 5, seed=1).detach().bfloat16(), normal(64, 3, seed=2).detach().bfloat16()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        FlopCounterMode(display=False) as counter,
    ):
        out, bias = project_both(first, x, second, y)
    assert counter.get_total_flops() == 2 * 64 * 4 * (5 + 3)
    assert out.dtype == torch.bfloat16
    theirs = x.double() @ first.weight.double().T + y.double() @ second.weight.double().T
    torch.testing.assert_close(out.double(), theirs + first.bias + second.bias, atol=0.05, rtol=0.02)
    with_bias(out, bias).float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in (*first.parameters(), *second.parameters()))
    torch.testing.assert_close(first.bias.grad, torch.full((4,), 64.0))
    torch.testing.assert_close(second.weight.grad, y.float().sum(0).expand(4, 3), atol=0.2, rtol=0.02)


@pytest.mark.parametrize("watched", [0, 1])
def test_watched_layers_are_called(watched):
    layers = pair()
    calls = []
    layers[watched].register_forward_hook(lambda _, args, out: calls.append(args[0].shape))
    x, y = normal(7, 5, seed=1), normal(7, 3, seed=2)
    out, bias = project_both(layers[0], x, layers[1], y)
    assert calls == [(x if watched == 0 else y).shape]
    same_with_gradients(with_bias(out, bias), layers[0](x) + layers[1](y), x, y, *layers.parameters())


def test_a_precision_recipe_makes_all_itself():
    class Other(nn.Linear):
        pass

    layer, x = randomised(Other(5, 4)), normal(7, 5, seed=1)
    out, bias = project(layer, x)
    assert bias is None
    same_with_gradients(out, x @ layer.weight.T + layer.bias, x, layer.weight, layer.bias)


def test_columns_side_by_side_are_aligned(always_aligned):
    layer = randomised(nn.Linear(11, 4))
    columns = [normal(7, n, seed=n) for n in (4, 6, 1)]
    seen = []
    real = torch.nn.functional.linear
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", lambda x, *rest: seen.append(x.shape[1]) or real(x, *rest))
        ours = linear_of(layer, columns)
    assert seen == [16]
    same_with_gradients(ours, torch.cat(columns, 1) @ layer.weight.T + layer.bias, *columns, *layer.parameters())


@pytest.mark.parametrize("tokens", [5, 8])
def test_mixed_tokens_and_a_bias(tokens, always_aligned):
    mix, x, bias = randomised(TokenMix(tokens, 3)), normal(2, tokens, 4, seed=1), normal(4, seed=2)

    def theirs():
        return torch.einsum("mn,bnd->bmd", mix.weight, x)

    same_with_gradients(mix(x), theirs(), x, mix.weight)
    same_with_gradients(mix(x, bias), theirs() + bias, x, mix.weight, bias)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: Wukong(n, 5, 16, n_fm=3, rank=4, hidden=10),
        lambda n: DHEN(n, preset("tiny", experts=("wukong", "dcn", "attention"))),
    ],
)
def test_tokens_of_zeros_change_nothing(make, always_aligned, monkeypatch):
    module = randomised(make(9), std=0.2)
    x = normal(3, 9, 16, seed=1)
    padded = interformer._together([x[:, :4], x[:, 4:]], align=True)
    assert padded.shape == (3, 16, 16)
    assert (padded[:, 9:] == 0).all()
    ours = module(padded)
    for place in (projection, interaction, interformer):
        monkeypatch.setattr(place, "unaligned", lambda *_: 0)
    same_with_gradients(ours, module(x), x, *module.parameters())


def test_only_16_bit_numbers_on_a_gpu_are_aligned():
    assert projection.unaligned(9, torch.zeros(2, 9, 3, dtype=torch.bfloat16)) == 0


def test_event_tokens_stay_in_the_working_dtype():
    from gem_model.testing import example_inputs, random_batch

    inputs = example_inputs()
    encoder = embed.EventEncoder(inputs.sources[0], preset("tiny"), inputs)
    batch = random_batch(inputs, 4)
    rows, sequence = embed.Tables(inputs)(batch), batch.sequences[inputs.sources[0].name]
    age = torch.rand(sequence.time.shape[0])
    expected = encoder(rows, sequence, age, age)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tokens = encoder(rows, sequence, age, age)
    assert tokens.dtype == torch.bfloat16
    torch.testing.assert_close(tokens.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("watched", [False, True])
def test_rows_apart_are_rows_and_their_gradient_is_added(watched):
    linear = torch.nn.Linear(6, 4).double()
    if watched:
        linear.register_forward_hook(lambda *_: None)
    x = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    others = torch.tensor([7, 0, 4])
    out, bias, rest = project_apart(linear, x, others)
    assert (bias is None) == watched
    torch.testing.assert_close(out, linear(x))
    torch.testing.assert_close(rest, linear(x)[others])
    probes = torch.randn_like(out), torch.randn_like(rest)
    leaves = [x, linear.weight, linear.bias]
    found = torch.autograd.grad([with_bias(out, bias), rest], leaves, probes)
    wanted = torch.autograd.grad([linear(x), linear(x)[others]], leaves, probes)
    torch.testing.assert_close(found, wanted)


def test_a_projection_takes_over_the_weight_and_bias_of_its_norm():
    layer = NormLinear(6, 4, norm="layer").double()
    for p in layer.parameters():
        torch.nn.init.normal_(p)
    x = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    out, bias = project_bare(layer, torch.nn.functional.layer_norm(x, (6,), eps=layer.norm.eps))
    wanted = layer.linear(torch.nn.functional.layer_norm(x, (6,), layer.norm.weight, layer.norm.bias, layer.norm.eps))
    torch.testing.assert_close(out, wanted)
    leaves, probe = [x, *layer.parameters()], torch.randn_like(out)
    found = torch.autograd.grad(with_bias(out, bias), leaves, probe)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, leaves, probe))


def test_taken_rows_have_their_gradient_in_their_places():
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    places, others = torch.tensor([5, 0, 3, 6]), torch.tensor([1, 2, 4])
    out = taken(x, places, others)
    probe = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, x, probe)
    torch.testing.assert_close(out, x[places])
    torch.testing.assert_close(found, torch.autograd.grad(x[places], x, probe)[0])
