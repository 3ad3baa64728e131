"""Which kernels a call launches."""

from collections.abc import Callable

import torch


def launched(call: Callable[[], object]) -> str:
    """The names of the CUDA kernels of a call, in one string."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profile.key_averages())
