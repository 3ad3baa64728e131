"""`make op`: what it lays out is whole, and an op is few places."""

import runpy
import shutil
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_COMPILED = shutil.ignore_patterns("__pycache__")


def test_a_new_op_is_at_most_twelve_places(tmp_path):
    for folder in ("ops", "kernels/cuda/fused_relu_add", "python/dpa", "test/ops"):
        # Other test processes may be writing their compiled modules.
        shutil.copytree(_ROOT / folder, tmp_path / folder, ignore=_COMPILED)
    tools = runpy.run_path(str(_ROOT / "ops/new_op.py"))
    places = tools["Layout"](tmp_path, tools["_MODEL"], "swish_mult").lay_out()
    assert len(places) == len(set(places)) <= 12
    for path in places:
        text = path.read_text()
        assert "swish_mult" in text
        if "swish_mult" in path.name:
            assert "fused_relu_add" not in text and "FusedReluAdd" not in text
        if path.suffix == ".py":
            compile(text, str(path), "exec")
    schema = "swish_mult(Tensor x, Tensor y, float bias=0.0) -> Tensor"
    assert f'm.def("{schema}", functional);' in (tmp_path / "ops/library.cpp").read_text()
    made = {path.name for path in places if path.parent.name == "swish_mult"}
    model = {path.name for path in (_ROOT / "ops/fused_relu_add").iterdir()}
    model |= {path.name for path in (_ROOT / "kernels/cuda/fused_relu_add").iterdir()}
    assert made == {name.replace("fused_relu_add", "swish_mult") for name in model}
