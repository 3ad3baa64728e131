"""Every op has every key, a Meta kernel, and gradients that are not silently lost."""

import re
from pathlib import Path

import pytest
import torch
from proofs import proofs_by_op
from test_corrupted_calls import NAMES as CORRUPTED

import dpa
from dpa.diagnostics.info import op_names

_OPS = op_names()
# Each with proofs takes part in autograd and autocast.
_PROVED = {f"dpa::{name}" for name in proofs_by_op()}
# Steps of those, which their autograd kernels call, beneath autograd and after autocast.
_INNER = {f"{name}_{step}" for name in _PROVED for step in ("forward", "backward")} & set(_OPS)
# Inference, a loop's other work and an optimizer's, which test_corrupted_calls.py corrupts, or
# test_parallel.py, test_normal_draws.py, test_adamw_ema.py, test_captured_order.py and
# test_weights_in_order.py.
_WITHOUT_RESULTS = (
    *("parallel_move_", "loop_inputs_", "adamw_ema_", "pack_ahead"),
    "weights_in_order",
)
_INFERENCE = {f"dpa::{name}" for name in (*CORRUPTED, *_WITHOUT_RESULTS)}
_WITHOUT_CPU = {
    "dpa::unet1d_film",
    "dpa::unet1d_on_film",
    "dpa::unet1d_step_film",
    "dpa::diffusion_sample_on_film",
    "dpa::diffusion_sample_clocks",
    "dpa::unet1d_batch",
    "dpa::unet1d_batch_film",
    "dpa::unet1d_batch_on_film",
    "dpa::unet1d_batch_pack",
    "dpa::image_encoder",
    "dpa::image_encoder_pack",
    "dpa::parallel_window",
    "dpa::parallel_move_",
}
# No tensor among its arguments, so no backend of its own.
HOST = {"dpa::unet1d_weight_names", "dpa::unet1d_path", "dpa::unet1d_layout"}
_BUILT_WITH_CUDA = dpa.info()["built for"].startswith("the CPU and CUDA")


def test_every_op_has_proofs():
    """An op that nothing tests fails here: write test_<op>.py, a subclass of OpProofs."""
    assert set(_OPS) == _PROVED | _INNER | _INFERENCE | HOST


def test_the_contract_is_there():
    expected = {
        "elementwise_mult",
        "fused_relu_add",
        "lltm",
        "denoise",
        "scheduler_step",
        "group_norm_mish",
        "conv1d_gnm",
    }
    assert {name.removeprefix("dpa::") for name in _PROVED} >= expected


@pytest.mark.parametrize("name", sorted(set(_OPS) - HOST))
def test_keys(name):
    keys = {"Meta", "Autograd"}
    if name not in _WITHOUT_CPU:
        keys.add("CPU")
    if _BUILT_WITH_CUDA:
        keys.add("CUDA")
    if name in _PROVED:
        keys |= {"AutocastCPU", "AutocastCUDA"}
    missing = [k for k in keys if not torch._C._dispatch_has_kernel_for_dispatch_key(name, k)]
    assert not missing


@pytest.mark.parametrize("name", _OPS)
def test_tags_and_schema(name):
    overload = getattr(torch.ops.dpa, name.removeprefix("dpa::")).default
    assert torch.Tag.pt2_compliant_tag in overload.tags
    # By the name, as in PyTorch, an op writes in place.
    assert overload._schema.is_mutable == name.endswith("_")
    for other in getattr(torch.ops.dpa, name.removeprefix("dpa::")).overloads():
        tags = getattr(getattr(torch.ops.dpa, name.removeprefix("dpa::")), other).tags
        if hasattr(torch.Tag, "out_variant"):  # torch 2.9 has none
            assert (torch.Tag.out_variant in tags) == (other == "out")
    # Sizes would be SymInt; a plain int is a number that does not follow the sizes of tensors.
    ints = re.findall(r"\bint (\w+)", str(overload._schema))
    # num_groups, kernel_size, stride, padding and int[] config are an architecture, not sizes.
    assert set(ints) <= {"num_groups", "kernel_size", "stride", "padding"}, ints


def test_every_op_with_gradients_has_a_backward_op():
    """One whose derivative is made of other ops has a node of its own or a formula, not both."""
    ops = Path(__file__).parents[2] / "ops"
    for name in _PROVED:
        folder = ops / name.removeprefix("dpa::")
        source = "".join(file.read_text() for file in folder.glob("*.cpp"))
        made = ["SavingNode" in source, "formula_autograd" in source]
        assert any(made) and all(made) == (f"{name}_backward" in _OPS), name


def test_the_schemas_say_what_the_contract_says():
    schemas = {name: str(getattr(torch.ops.dpa, name[5:]).default._schema) for name in _PROVED}
    assert schemas["dpa::scheduler_step"].endswith(
        "(Tensor model_output, Tensor sample, Tensor table, Tensor index, "
        "Tensor? noise=None, float clip=inf) -> Tensor"
    )
    assert schemas["dpa::group_norm_mish"].endswith(
        "(Tensor input, int num_groups, Tensor? weight=None, Tensor? bias=None, "
        "float eps=1.0000000000000001e-05, Tensor? scale=None, Tensor? shift=None, "
        "Tensor? residual=None) -> Tensor"
    )


def test_loading_twice_is_harmless():
    torch.ops.load_library(str(dpa.library_path()))
    dpa.library.loader.load()


def test_info_is_complete_and_works():
    facts = dpa.info()
    assert facts["torch"] == torch.__version__
    assert set(facts["smoke test"].values()) == {"ok"}
    assert facts["ops"]["dpa::denoise"][:1] == ["CPU"]
