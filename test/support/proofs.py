"""The six proofs of an op: values, gradients, opcheck, rejected input, capture, inference mode.

A test file names its op, its reference and its samples in a subclass of :class:`OpProofs`; the same
samples feed every proof.
"""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tolerances import gradient_tolerance, tolerance
from torch import Tensor
from torch._dynamo.compiled_autograd import _enable
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dpa.diagnostics.info import op_names

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@dataclass
class Sample:
    """Arguments of one call, lists of tensors among them."""

    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)

    def map(self, f: Callable[[Tensor], Tensor]) -> "Sample":
        """The sample with ``f`` applied to every tensor."""
        apply = lambda x: f(x) if isinstance(x, Tensor) else x  # noqa: E731
        return Sample(tree_map(apply, self.args), tree_map(apply, self.kwargs))

    def floating(self) -> list[Tensor]:
        """The floating tensors, in order."""
        everything = tree_leaves((self.args, self.kwargs))
        return [x for x in everything if isinstance(x, Tensor) and x.is_floating_point()]

    def with_floating(self, tensors: tuple[Tensor, ...]) -> "Sample":
        """The sample with its floating tensors replaced, in order."""
        rest = iter(tensors)
        return self.map(lambda x: next(rest) if x.is_floating_point() else x)

    def requiring_grad(self) -> "Sample":
        """A copy whose floating tensors are leaves that require gradients."""
        fresh = lambda x: x.detach().clone().requires_grad_(x.is_floating_point())  # noqa: E731
        return self.map(fresh)


def call(function: Callable, sample: Sample) -> tuple[Tensor, ...]:
    """The outputs as a tuple."""
    out = function(*sample.args, **sample.kwargs)
    return out if isinstance(out, tuple) else (out,)


def widened(sample: Sample) -> Sample:
    """The sample in float64: the reference's arithmetic on the very values that the op receives."""
    return sample.map(lambda x: x.double() if x.is_floating_point() else x)


def layouts(device):
    """Pairs of tensors whose memory is laid out in every way that strides allow."""
    x, y = torch.randn(2, 6, 5, 4, device=device).unbind()
    yield x.transpose(0, 2), y.transpose(0, 2)  # dense, permuted alike
    yield x.transpose(0, 1), y.reshape(5, 6, 4)  # permuted against contiguous
    yield x[::2, 1:, ::3], y[1::2, :4, 1::2]
    yield x[:, :1].expand(6, 5, 4), y  # strides of zero
    yield torch.randn((), device=device).expand(6, 5), y[..., 0]
    yield x.reshape(-1)[1:], y.reshape(-1)[:-1]  # not at a multiple of 16 bytes
    yield x.reshape(-1)[3:18], y.reshape(-1)[3:18]
    many = torch.randn((2,) * 12, device=device)
    yield many.permute(*range(11, -1, -1))[..., ::2], many[::2].permute(*range(1, 12), 0)


def strided(x: Tensor) -> Tensor:
    """The same values in memory with gaps, at an odd offset, dimensions in reverse order."""
    if x.dim() == 0:
        return x
    storage = x.new_zeros(tuple(reversed(x.shape[1:])) + (2 * x.shape[0] + 1,))
    view = storage[..., 1::2].permute(*reversed(range(x.dim())))
    return view.copy_(x)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, so an element that a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Calls(TorchDispatchMode):
    """Names of the ops that run, and how many gradients each backward op of dpa returned."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.gradients: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        if func.namespace == "dpa" and func._opname.endswith("_backward"):
            returned = out if isinstance(out, tuple) else (out,)
            self.gradients.append(sum(x is not None for x in returned))
        return out


def random_gradients(outputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Random gradients of the outputs."""
    return [torch.randn_like(out) for out in outputs]


class OpProofs:
    """What every op has to show. Subclasses are named Test... and set the attributes below."""

    op: ClassVar[Any]  # torch.ops.dpa.<op>
    reference: ClassVar[Callable]
    double_backward: ClassVar[bool] = True
    forward_ad: ClassVar[bool] = True
    contiguous_output: ClassVar[bool] = True
    normalised: ClassVar[bool] = False  # whether its gradients divide by a deviation of its input

    @staticmethod
    def samples(device: torch.device, dtype: torch.dtype) -> Iterator[Sample]:
        """Small samples for every proof: odd and empty sizes, optional arguments there or not."""
        raise NotImplementedError

    @staticmethod
    def rejected(device: torch.device) -> Iterator[tuple[str, Sample]]:
        """Invalid samples, each with the regular expression that its message matches."""
        raise NotImplementedError

    @staticmethod
    def batches(device: torch.device) -> Iterator[Sample]:
        """Samples that differ in size alone, so that one compiled frame must serve them all."""
        raise NotImplementedError

    # What test_properties.py generates, and how far rounding may take the result.
    @staticmethod
    def drawn(d: Any) -> Sample:
        """A valid call of any sizes, layouts and values; ``d`` is a :class:`strategies.Draw`."""
        raise NotImplementedError

    @staticmethod
    def rounding(sample: Sample, finite: Sample) -> float:
        """What rounding adds to the absolute tolerance; ``finite`` is the sample in float64."""
        return 0.0

    @staticmethod
    def cancelling(exact: Sample, grads: list[Tensor]) -> list[float]:
        """How large the terms are of those gradients' sums that cancel, the first ones."""
        return []

    @staticmethod
    def clamped(exact: Sample) -> tuple[tuple[Tensor, Tensor], float] | None:
        """The terms of a sum that the op clamps, and the bound, where it does."""
        return None

    @staticmethod
    def takes(sample: Sample, argument: Tensor, how: str) -> bool:
        """Whether ``argument`` is still valid when it is corrupted as ``how`` says."""
        return False

    # 1. values
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("layout", ["contiguous", "strided"])
    def test_values(self, device, dtype, layout):
        for sample in self.samples(device, dtype):
            given = sample.map(strided) if layout == "strided" else sample
            with poisoned_memory():
                got = call(type(self).op, given)
            expected = call(type(self).reference, widened(sample))
            for g, e in zip(got, expected, strict=True):
                assert g.dtype == dtype
                assert g.is_contiguous() or not self.contiguous_output
                assert_close(g, e.to(dtype), **tolerance(dtype))

    def test_input_stays(self, device):
        for sample in self.samples(device, torch.float32):
            before = sample.map(torch.clone)
            call(type(self).op, sample)
            for a, b in zip(sample.floating(), before.floating(), strict=True):
                assert torch.equal(a, b)

    # 2. gradients
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_gradients(self, device, dtype):
        for sample in self.samples(device, dtype):
            ours, exact = sample.requiring_grad(), widened(sample).requiring_grad()
            out, out_exact = call(type(self).op, ours), call(type(self).reference, exact)
            grads = random_gradients(out)
            with poisoned_memory():
                torch.autograd.backward(out, grads)
            torch.autograd.backward(out_exact, [g.double() for g in grads])
            for a, b in zip(ours.floating(), exact.floating(), strict=True):
                assert a.grad is not None and a.grad.dtype == dtype
                assert_close(a.grad, b.grad.to(dtype), **gradient_tolerance(dtype))

    def test_each_gradient_alone(self, device):
        """The backward computes what is wanted and nothing else."""
        for sample in self.samples(device, torch.float32):
            together = sample.requiring_grad()
            out = call(type(self).op, together)
            torch.autograd.backward(out, [torch.ones_like(o) for o in out])
            for i, expected in enumerate(together.floating()):
                tensors = [x.detach().clone() for x in sample.floating()]
                tensors[i].requires_grad_()
                out = call(type(self).op, sample.with_floating(tuple(tensors)))
                with Calls() as calls:
                    torch.autograd.backward(out, [torch.ones_like(o) for o in out])
                assert set(calls.gradients) <= {1}
                assert_close(tensors[i].grad, expected.grad, **tolerance(torch.float32))
                assert all(x.grad is None for j, x in enumerate(tensors) if j != i)

    def test_gradcheck(self, device):
        for sample in self.samples(device, torch.float64):
            leaf = sample.requiring_grad()
            run = lambda *tensors: call(type(self).op, leaf.with_floating(tensors))  # noqa: E731, B023
            assert torch.autograd.gradcheck(
                run, tuple(leaf.floating()), check_forward_ad=self.forward_ad, fast_mode=True
            )

    def test_gradgradcheck(self, device):
        if not self.double_backward:
            pytest.skip("the op does not claim double backward")
        for sample in self.samples(device, torch.float64):
            leaf = sample.requiring_grad()
            run = lambda *tensors: call(type(self).op, leaf.with_floating(tensors))  # noqa: E731, B023
            assert torch.autograd.gradgradcheck(run, tuple(leaf.floating()), fast_mode=True)

    def test_functorch(self, device):
        """torch.func.grad and jvp agree with the reference's."""
        for sample in self.samples(device, torch.float64):
            tensors = tuple(sample.floating())

            def total(function, *given, sample=sample):
                return sum(out.sum() for out in call(function, sample.with_floating(given)))

            ours = lambda *given: total(type(self).op, *given)  # noqa: E731
            exact = lambda *given: total(type(self).reference, *given)  # noqa: E731
            everything = tuple(range(len(tensors)))
            got = torch.func.grad(ours, everything)(*tensors)
            expected = torch.func.grad(exact, everything)(*tensors)
            assert_close(got, expected, **gradient_tolerance(torch.float64))
            if self.forward_ad:
                tangents = tuple(map(torch.randn_like, tensors))
                got = torch.func.jvp(ours, tensors, tangents)
                expected = torch.func.jvp(exact, tensors, tangents)
                assert_close(got, expected, **gradient_tolerance(torch.float64))

    def test_functorch_twice(self, device):
        """Second derivatives by torch.func, reverse over reverse and forward over reverse."""
        if not self.double_backward:
            pytest.skip("the op does not claim double backward")
        for sample in self.samples(device, torch.float64):
            tensors = tuple(sample.floating())
            everything = tuple(range(len(tensors)))
            directions = tuple(map(torch.randn_like, tensors))

            def gradients(function, *given, sample=sample, everything=everything):
                total = lambda *t: sum(  # noqa: E731
                    out.square().sum() for out in call(function, sample.with_floating(t))
                )
                return torch.func.grad(total, everything)(*given)

            ours = lambda *given: gradients(type(self).op, *given)  # noqa: E731
            exact = lambda *given: gradients(type(self).reference, *given)  # noqa: E731
            expected = torch.func.vjp(exact, *tensors)[1](directions)
            got = torch.func.vjp(ours, *tensors)[1](directions)
            assert_close(got, expected, **gradient_tolerance(torch.float64))
            if self.forward_ad:
                expected = torch.func.jvp(exact, tensors, directions)[1]
                got = torch.func.jvp(ours, tensors, directions)[1]
                assert_close(got, expected, **gradient_tolerance(torch.float64))

    # 3. opcheck
    @pytest.mark.parametrize("requires_grad", [False, True])
    def test_opcheck(self, device, requires_grad):
        for sample in self.samples(device, torch.float32):
            given = sample.requiring_grad() if requires_grad else sample
            torch.library.opcheck(
                getattr(type(self).op, "default", type(self).op), given.args, given.kwargs
            )

    # 4. rejected input
    @pytest.mark.parametrize("mode", ["grad", "no_grad", "inference", "meta"])
    def test_rejected(self, device, mode):
        guards = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        count = 0
        for match, sample in self.rejected(device):
            given = sample
            if mode == "meta":
                if "device" in match or "lie in" in match:
                    continue  # meta tensors have no second device and no values
                given = sample.map(lambda x: x.to("meta"))
            with guards.get(mode, contextlib.nullcontext)(), pytest.raises(RuntimeError) as info:
                call(type(self).op, given)
            info.match(match)
            count += 1
        assert count > 0

    def test_missing_tensor(self, device):
        """None in the place of a tensor that must be there."""
        schema = getattr(type(self).op, "default", type(self).op)._schema
        sample = next(iter(self.samples(device, torch.float32)))
        for i, argument in enumerate(schema.arguments[: len(sample.args)]):
            if str(argument.type) == "Tensor":
                given = Sample((*sample.args[:i], None, *sample.args[i + 1 :]), sample.kwargs)
                with pytest.raises(RuntimeError, match=f"^{schema.name}: {argument.name} must"):
                    call(type(self).op, given)

    # 5. capture
    def test_compile(self, device):
        """One compiled frame serves every size, values and gradients equal to eager."""
        counter = CompileCounterWithBackend("aot_eager")
        op = type(self).op
        compiled = torch.compile(
            lambda *args, **kwargs: op(*args, **kwargs), backend=counter, fullgraph=True
        )
        frames = []
        for sample in self.batches(device):
            ours, exact = sample.requiring_grad(), sample.requiring_grad()
            # Sizes become dynamic at the second one that is seen.
            out, expected = call(compiled, ours), call(op, exact)
            grads = random_gradients(out)
            torch.autograd.backward(out, grads)
            torch.autograd.backward(expected, grads)
            assert_close(out, expected)
            for a, b in zip(ours.floating(), exact.floating(), strict=True):
                assert_close(a.grad, b.grad)
            frames.append(counter.frame_count)
        assert len(frames) >= 4 and frames[1] == frames[-1] <= 2, frames

    def test_compiled_autograd(self, device):
        """The whole backward compiled, with an ATen node before the op's own."""
        compiler = torch.compile(backend="aot_eager", fullgraph=True)
        for sample in self.batches(device):
            ours, exact = sample.requiring_grad(), sample.requiring_grad()
            ours.floating()[0].requires_grad_(False)
            for given, mode in ((exact, contextlib.nullcontext()), (ours, _enable(compiler))):
                total = sum(out.square().sum() for out in call(type(self).op, given))
                with mode:
                    total.backward()
            assert ours.floating()[0].grad is None
            for a, b in zip(ours.floating()[1:], exact.floating()[1:], strict=True):
                assert_close(a.grad, b.grad)

    def test_cuda_graph(self, device):
        """Captured on a side stream and replayed on new data."""
        if device.type != "cuda":
            pytest.skip("CUDA graphs need a CUDA device")
        for sample in self.samples(device, torch.float32):
            static = sample.map(torch.clone)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                call(type(self).op, static)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                out = call(type(self).op, static)
            for x in static.floating():
                x.copy_(torch.randn_like(x).abs() + 0.1)
            for x in out:
                x.fill_(float("nan"))
            graph.replay()
            assert_close(out, call(type(self).op, static))

    def test_a_backward_that_failed_runs_again(self, device):
        """An error in a saved tensor's hook or in the op of the backward leaves the graph there."""
        fails = []

        class Failing(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if fails == ["op"]:
                    raise MemoryError("in the op")
                return func(*args, **(kwargs or {}))

        def unpack(tensor):
            if fails == ["hook"]:
                raise MemoryError("in the hook")
            return tensor

        for sample in self.samples(device, torch.float32):
            leaves = sample.requiring_grad()
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
                outs = [x for x in call(type(self).op, leaves) if x.requires_grad]
            inputs, grads = leaves.floating(), [torch.ones_like(out) for out in outs]
            for fails[:] in (["hook"], ["op"]):
                with pytest.raises(MemoryError), Failing():
                    torch.autograd.grad(outs, inputs, grads, allow_unused=True)
            fails.clear()
            first, again = (
                torch.autograd.grad(outs, inputs, grads, allow_unused=True, retain_graph=True)
                for _ in range(2)
            )
            assert_close(first, again)

    # 6. inference mode
    def test_inference_mode(self, device):
        for sample in self.samples(device, torch.float32):
            expected = call(type(self).op, sample)
            with torch.inference_mode():
                got = call(type(self).op, sample)
            assert all(x.is_inference() for x in got)
            assert_close(got, expected, rtol=0, atol=0)


def proofs_by_op() -> dict[str, type[OpProofs]]:
    """The proofs of every op that has them: those of ``dpa::stem`` are in test_stem.py."""
    found = {}
    for name in (name.removeprefix("dpa::") for name in op_names()):
        if not (Path(__file__).parents[1] / "ops" / f"test_{name}.py").is_file():
            continue
        for value in vars(importlib.import_module(f"test_{name}")).values():
            is_proofs = inspect.isclass(value) and issubclass(value, OpProofs)
            if is_proofs and getattr(value, "op", None) is getattr(torch.ops.dpa, name):
                found.setdefault(name, value)
    return found


class OneTensorProofs(OpProofs):
    """Of an op whose only tensor is its first argument."""

    def test_missing_tensor(self, device):
        """The dispatcher knows no kernel that could refuse it."""
        sample = next(iter(self.samples(device, torch.float32)))
        with pytest.raises(RuntimeError, match="no tensor arguments"):
            type(self).op(None, *sample.args[1:])

    def test_compiled_autograd(self, device):
        """The whole backward compiled, with ATen nodes before the op's own and behind it."""
        compiler = torch.compile(backend="aot_eager", fullgraph=True)
        for sample in self.batches(device):
            leaves = [sample.args[0].clone().requires_grad_() for _ in range(2)]
            for x, mode in zip(leaves, (contextlib.nullcontext(), _enable(compiler)), strict=True):
                total = type(self).op(x * 1.5, *sample.args[1:]).pow(3).sum()
                with mode:
                    total.backward()
            assert_close(leaves[0].grad, leaves[1].grad)


class ConvolutionProofs(OpProofs):
    """Of an op that ends in PyTorch's convolutions of images.

    On a GPU they add gradients up in any order, unless cuDNN is to keep to one.
    """

    @staticmethod
    def rejected_images(head, x, w, sized):
        """What is refused of (2, 3, 5, 6) images and (8, 3, 3, 3) weights.

        ``sized(stride, padding)`` is the call with these.
        """
        wrong = torch.cat([w[:, :1], w[:, :1]], 1)
        shape = r"weight must have shape \(C_out, C_in, kh, kw\) with C_in = 3, got \[8, 2, 3, 3\]"
        yield head + r"input must have 4 dimensions", Sample((x[0], w))
        yield head + r"input must be float64, float32.*got Byte", Sample((x.byte(), w))
        yield head + shape, Sample((x, wrong))
        yield head + r"weight must have at least one tap each way", Sample((x, w[..., :0]))
        yield head + r"weight must have the dtype of input", Sample((x, w.half()))
        yield head + r"stride must be at least 1, got 0", sized(0, 0)
        yield head + r"padding must be at least 0, got -1", sized(1, -1)
        for padding in (2**62, 2**58, 2**29):
            yield head + r"padding must give images whose bytes", sized(1, padding)
        yield head + r"input must be large enough", Sample((x[:, :, :2], w))
        if x.is_cuda:
            yield head + r"weight must be on the device", Sample((x, w.cpu()))

    def test_gradcheck(self, device):
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            super().test_gradcheck(device)

    def test_gradgradcheck(self, device):
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            super().test_gradgradcheck(device)
