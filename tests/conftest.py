"What all tests share: one thread, one hypothesis profile, and two small models."
import os
os.environ.setdefault("OMP_NUM_THREADS", "1")          # before torch is imported
os.environ.setdefault("TINY_RLVR_PROGRESS", "")        # no progress bars
import pytest, torch
from hypothesis import settings
from tiny_rlvr.model import GPT, GPTConfig
from tiny_rlvr.pretrain import PretrainConfig, pretrain
from tiny_rlvr.tasks import Task

torch.set_num_threads(1)
settings.register_profile("tiny_rlvr", deadline=None, derandomize=True)   # a slow machine is no failure, and a failure comes again
settings.load_profile("tiny_rlvr")

SMALL = GPTConfig(n_layer=2, n_head=4, d_model=32, d_ff=128, max_seq_len=32)
MIX = {Task("+", 1, 1): .4, Task("-", 1, 1): .3, Task("+", 2, 1): .3}


@pytest.fixture(scope="session")
def trained():
    "A policy that is sometimes right: p is 0.3 to 0.7 on +(1,1) and 0.01 to 0.2 on +(2,1). Tests copy it before they change it."
    model, _ = pretrain(SMALL, PretrainConfig(steps=400, batch_size=64, lr=3e-3, warmup=20), mix=MIX)
    return model.requires_grad_(False)


@pytest.fixture(scope="session")
def untrained():
    "Random weights, large enough that the distributions aren't flat."
    model = GPT(SMALL, seed=3).requires_grad_(False)
    for p in model.parameters():
        if p.dim() > 1: p.mul_(6)
    return model
