"""What tests of exported policies share."""

import pytest
import torch
from exported import DA, DO, UNET

import dpa


@pytest.fixture
def unet():
    torch.manual_seed(5)
    return dpa.nn.ConditionalUnet1D(DA, global_cond_dim=DO, **UNET).eval()
