import os

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # threads that wait for each other cost more than they do for a tiny model
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # vLLM would compile one small function: a second each time
os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
