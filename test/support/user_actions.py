"""What users do to policies, in small: each action on an accelerated policy and on its plain twin.

An action takes a policy and a ``random.Random``, and does the same to both twins for equal seeds.
"""

import contextlib
import copy
import inspect
import pickle
from types import SimpleNamespace

import torch
from encoder_actions import ACTIONS as ENCODER_ACTIONS
from encoder_actions import DiffusionRgbEncoder
from policies import (
    AroundLeRobots,
    OriginalPolicy,
    diffusers,
    lerobot_policy,
    lerobot_unet,
)
from torch import nn

import dpa

TINY = {"diffusion_step_embed_dim": 8, "down_dims": (8, 16), "n_groups": 4}
LAYERS = (nn.Conv1d, nn.ConvTranspose1d, nn.Linear, nn.GroupNorm, nn.Conv2d, nn.BatchNorm2d)
_PARTS = ("unet.", "model.", "encoder.")  # of policies: what is accelerated


class Guided(OriginalPolicy):
    """A loop with an argument, attributes and a buffer of its own."""

    def __init__(self, *args):
        super().__init__(*args)
        self.offset, self.held = 0.0, SimpleNamespace(offset=0.0)
        self.register_buffer("shift", torch.zeros(()))

    def conditional_sample(
        self, condition_data, condition_mask, local_cond=None, global_cond=None, generator=None,
        guidance=0.0, **kwargs,
    ):  # fmt: skip
        x = super().conditional_sample(
            condition_data, condition_mask, local_cond, global_cond, generator, **kwargs
        )
        return x + guidance + self.offset + self.held.offset + self.shift


def _scheduler(kind="DDIM", **options):
    return getattr(diffusers, f"{kind}Scheduler")(12, beta_schedule="squaredcos_cap_v2", **options)


def _arguments(**more):
    return {"input_dim": 2, "global_cond_dim": 3, **TINY, **more}


def make_policies(kind):
    """A policy, and what its twin is: its copy, or for dpa's network the same in plain layers."""
    torch.manual_seed(0)
    if kind == "lerobot":
        policy = lerobot_policy(num_inference_steps=2, noise_scheduler_type="DDIM", **TINY)
        policy.diffusion.noise_scheduler.register_to_config(prediction_type="epsilon")
        return policy.diffusion, copy.deepcopy(policy.diffusion)
    if kind == "around":
        policy = AroundLeRobots(lerobot_unet(_arguments()), _scheduler(), 2).eval()
        return policy, copy.deepcopy(policy)
    scale = {"cond_predict_scale": kind == "guided"}
    unet = dpa.nn.ConditionalUnet1D(**_arguments(**scale))
    plain = dpa.reference.plain(unet)
    made = Guided if kind == "guided" else OriginalPolicy
    fast = unet if kind == "dpa.nn" else copy.deepcopy(plain)
    policies = [made(one, _scheduler(), 2) for one in (fast, plain)]
    if kind == "images":
        policies[0].encoder = DiffusionRgbEncoder(3)
        policies[1].encoder = copy.deepcopy(policies[0].encoder)
    policies = [policy.eval() for policy in policies]
    policies[1].normalizer = copy.deepcopy(policies[0].normalizer)
    return tuple(policies)


def network(policy):
    return policy.unet if hasattr(policy, "unet") else policy.model


def layers(policy, kinds=LAYERS):
    """The layers by path, in an order that does not depend on when they were put there."""
    modules = [(p, m) for p, m in policy.named_modules() if p.startswith(_PARTS)]
    return sorted(((p, m) for p, m in modules if isinstance(m, kinds)), key=lambda pair: pair[0])


def _weights(policy):
    return [p for name, p in sorted(policy.named_parameters()) if name.startswith(_PARTS)]


def _numbers(like, random, scale=0.1):
    generator = torch.Generator().manual_seed(random.randrange(1000))
    numbers = torch.randn(like.shape, generator=generator, dtype=torch.float64) * scale
    return numbers.to(like.device, like.dtype)


def _put(policy, path, layer):
    parent, _, name = path.rpartition(".")
    setattr(policy.get_submodule(parent), name, layer)


def _like(layer, new):
    parameter = next(layer.parameters(), torch.zeros(()))
    return new.to(parameter.device, parameter.dtype).train(layer.training)


class Times(nn.Module):
    """A layer and a factor."""

    def __init__(self, layer, factor):
        super().__init__()
        self.layer, self.factor = layer, factor

    def forward(self, *args):
        return self.layer(*args) * self.factor


# Weights.
def _optimizer_step(make):
    def act(policy, random):
        weights = [p for p in _weights(policy) if p.requires_grad]
        for p in weights:
            p.grad = _numbers(p, random, 1.0)
        if weights:
            make(weights).step()
        for p in weights:
            p.grad = None

    return act


def _load(assign):
    def act(policy, random):
        state = {k: v + _numbers(v, random) for k, v in sorted(policy.state_dict().items())}
        policy.load_state_dict(state, assign=assign)

    return act


def _load_some(policy, random):
    state = sorted(policy.state_dict().items())
    some = random.sample(state, min(3, len(state)))
    policy.load_state_dict({k: v * 1.5 for k, v in some}, strict=False)


def _write(place):
    """A write through .data of one place: a row, a channel, a tap, one element of a vector."""

    def act(policy, random):
        weights = [p for p in _weights(policy) if p.dim() > (place is not None and place >= 0)]
        if place is not None and place < 0:
            weights = [p for p in weights if p.dim() == 1]
        weights = [p for p in weights if place is None or place < p.dim()]
        if not weights:
            return
        data = random.choice(weights).data
        if place is None:
            data.add_(_numbers(data, random))
        elif place < 0:
            data[random.randrange(len(data))] += 1.0
        else:
            data.select(place, random.randrange(data.shape[place])).add_(0.5)

    return act


def _write_inside(policy, random):
    """One element anywhere: only for weights="checked"."""
    p = random.choice(_weights(policy)).data
    p[tuple(random.randrange(n) for n in p.shape)] += 1.0


def _write_in_place(policy, random):
    p = random.choice(_weights(policy))
    with torch.no_grad():
        p[tuple(random.randrange(n) for n in p.shape)] += 1.0


def _new_data(policy, random):
    p = random.choice(_weights(policy))
    p.data = p.data + _numbers(p, random)


def _new_parameter(policy, random):
    _, layer = random.choice(layers(policy))
    if layer._parameters.get("weight") is not None:
        layer.weight = nn.Parameter(layer.weight.detach() + _numbers(layer.weight, random))


def _flat(policy, random):
    """Parameters become views of one vector, which is written afterwards."""
    weights = _weights(policy)
    if {(p.dtype, p.device) for p in weights} != {(weights[0].dtype, weights[0].device)}:
        return
    vector = nn.utils.parameters_to_vector(weights).detach().clone()
    nn.utils.vector_to_parameters(vector, weights)
    vector.mul_(1.02)


def _swap(policy, random):
    pairs = {}
    for p in _weights(policy):
        pairs.setdefault((p.shape, p.dtype), []).append(p)
    a, b = random.sample(random.choice([v for v in pairs.values() if len(v) > 1]), 2)
    a.data, b.data = b.data, a.data


def _average(policy, random):
    for p in _weights(policy):
        p.data.copy_(p.data * 0.9 + _numbers(p, random, 0.01))


def _freeze(policy, random):
    p = random.choice(_weights(policy))
    p.requires_grad_(not p.requires_grad)


# Modules and their settings.
def _wrap(policy, random):
    path, layer = random.choice(layers(policy))
    _put(policy, path, _like(layer, Times(layer, 1.25)))


def _unwrap(policy, random):
    for path, wrapped in layers(policy, Times):
        _put(policy, path, wrapped.layer)


def _factor(policy, random):
    for _, wrapped in layers(policy, Times):
        wrapped.factor = random.choice((0.75, 1.0, 1.5))


def _sequential(policy, random):
    path, layer = random.choice(layers(policy))
    _put(policy, path, nn.Sequential(layer))


def _replace(policy, random):
    path, layer = random.choice(layers(policy))
    new = copy.deepcopy(layer)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(_numbers(p, random))
    _put(policy, path, new)


def _activation(policy, random):
    found = layers(policy, (nn.Mish, nn.SiLU))
    path, layer = random.choice(found)
    _put(policy, path, (nn.SiLU if isinstance(layer, nn.Mish) else nn.Mish)().train(layer.training))


def _eps(policy, random):
    norms = layers(policy, nn.GroupNorm)
    random.choice(norms)[1].eps = random.choice((1e-5, 1e-2, 0.5))


def _groups(policy, random):
    norms = layers(policy, nn.GroupNorm)
    random.choice(norms)[1].num_groups = random.choice((2, 4))


def _own_forward(policy, random):
    _, layer = random.choice(layers(policy))
    if "forward" in vars(layer):
        del layer.forward
    else:
        own = layer.forward
        layer.forward = lambda x: own(x) * 1.25


def _parametrize(policy, random):
    _, layer = random.choice(layers(policy, (nn.Conv1d, nn.Conv2d, nn.Linear)))
    if not nn.utils.parametrize.is_parametrized(layer) and "weight" in layer._parameters:
        nn.utils.parametrizations.weight_norm(layer)
        layer.parametrizations.weight.original0.data.mul_(1.1)


# Hooks. They are kept on the policy, so that copies share what a later action removes.
def _hook(register):
    def act(policy, random):
        found = [network(policy), *(layer for _, layer in layers(policy))]
        register(random.choice(found))

    return act


def _louder(module, args, result):
    return result * 1.25


def _quieter(module, args):
    return (args[0] * 0.75, *args[1:])


def _unhook(policy, random):
    for module in policy.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        module._backward_hooks.clear()


# Schedulers.
def _steps(policy, random):
    policy.num_inference_steps = random.choice((1, 2, 3))


def _new_scheduler(policy, random):
    kind, options = random.choice(
        [
            ("DDIM", {}),
            ("DDIM", {"prediction_type": "sample"}),
            ("DDIM", {"clip_sample": False, "timestep_spacing": "linspace"}),
            ("DDPM", {}),
            ("DDPM", {"variance_type": "fixed_large", "prediction_type": "v_prediction"}),
            ("DPMSolverMultistep", {}),
            ("DDIM", {"thresholding": True}),
        ]
    )
    policy.noise_scheduler = _scheduler(kind, **options)


def _configure(policy, random):
    name, value = random.choice(
        [
            ("prediction_type", "sample"),
            ("prediction_type", "epsilon"),
            ("prediction_type", "v_prediction"),
            ("clip_sample", False),
            ("clip_sample", True),
            ("timestep_spacing", "trailing"),
        ]
    )
    if name in policy.noise_scheduler.config:
        policy.noise_scheduler.register_to_config(**{name: value})


def _set_timesteps(policy, random):
    policy.noise_scheduler.set_timesteps(random.choice((2, 3, 5)))


def _levels(policy, random):
    scheduler = policy.noise_scheduler
    if random.random() < 0.5:
        scheduler.alphas_cumprod = scheduler.alphas_cumprod**1.1
    else:
        scheduler.alphas_cumprod.pow_(1.1)


def _has_own_step(scheduler):
    """Whether a user's function took the place of the step, and not what accelerates it."""
    return inspect.isfunction(vars(scheduler).get("step"))


def _own_step(policy, random):
    scheduler = policy.noise_scheduler
    if _has_own_step(scheduler) or isinstance(scheduler, diffusers.DPMSolverMultistepScheduler):
        return
    own = scheduler.step

    def step(output, *args, **kwargs):
        return own(output * 0.9, *args, **kwargs)

    scheduler.step = step


def _no_own_step(policy, random):
    if _has_own_step(policy.noise_scheduler):
        del policy.noise_scheduler.step


def _offset(policy, random):
    if hasattr(policy, "offset"):
        policy.offset = random.choice((0.0, 1.0))


def _held_offset(policy, random):
    if hasattr(policy, "held"):
        policy.held.offset = random.choice((0.0, 1.0))


def _shift(policy, random):
    if hasattr(policy, "shift"):
        policy.shift.fill_(random.choice((0.0, 1.0)))


# Modes and dtypes.
def _to(dtype):
    return lambda policy, random: policy.to(dtype)


def _move(policy, random):
    """To the other device, where there is one."""
    if torch.cuda.is_available():
        here = next(network(policy).parameters()).device.type
        policy.to("cuda" if here == "cpu" else "cpu")


def _mode(policy, random):
    network(policy).train(not network(policy).training)


def _mode_of_one(policy, random):
    random.choice(layers(policy))[1].train(random.random() < 0.5)


ACTIONS = {
    "SGD": _optimizer_step(lambda p: torch.optim.SGD(p, lr=0.03)),
    "AdamW": _optimizer_step(lambda p: torch.optim.AdamW(p, lr=0.03)),
    "fused AdamW": _optimizer_step(lambda p: torch.optim.AdamW(p, lr=0.03, fused=True)),
    "load": _load(False),
    "load and assign": _load(True),
    "load some": _load_some,
    "write all": _write(None),
    "write a row": _write(0),
    "write a channel": _write(1),
    "write a tap": _write(2),
    "write one of a vector": _write(-1),
    "write inside": _write_inside,
    "write in place": _write_in_place,
    "new data": _new_data,
    "new parameter": _new_parameter,
    "one vector": _flat,
    "swap": _swap,
    "average": _average,
    "freeze": _freeze,
    "wrap": _wrap,
    "unwrap": _unwrap,
    "factor": _factor,
    "sequential": _sequential,
    "replace": _replace,
    "activation": _activation,
    "eps": _eps,
    "groups": _groups,
    "own forward": _own_forward,
    "parametrize": _parametrize,
    "hook": _hook(lambda m: m.register_forward_hook(_louder)),
    "hook before": _hook(lambda m: m.register_forward_pre_hook(_quieter)),
    "unhook": _unhook,
    "steps": _steps,
    "scheduler": _new_scheduler,
    "configure": _configure,
    "set_timesteps": _set_timesteps,
    "levels": _levels,
    "own step": _own_step,
    "no own step": _no_own_step,
    "offset": _offset,
    "offset that is held": _held_offset,
    "shift": _shift,
    "float64": _to(torch.float64),
    "float32": _to(torch.float32),
    "bfloat16": _to(torch.bfloat16),
    "move": _move,
    "mode": _mode,
    "mode of one": _mode_of_one,
}
_NAMES = list(ACTIONS)
OF_WEIGHTS = _NAMES[: _NAMES.index("wrap")]
OF_MODULES = _NAMES[_NAMES.index("wrap") : _NAMES.index("steps")]
OF_SCHEDULERS = _NAMES[_NAMES.index("steps") : _NAMES.index("float64")]
OF_MODES = _NAMES[_NAMES.index("float64") :]
OF_ENCODERS = list(ENCODER_ACTIONS)
ACTIONS |= ENCODER_ACTIONS
COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda policy: pickle.loads(pickle.dumps(policy)),
}


@contextlib.contextmanager
def hook_of_all():
    """A hook of all modules, for as long as this lasts."""
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, result: result * 1.25 if isinstance(module, nn.Linear) else None
    )
    try:
        yield
    finally:
        handle.remove()
