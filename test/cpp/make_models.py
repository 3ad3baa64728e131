"""Write what the C++ tests open: make_models.py FOLDER.

For deploy_test.cpp: a TorchScript module and an AOTInductor package that call every op, and the
values and gradients that PyTorch gives for them. For cpu_unet_test.cpp: U-Nets, inputs, and the
outputs that PyTorch gives for them in float64.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
import compiler_checks  # noqa: F401
from everywhere import EveryOp

import dpa
from dpa.packed.unet import PackedUnet


class Data(torch.nn.Module):
    """Tensors by name, in a file that C++ reads."""

    def __init__(self, **tensors: torch.Tensor):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self) -> None:
        """Nothing: the module is a container."""


def write_unets(path: Path) -> None:
    """Write the U-Nets in the order and the types in which cpu_unet_test.cpp reads them."""
    tolerances = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
    with path.open("wb") as file:
        for number, (dtype, tolerance) in enumerate(tolerances.items()):
            for batch, horizon, cond_dim, scale in (
                (1, 16, 7, True),
                (5, 8, 0, False),
                (2, 8, 7, True),
            ):
                unet = dpa.nn.ConditionalUnet1D(
                    3,
                    global_cond_dim=cond_dim or None,
                    diffusion_step_embed_dim=32,
                    down_dims=(24, 48, 40),
                    n_groups=4,
                    cond_predict_scale=scale,
                ).eval()
                for block in unet.modules():
                    if batch == 2 and isinstance(block, dpa.nn.Conv1dBlock):
                        block.block[2] = torch.nn.ReLU()
                packed = PackedUnet(unet, dtype)
                weights = packed.network.weights()
                names = torch.ops.dpa.unet1d_weight_names(packed.config)
                sample, timestep = torch.randn(batch, horizon, 3), torch.arange(batch) * 7.0
                cond = torch.randn(batch, cond_dim) if cond_dim else None
                given = None if cond is None else cond.double()
                with torch.no_grad():
                    expected = dpa.reference.plain(unet).double()(
                        sample.double(), timestep, None, given
                    )
                sizes = [number, batch, horizon, len(packed.config), *packed.config]
                torch.tensor(sizes, dtype=torch.int32).numpy().tofile(file)
                torch.tensor([tolerance]).numpy().tofile(file)
                for name in names:
                    weight = weights[name].detach().float().contiguous()
                    weight.numpy().tofile(file)
                    weight.to(dtype).view(torch.uint8).numpy().tofile(file)
                for tensor in (sample, timestep, torch.empty(0) if cond is None else cond):
                    tensor.numpy().tofile(file)
                expected.numpy().tofile(file)


def main(folder: Path) -> None:
    """Write script.pt, package.pt2, data.pt and unets.bin into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    write_unets(folder / "unets.bin")
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
