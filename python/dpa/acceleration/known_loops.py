"""The loops of policies that people have: LeRobot, diffusion_policy and what is made of it.

An entry says what a policy's method does before and after its loop. The first call of an
accelerated policy runs the original's method too, and compares. Of entries for one method the last
one that fits a policy is its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dpa.acceleration.clean_diffuser import CLEAN_DDPM, CLEAN_EDM, CLEAN_SDE
from dpa.acceleration.consistency_policy import CONSISTENCY, KARRAS
from dpa.acceleration.diffuser import DIFFUSER
from dpa.acceleration.dppo import DPPO
from dpa.acceleration.loops import CONDITIONED, ORIGINAL, Loop, LoopCall
from dpa.acceleration.streaming_policy import STREAMING
from dpa.schedulers.conversion import from_diffusers
from dpa.schedulers.flow import flow_matching
from dpa.schedulers.tables import MultistepTable, StepTable
from dpa.tracking import find

_STEP_OPTIONS = frozenset({"eta", "use_clipped_model_output"})
# DP3 has the two of a point cloud, and does not use them.
_OF_A_CLOUD = frozenset({"condition_data_pc", "condition_mask_pc"})


def _unet_or_model(policy: Any) -> Any:
    return getattr(policy, "unet", None) or getattr(policy, "model", None)


def _lerobot(
    policy: Any,
    batch_size: int | None = None,
    global_cond: Tensor | None = None,
    generator: torch.Generator | None = None,
    noise: Tensor | None = None,
) -> LoopCall | None:
    conditions = {"global_cond": global_cond}
    if noise is not None:
        if not isinstance(noise, Tensor):
            return None
        if noise.dim() != 3:
            raise ValueError(f"noise is {tuple(noise.shape)}")
        return LoopCall(tuple(noise.shape), conditions, noise, generator)
    horizon = find(policy, "config.horizon")
    if horizon is None:
        raise ValueError("its config has no horizon")
    width = find(policy, "config.action_feature.shape")
    return LoopCall((batch_size, horizon, width and width[0]), conditions, None, generator)


def _original(
    policy: Any,
    condition_data: Tensor,
    condition_mask: Tensor,
    *,
    generator: Any = None,
    **others: Any,
) -> LoopCall | None:
    data, mask = condition_data, condition_mask
    if not isinstance(data, Tensor) or not isinstance(mask, Tensor):
        return None
    if mask.dtype != torch.bool or mask.shape != data.shape:
        raise ValueError(f"condition_mask is {mask.dtype}, {tuple(mask.shape)}")
    names = ("local_cond", "global_cond", "cond")
    conditions = {name: others.pop(name) for name in names if name in others}
    one_stream = not others.keys() & _OF_A_CLOUD  # whose loop takes a generator and ignores it
    generator = generator if one_stream else None
    options = {name: value for name, value in others.items() if name not in _OF_A_CLOUD}
    if unknown := sorted(options.keys() - _STEP_OPTIONS):
        raise ValueError(f"no fused step takes {', '.join(unknown)}")
    given = None, generator, data, mask, options
    return LoopCall(tuple(data.shape), conditions, *given, one_stream=one_stream)


def _from_last_chunk(policy: Any, *args: Any, **kwargs: Any) -> LoopCall | None:
    if policy.initial_guess or policy.guess is None or policy.steps is None:
        return None
    call = _original(policy, *args, **kwargs)
    if call is not None:
        call.noise = torch.cat([policy.guess[:, 1:], policy.guess[:, -1:]], 1)
    return call


def _chosen_steps(policy: Any, **options: Any) -> StepTable:
    """Return the steps of RTI-DP: some of those that the scheduler's timesteps make."""
    whole = from_diffusers(policy.noise_scheduler, **options, scaled=False)
    if isinstance(whole, MultistepTable):
        raise ValueError("the steps of its scheduler depend on earlier ones")
    rows = {int(timestep): row for row, timestep in enumerate(whole.timesteps)}
    wanted = [int(step) for step in policy.steps]
    if missing := [step for step in wanted if step not in rows]:
        raise ValueError(f"its steps {missing} are none of its scheduler's timesteps")
    chosen = [rows[step] for step in wanted]
    noisy = tuple(whole.draws_noise[row] for row in chosen)
    # No levels: the loop starts from a chunk without noise.
    x0 = None if whole.x0 is None else whole.x0[chosen]
    steps = whole.timesteps[chosen], whole.coefficients[chosen], whole.clip, noisy
    return StepTable(*steps, x0=x0)


def _maniskill(policy: Any, obs_seq: Any) -> LoopCall:
    if isinstance(obs_seq, dict):
        images = ("rgb", "depth")
        obs_seq = {k: v.permute(0, 1, 4, 2, 3) if k in images else v for k, v in obs_seq.items()}
        cond = policy.encode_obs(obs_seq, eval_mode=True)
    else:
        cond = obs_seq.flatten(start_dim=1)
    shape = (len(cond), policy.pred_horizon, policy.act_dim)
    return LoopCall(shape, {"global_cond": cond})


def _maniskill_actions(policy: Any, sample: Tensor, obs_seq: Any) -> Tensor:
    first = policy.obs_horizon - 1
    return sample[:, first : first + policy.act_horizon]


def _robomimic_nets(policy: Any) -> Any:
    return policy.nets if policy.ema is None else policy.ema_nets


def _robomimic_network(policy: Any) -> Any:
    return _robomimic_nets(policy)["policy"]["noise_pred_net"]


def _robomimic_steps(policy: Any) -> int | None:
    config = policy.algo_config
    kinds = [kind for kind in (config.ddpm, config.ddim) if kind.enabled]
    return kinds[0].num_inference_timesteps if kinds else None


def _robomimic(policy: Any, obs_dict: Any, goal_dict: Any = None) -> LoopCall | None:
    import robomimic.utils.tensor_utils as utilities

    if policy.nets.training:
        return None
    observed = dict(obs_dict)
    for name, shape in policy.obs_shapes.items():
        if observed[name].ndim == len(shape) + 1:  # one frame, without a dimension of time
            observed[name] = observed[name].unsqueeze(1)
    encoder = _robomimic_nets(policy)["policy"]["obs_encoder"]
    inputs = {"obs": observed, "goal": goal_dict}
    features = utilities.time_distributed(inputs, encoder, inputs_as_kwargs=True)
    shape = (len(features), policy.algo_config.horizon.prediction_horizon, policy.ac_dim)
    return LoopCall(shape, {"global_cond": features.flatten(start_dim=1)})


def _robomimic_actions(policy: Any, sample: Tensor, obs_dict: Any, goal_dict: Any = None) -> Tensor:
    horizon = policy.algo_config.horizon
    first = horizon.observation_horizon - 1
    return sample[:, first : first + horizon.action_horizon]


def _transformer_of_lerobot(policy: Any, batch: Any) -> LoopCall | None:
    state = batch["observation.state"]
    if state.shape[1] != policy.config.n_obs_steps:
        return None
    objective, vector = policy.objective, policy.observation_encoder.encode(batch)
    shape = (state.shape[0], objective.horizon, objective.action_dim)
    return LoopCall(shape, {"conditioning_vec": vector})


def _actions_of_lerobot(policy: Any, sample: Tensor, batch: Any) -> Tensor:
    first = policy.config.n_obs_steps - 1
    return sample[:, first : first + policy.config.n_action_steps]


def _flow_of_lerobot(policy: Any) -> StepTable:
    config = policy.objective.config
    times = torch.linspace(0, 1, config.num_integration_steps + 1, device="cpu").tolist()
    return flow_matching(times, config.integration_method)


def _flow_network(policy: Any) -> nn.Module | None:
    objective = find(policy, "objective")
    flows = objective is not None and not hasattr(objective, "noise_scheduler")
    return policy.noise_predictor if flows else None


def _flow_policy_network(policy: Any) -> nn.Module | None:
    of_it = ("num_inference_step", "num_segments", "eps", "obs_encoder")
    return policy.model if all(hasattr(policy, name) for name in of_it) else None


def _flow_policy(policy: Any, obs_dict: Any) -> LoopCall:
    if not policy.obs_as_global_cond:
        raise ValueError("it is conditioned by inpainting")
    observed = policy.normalizer.normalize(obs_dict)
    if not policy.use_pc_color:
        observed["point_cloud"] = observed["point_cloud"][..., :3]
    batch, count = len(next(iter(observed.values()))), policy.n_obs_steps
    frames = {name: value[:, :count].flatten(0, 1) for name, value in observed.items()}
    features = policy.obs_encoder(frames)
    sequence = "cross_attention" in policy.condition_type
    cond = features.reshape(batch, count, -1) if sequence else features.reshape(batch, -1)
    return LoopCall((batch, policy.horizon, policy.action_dim), {"global_cond": cond})


def _flow_policy_actions(policy: Any, sample: Tensor, obs_dict: Any) -> dict[str, Tensor]:
    actions = policy.normalizer["action"].unnormalize(sample[..., : policy.action_dim])
    first = policy.n_obs_steps - 1
    return {"action": actions[:, first : first + policy.n_action_steps], "action_pred": actions}


def _flow_policy_steps(policy: Any) -> StepTable:
    count, eps = policy.num_inference_step, policy.eps
    table = flow_matching(count, draws_noise=True)  # of weight zero
    times = [99 * (step / count * (1 - eps) + eps) for step in range(count)]
    # It is made in the order of the network's output. A GPU's generator moves alike in any order.
    transposed = next(policy.model.parameters()).device.type == "cpu"
    moments = torch.tensor(times, dtype=torch.float32, device="cpu")
    return replace(table, timesteps=moments, transposed=(transposed,) * count)


_MULTI_TASK_DIT: dict[str, Any] = {
    "method": "_generate_actions",
    "begin": _transformer_of_lerobot,
    "end": _actions_of_lerobot,
    "changing": ("_queues",),
    "holders": ("config", "objective"),
}
_RTI: dict[str, Any] = {
    "network": "model",
    "needs": CONDITIONED,
    "knows": CONDITIONED | {"kwargs"},
    "changing": ("guess", "initial_guess"),
}
KNOWN = (
    Loop(
        "conditional_sample",
        _unet_or_model,
        _lerobot,
        needs=frozenset({"batch_size", "global_cond", "generator"}),
        knows=frozenset({"batch_size", "global_cond", "generator", "noise"}),
    ),
    Loop(
        "conditional_sample",
        _unet_or_model,
        _original,
        needs=CONDITIONED,
        knows=CONDITIONED | _OF_A_CLOUD | {"kwargs"},
    ),
    Loop(  # diffusion_policy's transformers
        "conditional_sample",
        "model",
        _original,
        needs=ORIGINAL | {"cond"},
        knows=ORIGINAL | {"cond", "kwargs"},
    ),
    Loop("initial_sample", begin=_original, **_RTI),
    Loop(
        "rti_sample",
        begin=_from_last_chunk,
        table=_chosen_steps,
        holders=("noise_scheduler",),  # whose timesteps are a setting here
        **_RTI,
    ),
    Loop(
        "get_action",
        "noise_pred_net",
        _maniskill,
        _maniskill_actions,
        steps=None,
        no_grad=True,
    ),
    Loop(
        "_get_action_trajectory",
        _robomimic_network,
        _robomimic,
        _robomimic_actions,
        steps=_robomimic_steps,
        changing=("action_queue", "obs_queue", "action_check_done", "_step_counter"),
        needs=frozenset({"obs_dict", "goal_dict"}),
    ),
    Loop(
        **_MULTI_TASK_DIT,
        network="noise_predictor",
        scheduler="objective.noise_scheduler",
        steps="objective.num_inference_steps",
    ),
    Loop(**_MULTI_TASK_DIT, network=_flow_network, table=_flow_of_lerobot),
    Loop(
        "predict_action",
        _flow_policy_network,
        _flow_policy,
        _flow_policy_actions,
        table=_flow_policy_steps,
        needs=frozenset({"obs_dict"}),
    ),
    CONSISTENCY,
    KARRAS,
    DPPO,
    STREAMING,
    DIFFUSER,
    CLEAN_DDPM,
    CLEAN_SDE,
    CLEAN_EDM,
)
