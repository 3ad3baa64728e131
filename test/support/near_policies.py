"""Policies around near-copies of the original network, true in structure to the projects' own.

Each has the attributes, arguments, order of random numbers and arithmetic of the class that its
docstring names. On 2026-11-23 each was compared with the project's own class on one state dict, at
the commits that ``near_copies`` names.
"""

import functools
import itertools
import math
from collections import namedtuple
from types import SimpleNamespace

import near_copies
import torch
from other_policies import Normalizer, awake
from torch import nn

Sample = namedtuple("Sample", "trajectories chains")


class States(nn.Module):
    """The images' encoder, on states."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, observed):
        return self.layer(observed["state"])


class Karras:
    """Consistency Policy's Karras_Scheduler, as far as it acts."""

    time_min, time_max, rho, data_std = 0.02, 80.0, 7.0, 0.5

    def __init__(self, solver="heun", scaling="boundary", bins=10):
        self.solver, self.scaling, self.bins = solver, scaling, bins

    def timesteps_to_times(self, timesteps):
        most, least = (time ** (1 / self.rho) for time in (self.time_max, self.time_min))
        t = (most + timesteps / (self.bins - 1) * (least - most)) ** self.rho
        return t.clamp(self.time_min, self.time_max)

    def get_scalings(self, time):
        norm = (time**2 + self.data_std**2) ** 0.5
        return self.data_std**2 / norm**2, time * self.data_std / norm, 1 / norm

    def get_scalings_for_boundary_condition(self, time):
        off, norm = time - self.time_min, (time**2 + self.data_std**2) ** 0.5
        c_skip = self.data_std**2 / (off**2 + self.data_std**2)
        return c_skip, off * self.data_std / norm, 1 / norm

    def scaled(self, times):
        boundary = self.scaling == "boundary"
        found = self.get_scalings_for_boundary_condition if boundary else self.get_scalings
        return [scale[:, None, None] for scale in found(times.reshape(-1))]

    def sample_inital_position(self, trajectory, generator):
        like = {"dtype": trajectory.dtype, "device": trajectory.device}
        return torch.randn(size=trajectory.shape, generator=generator, **like)

    def add_noise(self, trajectory, times):
        return trajectory + torch.randn(trajectory.shape, device=trajectory.device) * times

    def calc_out(self, model, x, times, clamp=False):
        c_skip, c_out, c_in = self.scaled(times)
        out = model(x * c_in, 250 * torch.log(times + 1e-44)) * c_out + x * c_skip
        return out.clamp(-1, 1) if clamp else out

    def step(self, model, x, t, after, clamp=False):
        step = after - t
        slope = (x - self.calc_out(model, x, t, clamp)) / t
        euler = x + step * slope
        if self.solver == "euler":
            return euler
        there = (euler - self.calc_out(model, euler, after, clamp)) / after
        return x + step * (slope + there) / 2


class Ctm(Karras):
    """Consistency Policy's CTM_Scheduler."""

    def CTM_calc_out(self, model, x, times, stops, clamp=False):
        c_skip, c_out, c_in = self.scaled(times)
        embedded = [(250 * torch.log(t + 1e-44)).expand(len(x)) for t in (times, stops)]
        out = model(x * c_in, *embedded) * c_out + x * c_skip
        ratio = (stops / times)[:, None, None]
        out = x * ratio + out * (1 - ratio)
        return out.clamp(-1, 1) if clamp else out


class KarrasPolicy(nn.Module):
    """Consistency Policy's teacher, KarrasUnetHybridImagePolicy: an ODE's steps."""

    def __init__(self, **scheduler):
        super().__init__()
        self.model = awake(near_copies.DP3(2, 6))
        self.obs_encoder, self.normalizer = States(), Normalizer()
        self.noise_scheduler = Karras(**scheduler)
        self._sizes()

    def _sizes(self):
        self.horizon, self.action_dim, self.n_action_steps, self.n_obs_steps = 8, 2, 4, 2
        self.obs_as_global_cond = True

    def conditional_sample(
        self, condition_data, condition_mask, local_cond=None, global_cond=None, generator=None
    ):
        data, mask, scheduler = condition_data, condition_mask, self.noise_scheduler
        x = scheduler.sample_inital_position(data, generator=generator)

        def denoise(x, t):
            return self.model(x, t, local_cond=local_cond, global_cond=global_cond)

        bins = torch.arange(0, scheduler.bins, device=data.device)
        for b, after in itertools.pairwise(bins):
            x[mask] = data[mask]
            times = [scheduler.timesteps_to_times(place) for place in (b, after)]
            x = scheduler.step(denoise, x, *times, clamp=True)
        x[mask] = data[mask]
        return x

    def predict_action(self, obs_dict):
        observed = self.normalizer.normalize(obs_dict)
        frames = {k: v[:, : self.n_obs_steps].flatten(0, 1) for k, v in observed.items()}
        batch = len(obs_dict["state"])
        cond = self.obs_encoder(frames).reshape(batch, -1)
        data = torch.zeros(batch, self.horizon, self.action_dim, device=cond.device)
        mask = torch.zeros_like(data, dtype=torch.bool)
        actions = self.conditional_sample(data, mask, local_cond=None, global_cond=cond)
        actions = self.normalizer["action"].unnormalize(actions)
        return {"action": actions[:, 1:5], "action_pred": actions}


class ConsistencyPolicy(KarrasPolicy):
    """Consistency Policy's student, CTMPPUnetHybridImagePolicy: one step, or a chain."""

    def __init__(self, chaining_times=None, **scheduler):
        super().__init__()
        self.model = awake(near_copies.ConsistencyPolicy(2, 6))
        self.noise_scheduler = Ctm(**scheduler)
        self.chaining_times, self.chain = chaining_times, chaining_times is not None

    def _forward(self, x, t, s, local_cond, global_cond):
        def denoise(x, t, s):
            return self.model(x, t, s, local_cond=local_cond, global_cond=global_cond)

        return self.noise_scheduler.CTM_calc_out(denoise, x, t, s, clamp=True)

    def conditional_sample(
        self, condition_data, condition_mask, local_cond=None, global_cond=None, generator=None
    ):
        data, mask, scheduler = condition_data, condition_mask, self.noise_scheduler
        x = scheduler.sample_inital_position(data, generator=generator)
        t = torch.tensor([scheduler.time_max], device=data.device)
        s = torch.tensor([scheduler.time_min], device=data.device)
        x[mask] = data[mask]
        out = self._forward(x, t, s, local_cond, global_cond)
        out[mask] = data[mask]
        for t in self.chaining_times[1:] if self.chain else []:
            t = torch.tensor([float(t)], device=data.device)
            if self.chaining_times[0] == "C":
                t = scheduler.timesteps_to_times(t)
            out = self._forward(scheduler.add_noise(out, t), t, s, local_cond, global_cond)
        return out


def cosine_betas(steps):
    x = torch.linspace(0, steps + 1, steps + 1, dtype=torch.float64)
    bars = torch.cos(((x / (steps + 1)) + 0.008) / 1.008 * math.pi * 0.5) ** 2
    return (1 - bars[1:] / bars[:-1]).clamp(0, 0.999).float()


class DiffusionModel(nn.Module):
    """DPPO's DiffusionEval, whose forward is DiffusionModel's."""

    def __init__(
        self, steps=12, ddim_steps=None, tuned=0, network=None, predict_epsilon=True, **clips
    ):
        super().__init__()
        self.network = self.actor = awake(network or near_copies.DPPO(2, 6))
        if tuned:
            self.actor_ft = awake(near_copies.DPPO(2, 6))
        self.horizon_steps, self.action_dim, self.ft_denoising_steps = 8, 2, tuned
        self.denoising_steps, self.ddim_steps = steps, ddim_steps
        self.use_ddim, self.predict_epsilon = ddim_steps is not None, predict_epsilon
        self.denoised_clip_value, self.eps_clip_value = 1.0, None
        self.final_action_clip_value, self.randn_clip_value = None, 10
        vars(self).update(clips)
        self.betas = cosine_betas(steps)
        alphas = 1 - self.betas
        bars = torch.cumprod(alphas, 0)
        before = torch.cat([torch.ones(1), bars[:-1]])
        self.sqrt_recip_alphas_cumprod = (1 / bars).sqrt()
        self.sqrt_recipm1_alphas_cumprod = (1 / bars - 1).sqrt()
        variance = self.betas * (1 - before) / (1 - bars)
        self.ddpm_logvar_clipped = variance.clamp(min=1e-20).log()
        self.ddpm_mu_coef1 = self.betas * before.sqrt() / (1 - bars)
        self.ddpm_mu_coef2 = (1 - before) * alphas.sqrt() / (1 - bars)
        if self.use_ddim:
            t = torch.arange(ddim_steps) * (steps // ddim_steps)
            chosen = bars[t]
            self.ddim_t, self.ddim_alphas = t.flip(0), chosen.flip(0)
            self.ddim_alphas_prev = torch.cat([torch.ones(1), chosen[:-1]]).flip(0)
            self.ddim_sqrt_one_minus_alphas = ((1 - chosen) ** 0.5).flip(0)

    def _apply(self, fn, recurse=True):
        for name, value in vars(self).items():  # the project makes them on the device
            if isinstance(value, torch.Tensor):
                setattr(self, name, fn(value) if value.is_floating_point() else value)
        return super()._apply(fn, recurse)

    def p_mean_var(self, x, t, cond, index, deterministic=False):
        noise = self.actor(x, t, cond=cond)
        rest = self.ddim_steps - index if self.use_ddim else t + 1
        chosen = torch.where(rest <= self.ft_denoising_steps)[0]
        if len(chosen):
            tuned = {name: value[chosen] for name, value in cond.items()}
            noise[chosen] = self.actor_ft(x[chosen], t[chosen], cond=tuned)

        def at(values, places):
            return values.to(x.device)[places][:, None, None]

        if self.use_ddim:
            alpha, before = at(self.ddim_alphas, index), at(self.ddim_alphas_prev, index)
            sigma = at(self.ddim_sqrt_one_minus_alphas, index)
            x0 = (x - sigma * noise) / alpha**0.5
        elif self.predict_epsilon:
            x0 = at(self.sqrt_recip_alphas_cumprod, t) * x
            x0 = x0 - at(self.sqrt_recipm1_alphas_cumprod, t) * noise
        else:
            x0 = noise
        if self.denoised_clip_value is not None:
            x0 = x0.clamp(-self.denoised_clip_value, self.denoised_clip_value)
            if self.use_ddim:
                noise = (x - alpha**0.5 * x0) / sigma
        if self.use_ddim:
            if self.eps_clip_value is not None:
                noise = noise.clamp(-self.eps_clip_value, self.eps_clip_value)
            mean = before**0.5 * x0 + (1 - before - 1e-20).clamp(min=0).sqrt() * noise
            return mean, torch.full_like(mean, 1e-20).log()
        mean = at(self.ddpm_mu_coef1, t) * x0 + at(self.ddpm_mu_coef2, t) * x
        return mean, at(self.ddpm_logvar_clipped, t)

    @torch.no_grad()
    def forward(self, cond, deterministic=True):
        state = cond["state"]
        x = torch.randn((len(state), self.horizon_steps, self.action_dim), device=state.device)
        count = self.denoising_steps
        times = self.ddim_t.tolist() if self.use_ddim else list(reversed(range(count)))
        for i, t in enumerate(times):
            places = [torch.full((len(x),), n, device=x.device, dtype=torch.long) for n in (t, i)]
            mean, logvar = self.p_mean_var(x, places[0], cond, places[1], deterministic)
            std = (0.5 * logvar).exp().clip(min=1e-3) * (not self.use_ddim and t != 0)
            noise = torch.randn_like(x, memory_format=torch.contiguous_format)
            x = mean + std * noise.clamp(-self.randn_clip_value, self.randn_clip_value)
            most = self.final_action_clip_value
            if most is not None and i == len(times) - 1:
                x = x.clamp(-most, most)
        return Sample(x, None)

    def act(self, state):
        return self(cond={"state": state}, deterministic=True).trajectories


class ActorMlp(nn.Module):
    """DPPO's DiffusionMLP."""

    def __init__(self):
        super().__init__()
        self.time = near_copies.time_mlp(16)
        self.layers = nn.Sequential(nn.Linear(16 + 16 + 6, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x, time, cond, **kwargs):
        features = [x.flatten(1), self.time(time.reshape(-1, 1)[:, 0]), cond["state"].flatten(1)]
        return self.layers(torch.cat(features, -1)).view_as(x)


class TediScheduler:
    """Streaming Diffusion Policy's DDPMTEDiScheduler and DDIMTEDiScheduler."""

    def __init__(self, steps=12, ddim=False, clip_sample=True, prediction_type="epsilon"):
        self.config = {"num_train_timesteps": steps, "clip_sample": clip_sample}
        self.config = _Config(self.config, prediction_type=prediction_type)
        self.betas, self.ddim = cosine_betas(steps), ddim
        self.alphas_cumprod = torch.cumprod(1 - self.betas, 0)
        self.num_inference_steps = None

    def set_timesteps(self, count, device=None):
        self.num_inference_steps = count
        self.timesteps = torch.arange(count).flip(0)

    def step(self, model_output, timestep, sample, generator=None):
        like = {"device": sample.device, "dtype": sample.dtype}
        self.alphas_cumprod, self.betas = self.alphas_cumprod.to(**like), self.betas.to(**like)
        back = self.config.num_train_timesteps // self.num_inference_steps if self.ddim else 1
        before, bar = timestep - back, self.alphas_cumprod[timestep][..., None]
        known = before >= 0 if self.ddim else timestep > 0
        bar_before = self.alphas_cumprod[before.clamp(min=0)][..., None]
        bar_before = torch.where(known[..., None], bar_before, torch.ones_like(bar_before))
        x0 = model_output
        if self.config.prediction_type == "epsilon":
            x0 = (sample - (1 - bar) ** 0.5 * model_output) / bar**0.5
        if self.config.clip_sample:
            x0 = x0.clamp(-1, 1)
        if self.ddim:
            out = bar_before**0.5 * x0 + (1 - bar_before) ** 0.5 * model_output
            return SimpleNamespace(prev_sample=out, pred_original_sample=x0)
        beta = self.betas[timestep][..., None]
        out = bar_before**0.5 * beta / (1 - bar) * x0
        out = out + (1 - beta) ** 0.5 * (1 - bar_before) / (1 - bar) * sample
        noise = torch.randn(sample.shape, generator=generator, **like)
        variance = ((1 - bar_before) / (1 - bar) * beta).clamp(min=1e-20)
        out = torch.where((timestep > 0)[..., None], out + variance**0.5 * noise, out)
        return SimpleNamespace(prev_sample=out, pred_original_sample=x0)

    def add_noise(self, x, noise, timesteps):
        bar = self.alphas_cumprod.to(x.device)[timesteps][..., None]
        return bar**0.5 * x + (1 - bar) ** 0.5 * noise


class _Config(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        vars(self).update(self)


class StreamingPolicy(nn.Module):
    """Streaming Diffusion Policy's TEDiUnetLowdimPolicy, whose buffer begins as noise."""

    def __init__(self, steps=12, frames=2, actions=2, inpaints=False, **scheduler):
        super().__init__()
        width = 5 if inpaints else 2
        network = near_copies.StreamingPolicy(width, 0 if inpaints else 3 * frames)
        self.model, self.normalizer = awake(network), nn.Linear(1, 1)
        self.noise_scheduler = TediScheduler(steps, **scheduler)
        self.horizon, self.action_dim, self.inpaints = 8, 2, inpaints
        self.n_obs_steps, self.n_action_steps = frames, actions
        self.num_inference_steps, self.kwargs = steps, {}
        self.action_buffer, self.buffer_diff_steps = None, None

    def reset_buffer(self):
        self.action_buffer, self.buffer_diff_steps = None, None

    def fill_buffer(self, shape, device):
        first, count = self.n_obs_steps - 1, self.n_action_steps
        chunks = (self.horizon - first) // count
        places = torch.arange(shape[1], device=device)
        chunk = torch.div(places - first, count, rounding_mode="floor")
        chunk = chunk.clamp(0, chunks - 1).repeat(shape[0], 1)
        steps = torch.floor(self.num_inference_steps * (chunk + 1) / chunks).long() - 1
        noise = torch.randn(shape, device=device)
        self.buffer_diff_steps = steps
        self.action_buffer = self.noise_scheduler.add_noise(torch.zeros_like(noise), noise, steps)

    def conditional_sample(
        self,
        condition_data,
        condition_mask,
        local_cond=None,
        global_cond=None,
        generator=None,
        **kwargs,
    ):
        data, mask, shape = condition_data, condition_mask, condition_data.shape
        count, first = self.n_action_steps, self.n_obs_steps - 1
        scheduler = self.noise_scheduler
        scheduler.set_timesteps(self.num_inference_steps)
        while torch.max(self.buffer_diff_steps[:, first + count - 1]) != -1:
            self.action_buffer[mask] = data[mask]
            steps = self.buffer_diff_steps
            out = self.model(
                self.action_buffer, steps, local_cond=local_cond, global_cond=global_cond
            )
            step = functools.partial(scheduler.step, generator=generator, **kwargs)
            self.action_buffer = step(out, steps, self.action_buffer).prev_sample
            self.buffer_diff_steps = torch.clamp(steps - 1, min=-1)
        self.action_buffer[mask] = data[mask]
        result, excess = self.action_buffer, (shape[1] - first) % count
        kept = slice(count, -excess if excess else None)
        self.action_buffer = self.action_buffer[:, kept]
        self.buffer_diff_steps = self.buffer_diff_steps[:, kept]
        new = (shape[0], count + excess)
        fresh = torch.randn(size=(*new, shape[2]), device=data.device)
        noisiest = torch.full(new, self.num_inference_steps - 1, device=data.device)
        self.action_buffer = torch.cat([self.action_buffer, fresh], 1)
        self.buffer_diff_steps = torch.cat([self.buffer_diff_steps, noisiest], 1)
        following = self.buffer_diff_steps[:, first].unsqueeze(1).repeat(1, first)
        self.buffer_diff_steps[:, :first] = following
        torch.randn(size=self.action_buffer[:, :first].shape, device=data.device)
        return result

    @torch.no_grad()
    def predict_action(self, obs_dict):
        observed, frames = obs_dict["obs"], self.n_obs_steps
        width = self.action_dim + (observed.shape[2] if self.inpaints else 0)
        data = torch.zeros(len(observed), self.horizon, width, device=observed.device)
        mask, cond = torch.zeros_like(data, dtype=torch.bool), None
        if self.inpaints:
            data[:, :frames, self.action_dim :] = observed[:, :frames]
            mask[:, :frames, self.action_dim :] = True
        else:
            cond = observed[:, :frames].flatten(1)
        if self.action_buffer is None:
            self.fill_buffer(data.shape, observed.device)
        result = self.conditional_sample(data, mask, local_cond=None, global_cond=cond)
        first = frames - 1
        actions = result[..., : self.action_dim].clone()
        return {"action": actions[:, first : first + self.n_action_steps], "action_pred": actions}
