"""The ways to start a run on several ranks give the same run: Lightning's launcher, torchrun, SLURM."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dclightning.report import read_scalars

ROOT = Path(__file__).parent.parent
SMALL = (
    f"--config {ROOT}/configs/quickstart.yaml --data.engine dclightning.TransformersEngine --data.prompts_per_step 4 "
    "--data.group_size 2 --data.sampling.max_tokens 16 --trainer.limit_train_batches 1 --trainer.max_epochs 2 "
    "--trainer.num_sanity_val_steps 0 --trainer.limit_val_batches 0 --trainer.enable_progress_bar false "
    "--trainer.strategy ddp"
).split()
SRUN = """#!/bin/bash
exec env SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 "$@"
"""


def launch(command, cwd, **environment):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    path = f"{cwd}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "MASTER_PORT": port, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done


def computed(run):
    """What a run has logged, but for times."""
    return {name: rows for name, rows in read_scalars(run).items() if not name.startswith(("time/", "perf/"))}


@pytest.mark.slow
def test_torchrun_gives_the_run_that_lightnings_own_launcher_gives(tmp_path):
    launch([sys.executable, "-m", "dclightning", "fit", *SMALL, "--trainer.devices", "2"], tmp_path)
    launch([ROOT / "examples" / "torchrun.sh", *SMALL], tmp_path, GPUS="2")
    own, torchrun = sorted((tmp_path / "runs" / "quickstart").iterdir())  # one folder each, not one for each rank
    logged = computed(own)
    assert len(logged["lagrangian/multiplier"]) == 2
    assert logged == computed(torchrun)


@pytest.mark.slow
def test_a_requeued_slurm_job_continues(tmp_path):
    (tmp_path / "srun").write_text(SRUN)  # starts the job's only task
    (tmp_path / "srun").chmod(0o755)
    job = {"SLURM_JOB_ID": "41", "SLURM_NNODES": "1", "SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1"}
    script = ROOT / "examples" / "slurm.sh"
    launch([script, *SMALL, "--trainer.max_epochs", "1"], tmp_path, **job)
    again = launch([script, *SMALL], tmp_path, **job)
    (run,) = (tmp_path / "runs" / "41" / "quickstart").iterdir()
    assert f"From checkpoint {(run / 'checkpoints').relative_to(tmp_path)}" in again.stderr
    assert len(computed(run)["lagrangian/multiplier"]) == 2


def test_a_slurm_job_goes_back_to_the_queue_when_its_time_is_up(tmp_path):
    (tmp_path / "srun").write_text("#!/bin/bash\ntouch started; exec sleep 5\n")
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@" > asked\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "41", "SLURM_NNODES": "1"}
    process = subprocess.Popen(
        [str(ROOT / "examples" / "slurm.sh")], cwd=tmp_path, env={**environment, "SLURM_NTASKS_PER_NODE": "1"}
    )
    while not (tmp_path / "started").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGUSR1)
    process.wait(60)
    assert (tmp_path / "asked").read_text() == "requeue 41\n"
