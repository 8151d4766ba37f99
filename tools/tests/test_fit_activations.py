"""The coefficients in gem_kernels are those that the script fits."""

from __future__ import annotations

import fit_activations
import pytest
from gem_kernels.gdpa.activations import POLYNOMIALS


@pytest.mark.parametrize(("name", "bound", "degree"), fit_activations.FITS)
def test_the_committed_coefficients_are_the_fit(name: str, bound: float, degree: int) -> None:
    fit, kept = fit_activations.fit(name, bound, degree), POLYNOMIALS[f"{name}_poly{bound:g}"]
    assert kept.bound == bound
    assert kept.coefficients == pytest.approx(fit.coefficients, rel=1e-6)
    assert (kept.error, kept.slope_error) == pytest.approx((fit.error, fit.slope_error), rel=0.06)  # two digits
