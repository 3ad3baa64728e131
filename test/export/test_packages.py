"""Packages whose compilation fails."""

import pytest
import torch

from dpa.export.packages import compile_package, open_package


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
