"""Times policies' loops on one GPU, plain beside accelerated: the tables of docs/works-with.md.

    python test/support/measure_loops.py [--float32] [--only PATTERN] [--profile PATTERN]

Policies have the structure of the originals (``near_policies``, ``other_policies``, ``planners``),
random weights and published sizes: channels 256/512/1024, horizon 16, one sample. A time is from
the call to the result on the device, a median; plain policies compute in float32 without TF32.
Errors are those of three calls against the plain policy, in the norm, the largest. A row says how
many times as fast as the plain policy the accelerated one is in bfloat16, and what is required.
"""

import argparse
import copy
import cProfile
import io
import pstats
import re
import statistics
import time
import warnings

import near_copies as copies
import near_policies as near
import other_policies as others
import planners
import torch
from policies import diffusers

import dpa
from dpa.acceleration.policy_loop import FastLoop
from dpa.acceleration.survey import replacements
from dpa.tracking.replacing import replaced

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where only whether it runs is of interest
WIDE, SIZE = (256, 512, 1024), {"step": 128, "dims": (256, 512, 1024)}
UNET = {"diffusion_step_embed_dim": 128, "down_dims": WIDE}
HORIZON = 16


class OwnLoop(torch.nn.Module):
    """A loop that dpa does not know: the network in a `for` of the user's own."""

    def __init__(self, network, steps, call):
        super().__init__()
        self.model, self.steps, self.call = others.awake(network), steps, call

    def act(self, state):
        x = torch.randn(len(state), HORIZON, 2, device=state.device)
        for step in reversed(range(self.steps)):
            t = torch.full((len(state),), step, device=state.device)
            x = x - 0.1 * self.call(self.model, x, t, state)
        return x


class NomadLoop(torch.nn.Module):
    """NoMaD's: the loop of its programs, outside of the model, so that each step is accelerated."""

    def __init__(self):
        super().__init__()
        sizes = {"diffusion_step_embed_dim": 256, "down_dims": (64, 128, 256), "kernel_size": 3}
        unet = dpa.nn.ConditionalUnet1D(2, global_cond_dim=256, cond_predict_scale=False, **sizes)
        self.model = others.awake(dpa.reference.plain(unet))
        options = {"beta_schedule": "squaredcos_cap_v2", "clip_sample": True}
        self.noise_scheduler = diffusers.DDPMScheduler(10, **options)

    def act(self, state):
        x = torch.randn(len(state), 8, 2, device=state.device)
        cond = state.flatten(1).repeat(1, 43)[:, :256]
        self.noise_scheduler.set_timesteps(10)
        for k in self.noise_scheduler.timesteps:
            times = k.unsqueeze(-1).repeat(len(x)).to(x.device)
            out = self.model(sample=x, timestep=times, global_cond=cond)
            x = self.noise_scheduler.step(model_output=out, timestep=k, sample=x).prev_sample
        return x


class Scheduled(torch.nn.Module):
    """diffusion_policy's loop, around a network and with a scheduler of diffusers."""

    def __init__(self, network, scheduler, steps, **options):
        super().__init__()
        self.model, self.normalizer = others.awake(network), torch.nn.Linear(1, 1)
        with torch.device("cpu"):  # diffusers makes its tables by NumPy
            self.noise_scheduler = getattr(diffusers, f"{scheduler}Scheduler")(100, **options)
        self.num_inference_steps = steps

    def conditional_sample(
        self, condition_data, condition_mask, local_cond=None, global_cond=None, generator=None
    ):
        data, mask = condition_data, condition_mask
        x = torch.randn(data.shape, device=data.device, generator=generator)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            x[mask] = data[mask]
            out = self.model(x, t, local_cond=local_cond, global_cond=global_cond)
            x = self.noise_scheduler.step(out, t, x).prev_sample
        x[mask] = data[mask]
        return x

    def predict_action(self, obs_dict):
        cond = obs_dict["obs"][:, :2].flatten(1)
        data = torch.zeros(len(cond), HORIZON, 2, device=cond.device)
        actions = self.conditional_sample(data, data.bool(), global_cond=cond)
        return {"action": actions[:, 1:9], "action_pred": actions}


def original(**sizes):
    return dpa.reference.plain(dpa.nn.ConditionalUnet1D(2, None, 6, **(UNET | sizes)))


def consistent(kind, network, *args, **options):
    policy = kind(*args, **options)
    policy.model, policy.horizon = others.awake(network(2, 6, **SIZE)), HORIZON
    return policy


def diffusing(network, **options):
    policy = near.DiffusionModel(network=network, **options)
    policy.horizon_steps = HORIZON
    return policy


def streaming(actions):
    policy = near.StreamingPolicy(steps=100, actions=actions)
    network = copies.StreamingPolicy(2, 6, horizon=HORIZON, **SIZE)
    policy.model, policy.horizon = others.awake(network), HORIZON
    return policy


def agent(kind, *args, **options):
    policy = getattr(planners, kind)(*args, **options)
    network = others.awake(copies.ChiUnet(2, 3, 2, WIDE, 128))
    parts = {"diffusion": network, "condition": planners.Identity()}
    policy.model = torch.nn.ModuleDict(parts)
    policy.model_ema = copy.deepcopy(policy.model).requires_grad_(False).eval()
    if kind == "DDPM":
        ends = torch.ones(1, HORIZON, 2)
        policy.x_max, policy.x_min = ends, -ends
    policy.options["sample_steps"] = 10
    return policy


def plan(policy, state):
    prior = torch.zeros(len(state), HORIZON, 2, device=state.device)
    given = {"n_samples": len(state), "condition_cfg": state, "w_cfg": 1.0}
    return policy.sample(prior=prior, **given, **policy.options)[0]


def diffuser(attention=False):
    policy = planners.GaussianDiffusion(20, attention=attention)
    network = copies.TemporalUnet(5, 32, (1, 4, 8), attention)
    policy.model, policy.horizon = others.awake(network), 32
    return policy


def transformer(kind, steps):
    """The lowdim policy of PushT: 8 layers of 256."""
    network = others.Transformer(256, 8, 4, HORIZON, observed=3)
    policy = Conditioned(kind, network)
    policy.noise_scheduler = getattr(diffusers, f"{kind}Scheduler")(100)
    policy.num_inference_steps = steps
    return policy


class Conditioned(others.TransformerPolicy):
    """The same policy over a horizon of 16."""

    def predict_action(self, obs_dict):
        cond = obs_dict["obs"][:, :2]
        data = torch.zeros(len(cond), HORIZON, 2, device=cond.device)
        actions = self.conditional_sample(data, data.bool(), cond=cond)
        return {"action": actions[:, 1:9], "action_pred": actions}


def dit(objective, steps):
    """LeRobot's defaults: 6 layers of 512, 8 heads, horizon 32."""
    network = others.DiT(512, 6, 8, vector=6, time=256)
    policy = others.MultiTaskDiT(objective, network)
    policy.objective.horizon = 32
    policy.config.num_integration_steps = policy.objective.num_inference_steps = steps
    return policy


def lerobots_dit(objective, steps):
    """LeRobot's own class with its defaults, its encoders' 2572 features made of the state."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.multi_task_dit import modeling_multi_task_dit as modeling
    from lerobot.policies.multi_task_dit.configuration_multi_task_dit import MultiTaskDiTConfig

    flow = objective == "euler"
    config = MultiTaskDiTConfig(
        input_features={"observation.state": PolicyFeature(FeatureType.STATE, (3,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
        objective="flow_matching" if flow else "diffusion",
        noise_scheduler_type="DDIM",
        num_inference_steps=steps,
        num_integration_steps=steps,
        device="cpu",
    )
    policy = modeling.MultiTaskDiTPolicy.__new__(modeling.MultiTaskDiTPolicy)
    torch.nn.Module.__init__(policy)
    policy.config, policy.observation_encoder = config, Features()
    network = modeling.DiffusionTransformer(config, conditioning_dim=Features.SIZE)
    for block in network.transformer_blocks:
        torch.nn.init.normal_(block.adaLN_modulation[-1].weight, std=0.02)
    kind = modeling.FlowMatchingObjective if flow else modeling.DiffusionObjective
    policy.noise_predictor = others.awake(network)
    policy.objective = kind(config, action_dim=2, horizon=config.horizon)
    policy.reset()
    return policy


class Features(torch.nn.Module):
    """As many features as CLIP's encoders of two cameras and a text give."""

    SIZE = 2572

    def encode(self, batch):
        state = batch["observation.state"].flatten(1)
        return state.repeat(1, -(-self.SIZE // state.shape[1]))[:, : self.SIZE]


def _chunk(policy, state):
    for queue in policy._queues.values():
        queue.extend(state.unbind(1))
    return policy.predict_action_chunk({"observation.state": state})


def rti():
    policy = others.RtiPolicy()
    policy.model = others.awake(original())
    return policy


def flow():
    policy = others.FlowPolicy(3)
    network = dpa.nn.ConditionalUnet1D(2, None, 12, **UNET)
    policy.model, policy.horizon = others.awake(dpa.reference.plain(network)), HORIZON
    return policy


def maniskill():
    policy = others.ManiSkillAgent()
    network = original(diffusion_step_embed_dim=64, down_dims=(64, 128, 256))
    policy.noise_pred_net, policy.pred_horizon = others.awake(network), HORIZON
    return policy


def robomimic():
    """Its own class, of its defaults' sizes, with ten steps of DDIM."""
    import robomimic.utils.obs_utils as observations
    from robomimic.algo import algo_factory
    from robomimic.config import config_factory

    config = config_factory("diffusion_policy")
    with config.unlocked():
        config.observation.modalities.obs.low_dim = ["position"]
        config.algo.ddpm.enabled, config.algo.ddim.enabled = False, True
        config.algo.ddim.num_inference_timesteps = 10
        config.algo.optim_params.policy.learning_rate.scheduler_type = "multistep"
    observations.initialize_obs_utils_with_config(config)
    policy = algo_factory(config.algo_name, config, {"position": [3]}, 2, torch.device(DEVICE))
    policy.set_eval()
    policy.ema_nets.eval()
    others.awake(policy.ema_nets)
    return policy


def _obs(state):
    return {"obs": state}


def _state(state):
    return {"state": state}


def _cloud(state):
    return {"point_cloud": state[:, :, None].repeat(1, 1, 64, 2), "agent_pos": state[..., :2]}


def _predicts(wrap):
    return lambda policy, state: policy.predict_action(wrap(state))


def _acts(policy, state):
    return policy.act(state)


def _diffuser(policy, state):
    return policy({0: state[:, 0], policy.horizon - 1: state[:, 1]}, verbose=False).trajectories


def chi_alone():
    network = copies.ChiUnet(2, 3, 2, WIDE, 128)
    return OwnLoop(network, 10, lambda model, x, t, state: model(x, t, state))


def unet_alone():
    def call(model, x, t, state):
        return model(x, t, None, state.flatten(1))

    return OwnLoop(original(), 20, call)


def dppo_alone():
    def call(model, x, t, state):
        return model(x, t, {"state": state})

    return OwnLoop(copies.DPPO(2, 6, **SIZE), 10, call)


DTYPES = torch.float32, torch.bfloat16
KARRAS = {"use_karras_sigmas": True}
RELU = {"film": "film", "act": torch.nn.ReLU, **SIZE}
LARGE = {"film": "large", "cond_mlp_dims": None, **SIZE}
# Name: the policy, how it is called.
ROWS = {
    "Consistency Policy, 1 step": (
        lambda: consistent(near.ConsistencyPolicy, copies.ConsistencyPolicy),
        _predicts(_state),
    ),
    "Consistency Policy, 3 steps": (
        lambda: consistent(near.ConsistencyPolicy, copies.ConsistencyPolicy, ["D", 27, 54]),
        _predicts(_state),
    ),
    "TransformerForDiffusion, DDIM 10": (lambda: transformer("DDIM", 10), _predicts(_obs)),
    "multi_task_dit, DDIM 10": (
        lambda: dit("DDIM", 10),
        lambda policy, state: policy.predict_action_chunk({"observation.state": state}),
    ),
    "multi_task_dit, Euler 10": (
        lambda: dit("euler", 10),
        lambda policy, state: policy.predict_action_chunk({"observation.state": state}),
    ),
    "ChiUNet1d alone, 10 steps": (chi_alone, _acts),
    "DPPO's network alone, 10 steps": (dppo_alone, _acts),
    "the original network alone, 20 steps": (unet_alone, _acts),
    "CleanDiffuser, DDPM 10": (lambda: agent("DDPM", 10), plan),
    "CleanDiffuser, DDIM 10": (lambda: agent("DiscreteDiffusionSDE", "ddim"), plan),
    "CleanDiffuser, DPM-Solver++ 2M 10": (
        lambda: agent("DiscreteDiffusionSDE", "ode_dpmsolver++_2M"),
        plan,
    ),
    "CleanDiffuser, EDM Euler 10": (lambda: agent("EDM"), plan),
    "DPPO, DDIM 10, one MLP": (
        lambda: diffusing(copies.DPPO(2, 6, **SIZE | {"film": "film"}), steps=20, ddim_steps=10),
        _acts,
    ),
    "DPPO, DDIM 5, three MLPs": (
        lambda: diffusing(copies.DPPO(2, 6, **LARGE), steps=20, ddim_steps=5),
        _acts,
    ),
    "DPPO, DDIM 10, ReLU": (
        lambda: diffusing(copies.DPPO(2, 6, **RELU), steps=20, ddim_steps=10),
        _acts,
    ),
    "DPPO, DDPM 20, an MLP": (lambda: near.DiffusionModel(20, network=near.ActorMlp()), _acts),
    "Consistency Policy's teacher, 5 steps of Heun": (
        lambda: consistent(near.KarrasPolicy, copies.DP3, bins=6),
        _predicts(_state),
    ),
    "Streaming, 1 action": (lambda: streaming(1), _predicts(_obs)),
    "RTI-DP, 3 steps": (rti, _predicts(_obs)),
    "FlowPolicy, 3 steps": (flow, _predicts(_cloud)),
    "ManiSkill, DDPM 10": (maniskill, lambda policy, state: policy.get_eval_action(state)),
    "NoMaD, DDPM 10": (NomadLoop, _acts),
    "robomimic, DDIM 10": (
        robomimic,
        lambda policy, state: policy._get_action_trajectory({"position": state}),
    ),
    "DP3, mlp_film, DDIM 10": (
        lambda: Scheduled(copies.DP3(2, 6, film="mlp_film", **SIZE), "DDIM", 10),
        _predicts(_obs),
    ),
    "Simple DP3, DDIM 10": (
        lambda: Scheduled(copies.DP3(2, 6, per_level=1, **SIZE), "DDIM", 10),
        _predicts(_obs),
    ),
    "FlowPolicy's network, DDIM 10": (
        lambda: Scheduled(copies.DP3(2, 6, var_est=True, **SIZE), "DDIM", 10),
        _predicts(_obs),
    ),
    "own loop, UniPC 10": (
        lambda: Scheduled(original(), "UniPCMultistep", 10),
        _predicts(_obs),
    ),
    "own loop, Euler 10": (
        lambda: Scheduled(original(), "EulerDiscrete", 10, **KARRAS),
        _predicts(_obs),
    ),
    "Diffuser, 20 steps": (diffuser, _diffuser),
    "Diffuser with attention, 20 steps": (lambda: diffuser(True), _diffuser),
    "LeRobot's own multi_task_dit, DDIM 10": (lambda: lerobots_dit("DDIM", 10), _chunk),
    "LeRobot's own multi_task_dit, Euler 10": (lambda: lerobots_dit("euler", 10), _chunk),
    "Streaming, 8 actions": (lambda: streaming(8), _predicts(_obs)),
    "TransformerForDiffusion, DDPM 100": (lambda: transformer("DDPM", 100), _predicts(_obs)),
}


# What issue 26 requires, in times the plain policy's speed, by what a row's name holds.
REQUIRED = {"Transformer": 5, "multi_task_dit": 5, "alone": 8, "NoMaD": 8, "": 15}


def first_tensor(result):
    return next(iter(result.values())) if isinstance(result, dict) else result


def synchronize():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(run, budget):
    """Return the median time of a call to its result, and of the host's part, in ms."""
    times, hosts, end = [], [], time.perf_counter() + budget
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        synchronize()
        start = time.perf_counter()
        run()
        middle = time.perf_counter()
        synchronize()
        times.append(1e3 * (time.perf_counter() - start))
        hosts.append(1e3 * (middle - start))
    return statistics.median(times), statistics.median(hosts)


def made(make):
    """A policy on the GPU; its tensors that the projects make elsewhere go there with it."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        policy = make()
    return policy.to(DEVICE).eval() if isinstance(policy, torch.nn.Module) else policy


def acting(policy, call, observed):
    """Forget what the last episode left, then act."""
    results = []
    for index, seen in enumerate(observed):
        torch.manual_seed(index)
        results.append(first_tensor(call(policy, seen)).float().cpu())
    return results


def start_over(policy):
    if "initial_guess" in vars(policy):
        policy.initial_guess, policy.guess = True, None
    if hasattr(policy, "reset_buffer"):
        policy.reset_buffer()


def what_runs(policy):
    """Say what replays: the whole call, or the loop, and that no trace stands for its network."""
    loops = [held for held in replacements(policy).values() if isinstance(held, FastLoop)]
    untraced = [loop.untraced() for loop in loops if loop.untraced() is not None]
    if untraced:
        return f"untraced: {untraced[0]}"
    for method in ("predict_action", "generate_actions"):
        if (whole := replaced(policy, method)) is not None and hasattr(whole, "captured"):
            return "whole" if whole.captured else f"parts: {whole.refused}"
    return ""


def profiled(run, calls=200):
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(calls):
        run()
    profile.disable()
    synchronize()
    out = io.StringIO()
    pstats.Stats(profile, stream=out).sort_stats("tottime").print_stats(28)
    lines = [line for line in out.getvalue().splitlines() if line.strip()]
    print("\n".join(line.replace("/python/", "/")[:110] for line in lines[2:]), flush=True)


def measured(name, make, call, options):
    """Print a row: plain, float32 and bfloat16 in ms, and the errors of both."""
    torch.manual_seed(1)
    observed = [torch.randn(1, 2, 3, device=DEVICE) for _ in range(4)]
    plain = made(make)
    expected = acting(plain, call, observed)
    start_over(plain)
    plain_ms, row, notes = timed(lambda: call(plain, observed[0]), options.plain)[0], {}, []
    for dtype in DTYPES if options.float32 else DTYPES[1:]:
        start_over(plain)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fast = dpa.accelerate(copy.deepcopy(plain), dtype=dtype, tolerance=0.5)
            if isinstance(fast, NomadLoop):  # whose loop is the program's own
                dpa.accelerate(fast.noise_scheduler)
            got = acting(fast, call, observed)
            whole, host = timed(lambda fast=fast: call(fast, observed[0]), options.fast)
        error = max(
            float((a - b).norm() / b.norm()) for a, b in zip(got[1:], expected[1:], strict=True)
        )
        row[dtype] = whole, error
        notes.append(f"host {host:.2f} {what_runs(fast)}")
        notes += {str(warning.message)[:160] for warning in caught}
        if options.profile and re.search(options.profile, name) and dtype == torch.bfloat16:
            profiled(lambda fast=fast: call(fast, observed[0]))
        del fast
    required = next(ratio for part, ratio in REQUIRED.items() if part in name)
    times = [f"{row[dtype][0]:.3g}" if dtype in row else "" for dtype in DTYPES]
    errors = [f"{row[dtype][1]:.0e}" if dtype in row else "" for dtype in DTYPES]
    cells, ratio = [name, f"{plain_ms:.3g}", *times, *errors], plain_ms / row[torch.bfloat16][0]
    missed = "" if ratio >= required else " MISSED"
    print("|", " | ".join(cells), f"| {ratio:.1f}x of {required}x{missed} {notes}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--without", default="^$")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--plain", type=float, default=0.3, help="seconds of plain calls")
    parser.add_argument("--fast", type=float, default=0.1, help="seconds of accelerated calls")
    parser.add_argument("--float32", action="store_true", help="float32 besides bfloat16")
    parser.add_argument("--profile")
    options = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    end = time.perf_counter() + options.seconds
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(name, torch.__version__, dpa.__file__, flush=True)
    for name, (make, call) in ROWS.items():
        chosen = re.search(options.only, name) and not re.search(options.without, name)
        if not chosen or time.perf_counter() > end:
            continue
        try:
            with torch.no_grad():
                measured(name, make, call, options)
        except Exception as error:  # the other rows still count
            print(f"| {name} | {type(error).__name__}: {str(error)[:300]}", flush=True)


if __name__ == "__main__":
    main()
