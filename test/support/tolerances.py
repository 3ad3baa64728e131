"""The one table of tolerances, by dtype, each with its reason."""

import torch

# Relative and absolute error allowed against a float64 reference on the same inputs.
_TOLERANCES = {
    # Sums of a few thousand terms, each rounded to 2^-53.
    torch.float64: {"rtol": 1e-10, "atol": 1e-11},
    # The same at 2^-24; an exponential good to 2 units in the last place, and values near zero that
    # differ by cancellation after a normalisation to unit size.
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    # Arithmetic is float32; the result is rounded once, by half a unit of 2^-10 or of 2^-7.
    torch.float16: {"rtol": 1e-3, "atol": 1e-3},
    torch.bfloat16: {"rtol": 8e-3, "atol": 8e-3},
}

# Gradients that are sums over many rounded terms have a longer tail.
_GRADIENT_FACTOR = 10


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Keywords for torch.testing.assert_close on values."""
    return dict(_TOLERANCES[dtype])


def gradient_tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Keywords for torch.testing.assert_close on gradients."""
    return {key: value * _GRADIENT_FACTOR for key, value in _TOLERANCES[dtype].items()}
