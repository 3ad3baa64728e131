"""A policy from images and a state in one file, with an encoder of the test's."""

import pytest
import torch
from exported import make_image_policy

from dpa.export import FORMATS, export_policy, load_policy


@pytest.mark.parametrize("to", ["torchscript", "exported-program"])
def test_a_file_gives_the_policys_actions(to, tmp_path):
    policy, inputs = make_image_policy()
    path = tmp_path / f"policy{FORMATS[to]}"
    manifest = export_policy(policy, path, to, inputs)
    assert [entry["name"] for entry in manifest["inputs"]] == ["top", "side", "state", "noise"]
    assert [entry["dtype"] for entry in manifest["inputs"]] == ["uint8"] * 2 + ["float32"] * 2
    assert manifest["normalisation"].keys() == {"top", "side", "state", "action"}
    loaded, others = load_policy(path), make_image_policy(seed=5)[1]
    with torch.no_grad():
        expected = policy(*others.values())
        torch.testing.assert_close(loaded(*others.values()), expected, rtol=1e-5, atol=1e-5)
        assert (policy(*inputs.values()) - expected).abs().max() > 1e-2


def test_images_are_normalised_by_channels():
    """From uint8 with channels last to numbers in [0, 1], then scale and offset."""
    policy, inputs = make_image_policy()
    encoder, seen = policy.encoder, {}
    encoder._encode = lambda given: seen.update(given)
    encoder(*list(inputs.values())[:-1])
    scale, offset = encoder.observed[0].affine
    expected = inputs["top"].double() / 255 * scale + offset
    torch.testing.assert_close(seen["top"].double(), expected.movedim(-1, 2), rtol=1e-6, atol=1e-6)


def test_an_encoder_that_a_trace_does_not_show(tmp_path):
    """What a trace computes is compared with the policy on other images."""
    policy, inputs = make_image_policy()
    encode, first = policy.encoder._encode, []

    def remembered(given):  # the features of the images that it was traced on
        first.append(encode(given).detach())
        return first[0] if torch.compiler.is_exporting() else first[-1]

    policy.encoder._encode = remembered
    policy(*inputs.values())
    with pytest.raises(ValueError, match="encoder must be traceable, got a relative error"):
        export_policy(policy, tmp_path / "policy.pt", "torchscript", inputs)
    assert not list(tmp_path.iterdir())


def test_it_is_not_for_onnx(tmp_path):
    policy, inputs = make_image_policy()
    with pytest.raises(ValueError, match="onnx"):
        export_policy(policy, tmp_path / "policy.onnx", "onnx", inputs)
