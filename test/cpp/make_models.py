"""Write what deploy_test.cpp opens: make_models.py FOLDER.

A TorchScript module and an AOTInductor package that call every op, and the values and gradients
that PyTorch gives for them.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from everywhere import EveryOp


class Data(torch.nn.Module):
    """Tensors by name, in a file that C++ reads."""

    def __init__(self, **tensors: torch.Tensor):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self) -> None:
        """Nothing: the module is a container."""


def main(folder: Path) -> None:
    """Write script.pt, package.pt2 and data.pt into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    module, x = EveryOp().eval(), torch.randn(3, 3, 12)
    torch.jit.script(module).save(str(folder / "script.pt"))
    out = module(x)
    out.sum().backward()
    gradient = module.block.block[0].weight.grad
    torch.jit.script(Data(input=x, output=out.detach(), gradient=gradient)).save(
        str(folder / "data.pt")
    )
    with torch.no_grad():
        program = torch.export.export(module, (x,))
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "package.pt2"))


main(Path(sys.argv[1]))
