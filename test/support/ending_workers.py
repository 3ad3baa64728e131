"""Run by test_distributed.py: processes of one rank, which end while Gloo's threads are behind.

All share one core, where those threads run when nothing else does. Prints how each has ended.
"""

import os
import sys

import torch
import torch.distributed as dist

from dpa.training.distributed import ranks

torch.set_num_threads(1)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="0")
children = []
for _ in range(int(sys.argv[1])):
    children.append(os.fork())
    if not children[-1]:
        break

if children[-1]:
    print(*(os.waitpid(child, 0)[1] for child in children))
else:
    with ranks(torch.device("cpu")) as team:
        kept = dist.group.WORLD  # as a DDP keeps it
        dist.barrier()
        for thread in map(int, os.listdir("/proc/self/task")):
            if thread != os.getpid():
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        for _ in range(5):
            value = torch.tensor(1.0)
            dist.all_reduce(value)
            del value
