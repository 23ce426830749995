"""Checkpoints as folders that transformers and vLLM load."""

import json
import re
import subprocess
import sys

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from dclightning import Sampling, TransformersEngine, VLLMEngine
from dclightning.callbacks import RolloutCheckpoint
from dclightning.errors import UserError
from dclightning.export import export
from dclightning.models import load_tokenizer, named_weights
from tests import ranks
from tests.helpers import TINY
from tests.test_fit import fit
from tests.test_models import FAMILIES, saved

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    module, _ = fit(folder, [RolloutCheckpoint()], rollouts=2, validate=True)
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump({"model": {"model": TINY, "loss": "x"}}))
    return folder / "run", dict(named_weights(module.model))


def test_the_exported_policy_is_the_trained_one(trained, tmp_path):
    folder, weights = trained
    export(folder, tmp_path / "exact", dtype="float32")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "exact").named_parameters())
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weight) for name, weight in weights.items())
    export(folder / "checkpoints" / "last.ckpt", tmp_path / "half")
    rounded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").named_parameters())
    assert all(torch.equal(rounded[name], weight.bfloat16()) for name, weight in weights.items())


def test_transformers_and_vllm_sample_from_the_folder(trained, tmp_path):
    export(trained[0], tmp_path / "out", dtype="float32")
    theirs, ours = load_tokenizer(str(tmp_path / "out")), load_tokenizer(TINY)
    prompt = [theirs.apply_chat_template([{"role": "user", "content": "What is 1 + 1?"}])["input_ids"]]
    assert prompt == [ours.apply_chat_template([{"role": "user", "content": "What is 1 + 1?"}])["input_ids"]]
    answers = []
    for engine in (TransformersEngine(), VLLMEngine(dtype="float32", kv_cache_gib=0.0625)):
        engine.start(str(tmp_path / "out"), max_length=64)
        (completion,) = engine.generate(prompt, Sampling(max_tokens=5, temperature=0.0), 1, 0)
        answers.append(completion)
        engine.close()
    assert answers[0].token_ids == answers[1].token_ids
    assert answers[0].logprobs == pytest.approx(answers[1].logprobs, abs=1e-3)
    assert (tmp_path / "out" / "generation_config.json").exists()


def test_the_card_says_how_it_was_trained(trained, tmp_path):
    export(trained[0], tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head == {"library_name": "transformers", "base_model": TINY}
    for text in ("for 2 rollouts", "in bfloat16", "loss: x"):
        assert text in card
    assert re.search(r"\| arithmetic \| deployed \| avg@2 \| [\d.]+ \| 2 \|", card)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model"), FAMILIES["qwen3"]())


def test_checkpoints_of_several_ranks_are_put_together(tmp_path, model):
    options = {"model": model, "kind": "parallel"}
    cases = [
        {"name": "parts", **options},
        {"name": "whole", "layout": {"save_distributed_checkpoint": False}, **options},
        {"name": "behind", "engine": "transformers", "one_step_off": True, "kind": "parallel"},
    ]
    for name, (rank, _) in ranks.run(tmp_path, 2, cases).items():
        last = tmp_path / name / "checkpoints" / "last.ckpt"
        assert last.is_dir() == (name != "whole")
        export(last, tmp_path / f"{name} out", model=TINY if name == "behind" else model, dtype="float32")
        loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / f"{name} out").named_parameters())
        assert loaded.keys() == rank["weights"].keys()
        assert all(torch.equal(loaded[name], weight) for name, weight in rank["weights"].items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint": "nowhere"}, "there is no checkpoint"),
        ({"checkpoint": __file__}, "is no checkpoint"),
        ({"dtype": "float8"}, "dtype='float8': must be one of float32, bfloat16, float16"),
        ({"output": "RUN"}, "exists already"),
        ({"model": "OTHER"}, "is not what .* is a checkpoint of"),
    ],
)
def test_what_cannot_be_exported_is_said(trained, tmp_path, model, arguments, message):
    from pathlib import Path

    options = {"checkpoint": trained[0], "output": tmp_path / "out"}
    options |= {key: Path(value) if key != "dtype" else value for key, value in arguments.items()}
    options |= {"output": trained[0]} if arguments.get("output") else {}
    options |= {"model": model} if "model" in arguments else {}
    with pytest.raises(UserError, match=message):
        export(**options)


def test_the_command_line(trained, tmp_path):
    command = [sys.executable, "-m", "dclightning", "export", "--checkpoint", str(trained[0])]
    done = subprocess.run([*command, "--output", str(tmp_path / "out")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    again = subprocess.run([*command, "--output", str(tmp_path / "out")], capture_output=True, text=True, timeout=120)
    assert again.returncode == 2
    assert again.stderr.count("\n") == 1
