"""Which backend runs, and that what cannot run says why."""

import gem_kernels
import pytest
import torch
from gem_kernels import dispatch, gdpa, jagged_attention
from gem_kernels.dispatch import Problem, why
from gem_kernels.testing import offsets_of, random_heads


@pytest.fixture
def q():
    return random_heads(4, 2, 8)


def test_a_cpu_gets_the_reference_even_where_the_interpreter_is_on(q):
    for op in dispatch.OPERATORS:
        choice = why(op, q)
        assert choice.backend == "reference"
        assert set(choice.reasons) == {"hopper", "triton", "reference"}
        assert "cpu" in choice.reasons["hopper"]
        assert "reference: plain PyTorch" in str(choice)


def test_an_explicit_backend_wins_or_raises_with_the_reason(q, monkeypatch):
    assert why("gdpa", q, "reference").backend == "reference"
    with pytest.raises(RuntimeError, match=r"'hopper' was asked for.*needs a Hopper GPU"):
        why("gdpa", q, "hopper")
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        why("gdpa", q, "cuda")
    with pytest.raises(ValueError, match="unknown operator 'attention'"):
        why("attention", q)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="Triton needs a GPU"):
        why("gdpa", q, "triton")
    offsets = offsets_of([4])
    with pytest.raises(RuntimeError, match="Triton needs a GPU"):
        gdpa(q, q, q, offsets, offsets, 4, 4, backend="triton")


def test_triton_says_what_it_does_not_take(q, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="float64"):
        why("jagged_attention", q.double(), "triton")
    with pytest.raises(RuntimeError, match="up to 256; got 264"):
        why("jagged_attention", random_heads(4, 1, 264), "triton")


def test_a_registered_backend_is_preferred_and_sees_the_features(q, monkeypatch):
    asked: list[Problem] = []

    def applies(problem: Problem) -> tuple[bool, str]:
        asked.append(problem)
        return False, "not today"

    monkeypatch.setattr(dispatch, "_BACKENDS", dict(dispatch._BACKENDS))
    dispatch.register("other", applies)
    try:
        offsets = offsets_of([4])
        jagged_attention(q, q, q, offsets, offsets, 4, 4, causal=True, return_lse=True)
        assert dispatch.backends()[0] == "other"
        assert asked[0].features == {"causal", "return_lse"}
        assert asked[0].head_dim == 8
        assert why("jagged_attention", q).reasons["other"] == "not today"
        with pytest.raises(ValueError, match="already registered"):
            dispatch.register("other", applies)
    finally:
        dispatch._choose.cache_clear()


def test_a_missing_backend_module_is_a_reason(monkeypatch):
    module, reason = dispatch._find("rotary", "absent")
    assert module is None
    assert "no module gem_kernels.rotary.absent" in reason


def test_the_fall_back_on_a_gpu_is_announced(monkeypatch):
    problem = Problem(op="gdpa", device=torch.device("cuda"), dtype=torch.float64, head_dim=8)
    refuse = {name: (lambda _problem: (False, "cannot")) for name in ("hopper", "triton")}
    monkeypatch.setattr(dispatch, "_BACKENDS", {**refuse, "reference": dispatch._reference_applies})
    dispatch._choose.cache_clear()
    with pytest.warns(UserWarning, match="gdpa falls back to plain PyTorch"):
        assert dispatch._choose(problem, None, False).backend == "reference"
    dispatch._choose.cache_clear()


def test_the_package_offers_its_operators():
    for name in gem_kernels.__all__:
        assert getattr(gem_kernels, name) is not None
    for op in ("jagged_attention", "gdpa", "block_attention", "rope", "rote"):
        assert callable(getattr(gem_kernels, op))


@pytest.mark.gpu
def test_a_gpu_gets_kernels():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    q = random_heads(4, 2, 64, dtype=torch.bfloat16, device="cuda")
    for op in dispatch.OPERATORS:
        assert why(op, q, features=()).backend in ("triton", "hopper")
