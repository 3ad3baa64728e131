"""LeRobot's commands that drive robots, and its server of policies, with a robot that has none."""

import importlib
import itertools
import logging
import os
import pickle
import socket
import subprocess
import sys
import time
import types
from concurrent import futures
from contextlib import contextmanager

import pytest
import torch
from lerobot_commands import (
    NAME,
    command,
    install_plugin,
    is_fast,
    largest_error,
    unload_plugin,
)
from patience import HANGS

from dpa.acceleration import construction
from dpa.acceleration.policy_loop import FastLoop
from dpa.tracking.replacing import replaced

for needed in ("lerobot.policies.diffusion.modeling_diffusion", "yamlinclude"):
    pytest.importorskip(needed, reason="requirements/lerobot.txt", exc_type=ImportError)


SERVER = "lerobot.async_inference.policy_server"
OURS = "dpa.acceleration.lerobot_server"
pytestmark = pytest.mark.usefixtures("unloaded")


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Lets LeRobot find the plugin."""
    return lambda: install_plugin(tmp_path, monkeypatch)


@pytest.fixture
def robot(monkeypatch):
    """The robot's module; the viewer that LeRobot imports is left out where it is missing."""
    try:
        import rerun  # noqa: F401
    except ImportError:
        monkeypatch.setitem(sys.modules, "rerun", types.ModuleType("rerun"))
    found = pytest.importorskip(
        "fake_robot", reason="requirements/lerobot.txt", exc_type=ImportError
    )
    found.StillRobot.sent.clear()
    return found.StillRobot


@pytest.fixture
def checkpoint(tmp_path):
    """A small policy for the robot's joints and camera, with LeRobot's processors."""
    from lerobot.configs.types import FeatureType, PolicyFeature
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
    from lerobot.policies.factory import make_pre_post_processors

    config = DiffusionConfig(
        input_features={
            "observation.state": PolicyFeature(FeatureType.STATE, (2,)),
            "observation.images.front": PolicyFeature(FeatureType.VISUAL, (3, 32, 32)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (2,))},
        device="cpu",
        push_to_hub=False,
        crop_shape=None,
        pretrained_backbone_weights=None,
        use_group_norm=True,
        spatial_softmax_num_keypoints=4,
        diffusion_step_embed_dim=16,
        down_dims=(16, 32),
        horizon=8,
        n_action_steps=6,
        noise_scheduler_type="DDIM",
        num_train_timesteps=20,
        num_inference_steps=3,
    )
    one = {"mean": 0.0, "std": 1.0, "min": -1.0, "max": 1.0}
    sizes = {"observation.state": (2,), "action": (2,), "observation.images.front": (3, 1, 1)}
    stats = {k: {n: torch.full(v, x) for n, x in one.items()} for k, v in sizes.items()}
    folder = tmp_path / "policy"
    DiffusionPolicy(config).save_pretrained(folder)
    for processor in make_pre_post_processors(config, dataset_stats=stats):
        processor.save_pretrained(folder)
    return folder


def record(checkpoint, folder, monkeypatch):
    """Record one episode of a policy's with ``lerobot-record``, as it was before 0.6."""
    command(
        "record",
        monkeypatch,
        robot__type="still_robot",
        policy__path=checkpoint,
        policy__device="cpu",
        dataset__repo_id="me/eval_still",
        dataset__root=folder,
        dataset__single_task="stay",
        dataset__fps=10,
        dataset__episode_time_s=1.5,
        dataset__reset_time_s=0,
        dataset__num_episodes=1,
        dataset__vcodec="h264",
        dataset__push_to_hub="false",
        play_sounds="false",
    )


def rollout(checkpoint, monkeypatch, **options):
    """Let a policy drive the robot with ``lerobot-rollout``, which records no data."""
    command(
        "rollout",
        monkeypatch,
        robot__type="still_robot",
        policy__path=checkpoint,
        device="cpu",
        fps=10,
        task="stay",
        play_sounds="false",
        return_to_initial_position="false",
        **options,
    )


@pytest.fixture
def drives(checkpoint, tmp_path, monkeypatch, robot):
    """Drives the robot by the command that this LeRobot has for it; returns what it was sent."""
    from lerobot.scripts import lerobot_record

    def drive(name, **options):
        robot.sent.clear()
        if hasattr(lerobot_record.RecordConfig, "policy"):
            record(checkpoint, tmp_path / name, monkeypatch)
        else:
            rollout(checkpoint, monkeypatch, **{"duration": 1.5, **options})
        return list(robot.sent)

    return drive


def test_a_robot_is_driven_with_the_plugin_absent_present_and_off(
    drives, plugin, made, monkeypatch, capfd
):
    assert drives("absent") and not is_fast(made[-1])
    plugin()
    capfd.readouterr()
    assert drives("present")
    printed = "".join(capfd.readouterr())
    assert printed.count("DiffusionPolicy runs accelerated: loop, encoder, U-Net") == 1
    assert is_fast(made[-1])
    assert largest_error(made[-1]) < 1e-4
    unload_plugin()
    monkeypatch.setenv("DPA_ACCELERATE", "0")
    assert drives("off")
    assert NAME in sys.modules and not is_fast(made[-1])


def test_real_time_chunking_drives_a_robot(drives, plugin, made):
    pytest.importorskip("lerobot.rollout", reason="LeRobot 0.6", exc_type=ImportError)
    options = {"inference__type": "rtc", "inference__queue_threshold": 4, "duration": 3}
    with pytest.raises(ValueError, match="RTC inference is not supported by policy type 'diff"):
        drives("absent", **options)
    plugin()
    held = []
    own = FastLoop.holding

    def holding(self, fields):
        held.append(fields)
        return own(self, fields)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastLoop, "holding", holding)
        sent = drives("present", **options)
    assert sent and is_fast(made[-1])
    assert held and all(one["inpainting"] == "x0" for one in held)
    assert replaced(made[-1].diffusion, "conditional_sample").refused is None


class Context:
    """What a call of the server knows of its client."""

    def peer(self):
        return "test"


def chunks_of(address, checkpoint, prepared=lambda: None, timesteps=(0, 1, 2)):
    """A chunk a timestep that a server makes of a checkpoint, None for each that it fails to make.

    A timestep of None begins an episode: the client connects again.
    """
    import grpc
    from lerobot.async_inference.helpers import RemotePolicyConfig, TimedObservation
    from lerobot.transport import services_pb2, services_pb2_grpc
    from lerobot.transport.utils import send_bytes_in_chunks

    chunks = []
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(HANGS)
        client = services_pb2_grpc.AsyncInferenceStub(channel)
        client.Ready(services_pb2.Empty())
        features = {
            "observation.state": {"dtype": "float32", "shape": (2,), "names": ["x.pos", "y.pos"]},
            "observation.images.front": {
                "dtype": "image",
                "shape": (32, 32, 3),
                "names": ["height", "width", "channels"],
            },
        }
        specs = RemotePolicyConfig("diffusion", str(checkpoint), features, 6, "cpu")
        client.SendPolicyInstructions(services_pb2.PolicySetup(data=pickle.dumps(specs)))
        prepared()
        for number in timesteps:
            if number is None:
                client.Ready(services_pb2.Empty())
                continue
            seen = {"x.pos": 0.1 * number, "y.pos": 0.0, "task": "stay"}
            seen["front"] = torch.full((32, 32, 3), 9, dtype=torch.uint8).numpy()
            timed = TimedObservation(0.1 * number, number, seen, must_go=True)
            client.SendObservations(
                send_bytes_in_chunks(pickle.dumps(timed), services_pb2.Observation)
            )
            data = client.GetActions(services_pb2.Empty()).data
            chunks.append(pickle.loads(data) if data else None)
    return chunks


def check_chunks(chunks, fast):
    if not fast:  # LeRobot's own policy wants the history that select_action keeps
        assert chunks == [None] * 3
        return
    assert [len(chunk) for chunk in chunks] == [6] * 3
    assert all(torch.isfinite(one.get_action()).all() for chunk in chunks for one in chunk)


@pytest.fixture
def serving(tmp_path, monkeypatch):
    """Runs a server of policies of a class in this process."""
    monkeypatch.chdir(tmp_path)  # for its logs
    pytest.importorskip(SERVER, reason="grpc", exc_type=ImportError)
    import grpc
    from lerobot.async_inference.configs import PolicyServerConfig
    from lerobot.transport import services_pb2_grpc

    @contextmanager
    def serve(kind, **options):
        own = kind(PolicyServerConfig(obs_queue_timeout=HANGS, **options))
        server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        services_pb2_grpc.add_AsyncInferenceServicer_to_server(own, server)
        port = server.add_insecure_port("localhost:0")
        server.start()
        try:
            yield f"localhost:{port}"
        finally:
            server.stop(None).wait()

    return serve


@pytest.mark.parametrize("fast", [False, True], ids=["as it is", "accelerated"])
def test_the_server_of_policies(fast, checkpoint, made, serving):
    if fast:
        construction.accelerate_new(logging.info)  # as `dpa run` does

    def prepared():
        assert is_fast(made[-1]) == fast

    with serving(importlib.import_module(SERVER).PolicyServer) as address:
        chunks = chunks_of(address, checkpoint, prepared)
    check_chunks(chunks, fast)
    assert not fast or largest_error(made[-1]) < 1e-4


def check_continued(chunks, moves, held):
    """Each chunk begins with so many actions of the one before, which moved on meanwhile."""
    values = [torch.stack([one.get_action() for one in chunk]) for chunk in chunks]
    for last, chunk, moved, count in zip(values[:-1], values[1:], moves, held, strict=True):
        assert torch.equal(chunk[:count], last[moved : moved + count])
        assert not torch.equal(chunk[count], last[moved + count])


def test_the_server_continues_chunks(checkpoint, made, serving, monkeypatch):
    ours = importlib.import_module(OURS)
    monkeypatch.setattr(ours, "perf_counter", itertools.count().__next__)  # a second a call
    with serving(ours.ContinuingServer, fps=1) as address:
        assert chunks_of(address, checkpoint) == [None] * 3  # as LeRobot's own server does
        construction.accelerate_new(logging.info)
        chunks = chunks_of(address, checkpoint, timesteps=[0, 2, 3, 4, None, 6, 13])
    # One was executed before. Meanwhile: no time is known until the second one that continues.
    check_continued(chunks[:4], [2, 1, 1], [1, 1, 3])
    before, new, late = chunks[3:]  # another episode's; too late for the last one
    assert not torch.isclose(new[0].get_action(), before[2].get_action()).any()
    assert not torch.isclose(late[0].get_action(), new[-1].get_action()).any()
    loop = replaced(made[-1].diffusion, "conditional_sample")
    assert is_fast(made[-1]) and loop.refused is None and largest_error(made[-1]) < 1e-4


def test_the_server_continues_what_it_sent_to_whom(tmp_path, monkeypatch):
    """Not what was cut off, nor a chunk that was made for another client or policy."""
    monkeypatch.chdir(tmp_path)  # for its logs
    ours = pytest.importorskip(OURS, reason="grpc", exc_type=ImportError)
    monkeypatch.setattr(ours, "replaced", lambda *_: object.__new__(ours.ChunkInTime))
    loaded = ours.policy_server.PolicyServer, "SendPolicyInstructions"
    monkeypatch.setattr(*loaded, lambda self, request, context: request)
    server, left, meanwhile = object.__new__(ours.ContinuingServer), [], []

    def predict(observation, *, inference_delay, prev_chunk_left_over):
        left.append(prev_chunk_left_over)
        for happens in meanwhile:
            happens()
        return torch.arange(6.0)[None, :, None]

    def ask(step):
        observed = types.SimpleNamespace(get_timestep=lambda: step, arrived=0.0)
        server.last_processed_obs = observed
        assert server._get_action_chunk({}).flatten().tolist() == [0, 1, 2]
        return left[-1]

    server._forget()
    server.config, server.actions_per_chunk = types.SimpleNamespace(environment_dt=1), 3
    server.policy = types.SimpleNamespace(predict_action_chunk=predict)
    assert ask(0) is None
    assert ask(1).flatten().tolist() == [1, 2]
    assert ask(4) is None  # the client had nothing left
    meanwhile.append(server._forget)  # another client connects
    assert ask(5).flatten().tolist() == [1, 2]
    meanwhile.clear()
    assert ask(5) is None
    assert server.SendPolicyInstructions("policy", None) == "policy"
    assert ask(5) is None


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


@pytest.mark.parametrize("by", ["plugin alone", "dpa run", "continuing"])
def test_the_server_in_a_process_of_its_own(by, checkpoint, plugin, tmp_path, monkeypatch):
    """It imports no plugins: one that is installed changes nothing, and `dpa run` does."""
    pytest.importorskip(SERVER, reason="grpc", exc_type=ImportError)
    plugin()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    fast, module = by != "plugin alone", OURS if by == "continuing" else SERVER
    run = ["-m", "dpa", "run"] if fast else []
    options = [f"--port={port}", "--host=localhost", f"--obs_queue_timeout={HANGS}"]
    with (tmp_path / "printed").open("w") as printed:
        server = subprocess.Popen(
            [sys.executable, *run, "-m", module, *options],
            cwd=tmp_path,
            stdout=printed,
            stderr=subprocess.STDOUT,
        )
        try:
            while server.poll() is None and not is_listening(port):
                time.sleep(0.1)
            assert server.poll() is None, (tmp_path / "printed").read_text()
            chunks = chunks_of(f"localhost:{port}", checkpoint, timesteps=[0, 2, 3])
        finally:
            server.kill()
            server.wait()
    said = (tmp_path / "printed").read_text()
    assert said.count("DiffusionPolicy runs accelerated: loop, encoder, U-Net") == fast, said
    check_chunks(chunks, fast)
    if by == "continuing":
        assert torch.equal(chunks[1][0].get_action(), chunks[0][2].get_action())
