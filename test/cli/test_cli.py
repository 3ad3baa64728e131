"""The command line: quick help, choices, exit statuses, checkpoints of the Hub."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import near_copies
import pytest
import torch
from lerobot_names import lerobot_name
from typer.testing import CliRunner

import dpa
from dpa.checkpoints.loading import CheckpointError
from dpa.cli import options
from dpa.cli.app import app, main
from dpa.cli.bench import Part
from dpa.nn import family

NOTHING_HEAVY = """
import sys, runpy
sys.argv, sys.orig_argv = ["-m", *{arguments}], [sys.executable, "-m", "dpa", *{arguments}]
try:
    runpy.run_module("dpa", run_name="__main__", alter_sys=True)
except SystemExit as stop:
    assert stop.code == 0, stop.code
assert not {{"torch", "numpy", "diffusers", "matplotlib"}} & set(sys.modules), "heavy"
"""


def run(*arguments, **environment):
    """Status, output and errors of the command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "dpa", *map(str, arguments)],
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def status_of_main(*arguments, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["dpa", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        main()
    return stop.value.code or 0


@pytest.fixture
def unet(tmp_path):
    torch.manual_seed(0)
    sizes = {"down_dims": (8, 16), "diffusion_step_embed_dim": 16, "n_groups": 4}
    unet = dpa.nn.ConditionalUnet1D(2, global_cond_dim=6, **sizes)
    torch.save(unet.state_dict(), tmp_path / "unet.pt")
    return tmp_path / "unet.pt"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["bench", "--help"]])
def test_help_waits_for_no_heavy_module(arguments):
    code = NOTHING_HEAVY.format(arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_takes_a_quarter_of_an_import_of_torch():
    """User time of both side by side: what slows a busy machine down slows both."""

    def seconds(*command):
        used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run([sys.executable, *command], check=True, capture_output=True)
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - used

    def is_quick():
        return seconds("-m", "dpa", "--help") < seconds("-c", "import torch") / 4

    assert any(is_quick() for _ in range(3))  # the second and third time where others were busy


def test_the_version():
    assert run("--version") == (0, f"dpa {dpa.__version__}\n", "")


def test_a_script_of_the_command_is_recognised_and_no_other(tmp_path):
    """A script that an installer writes, and one of the same name by someone else."""
    script = tmp_path / "dpa"
    for text, deferred in (("from dpa.cli import main\n", True), ("print('mine')\n", False)):
        script.write_text(f"{text}import sys; sys.exit('torch' in sys.modules)\n")
        probe = f"{text}import dpa, sys\nprint('torch' in sys.modules)\n"
        script.write_text(probe)
        done = subprocess.run([sys.executable, script], capture_output=True, text=True)
        assert done.stdout.split()[-1] == str(not deferred), done
    code = "import dpa, torch; torch.ops.dpa.denoise"
    other = subprocess.run([sys.executable, "-c", code, "dpa"], capture_output=True, text=True)
    assert other.returncode == 0, other.stderr


def test_the_deferred_package_has_every_public_name(tmp_path):
    script = tmp_path / "dpa"
    names = dpa.__all__
    script.write_text(
        "from dpa.cli import main\nimport dpa, sys\n"
        "assert 'torch' not in sys.modules\n"
        f"print([name for name in {names} if not hasattr(dpa, name)], dpa.nn.LLTM.__name__)\n"
        "import torch; torch.ops.dpa.denoise\n"
        "assert not hasattr(dpa, 'nothing')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "[] LLTM\n", done


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["explain"],
        ["explain", "none.pt"],
        ["explain", "empty.pt"],
        ["explain", "unet.pt", "--prefix", "other"],
        ["bench", "none.pt"],
        ["bench", "--only", "nothing"],
        ["bench", "--only", "norm"],
        ["run", "--mode", "fast", "unet.pt"],
        ["run", "-m", "nothing.main"],
        ["bench", "unet.pt", "--device", "tpu"],
        ["bench", "unet.pt", "--train"],
        ["bench", "unet.pt", "--networks", "80 M"],
        ["bench", "--steps", "3"],
        ["export", "unet.pt", "--to", "gguf"],
        ["export", "unet.pt", "--to", "onnx", "--dtype", "bfloat16"],
        ["export", "unet.pt", "--to", "aoti", "--horizon", "9"],
        ["export", "unet.pt", "--to", "torchscript", "--part", "step", "--layers"],
        ["export", "unet.pt", "--to", "torchscript", "--scheduler-config", "none.json"],
        ["eval", "none", "--env", "PushT"],
        ["eval", "unet.pt", "--env", "PushT", "--dtype", "int8"],
        ["eval", "unet.pt", "--env", "PushT", "--plain", "--compare"],
        ["eval", "unet.pt", "--env", "PushT", "--plain", "--dtype", "bfloat16"],
        ["eval", "unet.pt", "--env", "PushT", "--seed", "-1"],
        ["demo", "--dtype", "int8"],
        ["demo", "--checkpoint", "none.pt"],
        ["demo", "--device", "tpu"],
    ],
)
def test_wrong_usage_ends_with_status_2(arguments, unet, monkeypatch, capsys):
    monkeypatch.chdir(unet.parent)
    (unet.parent / "empty.pt").touch()
    assert status_of_main(*arguments, monkeypatch=monkeypatch) == 2
    captured = capsys.readouterr()
    assert captured.err and not captured.out and "Traceback" not in captured.err


@pytest.mark.parametrize("error", [RuntimeError, ImportError, OSError])
def test_a_failure_ends_with_status_1(error, unet, monkeypatch, capsys):
    def fail(*_, **__):
        raise error("it broke")

    monkeypatch.setattr(dpa, "load_checkpoint", fail)
    assert status_of_main("explain", unet, monkeypatch=monkeypatch) == 1
    assert capsys.readouterr().err == "dpa: it broke\n"


def test_a_missing_library_is_a_failure_in_one_line(tmp_path, unet):
    status, out, err = run("explain", unet, DPA_LIBRARY=str(tmp_path / "none.so"))
    assert (status, out) == (1, "")
    assert err.count("\n") == 1 and "none.so, which does not exist" in err


@pytest.mark.parametrize(
    ("command", "choices"),
    [
        ("export", "aoti|torchscript|exported-program"),
        ("export", "loop|step"),
        ("export", "DDIM|DDPM"),
        ("eval", "loop|step|chain"),
        ("run", "loop|step|chain"),
        ("bench", "all|ops|sampler|images|networks"),
    ],
)
def test_choices_are_listed_in_the_help(command, choices):
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert choices in result.output, result.output


def test_a_part_of_the_bench_is_one_that_it_measures():
    from dpa.bench import command

    assert set(get_args(Part)) == {*command.PARTS, *command.TRAIN_PARTS}


def test_the_shell_completes_commands():
    complete = {"_DPA_COMPLETE": "complete_bash", "COMP_WORDS": "dpa ex", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "from dpa.cli.app import app; app(prog_name='dpa')"],
        env={**os.environ, **complete},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["explain", "export"], done


class Hub:
    """The Hub, as far as the command uses it; only what matches the patterns is given."""

    def __init__(self, monkeypatch, answer):
        self.asked, self.patterns = [], []
        self.answer = answer
        hub = pytest.importorskip("huggingface_hub")
        monkeypatch.setattr(hub, "snapshot_download", self._download)

    def _download(self, name, allow_patterns):
        self.asked.append(name)
        self.patterns.append(allow_patterns)
        assert {*allow_patterns} <= {"*.safetensors", "*.json", "config.json"}  # no pickle
        if isinstance(self.answer, Exception):
            raise self.answer
        given = self.answer.with_name("of the Hub")
        for pattern in allow_patterns:
            for path in self.answer.glob(pattern):
                given.mkdir(exist_ok=True)
                shutil.copy(path, given)
        return str(given)


def test_a_checkpoint_of_the_hub(tmp_path, unet, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    safetensors.save_file(torch.load(unet), folder / "model.safetensors")
    hub = Hub(monkeypatch, folder)
    result = CliRunner().invoke(app, ["explain", "someone/policy", "--json"])
    assert result.exit_code == 0, result.output
    assert hub.patterns == [["config.json"], ["*.safetensors", "*.json"]]
    said = json.loads(result.stdout)
    assert said["checkpoint"] == "someone/policy" and said["weights"] == "(the file itself)"


@pytest.mark.parametrize("cameras", [0, 2])
def test_a_configuration_without_weights(tmp_path, cameras, monkeypatch):
    modeling = pytest.importorskip("lerobot.policies.diffusion.modeling_diffusion")
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    observed = {
        f"observation.images.{i}": (FeatureType.VISUAL, (3, 64, 64)) for i in range(cameras)
    }
    observed["observation.state"] = FeatureType.STATE, (5,)
    if not cameras:
        observed["observation.environment_state"] = FeatureType.ENV, (4,)
    config = DiffusionConfig(
        input_features={name: PolicyFeature(*feature) for name, feature in observed.items()},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (3,))},
        n_obs_steps=3, down_dims=(16, 32), kernel_size=3, diffusion_step_embed_dim=16,
        spatial_softmax_num_keypoints=7, crop_shape=None, use_film_scale_modulation=False,
        pretrained_backbone_weights=None, device="cpu",
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_text("never read")
    hub = Hub(monkeypatch, tmp_path)
    result = CliRunner().invoke(app, ["explain", "someone/policy", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert hub.patterns == [["config.json"]] and said["weights"].startswith("not read: ")
    unet = modeling.DiffusionModel(config).unet
    assert said["parameters"] == sum(parameter.numel() for parameter in unet.parameters())
    assert said["arguments"]["cond_predict_scale"] is False
    assert said["accelerated"][0]["how"] == dpa.explain(unet).findings[0].how


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "mine"}, "type must be 'diffusion' to describe a U-Net, got 'mine'"),
        ({"type": "diffusion"}, "lacks 'input_features'"),
        ({"type": "diffusion", "input_features": 3}, "describes no U-Net of the family"),
    ],
)
def test_a_configuration_of_no_unet(tmp_path, config, message, monkeypatch, capsys):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert status_of_main("explain", tmp_path, monkeypatch=monkeypatch) != 0
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("kind", "answer"),
    [("multi_task_dit", "the whole loop"), ("act", "no: it has no denoising loop"), ("pi0", "no")],
)
@pytest.mark.parametrize("on_hub", [False, True], ids=["folder", "Hub"])
def test_a_policy_without_a_unet(kind, answer, on_hub, tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"type": kind}))
    (tmp_path / "model.safetensors").write_text("never read")
    hub = Hub(monkeypatch, tmp_path)
    given = "someone/policy" if on_hub else tmp_path
    result = CliRunner().invoke(app, ["explain", str(given), "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["policy"] == kind and said["accelerated"].startswith(answer)
    assert hub.patterns == [["config.json"]] * on_hub


@pytest.mark.parametrize("unets", [0, 1])
def test_a_policy_of_somebody_elses_is_read(unets, unet, tmp_path, monkeypatch):
    """Only its weights say whether it has a U-Net."""
    safetensors = pytest.importorskip("safetensors.torch")
    folder = tmp_path / "mine"
    folder.mkdir()
    weights = torch.load(unet) if unets else {"layer.weight": torch.ones(2)}
    safetensors.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"type": "mine"}))
    Hub(monkeypatch, folder)
    for given in (str(folder), "someone/policy"):
        result = CliRunner().invoke(app, ["explain", given, "--json"])
        assert result.exit_code == 0, result.output
        said = json.loads(result.stdout)
        assert ("parameters" in said) == bool(unets)
        assert unets or said["accelerated"].startswith("no: ")


NEAR_COPIES = [
    ("Simple DP3", lambda: near_copies.DP3(2, 4, per_level=1)),
    ("DP3, with mlp_film", lambda: near_copies.DP3(2, 4, film="mlp_film")),
    ("FlowPolicy", lambda: near_copies.DP3(2, 4, var_est=True)),
    ("Streaming Diffusion Policy", lambda: near_copies.StreamingPolicy(2, 4, dims=(16, 32, 64))),
    ("DPPO", lambda: near_copies.DPPO(2, 6)),
    ("DPPO", lambda: near_copies.DPPO(2, 6, film="film", cond_mlp_dims=(8, 12))),
    ("CleanDiffuser's ChiUNet1d", lambda: near_copies.ChiUnet(2, 3, 2)),
    ("CleanDiffuser's ChiUNet1d", lambda: near_copies.ChiUnet(2, 3, 2, scale=False)),
    ("Diffuser's TemporalUnet", lambda: near_copies.TemporalUnet(2)),
    ("Diffuser's TemporalUnet", lambda: near_copies.TemporalUnet(2, attention=True)),
]
OWN_CLASS = "an object of its own class, which dpa.accelerate takes"


def explained(content, path):
    torch.save(content, path)
    result = CliRunner().invoke(app, ["explain", str(path), "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout)


@pytest.mark.parametrize(("whose", "make"), NEAR_COPIES)
@pytest.mark.parametrize("prefix", ["", "policy.model."])
def test_a_near_copy_is_described(whose, make, prefix, tmp_path):
    """By its state dict as dpa.accelerate recognises the network itself."""
    network = family.recognise(unet := make())
    weights = {prefix + name: value for name, value in unet.state_dict().items()}
    said = explained({"epoch": 1, "state_dict": weights}, tmp_path / "a.ckpt")
    assert said["network of"].startswith(whose)
    assert said["arguments"] == json.loads(json.dumps(network.arguments))
    assert said["parameters"] == sum(p.numel() for p in unet.parameters())
    assert said["weights"] == f"state_dict: {prefix}" and said["dtype"] == "float32"
    assert said["horizon"] == f"a multiple of {2 ** (len(said['arguments']['down_dims']) - 1)}"
    parts = network.parts_in_words()
    runs = f"; PyTorch runs {', '.join(parts)}" if parts else ""
    assert said["accelerated"] == OWN_CLASS + runs
    shown = CliRunner().invoke(app, ["explain", str(tmp_path / "a.ckpt")], env={"COLUMNS": "200"})
    assert shown.exit_code == 0 and OWN_CLASS in shown.output


@pytest.mark.parametrize("film", ["cross_attention_film", "cross_attention_add"])
def test_a_network_whose_loop_alone_is_taken(film, tmp_path):
    said = explained(near_copies.DP3(2, 4, film=film).state_dict(), tmp_path / "a.pt")
    assert said["network of"] == "DP3, with cross_attention"
    assert said["arguments"]["global_cond_dim"] == 4
    assert said["arguments"]["cond_predict_scale"] == film.endswith("film")
    assert said["accelerated"].startswith(f"{OWN_CLASS}; dpa runs the loop around")


@pytest.mark.parametrize("make", [make for _, make in NEAR_COPIES])
def test_a_damaged_near_copy_is_an_error(make, tmp_path):
    """Its names alone do not make it one."""
    for index in (-1, 5):
        weights = dict(make().state_dict())
        name = [n for n in weights if re.search(r"^(up|mid|final).*(conv|block)", n)][index]
        torch.save(weights | {name: weights[name][:-1]}, tmp_path / "a.pt")
        result = CliRunner().invoke(app, ["explain", str(tmp_path / "a.pt")])
        assert result.exit_code == 1 and isinstance(result.exception, CheckpointError), name


def test_consistency_policy_by_what_is_certain(tmp_path):
    """Its student's names are the original's; its first widths are the wider."""
    student = near_copies.ConsistencyPolicy(2, 20).state_dict()
    expected = {"network of": "Consistency Policy", "horizon": "a multiple of 2"}
    policy = {"policy": {"_target_": "consistency_policy.student.ctm_policy.CTMPP"}}
    teacher = prefixed(near_copies.DP3(2, 20).state_dict(), "teacher.")
    of_both = prefixed(student, "model.") | prefixed(student, "model_ema.") | teacher
    for content in ({"cfg": policy, "state_dicts": {"model": student}}, of_both):
        said = explained(content, tmp_path / "a.ckpt")
        assert expected.items() <= said.items()
        assert said["arguments"]["global_cond_dim"] == 20
        assert said["accelerated"] == f"{OWN_CLASS}; PyTorch runs the conditioning"
        with pytest.raises(CheckpointError, match="Consistency Policy: its own class loads it"):
            dpa.load_checkpoint(tmp_path / "a.ckpt")
    whole = dpa.load_checkpoint(tmp_path / "a.ckpt", prefix="teacher.")
    assert whole.arguments["global_cond_dim"] == 20 and not whole.perhaps


def test_consistency_policy_where_nothing_tells(tmp_path):
    student = near_copies.ConsistencyPolicy(2, 20).state_dict()
    said = explained(student, tmp_path / "a.pt")
    assert said["perhaps"].startswith("Consistency Policy's student")
    assert "its global_cond_dim is 20," in said["perhaps"] and OWN_CLASS in said["perhaps"]
    assert said["arguments"]["global_cond_dim"] == 36 and said["accelerated"][0]["how"]
    # The original for certain: a configuration that says so, or no place for a second timestep.
    original = {"policy": {"_target_": "diffusion_policy.policy.x.Policy"}}
    for cfg in (original, {"global_cond_dim": 36}, {"algo_name": "diffusion_policy"}):
        said = explained({"cfg": cfg, "state_dict": student}, tmp_path / "a.ckpt")
        assert "perhaps" not in said and said["arguments"]["global_cond_dim"] == 36
    named = {lerobot_name(name): value for name, value in student.items()}
    assert "perhaps" not in explained(named, tmp_path / "lerobot.pt")
    narrow = near_copies.DP3(2, 15).state_dict()
    assert "perhaps" not in explained(narrow, tmp_path / "narrow.pt")
    least = near_copies.ConsistencyPolicy(2, 0, dims=(16, 32)).state_dict()
    assert "its global_cond_dim is None," in explained(least, tmp_path / "least.pt")["perhaps"]


def prefixed(state, prefix):
    return {prefix + name: value for name, value in state.items()}


def test_a_folder_that_is_here_is_no_name_of_the_hub(tmp_path, monkeypatch):
    hub = Hub(monkeypatch, tmp_path)
    (tmp_path / "someone" / "policy").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert options.located("someone/policy") == Path("someone/policy")
    for path in ("./someone/none", "a/b/c", "/none", "none.pt", "~/none"):
        with pytest.raises(FileNotFoundError, match="there is no such file"):
            options.located(path)
    assert not hub.asked


def test_the_hub_out_of_reach(monkeypatch):
    Hub(monkeypatch, OSError("Name or service not known\nmore"))
    with pytest.raises(
        RuntimeError, match=r"cannot be reached \(Name or service not known\): give"
    ):
        options.located("someone/policy")


def test_no_such_repository(monkeypatch):
    errors = pytest.importorskip("huggingface_hub.errors")
    error = errors.RepositoryNotFoundError.__new__(errors.RepositoryNotFoundError)
    Hub(monkeypatch, error)
    with pytest.raises(FileNotFoundError, match="no such repository on the Hub"):
        options.located("someone/policy")


def test_a_name_of_the_hub_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="pip install huggingface_hub"):
        options.located("someone/policy")


def measured(*arguments):
    command = ["bench", *map(str, arguments), "--seconds", "0", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    for kind in ("plain", "dpa"):
        parts = dict(found[kind])
        whole = parts.pop("whole call")
        assert set(parts) == {"preparation", "network", "rest"}
        assert min(parts.values()) >= 0 and sum(parts.values()) >= 0.99 * whole > 0
    assert found["times faster"] > 0 and found["first call ms"] > 0
    return found


def test_bench_of_a_bare_network(unet):
    found = measured(unet, "--steps", "3")
    assert found["steps"] == 3 and found["what"].endswith("U-Net")
    assert found["plain"]["preparation"] == found["dpa"]["preparation"] == 0
    assert any("scheduler: the file does not name it" in line for line in found["how"])
    shown = CliRunner().invoke(app, ["bench", str(unet), "--steps", "3", "--seconds", "0"])
    assert all(part in shown.output for part in ("whole call", "preparation", "network", "rest"))


def test_bench_of_a_policy_of_lerobot(tmp_path, counted_calls):
    name = "lerobot.policies.diffusion.modeling_diffusion"
    pytest.importorskip(name, reason="LeRobot is not installed", exc_type=ImportError)
    from train_fetch_reach import make_policy

    ones = {"observation.state": 10, "observation.environment_state": 3, "action": 4}
    stats = {n: {"min": -torch.ones(width), "max": torch.ones(width)} for n, width in ones.items()}
    for part in make_policy(stats):
        part.save_pretrained(tmp_path)
    found = measured(tmp_path)
    assert found["steps"] == 10 and found["what"].startswith("LeRobot's policy")
    assert found["dpa"]["preparation"] > 0
    assert any("(loop)" in line for line in found["how"])
