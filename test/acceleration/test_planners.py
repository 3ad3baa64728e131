"""What the loops of Diffuser and CleanDiffuser leave to the originals.

That they act as the originals do is in ``test_other_loops``.
"""

import copy

import near_policies
import planners
import pytest
import torch
from test_near_policies import both, same_results
from torch import nn

import dpa
from dpa.acceleration import policy_loop
from dpa.packed.agreement import relative_error
from dpa.tracking.replacing import replaced

STATE = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(1))


def called(**options):
    def act(agent):
        agent.options = {**agent.options, **options}
        return agent.act(STATE)

    return act


@torch.no_grad()
def test_the_network_in_training_is_left_aside(monkeypatch):
    """It would be compared in every call, and an update of it would make the loop anew."""
    made = []
    monkeypatch.setattr(
        policy_loop,
        "make_route",
        lambda *given, make=policy_loop.make_route: made.append(0) or make(*given),
    )
    plain, fast = both(lambda: planners.DDPM(predict_noise=False))
    for agent in (plain, fast):
        agent.act(STATE)
        agent.model["diffusion"].trained = 1
    same_results(plain, fast, called())
    assert len(made) == 1


def with_classifier(agent):
    agent.classifier = nn.Identity()
    return agent.act(STATE)


def with_other_bounds(agent):
    agent.x_max = torch.full((1, 8, 2), 0.5)
    return agent.act(STATE)


def with_weights(agent):
    agent.fix_mask = torch.full((1, 8, 2), 0.25)
    return agent.act(STATE)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (called(w_cfg=0.5), "its w_cfg of 0.5 weighs two predictions"),
        (with_classifier, "its classifier guides it"),
        (with_other_bounds, "its x_min and x_max are not one bound"),
        (with_weights, "its fix_mask has weights"),
    ],
)
def test_what_agents_of_clean_diffuser_do_themselves(call, why):
    plain, fast = both(lambda: planners.DDPM(predict_noise=False))
    plain.options.pop("w_cfg", None)
    given = {"prior": torch.zeros(2, 8, 2), "n_samples": 2, "condition_cfg": STATE}

    def act(agent):
        act_once = agent.sample

        def sample(**options):
            return act_once(**{**options, **given, **agent.options})

        return call(Called(agent, sample))

    with pytest.warns(RuntimeWarning, match=why):
        same_results(plain, fast, act)
    assert why in str(dpa.explain(fast))


class Called:
    """An agent whose ``act`` passes its options over those that it has by itself."""

    def __init__(self, agent, sample):
        vars(self).update(_agent=agent, _sample=sample)

    def __getattr__(self, name):
        return getattr(self._agent, name)

    def __setattr__(self, name, value):
        setattr(self._agent, name, value)

    def act(self, state):
        return self._sample(w_cfg=1.0)[0]


def test_diffuser_with_a_chain_and_with_a_guide():
    def chain(planner):
        return planner({0: STATE[:, 0]}, verbose=False, return_chain=True).chains

    def guide(model, x, cond, t):
        x, values = planners.default_sample_fn(model, x, cond, t)
        return x + 0.1, values - x.mean((1, 2))

    def guided(planner):
        return planner({0: STATE[:, 0]}, verbose=False, sample_fn=guide).trajectories

    plain, fast = both(planners.GaussianDiffusion)
    same_results(plain, fast, chain)
    with pytest.warns(RuntimeWarning, match="its sample_fn is another one"):
        same_results(plain, fast, guided)


def test_diffuser_runs_without_gradients_whoever_calls_it():
    plain, fast = both(planners.GaussianDiffusion)
    for seed in range(2):
        results = []
        for planner in (plain, fast):
            torch.manual_seed(seed)
            results.append(planner.act(STATE).trajectories)
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    loop = replaced(fast, "p_sample_loop")
    assert loop.shadow.agreed and not results[1].requires_grad
    assert "accelerated: the whole loop" in str(dpa.explain(fast))


@pytest.mark.parametrize("through", [lambda x: x, lambda x: x.data], ids=["itself", "data"])
def test_a_written_buffer_of_diffuser_is_followed(device, through):
    plain, fast = both(lambda: planners.GaussianDiffusion().to(device))

    def act(planner):
        return planner.act(STATE.to(device)).trajectories

    same_results(plain, fast, act)
    for planner in (plain, fast):
        through(planner.posterior_mean_coef1).mul_(0.5)
    same_results(plain, fast, act)


@pytest.mark.parametrize("name", ["x_max", "bar_alpha", "fix_mask"])
def test_tensors_of_clean_diffuser_written_through_data_are_followed(device, name):
    mask = torch.zeros(8, 2)
    mask[0] = 1
    plain, fast = both(lambda: planners.DDPM(fix_mask=mask.clone()).to(device))

    def act(agent):
        return agent.act(STATE.to(device))

    same_results(plain, fast, act)
    for agent in (plain, fast):
        getattr(agent, name).data[..., -1].mul_(0.5)
    same_results(plain, fast, act)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("solver", ["ode_dpmsolver_1", "sde_dpmsolver_1", "ode_dpmsolver++_2M"])
def test_few_steps_of_clean_diffuser_from_pure_noise(device, solver, steps):
    """There alpha is small, and what the agent rounds is large in the result."""
    options = {"predict_noise": False, "bound": 0.4}
    plain, fast = both(lambda: planners.DiscreteDiffusionSDE(solver, **options).to(device))
    for agent in (plain, fast):
        agent.options["sample_steps"] = steps
    same_results(plain, fast, lambda agent: agent.act(STATE.to(device)), calls=4)
    errors = replaced(fast, "sample").shadow.errors.values()
    assert errors and max(errors) < 1e-4


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("kind", ["GaussianDiffusion", "Maze2dDiffusion"])
def test_diffuser_that_predicts_x0(device, kind, graphs):
    """Its noise is made in the order in which its network's outputs lie in memory."""
    torch.manual_seed(0)
    plain = getattr(planners, kind)(predict_epsilon=False).to(device).eval()
    fast = dpa.accelerate(copy.deepcopy(plain), fallback=False, graphs=graphs)

    def act(planner):
        result = planner.act(STATE.to(device))
        return getattr(result, "trajectories", result)

    same_results(plain, fast, act, calls=4)
    assert replaced(fast, "p_sample_loop").shadow.agreed


def test_a_prior_of_another_dtype_is_refused_as_before():
    plain, fast = both(planners.DDPM)
    same_results(plain, fast, lambda agent: agent.act(STATE))
    given = {"n_samples": 2, "condition_cfg": STATE, "w_cfg": 1.0, **plain.options}
    for agent in (plain, fast):
        with pytest.raises(RuntimeError), torch.no_grad():
            agent.sample(prior=torch.zeros(2, 8, 2, dtype=torch.float64), **given)


@torch.no_grad()
@pytest.mark.parametrize("agent", [planners.DDPM, planners.DiscreteDiffusionSDE, planners.EDM])
def test_noise_lies_in_the_priors_order(agent):
    """Agents make it like the prior, so a transposed one has other numbers in its places."""
    torch.manual_seed(1)
    plain = agent().eval()
    fast = dpa.accelerate(copy.deepcopy(plain))
    steps = (
        {"sample_steps": plain.diffusion_steps} if agent is planners.DDPM else {"sample_steps": 6}
    )
    for prior in (
        torch.zeros(2, 8, 2),
        torch.zeros(2, 2, 8).mT,
        torch.zeros(8, 2, 2).transpose(0, 1),
    ):
        results = []
        for each in (plain, fast):
            torch.manual_seed(3)
            given = {"prior": prior, "n_samples": 2, "condition_cfg": STATE, "w_cfg": 1.0}
            results.append((each.sample(**given, **steps)[0], torch.randn(3)))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


class Other(nn.Module):
    """A network that is no U-Net of the family, called as CleanDiffuser calls its own."""

    def __init__(self):
        super().__init__()
        self.mix, self.cond = nn.Linear(8, 8), nn.Linear(3, 2)

    def forward(self, x, noise, condition=None):
        scale = 1 + 0.1 * noise[:, None, None].to(x.dtype)
        x = self.mix(x.mT).mT.tanh() * scale
        return x if condition is None else x + self.cond(condition.flatten(1)[:, :3])[:, None]


@pytest.mark.parametrize("masked", [False, True])
def test_any_network_with_a_mask(device, masked):
    """Its config says no number of actions; what is inpainted does."""
    torch.manual_seed(0)
    mask = torch.zeros(8, 2)
    mask[0] = 1
    plain = planners.DDPM(**({"fix_mask": mask} if masked else {})).to(device).eval()
    plain.model["diffusion"] = Other().to(device)
    plain.model_ema = copy.deepcopy(plain.model).requires_grad_(False).eval()
    fast = dpa.accelerate(copy.deepcopy(plain), fallback=False)
    same_results(plain, fast, lambda agent: agent.act(STATE.to(device)), calls=4)
    assert replaced(fast, "sample").shadow.agreed


def test_a_schedule_of_edm_that_was_edited(device):
    """Steps make a schedule, which the agent keeps until their number changes."""
    plain, fast = both(lambda: planners.EDM("euler").to(device))

    def act(count):
        def call(agent):
            agent.options["sample_steps"] = count
            return agent.act(STATE.to(device))

        return call

    for count in (5, 8, 5):
        same_results(plain, fast, act(count))
        assert plain.sample_steps == fast.sample_steps == count
        assert torch.equal(plain.sigma_s, fast.sigma_s)
    for agent in (plain, fast):
        agent.sigma_s = agent.sigma_s * 0.5
    with pytest.warns(RuntimeWarning, match="its sigma_s is not what its set_sample_steps makes"):
        same_results(plain, fast, act(5))
    same_results(plain, fast, act(8))
    for most, count in ((20.0, 5), (80.0, 5), (20.0, 8), (20.0, 5), (80.0, 5), (80.0, 5)):
        for agent in (plain, fast):
            agent.sigma_max = most
        same_results(plain, fast, act(count), calls=2)


class Schedule:
    power = 1.0

    def __call__(self, count, steps):
        return ((count - 1) * torch.linspace(0, 1, steps + 1) ** self.power).long()


def test_a_schedule_that_is_an_object(monkeypatch):
    """Its own values may change, so loops over it are the original's."""
    schedule = Schedule()
    monkeypatch.setitem(planners.SUPPORTED_SAMPLING_STEP_SCHEDULE, "own", schedule)
    plain, fast = both(lambda: planners.DiscreteDiffusionSDE("ddim"))
    act = called(sample_step_schedule="own")
    for power in (1.0, 1.0, 2.0):
        schedule.power = power
        same_results(plain, fast, act)


def test_a_schedule_that_repeats_a_place():
    plain, fast = both(lambda: planners.DiscreteDiffusionSDE("ode_dpmsolver++_2M", steps=4))
    act = called(sample_steps=6)
    for agent in (plain, fast, fast):
        assert act(agent).isnan().all()


@pytest.mark.parametrize("name", ["sample_steps", "diffusion_x_sampling_steps"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_steps_that_are_no_integer(name):
    plain, fast = both(lambda: planners.DiscreteDiffusionSDE("ddim"))
    same_results(plain, fast, called(**{name: 5}))
    same_results(plain, fast, called(**{name: 5}))
    for agent in (plain, fast):
        with pytest.raises(TypeError):
            called(**{name: 5.0})(agent)


@pytest.mark.parametrize("kind", ["DDPM", "DiscreteDiffusionSDE", "GaussianDiffusion", "DPPO"])
def test_noise_under_autocast(device, kind):
    """It is made like the sample, which stays in float32, not like the network's output."""
    torch.manual_seed(0)
    make = near_policies.DiffusionModel if kind == "DPPO" else getattr(planners, kind)
    plain = make().to(device).eval()
    fast = dpa.accelerate(copy.deepcopy(plain), fallback=False, graphs=False)

    @torch.no_grad()
    def act(planner):
        torch.manual_seed(7)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            result = planner.act(STATE.to(device))
        return getattr(result, "trajectories", result)

    wanted = act(plain)
    for _ in range(3):
        assert relative_error(act(fast), wanted) < 0.03
