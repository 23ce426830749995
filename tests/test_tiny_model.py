"""The model that ships: what it can do before reinforcement learning, and that its script makes such a model."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dclightning import MathReward, Sampling, VLLMEngine
from dclightning.data.problems import load_problems
from dclightning.models import load_tokenizer, resolve_model
from tests.helpers import TINY

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


def test_deployed_in_fp8_it_leaves_room_to_learn():
    tokenizer = load_tokenizer(TINY)
    problems = load_problems("dclightning/arithmetic-test")[:200]
    questions = [[{"role": "user", "content": p.problem}] for p in problems]
    prompts = [tokenizer.apply_chat_template(q, add_generation_prompt=True)["input_ids"] for q in questions]
    engine = VLLMEngine("fp8_per_channel", dtype="bfloat16", kv_cache_gib=0.0625)
    engine.start(resolve_model(TINY), max_length=96)
    completions = engine.generate(prompts, Sampling(max_tokens=64, temperature=0.7), 1, seed=0)
    engine.close()
    for completion in completions:
        completion.text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    rewards = MathReward()(problems, completions)
    assert 0.3 < sum(rewards) / len(rewards) < 0.6
    assert all(completion.finish_reason == "stop" for completion in completions)


def test_the_script_makes_the_same_kind_of_model_and_the_same_one_twice(tmp_path):
    for name in ("a", "b"):
        command = [sys.executable, "scripts/teach_tiny_model.py", "--steps", "2", "--out", str(tmp_path / name)]
        subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("a", "b"))
    shipped = AutoModelForCausalLM.from_pretrained(resolve_model(TINY))
    assert {n: p.shape for n, p in one.named_parameters()} == {n: p.shape for n, p in shipped.named_parameters()}
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "a" / file).read_text() == (Path(resolve_model(TINY)) / file).read_text()
