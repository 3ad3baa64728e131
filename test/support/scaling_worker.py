"""Run under torchrun by test_bench_train.py: the cases of several GPUs, small."""

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from dpa.bench import train, train_ranks
from dpa.bench.timing import latency_us

torch.set_num_threads(1)
# One call a measurement: what is measured is tried, not how long it takes.
train_ranks.device_us = lambda work, *_, **__: latency_us(work)
SMALL = train.SMALL[0].network
train_ranks.CASES = {
    "network": partial(train_ranks.train, train_ranks.Unet(SMALL, 3)),
    "sampled": partial(train_ranks.sample, SMALL, 5),
}
if find_spec("lerobot"):
    policy = train_ranks.Policy(2, down_dims=(16, 32))
    train_ranks.CASES["policy"] = partial(train_ranks.train, policy)
train_ranks.main(Path(sys.argv[1]), list(train_ranks.CASES))
