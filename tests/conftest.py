import os

os.environ["TORCH_COMPILE_DISABLE"] = "1"  # vLLM would compile one small function: a second each time
os.environ["VLLM_CONFIGURE_LOGGING"] = "0"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import pytest
import torch

from dclightning import VLLMEngine
from dclightning.models import resolve_model

TINY = "dclightning/tiny-arithmetic"


@pytest.fixture(scope="session")
def fp32_engine():
    """The tiny model in FP32: nothing but kernels between it and transformers."""
    engine = VLLMEngine(dtype="float32", kv_cache_gib=0.0625)
    engine.start(resolve_model(TINY), max_length=128)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
