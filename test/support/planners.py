"""Diffuser's planner and CleanDiffuser's agents, true in structure to the projects' own.

Each has the attributes, arguments, order of random numbers and arithmetic of the class that its
docstring names. On 2026-11-23 each was compared with the project's own class on one state dict, at
the commits that ``near_copies`` names.
"""

import copy
import math
from collections import namedtuple

import near_copies
import torch
from near_policies import cosine_betas
from other_policies import awake
from torch import nn

Sample = namedtuple("Sample", "trajectories values chains")


@torch.no_grad()
def default_sample_fn(model, x, cond, t):
    mean, _, logvar = model.p_mean_variance(x=x, cond=cond, t=t)
    noise = torch.randn_like(x)
    noise[t == 0] = 0
    return mean + torch.exp(0.5 * logvar) * noise, torch.zeros(len(x), device=x.device)


def hold(x, cond, first):
    for t, state in cond.items():
        x[:, t, first:] = state.clone()
    return x


class GaussianDiffusion(nn.Module):
    """Diffuser's GaussianDiffusion, on the branch of locomotion."""

    def __init__(self, steps=8, clip_denoised=True, predict_epsilon=True, attention=False):
        super().__init__()
        self.horizon, self.observation_dim, self.action_dim, self.transition_dim = 8, 3, 2, 5
        self.model = awake(near_copies.TemporalUnet(5, attention=attention))
        self.n_timesteps, self.clip_denoised = steps, clip_denoised
        self.predict_epsilon = predict_epsilon
        betas = cosine_betas(steps)
        bars = torch.cumprod(1 - betas, 0)
        before = torch.cat([torch.ones(1), bars[:-1]])
        variance = betas * (1 - before) / (1 - bars)
        for name, value in {
            "betas": betas,
            "sqrt_recip_alphas_cumprod": (1 / bars).sqrt(),
            "sqrt_recipm1_alphas_cumprod": (1 / bars - 1).sqrt(),
            "posterior_variance": variance,
            "posterior_log_variance_clipped": variance.clamp(min=1e-20).log(),
            "posterior_mean_coef1": betas * before.sqrt() / (1 - bars),
            "posterior_mean_coef2": (1 - before) * (1 - betas).sqrt() / (1 - bars),
        }.items():
            self.register_buffer(name, value)

    def p_mean_variance(self, x, cond, t):
        def at(values):
            return values[t][:, None, None]

        x0 = self.model(x, cond, t)
        if self.predict_epsilon:
            recip, recipm1 = self.sqrt_recip_alphas_cumprod, self.sqrt_recipm1_alphas_cumprod
            x0 = at(recip) * x - at(recipm1) * x0
        if self.clip_denoised:
            x0.clamp_(-1.0, 1.0)
        mean = at(self.posterior_mean_coef1) * x0 + at(self.posterior_mean_coef2) * x
        return mean, at(self.posterior_variance), at(self.posterior_log_variance_clipped)

    @torch.no_grad()
    def p_sample_loop(
        self, shape, cond, verbose=True, return_chain=False, sample_fn=default_sample_fn, **kwargs
    ):
        x = hold(torch.randn(shape, device=self.betas.device), cond, self.action_dim)
        chain = [x]
        for i in reversed(range(self.n_timesteps)):
            t = torch.full((shape[0],), i, device=x.device, dtype=torch.long)
            x, values = sample_fn(self, x, cond, t, **kwargs)
            x = hold(x, cond, self.action_dim)
            chain.append(x)
        order = torch.argsort(values, descending=True)
        return Sample(x[order], values[order], torch.stack(chain, 1) if return_chain else None)

    @torch.no_grad()
    def conditional_sample(self, cond, horizon=None, **kwargs):
        shape = (len(cond[0]), horizon or self.horizon, self.transition_dim)
        return self.p_sample_loop(shape, cond, **kwargs)

    def forward(self, cond, *args, **kwargs):
        return self.conditional_sample(cond, *args, **kwargs)

    def act(self, state):
        return self({0: state[:, 0], self.horizon - 1: state[:, 1]}, verbose=False)


class Maze2dDiffusion(GaussianDiffusion):
    """The same on the branch of Maze2D, around the network of the other branch."""

    @torch.no_grad()
    def p_sample_loop(self, shape, cond, verbose=True, return_diffusion=False):
        x = hold(torch.randn(shape, device=self.betas.device), cond, self.action_dim)
        for i in reversed(range(self.n_timesteps)):
            t = torch.full((shape[0],), i, device=x.device, dtype=torch.long)
            mean, _, logvar = self.p_mean_variance(x, cond, t)
            noise = torch.randn_like(x)
            x = mean + (1 - (t == 0).float())[:, None, None] * (0.5 * logvar).exp() * noise
            x = hold(x, cond, self.action_dim)
        return x


class Identity(nn.Module):
    """CleanDiffuser's IdentityCondition, in evaluation."""

    def forward(self, condition, mask=None):
        return condition


class Agent(nn.Module):
    """CleanDiffuser's DiffusionModel, made a module so that it moves with its parts."""

    def __init__(self, fix_mask=None):
        super().__init__()
        network = awake(near_copies.ChiUnet(2, 3, 2))
        self.model = nn.ModuleDict({"diffusion": network, "condition": Identity()})
        self.model_ema = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.classifier, self.fix_mask = None, 0.0 if fix_mask is None else fix_mask[None]
        self.options = {}

    @property
    def device(self):
        return next(self.parameters()).device

    def _apply(self, fn, recurse=True):
        for name, value in vars(self).items():  # the project makes them on the device
            if isinstance(value, torch.Tensor):
                setattr(self, name, fn(value))
        return super()._apply(fn, recurse)

    def fixed(self, x, prior):
        return x * (1.0 - self.fix_mask) + prior * self.fix_mask

    def act(self, state):
        prior = torch.zeros(len(state), 8, 2, device=state.device)
        prior[:, 0] = 0.5
        given = {"n_samples": len(state), "condition_cfg": state, "w_cfg": 1.0}
        return self.sample(prior=prior, **given, **self.options)[0]


class DDPM(Agent):
    """CleanDiffuser's DDPM."""

    def __init__(self, steps=6, predict_noise=True, bound=1.0, **mask):
        super().__init__(**mask)
        self.diffusion_steps, self.predict_noise = steps, predict_noise
        self.options = {"sample_steps": steps, "solver": None}
        self.beta = cosine_betas(steps)
        self.alpha = 1 - self.beta
        self.bar_alpha = torch.cumprod(self.alpha, 0)
        ends = torch.ones(1, 8, 2) * (bound or 1)
        self.x_max, self.x_min = (ends, -ends) if bound else (None, None)

    def sample(
        self,
        prior=None,
        n_samples=1,
        sample_steps=None,
        use_ema=True,
        temperature=1.0,
        condition_cfg=None,
        mask_cfg=None,
        w_cfg=0.0,
        condition_cg=None,
        w_cg=0.0,
        requires_grad=False,
        preserve_history=False,
        **kwargs,
    ):
        x = self.fixed(torch.randn_like(prior) * temperature, prior)
        model = self.model_ema if use_ema else self.model
        cond = model["condition"](condition_cfg, mask_cfg)
        for t in range(self.diffusion_steps - 1, -1, -1):
            bar, alpha, beta = self.bar_alpha[t], self.alpha[t], self.beta[t]
            before = self.bar_alpha[t - 1] if t > 0 else torch.tensor(1.0, device=x.device)
            times = torch.full((n_samples,), t, device=x.device)
            pred = model["diffusion"](x, times, cond)
            if w_cfg not in (0.0, 1.0):
                pred = w_cfg * pred + (1 - w_cfg) * model["diffusion"](x, times, cond * 0)
            if self.predict_noise:
                if self.x_max is not None:
                    ends = (self.x_max, self.x_min)
                    pred = pred.clip(*((x - bar.sqrt() * e) / (1 - bar).sqrt() for e in ends))
                pred = pred * (1 - self.fix_mask)
                x = 1 / alpha.sqrt() * (x - beta / (1 - bar).sqrt() * pred)
            else:
                pred = pred if self.x_max is None else pred.clip(self.x_min, self.x_max)
                past = alpha.sqrt() * (1 - before) * x
                x = 1 / (1 - bar) * (past + beta * before.sqrt() * pred)
            if t != 0:
                x = x + (beta * (1 - before) / (1 - bar)).sqrt() * torch.randn_like(x)
            x = self.fixed(x, prior)
        return x, {"log_p": None}


def _uniform(count, steps):
    return torch.linspace(0, count - 1, steps + 1, dtype=torch.long)


SUPPORTED_SAMPLING_STEP_SCHEDULE = {"uniform": _uniform}


class DiscreteDiffusionSDE(Agent):
    """CleanDiffuser's DiscreteDiffusionSDE, with its cosine noise schedule."""

    def __init__(self, solver="ddpm", predict_noise=True, bound=1.0, steps=20, again=0, **mask):
        super().__init__(**mask)
        self.diffusion_steps, self.predict_noise = steps, predict_noise
        self.x_max, self.x_min = (bound, -bound) if bound else (None, None)
        self.options = {"solver": solver, "diffusion_x_sampling_steps": again}
        t, s = torch.linspace(1e-3, 1.0, steps), 0.008
        alpha = (math.pi / 2 * (t.clip(0, 0.9946) + s) / (1 + s)).cos()
        self.alpha = alpha / math.cos(math.pi / 2 * s / (1 + s))
        self.sigma = (1 - self.alpha**2).sqrt()

    def sample(
        self,
        prior,
        solver="ddpm",
        n_samples=1,
        sample_steps=5,
        sample_step_schedule="uniform",
        use_ema=True,
        temperature=1.0,
        condition_cfg=None,
        mask_cfg=None,
        w_cfg=0.0,
        condition_cg=None,
        w_cg=0.0,
        diffusion_x_sampling_steps=0,
        warm_start_reference=None,
        warm_start_forward_level=0.3,
        requires_grad=False,
        preserve_history=False,
        **kwargs,
    ):
        model, buffer = self.model_ema if use_ema else self.model, []
        x = self.fixed(torch.randn_like(prior) * temperature, prior)
        cond = model["condition"](condition_cfg, mask_cfg)
        schedule = SUPPORTED_SAMPLING_STEP_SCHEDULE[sample_step_schedule]
        places = schedule(self.diffusion_steps, sample_steps)
        a, s = self.alpha[places.to(x.device)], self.sigma[places.to(x.device)]
        snr = torch.log(a / s)
        hs = torch.zeros_like(snr)
        hs[1:] = snr[:-1] - snr[1:]
        stds = torch.zeros_like(snr)
        stds[1:] = s[:-1] / s[1:] * (1 - (a[1:] / a[:-1]) ** 2).sqrt()
        for i in reversed([1] * diffusion_x_sampling_steps + list(range(1, sample_steps + 1))):
            t = torch.full((n_samples,), int(places[i]), device=x.device)
            pred, noise = model["diffusion"](x, t, cond), self.predict_noise
            if self.x_max is not None:
                ends = (self.x_max, self.x_min) if noise else (self.x_min, self.x_max)
                pred = pred.clip(*((x - a[i] * e) / s[i] if noise else e for e in ends))
            eps = pred if noise else (x - a[i] * pred) / s[i]
            x0 = (x - s[i] * pred) / a[i] if noise else pred
            buffer.append(x0)
            h, a2, s2 = hs[i], a[i - 1], s[i - 1]
            if solver.endswith("2M") and i < sample_steps:
                r = hs[i + 1] / h
                x0 = (1 + 0.5 / r) * buffer[-1] - 0.5 / r * buffer[-2]
            if solver == "ddpm":
                x = a2 / a[i] * (x - s[i] * eps) + (s2**2 - stds[i] ** 2 + 1e-8).sqrt() * eps
                x = x + stds[i] * torch.randn_like(x) if i > 1 else x
            elif solver == "ddim":
                x = a2 * ((x - s[i] * eps) / a[i]) + s2 * eps
            elif solver == "ode_dpmsolver_1":
                x = a2 / a[i] * x - s2 * torch.expm1(h) * eps
            elif solver.startswith("ode_dpmsolver++"):
                x = s2 / s[i] * x - a2 * torch.expm1(-h) * x0
            elif solver == "sde_dpmsolver_1":
                x = a2 / a[i] * x - 2 * s2 * torch.expm1(h) * eps
                x = x + s2 * torch.expm1(2 * h).sqrt() * torch.randn_like(x)
            else:
                x = s2 / s[i] * (-h).exp() * x - a2 * torch.expm1(-2 * h) * x0
                x = x + s2 * (-torch.expm1(-2 * h)).sqrt() * torch.randn_like(x)
            x = self.fixed(x, prior)
        x = x if self.x_max is None else x.clip(self.x_min, self.x_max)
        return x, {"sample_history": None}


class EDM(Agent):
    """CleanDiffuser's EDM."""

    def __init__(self, solver="euler", **mask):
        super().__init__(**mask)
        self.sigma_data, self.sigma_min, self.sigma_max, self.rho = 0.5, 0.002, 80.0, 7.0
        self.options = {"sample_steps": 6, "solver": solver}
        self.sample_steps = self.sigma_s = None

    def set_sample_steps(self, count):
        self.sample_steps = count
        ends = self.sigma_max ** (1 / self.rho), self.sigma_min ** (1 / self.rho)
        places = torch.arange(count + 1, device=self.device) / count
        self.sigma_s = (ends[0] + places * (ends[1] - ends[0])) ** self.rho

    def dot_x(self, x, i, model, cond):
        sigma = self.sigma_s[i].repeat(len(x))
        norm = (self.sigma_data**2 + sigma**2)[:, None, None]
        out = model["diffusion"](x / norm.sqrt(), 0.25 * sigma.log(), cond)
        wide = sigma[:, None, None]
        d = self.sigma_data**2 / norm * x + wide * self.sigma_data / norm.sqrt() * out
        return (x / self.sigma_s[i] - d / self.sigma_s[i]) * (1.0 - self.fix_mask)

    def sample(
        self,
        prior=None,
        n_samples=1,
        sample_steps=5,
        use_ema=True,
        solver="euler",
        condition_cfg=None,
        mask_cfg=None,
        w_cfg=0.0,
        condition_cg=None,
        w_cg=0.0,
        preserve_history=False,
        **kwargs,
    ):
        if sample_steps != self.sample_steps:
            self.set_sample_steps(sample_steps)
        model, times = self.model_ema if use_ema else self.model, self.sigma_s
        cond = model["condition"](condition_cfg, mask_cfg)
        x = self.fixed(torch.randn_like(prior) * times[0], prior)
        for i in range(sample_steps):
            slope, length = self.dot_x(x, i, model, cond), times[i] - times[i + 1]
            after = self.fixed(x - slope * length, prior)
            if solver == "heun" and i != sample_steps - 1 and times[i + 1] > 0.005:
                there = self.dot_x(after, i + 1, model, cond)
                after = self.fixed(x - (slope + there) / 2 * length, prior)
            x = after
        return x, {"log_p": None, "sample_history": None}
