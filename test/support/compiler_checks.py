"""PyTorch's compiler, which tries vector instructions in this process: import the module.

By itself it starts Python for each set of them, up to six times, and each imports PyTorch.
"""

from types import SimpleNamespace

from torch._inductor import cpu_vec_isa


def _run_here(command: list[str], **_):
    *_, code = command
    exec(code, {})


cpu_vec_isa.subprocess = SimpleNamespace(check_call=_run_here, DEVNULL=None)
