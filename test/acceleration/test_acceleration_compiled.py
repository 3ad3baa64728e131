"""Accelerated networks under torch.compile, checkpointing, tracing and forward mode."""

import copy
import warnings

import pytest
import torch
from policies import (
    ONE_LEVEL,
    unet_and_inputs,
)
from test_acceleration import doubled_and_inputs

import dpa
from dpa.training.graphed_calls import replaced_forward


@torch.no_grad()
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_without_a_graph_break(backend, device):
    # Inductor's code of a level is long to make, and stands for that of the others.
    unet, inputs = unet_and_inputs(device, **(ONE_LEVEL if backend == "inductor" else {}))
    expected = unet(*inputs) * 2
    dpa.accelerate(unet)
    compiled = torch.compile(lambda *args: unet(*args) * 2, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(*inputs), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_compiled_first_a_network_is_compared_too():
    def graph(module, _):
        graphs.append(any("dpa" in str(node.target) for node in module.graph.nodes))
        return module.forward

    for make, fits in ((doubled_and_inputs, False), (unet_and_inputs, True)):
        torch._dynamo.reset()
        graphs = []
        unet, inputs = make(**ONE_LEVEL)
        want = unet(*inputs)
        dpa.accelerate(unet)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = torch.compile(unet, backend=graph, fullgraph=True)(*inputs)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert graphs == [fits]
        assert fits != any("accelerated Doubled differs" in str(w.message) for w in caught)


def test_compiled_calls_leave_float_timesteps_to_the_original():
    unet, _ = unet_and_inputs(**ONE_LEVEL)

    class Truncating(type(unet)):
        def forward(self, sample, timestep, local_cond=None, global_cond=None):
            return super().forward(sample, int(timestep), local_cond, global_cond)

    unet.__class__ = Truncating
    sample, cond = torch.randn(3, 8, 2), torch.randn(3, 4)
    want = unet(sample, 7.9, None, cond)
    dpa.accelerate(unet)
    unet(sample, 7, None, cond)
    got = torch.compile(unet, backend="eager")(sample, 7.9, None, cond)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_checkpointed_from_the_first_call_on():
    unet, inputs = unet_and_inputs()
    plain = copy.deepcopy(unet)
    dpa.accelerate(unet.train())
    for _ in range(2):
        for network in (unet, plain.train()):
            network.zero_grad()
            out = torch.utils.checkpoint.checkpoint(network, *inputs, use_reentrant=False)
            out.square().sum().backward()
        for got, want in zip(unet.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-4)
    assert max(replaced_forward(unet).shadow.errors.values()) < 1e-5


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@torch.no_grad()
def test_traced_and_exported_it_is_the_original():
    unet, inputs = unet_and_inputs()
    unet.requires_grad_(False)  # torch.jit.trace takes them for constants
    want = unet(*inputs)
    dpa.accelerate(unet)
    sample, timestep, _, cond = inputs
    for _ in range(2):
        traced = torch.jit.trace(lambda x, t, g: unet(x, t, None, g), (sample, timestep, cond))
        exported = torch.export.export(unet, inputs).module()
        torch.testing.assert_close(traced(sample, timestep, cond), want)
        torch.testing.assert_close(exported(*inputs), want)
        unet(*inputs)


@torch.no_grad()
def test_forward_mode_derivatives():
    unet, inputs = unet_and_inputs()
    plain, tangent = copy.deepcopy(unet), torch.randn_like(inputs[0])
    dpa.accelerate(unet)
    unet(*inputs), unet(*inputs)
    results = []
    for network in (unet, unet, plain):
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(inputs[0], tangent)
            out = torch.autograd.forward_ad.unpack_dual(network(dual, *inputs[1:]))
            results.append(out.tangent)
    for got in results[:2]:
        torch.testing.assert_close(got, results[2], rtol=1e-4, atol=1e-4)
