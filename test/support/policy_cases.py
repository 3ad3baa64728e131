"""Policies with loops and networks of other kinds, with what is needed to call them."""

import functools

import near_copies as copies
import near_policies as near
import other_policies as others
import planners
import torch
from torch import nn


def cloud(device, batch=2):
    points, state = torch.randn(batch, 2, 5, 6), torch.randn(batch, 2, 2)
    return {"point_cloud": points.to(device), "agent_pos": state.to(device)}


def images(device, batch=2):
    rgb = torch.randint(0, 255, (batch, 2, 8, 8, 3), dtype=torch.uint8)
    return {"rgb": rgb.to(device), "state": torch.randn(batch, 2, 3).to(device)}


def images_and_depth(device, batch=2):
    depth = torch.randint(0, 2000, (batch, 2, 8, 8, 1), dtype=torch.int16)
    return images(device, batch) | {"depth": depth.to(device)}


def state(device, batch=2):
    return torch.randn(batch, 2, 3).to(device)


def obs(device):
    return {"obs": state(device)}


def states(device):
    return {"state": state(device)}


def start_over(policy):
    """Forget the last chunk, as policies do at the beginning of an episode."""
    if "initial_guess" in vars(policy):
        policy.initial_guess, policy.guess = True, None
    if hasattr(policy, "reset_buffer"):
        policy.reset_buffer()


def _diffuses(**options):
    return functools.partial(near.DiffusionModel, **options), "act", state, ["forward"]


def _streams(**options):
    make = functools.partial(near.StreamingPolicy, **options)
    return make, "predict_action", obs, ["conditional_sample"]


def _is_consistent(kind, *args, **options):
    make = functools.partial(kind, *args, **options)
    return make, "predict_action", states, ["conditional_sample"]


def _plans(kind, *args, **options):
    make = functools.partial(getattr(planners, kind), *args, **options)
    method = "sample" if issubclass(getattr(planners, kind), planners.Agent) else "p_sample_loop"
    return make, "act", state, [method]


FIRST = torch.zeros(8, 2)
FIRST[0] = 1.0

# The policy, its method, an observation, the methods that hold its loops.
CASES = {
    "transformer": (
        others.TransformerPolicy,
        "predict_action",
        obs,
        ["conditional_sample"],
    ),
    "transformer_ddim": (
        lambda: others.TransformerPolicy("DDIM"),
        "predict_action",
        obs,
        ["conditional_sample"],
    ),
    "rti": (
        others.RtiPolicy,
        "predict_action",
        obs,
        ["initial_sample", "rti_sample"],
    ),
    "maniskill": (others.ManiSkillAgent, "get_action", state, ["get_action"]),
    "maniskill_images": (
        lambda: others.ManiSkillAgent(images=("rgb",)),
        "get_action",
        images,
        ["get_action"],
    ),
    "maniskill_depth": (
        lambda: others.ManiSkillAgent(images=("rgb", "depth")),
        "get_action",
        images_and_depth,
        ["get_action"],
    ),
    "flow_policy": (others.FlowPolicy, "predict_action", cloud, ["predict_action"]),
    **{
        f"multi_task_dit_{kind}": (
            lambda kind=kind: others.MultiTaskDiT(kind),
            "predict_action_chunk",
            lambda device: {"observation.state": state(device)},
            ["_generate_actions"],
        )
        for kind in ("DDPM", "DDIM", "euler", "rk4")
    },
    "consistency": _is_consistent(near.ConsistencyPolicy),
    "consistency_chain": _is_consistent(near.ConsistencyPolicy, ["D", 27, 54]),
    "consistency_bins": _is_consistent(near.ConsistencyPolicy, ["C", 3], scaling="no_boundary"),
    "consistency_teacher": _is_consistent(near.KarrasPolicy),
    "consistency_teacher_euler": _is_consistent(near.KarrasPolicy, solver="euler"),
    "dppo": _diffuses(),
    "dppo_ddim": _diffuses(steps=20, ddim_steps=5, randn_clip_value=3, final_action_clip_value=0.5),
    "dppo_tuned": _diffuses(steps=20, ddim_steps=5, tuned=5, denoised_clip_value=None),
    "dppo_relu": _diffuses(network=copies.DPPO(2, 6, act=nn.ReLU), ddim_steps=5),
    "dppo_mlp": _diffuses(network=near.ActorMlp(), predict_epsilon=False),
    "diffuser": _plans("GaussianDiffusion"),
    "diffuser_x0": _plans("GaussianDiffusion", predict_epsilon=False),
    "diffuser_attention": _plans("GaussianDiffusion", attention=True),
    "diffuser_maze": _plans("Maze2dDiffusion", clip_denoised=False),
    "clean_ddpm": _plans("DDPM"),
    "clean_ddpm_x0": _plans("DDPM", predict_noise=False, bound=None, fix_mask=FIRST),
    "clean_ddpm_free": _plans("DDPM", bound=None),
    **{
        f"clean_sde_{solver}": _plans("DiscreteDiffusionSDE", solver)
        for solver in ("ddpm", "ddim", "ode_dpmsolver_1", "sde_dpmsolver_1", "ode_dpmsolver++_1")
    },
    "clean_sde_1": _plans("DiscreteDiffusionSDE", "sde_dpmsolver++_1", bound=None, again=2),
    "clean_ode_2M": _plans("DiscreteDiffusionSDE", "ode_dpmsolver++_2M", fix_mask=FIRST),
    "clean_sde_2M": _plans("DiscreteDiffusionSDE", "sde_dpmsolver++_2M", predict_noise=False),
    "clean_edm": _plans("EDM"),
    "clean_edm_heun": _plans("EDM", "heun", fix_mask=FIRST),
    "streaming": _streams(),
    "streaming_ddim": _streams(ddim=True),
    "streaming_inpainting": _streams(inpaints=True, prediction_type="sample"),
}
