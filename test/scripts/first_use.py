"""A user's first minutes with the wheel: doctor found nothing wrong, and a policy runs accelerated.

first_use.py DOCTOR.JSON. The policy is LeRobot's, unedited, with an image encoder; where LeRobot is
not installed, dpa's network under a scheduler of diffusers. The last line is for a table.
"""

import json
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

import dpa

# Where there is a GPU, the policy runs there; the plain one's convolutions are to be as exact.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cudnn.allow_tf32 = False


def lerobot_call():
    """A call of a policy of LeRobot; what accelerates it, and says whether its loop is."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy

    config = DiffusionConfig(
        input_features={
            "observation.state": PolicyFeature(FeatureType.STATE, (3,)),
            "observation.image": PolicyFeature(FeatureType.VISUAL, (3, 96, 96)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
        device=DEVICE,
        down_dims=(64, 128),
        pretrained_backbone_weights=None,  # LeRobot 0.6 would fetch some
        num_train_timesteps=10,
    )
    policy = DiffusionPolicy(config).eval().to(DEVICE)
    state, image = torch.randn(1, 3, device=DEVICE), torch.rand(1, 3, 96, 96, device=DEVICE)
    observation = {"observation.state": state, "observation.image": image}

    def call():
        policy.reset()
        torch.manual_seed(0)
        return policy.select_action(dict(observation))

    def accelerate():
        dpa.accelerate(policy)
        return call

    def is_accelerated():
        found = dpa.explain(policy)
        print(found)
        return any(finding.part == "loop" and finding.active for finding in found.findings)

    return call, accelerate, is_accelerated


def sampler_call():
    """The same of dpa's own network and diffusers' scheduler."""
    from diffusers import DDIMScheduler

    unet = dpa.nn.ConditionalUnet1D(2, global_cond_dim=20, down_dims=(64, 128)).to(DEVICE)
    scheduler = DDIMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2")
    options = {"num_inference_steps": 5, "horizon": 16}
    plain = dpa.DiffusionSampler(unet, scheduler, fused=False, **options)
    fused = dpa.DiffusionSampler(unet, scheduler, fused=True, **options)  # raises where it cannot
    shapes = {"global_cond": (1, 20), "noise": (1, 16, 2)}
    inputs = {name: torch.randn(shape, device=DEVICE) for name, shape in shapes.items()}
    return lambda: plain(**inputs), lambda: lambda: fused(**inputs), lambda: True


def milliseconds(call):
    """The quickest of five calls: for people to read, compared with nothing."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        call().cpu()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main():
    found = json.loads(Path(sys.argv[1]).read_text())
    assert found["healthy"], found
    call, accelerate, is_accelerated = lerobot_call() if find_spec("lerobot") else sampler_call()
    with torch.no_grad():
        expected, before = call(), milliseconds(call)
        call = accelerate()
        for _ in range(3):
            torch.testing.assert_close(call(), expected, rtol=1e-3, atol=1e-3)
        after = milliseconds(call)
    assert is_accelerated()
    where = f"{dpa.library_path().parent.name} on {DEVICE}"
    print(f"torch {torch.__version__}, {where}: a call {before:.1f} ms, accelerated {after:.1f}")


main()
