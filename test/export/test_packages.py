"""Packages whose compilation fails, and what a package takes."""

import re

import pytest
import torch
from exported import DA, DO, B, T, make_policy

from dpa.export import PackedLoop, export_policy, load_policy
from dpa.export.packages import Input, checking, compile_package, open_package


@pytest.mark.parametrize(
    ("message", "tries"), [("'int_array_5' was not declared", 2), ("No space left", 1)]
)
def test_code_without_a_declaration_is_made_once_more(monkeypatch, tmp_path, message, tries):
    compile_once, calls = torch._inductor.aoti_compile_and_package, []

    def failing_first(*args, **kwargs):
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError(message)
        return compile_once(*args, **kwargs)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", failing_first)
    network, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    if tries == 1:
        with pytest.raises(RuntimeError, match=message):
            compile_package(network, (x,))
    else:
        path = tmp_path / "network.pt2"
        path.write_bytes(compile_package(network, (x,)))
        torch.testing.assert_close(open_package(path)(x), network(x))
    assert len(calls) == tries


INPUTS = [Input("observation", (B, DO), torch.float32), Input("index", (1,), torch.int64)]
RIGHT = torch.zeros(B, DO), torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (RIGHT[:1], "inputs must be observation, index, got 1 of them"),
        ((*RIGHT, RIGHT[1]), "inputs must be observation, index, got 3 of them"),
        (RIGHT[::-1], "observation must be torch.float32, [2, 5], got torch.int64"),
        ((RIGHT[0].double(), RIGHT[1]), "observation must be torch.float32, [2, 5], got torch.fl"),
        ((RIGHT[0].int(), RIGHT[1]), "observation must be torch.float32, [2, 5], got torch.int32"),
        ((RIGHT[0][:1], RIGHT[1]), "observation must be torch.float32, [2, 5], got [1, 5]"),
        ((RIGHT[0].mT, RIGHT[1]), "observation must be torch.float32, [2, 5], got [5, 2]"),
        ((RIGHT[0][0], RIGHT[1]), "observation must be torch.float32, [2, 5], got [5]"),
        ((RIGHT[0], RIGHT[1][0]), "index must be torch.int64, [1], got []"),
        ((RIGHT[0].tolist(), RIGHT[1]), "observation must be a tensor, got list"),
        ((RIGHT[0].to("meta"), RIGHT[1]), "observation must be on cpu, got meta"),
    ],
)
def test_a_package_takes_its_own_inputs_alone(given, message):
    """It would read any others as if they were those."""
    package = checking(lambda *given: pytest.fail("the package ran"), INPUTS, "cpu")
    with pytest.raises(ValueError, match=re.escape(message)):
        package(*given)


def test_a_package_that_is_opened_checks_its_inputs_and_takes_any_strides(tmp_path):
    policy, _, _ = make_policy("ddim", "cpu", torch.float32, PackedLoop)
    inputs = {"observation": torch.randn(B, DO), "noise": torch.randn(1, B, T, DA)}
    export_policy(policy, tmp_path / "policy.pt2", "aoti", inputs)
    package = load_policy(tmp_path / "policy.pt2")
    observation, noise = torch.randn(B, 2 * DO)[:, ::2], torch.randn(1, B, DA, T).mT
    with torch.no_grad():
        torch.testing.assert_close(package(observation, noise), policy(observation, noise))
    with pytest.raises(ValueError, match=re.escape("observation must be torch.float32")):
        package(observation.long(), noise)
    with pytest.raises(
        ValueError, match=re.escape(f"noise must be torch.float32, {[1, B, T, DA]}")
    ):
        package(observation, noise[:, :, :-1])
