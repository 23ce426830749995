"""The command line as a user meets it: in a process of its own, in a folder of the user's."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.commands import run

ROOT = Path(__file__).parent.parent
QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
SHORT = ["--config", QUICKSTART, "--data.prompts_per_step", "4", "--data.validation_limit", "4"]


def dclightning(*arguments, cwd, **options):
    return subprocess.run(
        [sys.executable, "-m", "dclightning", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
        **options,
    )


def test_help_imports_nothing_heavy():
    code = (
        "import sys, dclightning.__main__ as m; sys.argv = ['dclightning', '--help']; m.main(); print(len(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "fit" in done.stdout
    assert int(done.stdout.split()[-1]) < 200  # torch alone brings over a thousand


BAD_INPUT = [
    (["dance"], "'dance' is not a command"),
    (["fit", "--config", QUICKSTART, "--model.optimizer.lrr", "1"], "lrr"),
    (["fit", "--config", QUICKSTART, "--model.optimizer.lr", "fast"], "model.optimizer.lr"),
    (["fit", "--config", "nowhere.yaml"], "nowhere.yaml"),
    (["fit", "--config", QUICKSTART, "--config", "broken.yaml"], "in broken.yaml, line 2"),
    (["fit", "--config", QUICKSTART, "--data.group_size", "1"], "group_size=1: advantage='grpo' compares"),
    (["fit", "--config", QUICKSTART, "--trainer.callbacks+=FixedPenalty"], "both set the penalty"),
    (["fit", "--config", QUICKSTART, "--trainer.precision", "bf16-true"], "trainer.precision=bf16-true"),
    (["toy", "--epsilon", "0"], "--epsilon=0"),
    (["fit", "--config", QUICKSTART, "--model.model", "nowhere/at-all"], "model='nowhere/at-all': no such folder"),
    (["fit", "--config", QUICKSTART, "--data.problems", "nowhere.jsonl"], "problems='nowhere.jsonl'"),
    (["fit", "--config", QUICKSTART, "--data.sampling.top_p", "0.8"], "top_p=0.8"),
    (["fit", "--config", QUICKSTART, "--ckpt_path", "last"], "ckpt_path='last': there is no checkpoint"),
    (["fit", "--config", QUICKSTART, "--ckpt_path", "nowhere.ckpt"], "ckpt_path='nowhere.ckpt': no such file"),
    (["fit", "--config", QUICKSTART, "--trainer.callbacks+=nowhere.Callback"], "nowhere"),
    (["fit", "--config", QUICKSTART, "--data.engine.init_args.quantization", "fp9"], "quantization"),
    (["fit", "--config", QUICKSTART, "--config", "native.yaml"], "quantization='fp8': vLLM has no CPU kernel"),
    (["fit", "--config", QUICKSTART, "--model.mini_batches", "5"], "mini_batches=5: must divide"),
    (["fit", "--config", QUICKSTART, "--trainer.max_epochs=-1"], "schedule='linear': needs an end"),
    (["fit", "--config", QUICKSTART, "--data.validation_limit", "0"], "validation_limit=0"),
    (
        ["fit", "--config", QUICKSTART, "--data.validation_problems", "{a: nowhere}"],
        "validation_problems.a='nowhere'",
    ),
    (["validate", "--config", QUICKSTART, "--ckpt_path", "last", "--trainer.logger", "false"], "ckpt_path='last'"),
    (["report", "nowhere"], "run='nowhere'"),
    (["fit", "--config", QUICKSTART, "--model.lora.rank", "0"], "error: fit: lora.rank=0: must be at least 1"),
    (
        ["fit", "--config", QUICKSTART, "--trainer.strategy", "dclightning.X"],
        "--trainer.strategy.class_path dclightning.",
    ),
    (["serve", "--model", "dclightning/tiny-arithmetic", "--port", "99999"], "port=99999: must be from 1 to 65535"),
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Exit code and output for each bad input."""
    folder = tmp_path_factory.mktemp("refused")
    (folder / "broken.yaml").write_text("model: [\n")
    (folder / "native.yaml").write_text("data: {engine: {init_args: {quantization: fp8, simulate: false}}}")
    return run([arguments for arguments, _ in BAD_INPUT], folder, engine=False)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(BAD_INPUT)), ids=[named for _, named in BAD_INPUT])
def test_bad_input_is_one_line_and_exit_code_2(refused, number):
    code, output = refused[number]
    assert code == 2
    assert BAD_INPUT[number][1] in output
    assert output.startswith("dclightning: error: ")
    assert len(output.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_run_its_report_its_checkpoint_and_the_users_own_code(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import lightning as L\n"
        "class Hello(L.Callback):\n"
        "    def on_train_start(self, trainer, pl_module):\n"
        "        open('hello.txt', 'w').close()\n"
        "def digits(problems, completions):\n"
        "    return [sum(c.text.count(d) for d in '12345') for c in completions]\n"
    )
    own = ["--data.reward", "mine.digits", "--trainer.callbacks+=mine.Hello"]
    done = dclightning("fit", *SHORT, "--trainer.limit_train_batches", "2", *own, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hello.txt").exists()
    assert "rollout 2/2" in done.stderr
    assert "vllm" not in (done.stdout + done.stderr).lower()  # its chatter is in the log
    run_folder = tmp_path / "runs" / "quickstart" / "version_0"
    assert "vllm" in (run_folder / "run.log").read_text()
    assert (run_folder / "config.yaml").exists()

    config, last = ["--config", str(run_folder / "config.yaml")], "runs/quickstart/version_0/checkpoints/last.ckpt"
    commands = [
        ["report", "runs"],
        ["validate", *config, "--ckpt_path", "last"],
        ["fit", *config, "--ckpt_path", last, "--trainer.max_epochs", "2"],
        ["fit", *config, "--ckpt_path", last, "--model.loss", "GSPO"],
    ]
    codes, (report, checked, resumed, again) = zip(*run(commands, tmp_path), strict=True)
    assert codes == (0, 0, 0, 0), (report, checked, resumed, again)
    for text in ("2 rollouts", "avg@4 of the deployed policy", "mean reward", "multiplier", "version_0/checkpoints"):
        assert text in report
    assert re.search(r"^arithmetic +deployed +avg@4 +[\d.]+ +\([\d.]+, [\d.]+\)$", checked, flags=re.MULTILINE)
    assert not (tmp_path / "config.yaml").exists()

    assert "rollout 4/4" in resumed
    assert "rollout 2/" not in resumed
    assert not (run_folder.parent / "version_1").exists()  # continued in its own folder

    assert "Nothing was left to train" in again
    assert "continued with another model; its config so far is now config-1.yaml" in again
    former = yaml.safe_load((run_folder / "config-1.yaml").read_text())
    assert former["ckpt_path"] is None
    assert former["model"]["loss"]["class_path"].endswith("PPOClip")
    assert "GSPO" in (run_folder / "config.yaml").read_text()
    assert "From checkpoint runs/quickstart/version_0/checkpoints/step=4.ckpt" in again


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_nothing_behind(tmp_path, number):
    command = [sys.executable, "-m", "dclightning", "fit", *SHORT]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DCLIGHTNING_TEST": str(tmp_path)}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # tests in the background ignore it
    )
    for line in process.stderr:
        if "rollout 1/" in line:
            break
    process.send_signal(number)
    process.stderr.read()
    assert process.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    if number == signal.SIGTERM:  # a preempted run has lost nothing
        assert (tmp_path / "runs" / "quickstart" / "version_0" / "checkpoints" / "last.ckpt").exists()
    time.sleep(0.5)
    left = [
        path.name
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and str(tmp_path).encode() in _environment(path)
    ]
    assert not left


def _environment(process):
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_calibrate_and_inspect_take_a_run(tmp_path):
    short = ["--trainer.limit_train_batches", "1", "--saved_rollouts.responses", "3"]
    measure = ["--ckpt_path", "last", "--rollouts", "1", "--positions", "8"]
    folder = "runs/quickstart/version_0"
    commands = [
        ["fit", *SHORT, *short],
        ["calibrate", "--config", f"{folder}/config.yaml", *measure],
        *(["inspect", source, "--output", f"{number}.html"] for number, source in enumerate(("calibration", folder))),
    ]
    done = run(commands, tmp_path)
    assert [code for code, _ in done] == [0, 0, 0, 0], done
    assert len((tmp_path / folder / "rollouts" / "000000.jsonl").read_text().splitlines()) == 3
    assert "From checkpoint" in done[1][1]
    assert min((tmp_path / f"{number}.html").stat().st_size for number in (0, 1)) > 10_000
