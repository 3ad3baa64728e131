"""What every registered op gives, to compare two ways of running the library bit for bit.

answers.py FILE        calls every op, and the networks and loops made of them, on fixed inputs;
                       exit status 1, with their names, if a registered op was not called
answers.py FILE FILE   compares two such files; exit status 1 where bits differ
"""

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import test_conv1d
import test_corrupted_calls
import test_joint_linear
import test_residual_block1d
import torch
from diffusers import DDIMScheduler, DDPMScheduler
from everywhere import EveryOp
from proofs import Sample, call, proofs_by_op
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import dpa
from dpa.diagnostics.info import op_names

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Called(TorchDispatchMode):
    """Names of the ops of dpa that run, overloads included."""

    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dpa":
            self.names.add(func.name())
        return func(*args, **(kwargs or {}))


class _NoKernel(Exception):
    """The device, or the build, has no kernel for the call."""


@contextlib.contextmanager
def _missing_kernel() -> Iterator[None]:
    """Name the error of an op that needs another device or build."""
    try:
        yield
    except RuntimeError as error:
        if "one-sample kernel runs on this device" in str(error):
            raise _NoKernel from error
        raise


class Answers:
    """Results by name, on the CPU."""

    def __init__(self, device: torch.device):
        self.device, self.kept = device, {}

    def keep(self, name: str, results: Iterable[Tensor | None]) -> None:
        """Keep every tensor of ``results`` under ``name``."""
        for i, x in enumerate(results):
            if x is not None:
                self.kept[f"{name} {i}"] = x.detach().cpu()

    def with_gradients(self, name: str, op: Callable, sample: Sample) -> None:
        """Keep the outputs of a call, without and with gradients of all its floating tensors."""
        self.keep(f"{name} alone", call(op, sample))
        given = sample.map(lambda x: x.detach().requires_grad_(x.is_floating_point()))
        out = call(op, given)
        torch.manual_seed(1)
        torch.autograd.backward(out, [torch.randn_like(o) for o in out])
        self.keep(name, [*out, *(x.grad for x in given.floating())])

    def ops(self, dtype: torch.dtype) -> None:
        """Ops with gradients, at small sizes."""
        torch.manual_seed(0)
        module = EveryOp().to(self.device, dtype)
        x = torch.randn(5, 3, 16, device=self.device, dtype=dtype, requires_grad=True)
        y = module(x)
        y.sum().backward()
        self.keep(f"every {dtype}", [y, x.grad, *(p.grad for p in module.parameters())])
        a, out = x.detach(), torch.empty_like(x.detach())
        torch.ops.dpa.elementwise_mult.out(a, a, out=out)
        self.keep(f"elementwise_mult.out {dtype}", [out])
        for _ in range(50):  # one short kernel behind the other
            a = torch.ops.dpa.fused_relu_add(torch.ops.dpa.elementwise_mult(a, a), a, -0.5)
            a = a.clamp(-2, 2)
        self.keep(f"chain {dtype}", [a])
        for proofs in proofs_by_op().values():
            torch.manual_seed(0)
            for i, sample in enumerate(proofs.samples(self.device, dtype)):
                if all(t.numel() for t in sample.floating()):
                    self.with_gradients(f"{proofs.__name__} {dtype} {i}", proofs.op, sample)

    def time_order(self, dtype: torch.dtype) -> None:
        """GEMMs and convolutions on a GPU's matrix units: channels last, and the layers of FiLM."""
        for i, shape in enumerate(test_conv1d.SHAPES):
            torch.manual_seed(i)
            sample = test_conv1d._sample(self.device, dtype, *shape)
            sample.args = (test_conv1d.in_time_order(sample.args[0]), *sample.args[1:])
            self.with_gradients(f"conv1d-last {dtype} {i}", torch.ops.dpa.conv1d, sample)
        for i, shape in enumerate(test_residual_block1d.SHAPES):
            torch.manual_seed(i)
            sample = test_residual_block1d._sample(self.device, dtype, *shape)
            x, *parameters, skip = sample.args
            in_order = test_conv1d.in_time_order
            sample.args = (in_order(x), *parameters, skip if skip is None else in_order(skip))
            op = torch.ops.dpa.residual_block1d
            self.with_gradients(f"residual-last {dtype} {i}", op, sample)
        for i, (batch, c_in, outs) in enumerate(test_joint_linear.SHAPES):
            torch.manual_seed(i)
            sample = test_joint_linear._sample(self.device, dtype, batch, c_in, *outs)
            self.with_gradients(f"joint-wide {dtype} {i}", torch.ops.dpa.joint_linear, sample)

    def network(self, dtype: torch.dtype) -> None:
        """A step of training, and the network on packed weights."""
        torch.manual_seed(0)
        unet = _unet((64, 128)).to(self.device)
        sample, cond = (torch.randn(33, *s, device=self.device) for s in ((16, 2), (8,)))
        steps = torch.arange(33, device=self.device)
        lower = torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32)
        with lower:
            out = unet(sample, steps, global_cond=cond)
        out.float().square().mean().backward()
        self.keep(f"training {dtype}", [out, *(p.grad for p in unet.parameters())])
        with lower, torch.no_grad():
            calls = [unet(sample, steps, global_cond=cond) for _ in range(3)]
        self.keep(f"kept {dtype}", calls)

    def inference(self, dtype: torch.dtype) -> None:
        """Each op on packed weights that the device and the build have a kernel of."""
        torch.manual_seed(0)
        for name, sample in test_corrupted_calls._samples(self.device):
            if dtype == torch.float32 and test_corrupted_calls._has_kernel(name, self.device):
                torch.manual_seed(1)
                with contextlib.suppress(_NoKernel), _missing_kernel():
                    self.keep(f"inference {name}", call(getattr(torch.ops.dpa, name), sample))

    def clocks(self, dtype: torch.dtype) -> None:
        """Times, which differ from call to call: kept is that they came."""
        if self.device.type == "cuda" and dtype == torch.bfloat16:
            unet = _unet((256, 512, 1024)).to(self.device).eval()
            sampler = dpa.DiffusionSampler(
                unet, DDIMScheduler(100), 10, horizon=16, fused=True, dtype=dtype
            )
            with contextlib.suppress(_NoKernel), _missing_kernel():
                self.keep("clocks", [torch.tensor(dpa.profile(sampler, runs=1).step > 0)])

    def loops(self, dtype: torch.dtype) -> None:
        """Denoising loops: the first call, the one that is captured, and a replay."""
        sizes = ((1, (64, 128)), (4, (64, 128)), (8, (256, 512)))
        for batch, dims in sizes if self.device.type == "cuda" else sizes[:1]:
            torch.manual_seed(0)
            unet = _unet(dims).to(self.device).eval()
            squared = DDPMScheduler(100, beta_schedule="squaredcos_cap_v2")
            for name, scheduler, steps, parallel in (
                ("ddim", DDIMScheduler(100), 10, None),
                ("ddpm", squared, 100, None),
                ("parallel", squared, 100, dpa.Parallel(5, 0.0)),
            ):
                sampler = dpa.DiffusionSampler(
                    unet, scheduler, steps, horizon=16, fused=True, dtype=dtype, parallel=parallel
                )
                generator = torch.Generator(self.device).manual_seed(3)
                cond = torch.ones(batch, 8, device=self.device)
                calls = [sampler(cond, generator=generator).clone() for _ in range(3)]
                self.keep(f"{name} {dtype} batch {batch}", calls)


def _unet(dims: tuple[int, ...]) -> torch.nn.Module:
    return dpa.nn.ConditionalUnet1D(
        2,
        global_cond_dim=8,
        diffusion_step_embed_dim=32,
        down_dims=dims,
        cond_predict_scale=True,
    )


def write(path: Path) -> int:
    """Call everything and save the answers; the number of ops that were not called."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    answers = Answers(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    start = time.perf_counter()
    with _Called() as called:
        for dtype in _DTYPES:
            for part in ("ops", "time_order", "network", "inference", "loops", "clocks"):
                getattr(answers, part)(dtype)
            torch.save(answers.kept, path)
            seconds = time.perf_counter() - start
            print(f"{len(answers.kept)} tensors up to {dtype}, {seconds:.1f} s", flush=True)
    missing = sorted(set(op_names()) - {name.partition(".")[0] for name in called.names})
    print(f"{len(called.names)} ops and overloads called; missing: {missing}", flush=True)
    return len(missing)


def compare(first: Path, second: Path) -> int:
    """Print, by kind of answer, how many differ and by how much in the norm."""
    a, b = (torch.load(path) for path in (first, second))
    apart, count = defaultdict(list), defaultdict(int)
    for name in a.keys() & b.keys():
        kind = " ".join(name.split(" ")[:2])
        count[kind] += 1
        x, y = a[name].double(), b[name].double()
        if not torch.equal(x.nan_to_num(nan=1e300), y.nan_to_num(nan=1e300)):
            error = (x - y).norm() / x.norm().clamp_min(1e-30)
            apart[kind].append((error.item(), name))
    for kind, errors in sorted(apart.items()):
        print(f"{kind}: {len(errors)} of {count[kind]} differ, most {max(errors)}")
    alone = sorted({" ".join(name.split(" ")[:2]) for name in a.keys() ^ b.keys()})
    print(f"{sum(count.values())} compared, {sum(map(len, apart.values()))} differ; alone: {alone}")
    return len(apart)


if __name__ == "__main__":
    files = [Path(name) for name in sys.argv[1:]]
    sys.exit(bool(compare(*files) if len(files) == 2 else write(*files)))
