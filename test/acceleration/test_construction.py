"""Policies accelerated as they are made: the hook on imports, the environment, `dpa run`."""

import copy
import sys
import textwrap

import pytest
import torch
from policies import lerobot_policy, observations
from processes import run_python

from dpa.acceleration import construction
from dpa.acceleration.policy_loop import FastLoop
from dpa.tracking.replacing import replaced


@pytest.fixture
def said():
    lines = []
    yield lines
    construction.leave_new()


def is_fast(policy):
    return isinstance(replaced(policy.diffusion, "conditional_sample"), FastLoop)


def acts(policy):
    torch.manual_seed(3)
    with torch.no_grad():
        return torch.cat([policy.select_action(one) for one in observations(9, "cpu")])


def test_a_policy_that_is_made_is_accelerated(said):
    plain = lerobot_policy()
    construction.accelerate_new(said.append)
    policy = lerobot_policy()
    policy.load_state_dict(plain.state_dict())  # as from_pretrained does, afterwards
    assert is_fast(policy) and not is_fast(plain)
    [line] = said
    assert "DiffusionPolicy runs accelerated" in line and "loop" in line and "U-Net" in line
    twin = copy.deepcopy(policy)  # as EMA copies are made
    want = acts(plain)
    for one in (policy, twin):
        torch.testing.assert_close(acts(one), want, rtol=1e-4, atol=1e-4)
    construction.leave_new()
    assert not is_fast(lerobot_policy()) and is_fast(policy)
    assert len(said) == 1


def test_weights_in_sixteen_bits(said):
    construction.accelerate_new(said.append, dtype=torch.bfloat16)
    assert "bfloat16 weights" in (lerobot_policy(), said[0])[1]


PACKAGE = {
    "__init__": "",
    "policy/__init__": "",
    # As diffusion_policy has it: an abstract base, and policies that call its constructor.
    "policy/base_lowdim_policy": """
        from torch import nn
        class BaseLowdimPolicy(nn.Module):
            def predict_action(self, obs_dict):
                raise NotImplementedError
    """,
    "policy/diffusion_unet_lowdim_policy": """
        import torch
        from policies import OriginalPolicy, diffusers, dpa, SMALL
        from {package}.policy.base_lowdim_policy import BaseLowdimPolicy
        class DiffusionUnetLowdimPolicy(BaseLowdimPolicy):
            def __init__(self, steps):
                super().__init__()
                self.model = dpa.reference.plain(dpa.nn.ConditionalUnet1D(2, None, 4, **SMALL))
                self.noise_scheduler = diffusers.DDPMScheduler(20)
                self.num_inference_steps = steps
                self.kwargs = {{}}
            conditional_sample, predict = OriginalPolicy.conditional_sample, OriginalPolicy.predict
            def predict_action(self, obs_dict):
                cond = obs_dict["obs"].flatten(1)
                data = torch.zeros(len(cond), 8, 2)
                return {{"action": self.conditional_sample(data, data.bool(), None, cond)}}
        class IbcPolicy(BaseLowdimPolicy):
            def __init__(self):
                super().__init__()
    """,
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of the names of diffusion_policy, on the path and not imported."""
    name = f"my_diffusion_policy_{tmp_path.name.replace('-', '_')}"
    for path, text in PACKAGE.items():
        file = tmp_path / name / f"{path}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text).format(package=name))
    monkeypatch.syspath_prepend(tmp_path)
    yield f"{name}.policy.diffusion_unet_lowdim_policy"
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_policies_of_modules_that_are_imported_later(package, said):
    __import__(f"{package.rpartition('.')[0]}.base_lowdim_policy")
    construction.accelerate_new(said.append, graphs=False)
    module = __import__(package, fromlist=["x"])
    policy = module.DiffusionUnetLowdimPolicy(5)
    assert isinstance(replaced(policy, "conditional_sample"), FastLoop)
    module.IbcPolicy()
    fast, left = said
    assert "DiffusionUnetLowdimPolicy runs accelerated" in fast
    assert "IbcPolicy runs as it is" in left


def test_a_subclass_is_accelerated_once_it_is_made(said):
    construction.accelerate_new(said.append)
    of = type(lerobot_policy())
    said.clear()

    class Own(of):
        name = "own"

        def __init__(self, config):
            super().__init__(config)
            self.later = True

    policy = Own(lerobot_policy().config)
    assert is_fast(policy) and policy.later
    assert acts(policy).shape == (9, 2)


def test_a_failing_constructor_leaves_nothing(said):
    construction.accelerate_new(said.append)
    kind = type(lerobot_policy())
    said.clear()
    with pytest.raises(ValueError):
        kind(None)
    assert not said and not construction._making.objects


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({}, {}),
        ({"DPA_ACCELERATE": "0"}, None),
        ({"DPA_ACCELERATE": "off", "DPA_DTYPE": "bfloat16"}, None),
        ({"DPA_ACCELERATE": "1", "DPA_DTYPE": "bfloat16"}, {"dtype": torch.bfloat16}),
        ({"DPA_MODE": "step", "DPA_GRAPHS": "no"}, {"mode": "step", "graphs": False}),
        ({"DPA_TOLERANCE": "0.1", "DPA_FALLBACK": "0"}, {"tolerance": 0.1, "fallback": False}),
        ({"DPA_WEIGHTS": "checked"}, {"weights": "checked"}),
    ],
)
def test_the_environment(environment, options):
    assert construction.options_from(environment) == options


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"DPA_ACCELERATE": "perhaps"}, "DPA_ACCELERATE must be one of 1, on, .*'perhaps'"),
        ({"DPA_DTYPE": "int8"}, "DPA_DTYPE must be one of float32, .*'int8'"),
        ({"DPA_TOLERANCE": "few"}, "DPA_TOLERANCE must be a number, got 'few'"),
        ({"DPA_GRAPHS": "2"}, "DPA_GRAPHS must be one of"),
    ],
)
def test_wrong_values_in_the_environment(environment, words):
    with pytest.raises(ValueError, match=words):
        construction.options_from(environment)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "fast"}, "mode must be one of"),
        ({"tolerance": -1}, "tolerance must be positive"),
        ({"policies": ("policy",)}, "written as module:Class, got 'policy'"),
    ],
)
def test_wrong_options_are_refused_before_any_policy(options, words, said):
    with pytest.raises(ValueError, match=words):
        construction.accelerate_new(said.append, **options)
    assert construction._hook is None


def test_a_named_policy_that_its_module_imports(said, tmp_path, monkeypatch):
    kind = type(lerobot_policy())
    (tmp_path / "policies_of_mine.py").write_text(
        f"from {kind.__module__} import {kind.__name__} as Mine\nnumber = 3\nclass Other: pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    names = tuple(f"policies_of_mine:{name}" for name in ("Mine", "number", "Other", "Typo"))
    monkeypatch.setattr(construction, "KNOWN", ())
    construction.accelerate_new(said.append, names)
    monkeypatch.delitem(sys.modules, "policies_of_mine", raising=False)
    __import__("policies_of_mine")
    assert said == [f"dpa: {name} is no policy, so it runs as it is" for name in names[1:]]
    assert is_fast(lerobot_policy())


PROGRAM = """
import sys
sys.path.insert(0, {support!r})
sys.path.insert(0, {folder!r})
from {package} import DiffusionUnetLowdimPolicy
policy = DiffusionUnetLowdimPolicy(5)
print(sys.argv[1:], __name__, type(vars(policy).get("conditional_sample")).__name__)
if "fail" in sys.argv:
    raise ValueError("of the program")
"""


@pytest.fixture
def program(package, tmp_path):
    support = next(path for path in sys.path if path.endswith("test/support"))
    file = tmp_path / "program.py"
    file.write_text(PROGRAM.format(support=support, folder=str(tmp_path), package=package))
    return file


def dpa_run(*arguments, **options):
    return run_python("-m", "dpa", "run", *arguments, **options)


def test_a_program_runs_with_its_policies_accelerated(program):
    done = dpa_run("--mode", "chain", program, "--mode", "own", "-m", "x")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['--mode', 'own', '-m', 'x'] __main__ FastLoop\n"
    assert done.stderr.count("runs accelerated") == 1


def test_a_module_that_fails_shows_its_own_error(program, tmp_path):
    done = dpa_run("-m", "program", "fail", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == "['fail'] __main__ FastLoop\n"
    assert "ValueError: of the program" in done.stderr and "Traceback" in done.stderr


def test_wrong_usage_of_run(tmp_path):
    done = dpa_run("none.py", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "none.py: there is no such file" in done.stderr
    done = dpa_run(tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{tmp_path}: is a folder" in done.stderr
