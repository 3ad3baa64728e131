"""Accelerate the policies that people already run, in place, and undo it.

The parts that run are replaced, not what the user sees: on each U-Net that is found the attribute
``forward`` of the object, and on each policy with a supported loop its ``conditional_sample`` and
its method from observations to actions.
Modules, parameters, state dicts, queues, normalizers and encoders stay as they are.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch

from dpa.acceleration.any_network import AnyNetwork
from dpa.acceleration.encoder_forward import FastEncoder
from dpa.acceleration.encoder_training import graph_encoder, ungraph_encoder
from dpa.acceleration.example import call_on, why_no_example
from dpa.acceleration.loops import Loop, check_loops
from dpa.acceleration.policy_loop import FastLoop
from dpa.acceleration.real_time import ChunkInTime, YesInTime, add_real_time
from dpa.acceleration.scheduler_step import FastStep, why_no_step, why_no_table
from dpa.acceleration.shadow_run import Options
from dpa.acceleration.survey import (
    Report,
    Survey,
    is_scheduler,
    owners_of,
    replacements,
)
from dpa.acceleration.unet_forward import FastForward
from dpa.acceleration.whole_call import WHOLE_CALLS, WholeCall
from dpa.nn.family import Network
from dpa.nn.image_encoder import Encoder
from dpa.tracking.replacing import (
    BESIDE,
    Replacement,
    class_of,
    put_back,
    replace_method,
    replaced,
)
from dpa.training.graphed_calls import graph_calls, replaced_forward, ungraph_calls

_OF_POLICIES = FastLoop | WholeCall | ChunkInTime | YesInTime | FastStep


def accelerate(
    model: Any,
    dtype: torch.dtype | None = None,
    mode: str = "loop",
    *,
    tolerance: float | None = None,
    fallback: bool = True,
    graphs: bool = True,
    weights: str = "tracked",
    example: Any = None,
    loop: Loop | Sequence[Loop] | None = None,
    training_dtype: torch.dtype | None = None,
    encoders: bool = True,
) -> Any:
    """Accelerate every conditional U-Net and denoising loop inside ``model``, in place.

    The first call of each kind runs the original too, on the real input, compares, and returns the
    original's result; where they differ beyond the tolerance, a warning says so and the original
    runs from then on. In training, and wherever gradients are enabled, the network runs layer by
    layer with dpa's ops on its own parameters; optimizers, DDP and state dicts notice nothing. On a
    GPU its calls in training replay CUDA graphs, as :func:`dpa.training.graph_calls` says, and a
    policy's whole call, from observations to actions, is one graph from the third of a kind on.

    Whatever changes afterwards is noticed, and compared anew: weights (optimizer steps,
    ``load_state_dict``, EMA copies, ``.to()``), modules, settings, schedulers, and every attribute
    of a policy. ``weights`` says how writes through ``parameter.data`` are noticed.

    Args:
        model: a LeRobot or diffusion_policy policy, a U-Net, or an object that holds some; or a
            DDPM or DDIM scheduler of diffusers, whose ``step`` becomes one op.
        dtype: of packed weights, float32, float16 or bfloat16; None takes the dtype that the
            original computes in. Inputs and results keep their dtypes. On a GPU the steps of a loop
            around a network of another kind compute in it too.
        mode: "loop" runs whole denoising loops as one op where the policy's loop is supported;
            "step" leaves the loops alone and accelerates each step; "chain" runs the network layer
            by layer with dpa's fused ops, on the live parameters, with no packed copy.
        tolerance: relative error in the norm beyond which the original runs, of a step or of a
            whole loop. None is, by the coarsest dtype at work, 1e-4, 1e-2 (float16), 5e-2
            (bfloat16) for a step, and 1e-3, 5e-2, 1e-1 for a loop.
        fallback: what to do where a loop cannot be fused, or a self-check fails. True warns with
            the reason, and the original runs; False raises.
        graphs: whether calls in training, of U-Nets and of the encoders' residual networks, and
            whole calls of a policy replay. Activations and gradients stay allocated between the
            steps.
        weights: how changed weights are noticed by what runs on packed ones. "tracked": in every
            call, by where parameters lie, their versions and samples of their values;
            :class:`dpa.tracking.WeightTracker` says which writes that shows. "checked" compares a
            checksum of every element besides. "frozen" promises that nothing is written.
        example: an observation, as the policy's ``select_action``, ``predict_action`` or
            ``get_action`` takes it. The policy is called on it at once, so that no call of a
            control loop pays for comparing and capturing what is of the same shapes. Its queues are
            empty afterwards; the generators of random numbers are as they were.
        loop: where the policy has its denoising loop, as :class:`dpa.Loop` says, or several;
            instead of those that are looked for. The network may be of any kind: of one that dpa
            has no kernels for PyTorch's run, on a GPU in one CUDA graph of the whole loop.
        training_dtype: bfloat16 for a trainer in float32: the U-Net's calls in training compute
            under autocast, and give float32. Parameters, gradients and the optimizer's state stay
            float32; calls in evaluation, without gradients or under an autocast of the trainer's
            are as without it. None leaves the precision to the trainer.
        encoders: whether known image encoders run on packed weights too: on the CPU and on GPUs
            from compute capability 8.0 on, there in ``dtype``, in evaluation and without gradients.
            In training their residual networks replay; random crops stay outside. :func:`explain`
            says why another one does not.

    Returns:
        ``model``.

    Raises:
        TypeError: nothing in ``model`` can be accelerated, or with ``fallback=False`` not all that
            was found; or it has no such ``loop``, or ``example`` cannot be given to it. The message
            says why. The model stays as it was.
        ValueError: an unknown ``mode``, ``dtype``, ``training_dtype`` or ``weights``, a
            ``tolerance`` that is none, or a ``loop`` whose method is no name.

    """
    options = Options(dtype, mode, tolerance, fallback, weights, training_dtype)
    loops = None if loop is None else check_loops(loop)
    if example is not None and (why := why_no_example(model)) is not None:
        raise TypeError(f"accelerate: example needs {why}")
    before = [
        (part, name, replaced(part, name))
        for _, part in owners_of(model)
        for name, held in list(vars(part).items())
        if isinstance(held, Replacement) and not name.startswith(BESIDE)
    ]
    restore(model)
    try:
        _replace(model, options, graphs, loops, encoders)
        if example is not None:
            call_on(model, example)
    except BaseException:
        restore(model)
        for part, name, value in before:
            replace_method(part, name, value)
        raise
    return model


def _replace(
    model: Any,
    options: Options,
    graphs: bool,
    loops: tuple[Loop, ...] | None,
    encoders: bool,
) -> None:
    """Accelerate a model that is not, or raise TypeError."""
    if is_scheduler(model):
        if (why := why_no_step(model)) is not None:
            raise TypeError(f"accelerate: scheduler must be one whose step can be fused: {why}")
        replace_method(model, "step", FastStep(model, options))
        return
    survey = Survey(model, loops)
    report = survey.report()
    left = tuple(f for f in report.findings if f.part != "encoder" and not f.can)
    if not any(finding.can for finding in report.findings):
        raise TypeError(f"accelerate: model must hold a conditional U-Net, got: {report}")
    if left and not options.fallback:
        raise TypeError(f"accelerate: with fallback=False all must be fused, got: {Report(left)}")
    for module, network in survey.networks.items():
        if isinstance(network, Network):
            replace_method(module, "forward", FastForward(module, options, network))
            if graphs:
                graph_calls(module)
    for module, encoder in survey.encoders.items() if encoders else ():
        if isinstance(encoder, Encoder):
            replace_method(module, "forward", FastEncoder(module, options))
            if graphs:
                graph_encoder(module)
    for finding in left:
        warnings.warn(f"dpa.accelerate: {Report((finding,))}", RuntimeWarning, stacklevel=3)
    for place in survey.loops if options.mode != "step" else []:
        if place.loop is not None:
            _replace_loop(place.owner, place.loop, options, graphs)
    for _, owner in owners_of(model):
        add_real_time(owner)


def _replace_loop(owner: Any, loop: Loop, options: Options, graphs: bool) -> None:
    fast, original = FastLoop(owner, loop, options), getattr(class_of(owner), loop.method)
    replace_method(owner, loop.method, fast)
    for name, held in list(vars(owner).items()):
        bound = isinstance(held, MethodType) and held.__self__ is owner
        if bound and held.__func__ is original:  # by another name, as ManiSkill's get_eval_action
            vars(owner)[name] = fast
    scheduler = loop.scheduler_of(owner)
    fast.refused = None if scheduler is None else why_no_table(scheduler)  # said already
    own, kind = vars(owner), type(owner)
    method = next((n for n in WHOLE_CALLS if hasattr(kind, n) and n not in own), None)
    # A graph of the whole call would leave what the loop changes on the policy as it was.
    one_op = not isinstance(fast.of_network(), AnyNetwork) and not loop.changing
    whole = loop.method == "conditional_sample" and one_op
    if graphs and whole and options.mode == "loop" and method is not None:
        replace_method(owner, method, WholeCall(owner, method))


def restore(model: Any) -> Any:
    """Undo :func:`accelerate`, attribute for attribute, and return ``model``."""
    for _, owner in owners_of(model):
        forward = replaced_forward(owner)
        if isinstance(forward, FastEncoder):
            ungraph_encoder(owner)
        if isinstance(forward, FastForward | FastEncoder):
            put_back(ungraph_calls(owner), "forward")
        for name, held in list(vars(owner).items()):
            if isinstance(held, _OF_POLICIES) and not name.startswith(BESIDE):
                put_back(owner, name)
                if name != held.METHOD:
                    vars(owner)[name] = MethodType(getattr(class_of(owner), held.METHOD), owner)
    return model


def repack(model: Any) -> Any:
    """Pack the weights of every accelerated U-Net and encoder anew, and return ``model``."""
    for _, owner in owners_of(model):
        forward = replaced_forward(owner)
        if isinstance(forward, FastForward | FastEncoder):
            forward.repack()
        for replacement in replacements(owner).values():
            replacement.forget()
    return model


def explain(model: Any) -> Report:
    """Say what in ``model`` is or can be accelerated, and why the rest is not. Changes nothing."""
    return Survey(model).report()
