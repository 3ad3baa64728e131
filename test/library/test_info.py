"""What `dpa info` says, and how reports look in a notebook."""

import json
from importlib import metadata

import pytest
import torch

import dpa
from dpa.library import loader


def test_info_in_a_notebook():
    facts = dpa.info()
    assert json.loads(json.dumps(facts)) == facts
    html = facts._repr_html_()
    assert "dpa::group_norm_mish" in html and "works" in html and html.count("<table>") == 2


def test_a_report_in_a_notebook():
    unet = dpa.nn.ConditionalUnet1D(2, diffusion_step_embed_dim=16, down_dims=(8, 16))
    html = dpa.explain(unet)._repr_html_()
    assert "checked error" not in html  # nothing has run that could have been checked
    assert "can be accelerated" in html and "(itself)" in html
    unet.mid_modules[0].blocks[0].block[0] = torch.nn.Identity()
    assert "unchanged" in dpa.explain(unet)._repr_html_()
    assert "<p>no conditional" in dpa.explain(torch.nn.Linear(1, 1))._repr_html_()


def test_a_library_of_another_torch_is_refused(tmp_path):
    (tmp_path / "torch-version.txt").write_text("1.99.0+cu130\n")
    with pytest.raises(
        ImportError, match=r"built against torch 1\.99\.0\+cu130, and this is torch"
    ):
        loader._refuse_other_torch(tmp_path / "libdpa.so")
    (tmp_path / "torch-version.txt").write_text(torch.__version__)
    loader._refuse_other_torch(tmp_path / "libdpa.so")


def test_info_needs_no_metadata_of_an_installed_package(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert dpa.info()["dpa"].startswith("not installed")
