"""Policies whose loops or networks are of other kinds, true in structure to those that people have.

Each has the attributes, arguments, order of random numbers and arithmetic of the project's class
that its docstring names, with small networks. The projects' own classes were accelerated by hand,
on a CPU, with results equal to 5e-6. The fake of ManiSkill's was also run beside its original, on
2026-11-27: equal actions with one state dict and one seed, and the same random numbers after them.

    DiffusionTransformerLowdimPolicy   real-stanford/diffusion_policy 5ba07ac, beside its lowdim
                                       policy on a U-Net, with and without inpainting
    DiffusionUnetLowdimRTIPolicy       RTI-DP/rti-dp 6e51ec9
    FlowPolicy                         zql-kk/FlowPolicy ff3b3fe: film, add and mlp_film
    MultiTaskDiTPolicy                 LeRobot 0.6.2; 0.6.1 on a GPU
    Agent                              haosulab/ManiSkill: train.py at f565bc1, which has
                                       get_eval_action, and at b75e188, which has none;
                                       train_rgbd.py at b75e188: images, depth and both
"""

from types import SimpleNamespace

import near_copies
import torch
from policies import SMALL, diffusers
from torch import nn

import dpa


def unet(cond):
    return dpa.reference.plain(dpa.nn.ConditionalUnet1D(2, None, cond, **SMALL))


def awake(network):
    """Give what is initialised to zero some weights: a network of zeros proves nothing."""
    for parameter in network.parameters():
        if parameter.abs().max() == 0:
            nn.init.normal_(parameter, std=0.1)
    return network


class Embedding(nn.Module):
    """Of timesteps: sines and cosines."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, timestep):
        rates = torch.exp(torch.arange(self.size // 2, device=timestep.device) * -0.5)
        angles = timestep[:, None].float() * rates
        return torch.cat([angles.sin(), angles.cos()], -1)


class Transformer(nn.Module):
    """diffusion_policy's TransformerForDiffusion: time and observation are the memory."""

    def __init__(self, width=32, layers=2, heads=4, horizon=8, frames=2, actions=2, observed=3):
        super().__init__()
        self.input_emb = nn.Linear(actions, width)
        self.pos_emb = nn.Parameter(torch.randn(1, horizon, width) * 0.1)
        self.time_emb = Embedding(width)
        self.cond_obs_emb = nn.Linear(observed, width)
        self.cond_pos_emb = nn.Parameter(torch.randn(1, frames + 1, width) * 0.1)
        self.drop = nn.Dropout(0.1)
        wide = nn.Linear(width, 4 * width)
        self.encoder = nn.Sequential(wide, nn.Mish(), nn.Linear(4 * width, width))
        layer = nn.TransformerDecoderLayer(
            width, heads, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True
        )
        self.decoder = nn.TransformerDecoder(layer, layers)
        later = torch.ones(horizon, horizon).triu(1).bool()
        self.register_buffer("mask", torch.zeros(horizon, horizon).masked_fill(later, -torch.inf))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, actions)

    def forward(self, sample, timestep, cond=None, **kwargs):
        if not torch.is_tensor(timestep):
            timestep = torch.tensor([timestep], device=sample.device)
        elif timestep.dim() == 0:
            timestep = timestep[None].to(sample.device)
        time = self.time_emb(timestep.expand(len(sample)))[:, None]
        memory = torch.cat([time, self.cond_obs_emb(cond)], 1)
        memory = self.encoder(self.drop(memory + self.cond_pos_emb[:, : memory.shape[1]]))
        x = self.drop(self.input_emb(sample) + self.pos_emb[:, : sample.shape[1]])
        return self.head(self.ln_f(self.decoder(x, memory, tgt_mask=self.mask)))


class TransformerPolicy(nn.Module):
    """diffusion_policy's DiffusionTransformerLowdimPolicy."""

    def __init__(self, kind="DDPM", network=None):
        super().__init__()
        self.model = network or Transformer()
        self.normalizer = nn.Linear(1, 1)
        self.noise_scheduler = getattr(diffusers, f"{kind}Scheduler")(20)
        self.num_inference_steps, self.kwargs = 6, {}

    def conditional_sample(
        self, condition_data, condition_mask, cond=None, generator=None, **kwargs
    ):
        shape, device = condition_data.shape, condition_data.device
        x = torch.randn(shape, dtype=condition_data.dtype, device=device, generator=generator)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            x[condition_mask] = condition_data[condition_mask]
            out = self.model(x, t, cond)
            x = self.noise_scheduler.step(out, t, x, generator=generator, **kwargs).prev_sample
        x[condition_mask] = condition_data[condition_mask]
        return x

    def predict_action(self, obs_dict):
        cond = obs_dict["obs"][:, :2]
        data = torch.zeros(len(cond), 8, 2, device=cond.device)
        actions = self.conditional_sample(data, data.bool(), cond=cond, **self.kwargs)
        return {"action": actions[:, 1:5], "action_pred": actions}


class RtiPolicy(nn.Module):
    """RTI-DP's lowdim policy: a whole loop first, then a few steps from the last chunk."""

    def __init__(self):
        super().__init__()
        self.model, self.normalizer = unet(6), nn.Linear(1, 1)
        self.noise_scheduler = diffusers.DDPMScheduler(20)
        self.num_inference_steps, self.steps, self.kwargs = 20, [3, 1, 0], {}
        self.initial_guess, self.guess = True, None

    def _loop(self, x, timesteps, data, mask, conditions, generator, kwargs):
        for t in timesteps:
            x[mask] = data[mask]
            out = self.model(x, t, **conditions)
            x = self.noise_scheduler.step(out, t, x, generator=generator, **kwargs).prev_sample
        x[mask] = data[mask]
        return x

    def initial_sample(
        self,
        condition_data,
        condition_mask,
        local_cond=None,
        global_cond=None,
        generator=None,
        **kwargs,
    ):
        data = condition_data
        x = torch.randn(data.shape, dtype=data.dtype, device=data.device, generator=generator)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        conditions = {"local_cond": local_cond, "global_cond": global_cond}
        timesteps = self.noise_scheduler.timesteps
        return self._loop(x, timesteps, data, condition_mask, conditions, generator, kwargs)

    def rti_sample(
        self,
        condition_data,
        condition_mask,
        local_cond=None,
        global_cond=None,
        generator=None,
        **kwargs,
    ):
        if self.initial_guess:
            raise ValueError("Initial guess is not set, please run initial_sample first.")
        x = torch.cat([self.guess[:, 1:, :], self.guess[:, -1, :].unsqueeze(1)], dim=1)
        timesteps = torch.tensor(self.steps)  # beside the scheduler's, as newer diffusers wants
        conditions = {"local_cond": local_cond, "global_cond": global_cond}
        return self._loop(
            x, timesteps, condition_data, condition_mask, conditions, generator, kwargs
        )

    def predict_action(self, obs_dict):
        cond = obs_dict["obs"][:, :2].flatten(1)
        data = torch.zeros(len(cond), 8, 2, device=cond.device)
        sample = self.initial_sample if self.initial_guess else self.rti_sample
        actions = sample(data, data.bool(), local_cond=None, global_cond=cond, **self.kwargs)
        self.initial_guess, self.guess = False, actions.clone().detach()
        return {"action": actions[:, 1:5]}


class ManiSkillAgent(nn.Module):
    """ManiSkill's Agent: the loop is in get_action, on all timesteps of the scheduler.

    ``images`` are the names of those that it observes, as train_rgbd.py's does.
    """

    def __init__(self, images=()):
        super().__init__()
        self.obs_horizon, self.act_horizon, self.pred_horizon, self.act_dim = 2, 4, 8, 2
        self.images = images
        if images:
            channels = sum({"rgb": 3, "depth": 1}[name] for name in images)
            self.visual_encoder = nn.Conv2d(channels, 4, 3, 2)
        self.noise_pred_net = near_copies.ManiSkill(2, 2 * (3 + 4 * bool(images)))
        self.num_diffusion_iters = 10
        self.noise_scheduler = diffusers.DDPMScheduler(10, beta_schedule="squaredcos_cap_v2")
        if not images:
            self.get_eval_action = self.get_action

    def encode_obs(self, obs_seq, eval_mode):
        scales = {"rgb": 255.0, "depth": 1024.0}
        seen, *more = (obs_seq[name].float() / scales[name] for name in self.images)
        seen = torch.cat([seen, *more], 2) if more else seen
        features = self.visual_encoder(seen.flatten(end_dim=1)).amax((2, 3))
        features = features.unflatten(0, seen.shape[:2])
        return torch.cat([features, obs_seq["state"]], -1).flatten(1)

    def get_action(self, obs_seq):
        with torch.no_grad():
            if self.images:
                for name in self.images:
                    obs_seq[name] = obs_seq[name].permute(0, 1, 4, 2, 3)
                cond = self.encode_obs(obs_seq, eval_mode=True)
            else:
                cond = obs_seq.flatten(start_dim=1)
            x = torch.randn((len(cond), self.pred_horizon, self.act_dim), device=cond.device)
            for k in self.noise_scheduler.timesteps:
                out = self.noise_pred_net(sample=x, timestep=k, global_cond=cond)
                x = self.noise_scheduler.step(model_output=out, timestep=k, sample=x).prev_sample
        return x[:, self.obs_horizon - 1 : self.obs_horizon - 1 + self.act_horizon]


class Normalizer(nn.Module):
    """Of diffusion_policy, as far as policies call it."""

    def normalize(self, values):
        return {name: value / 2 for name, value in values.items()}

    def __getitem__(self, name):
        return SimpleNamespace(unnormalize=lambda value: value * 2)


class FlowPolicy(nn.Module):
    """FlowPolicy: Euler's steps inside predict_action, each with noise of weight zero."""

    def __init__(self, steps=3):
        super().__init__()
        self.obs_encoder = nn.Module()
        self.obs_encoder = CloudEncoder()
        self.model = unet(2 * 6)
        self.normalizer = Normalizer()
        self.horizon, self.action_dim, self.n_action_steps, self.n_obs_steps = 8, 2, 4, 2
        self.obs_as_global_cond, self.use_pc_color, self.condition_type = True, False, "film"
        self.eps, self.num_segments, self.num_inference_step = 1e-2, 2, steps
        self.kwargs = {}

    def predict_action(self, obs_dict):
        observed = self.normalizer.normalize(obs_dict)
        observed["point_cloud"] = observed["point_cloud"][..., :3]
        batch = len(next(iter(observed.values())))
        frames = {k: v[:, : self.n_obs_steps].flatten(0, 1) for k, v in observed.items()}
        cond = self.obs_encoder(frames).reshape(batch, -1)
        z = torch.randn(batch, self.horizon, self.action_dim, device=cond.device)
        count = self.num_inference_step
        for i in range(count):
            num_t = i / count * (1 - self.eps) + self.eps
            t = torch.ones(batch, device=z.device) * num_t
            pred = self.model(z, t * 99, local_cond=None, global_cond=cond)
            z = z.clone() + pred * (1.0 / count) + 0.0 * torch.randn_like(pred)
        actions = self.normalizer["action"].unnormalize(z[..., : self.action_dim])
        return {"action": actions[:, 1:5], "action_pred": actions}


class CloudEncoder(nn.Module):
    """Point clouds and states to features."""

    def __init__(self):
        super().__init__()
        self.points = nn.Linear(3, 4)

    def forward(self, frames):
        return torch.cat([self.points(frames["point_cloud"]).amax(1), frames["agent_pos"]], -1)


class DiT(nn.Module):
    """multi_task_dit's DiffusionTransformer: blocks whose scale and shift the condition gives."""

    def __init__(self, width=32, layers=2, heads=4, actions=2, vector=6, time=16):
        super().__init__()
        self.time_mlp = nn.Sequential(
            Embedding(time), nn.Linear(time, 2 * time), nn.GELU(), nn.Linear(2 * time, time)
        )
        self.input_proj, self.output_proj = nn.Linear(actions, width), nn.Linear(width, actions)
        blocks = (DiTBlock(width, heads, time + vector) for _ in range(layers))
        self.transformer_blocks = nn.ModuleList(blocks)

    def forward(self, x, timestep, conditioning_vec):
        features = torch.cat([self.time_mlp(timestep), conditioning_vec], -1)
        hidden = self.input_proj(x)
        for block in self.transformer_blocks:
            hidden = block(hidden, features)
        return self.output_proj(hidden)


class RotaryAttention(nn.Module):
    """Self-attention whose queries and keys are turned by their place."""

    def __init__(self, width, heads, longest=64):
        super().__init__()
        self.heads, size = heads, width // heads
        self.qkv_proj, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        rates = 10000.0 ** -(torch.arange(0, size, 2) / size)
        angles = (torch.arange(longest)[:, None] * rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def turned(self, x):
        length, half = x.shape[2], x.shape[3] // 2
        beside = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos[:length].to(x.dtype) + beside * self.sin[:length].to(x.dtype)

    def forward(self, x):
        split = self.qkv_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = self.turned(split[0]), self.turned(split[1]), split[2]
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class DiTBlock(nn.Module):
    """Attention and MLP, modulated."""

    def __init__(self, width, heads, features):
        super().__init__()
        self.attn = RotaryAttention(width, heads)
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        wide = nn.Linear(width, 4 * width)
        self.mlp = nn.Sequential(wide, nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(features, 6 * width))

    def forward(self, x, features):
        parts = self.adaLN_modulation(features)[:, None].chunk(6, dim=-1)
        attended = self.norm1(x) * (1 + parts[1]) + parts[0]
        x = x + parts[2] * self.attn(attended)
        return x + parts[5] * self.mlp(self.norm2(x) * (1 + parts[4]) + parts[3])


class DiffusionObjective(nn.Module):
    """multi_task_dit's: the loop of DDPM or DDIM."""

    def __init__(self, config, kind):
        super().__init__()
        self.config, self.horizon, self.action_dim = config, 8, 2
        self.noise_scheduler = getattr(diffusers, f"{kind}Scheduler")(20)
        self.num_inference_steps = 6

    def conditional_sample(self, model, batch_size, conditioning_vec):
        first = next(model.parameters())
        shape = (batch_size, self.horizon, self.action_dim)
        x = torch.randn(size=shape, dtype=first.dtype, device=first.device)
        self.noise_scheduler.set_timesteps(self.num_inference_steps)
        for t in self.noise_scheduler.timesteps:
            times = torch.full(x.shape[:1], t, dtype=torch.long, device=x.device)
            out = model(x, times, conditioning_vec=conditioning_vec)
            x = self.noise_scheduler.step(out, t, x).prev_sample
        return x


class FlowObjective(nn.Module):
    """multi_task_dit's: a velocity, integrated by Euler's or Runge and Kutta's steps."""

    def __init__(self, config):
        super().__init__()
        self.config, self.horizon, self.action_dim = config, 8, 2

    def conditional_sample(self, model, batch_size, conditioning_vec):
        first = next(model.parameters())
        shape = (batch_size, self.horizon, self.action_dim)
        x = torch.randn(shape, dtype=first.dtype, device=first.device)
        times = torch.linspace(0, 1, self.config.num_integration_steps + 1)

        def velocity(x, t):
            t = torch.full((len(x),), t, dtype=x.dtype, device=x.device)
            return model(x, t, conditioning_vec=conditioning_vec)

        for i in range(len(times) - 1):
            t, dt = times[i].item(), (times[i + 1] - times[i]).item()
            k1 = velocity(x, t)
            if self.config.integration_method == "euler":
                x = x + dt * k1
                continue
            k2 = velocity(x + dt * k1 / 2, t + dt / 2)
            k3 = velocity(x + dt * k2 / 2, t + dt / 2)
            k4 = velocity(x + dt * k3, t + dt)
            x = x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return x


class MultiTaskDiT(nn.Module):
    """LeRobot's multi_task_dit, on state observations."""

    def __init__(self, objective="DDPM", network=None):
        super().__init__()
        flow = objective in ("euler", "rk4")
        self.config = SimpleNamespace(
            n_obs_steps=2, n_action_steps=4, integration_method=objective, num_integration_steps=5
        )
        self.observation_encoder = StateEncoder()
        self.noise_predictor = awake(network or DiT())
        config = self.config
        self.objective = FlowObjective(config) if flow else DiffusionObjective(config, objective)
        self._queues = {}

    def _generate_actions(self, batch):
        state = batch["observation.state"]
        assert state.shape[1] == self.config.n_obs_steps
        vector = self.observation_encoder.encode(batch)
        actions = self.objective.conditional_sample(self.noise_predictor, len(state), vector)
        return actions[:, 1 : 1 + self.config.n_action_steps]

    @torch.no_grad()
    def predict_action_chunk(self, batch):
        self._queues = {"observation.state": object()}  # as reset and select_action change them
        return self._generate_actions(batch)


class StateEncoder(nn.Module):
    """States of all frames as one vector."""

    def encode(self, batch):
        return batch["observation.state"].flatten(1)
