"""Two real servers, started as the documentation says: equal to an engine in this process, until they are killed."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import psutil
import pytest
import torch

from dclightning import RemoteEngine, Sampling, VLLMEngine
from dclightning.errors import RunStoppedError, UserError
from dclightning.models import load_policy, named_weights, resolve_model
from dclightning.rollout.servers import LOADED, TOKEN, WEIGHTS, Servers
from dclightning.serve import serve
from tests.helpers import TINY
from tests.test_models import FAMILIES, saved

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "servers.md").read_text()
PROMPTS = [[6, 40 + i, 41, 42, 7] for i in range(12)]
SAMPLING = Sampling(max_tokens=40)


def dclightning(*arguments, **options):
    return [sys.executable, "-m", "dclightning", *arguments], {
        "env": {**os.environ, "PYTHONPATH": str(ROOT)},
        **options,
    }


class Fleet:
    """The servers of the document's first commands, on free ports."""

    def __init__(self, folder):
        commands = re.findall(r"^dclightning (serve .*--port 800\d)$", DOCUMENT, flags=re.MULTILINE)
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in commands]
        self.ports = [s.getsockname()[1] for s in sockets]
        self.commands = [re.sub(r"800\d$", str(port), c).split() for c, port in zip(commands, self.ports, strict=True)]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.processes, self.children, self.folder = {}, [], folder
        for s in sockets:
            s.close()

    def start(self, *which):
        for i in which:
            command, options = dclightning(*self.commands[i])
            log = (self.folder / f"server-{i}.log").open("a")
            self.processes[i] = subprocess.Popen(command, stdout=log, stderr=log, **options)

    def family(self, i):
        process = psutil.Process(self.processes[i].pid)
        return [process, *process.children(recursive=True)]

    def stop(self):
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(timeout=60)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN, "secret")
        fleet = Fleet(tmp_path_factory.mktemp("fleet"))
        fleet.start(0, 1)
        yield fleet
        fleet.stop()


@pytest.fixture(scope="module")
def remote(fleet):
    engine = RemoteEngine(fleet.urls, responses_at_once=12, start_seconds=200, retry_seconds=2)
    engine.start(resolve_model(TINY), max_length=400)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def local():
    engine = VLLMEngine("fp8_per_channel", dtype="bfloat16", kv_cache_gib=0.0625)
    engine.start(resolve_model(TINY), max_length=400)
    yield engine
    engine.close()


def moved(scale):
    model = load_policy(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1)
    return model


@pytest.mark.slow
def test_pushed_weights_are_sampled_with_as_in_this_process(remote, local):
    before = remote.distributions(PROMPTS, 1.0)
    model = moved(1.1)
    for engine in (remote, local):
        engine.load_weights(named_weights(model), 3)
    after = remote.distributions(PROMPTS, 1.0)
    assert (after - before).exp().max() > 1.5
    # Nearly all to the bit; batches are others, and now and then a number is rounded to another one of FP8.
    gap = (after - local.distributions(PROMPTS, 1.0)).abs().amax(-1)
    assert (gap < 1e-4).sum() >= 10
    assert gap.max() < 0.5
    assert remote.version == 3
    assert remote.differing_weights(named_weights(model)) == []
    assert "model.embed_tokens.weight" in remote.differing_weights(named_weights(moved(1.2)))
    # The log-probs of what it samples are those distributions'.
    completions = remote.generate(PROMPTS, SAMPLING, 2, seed=0)
    firsts = torch.tensor([(i, c.token_ids[0]) for i in range(12) for c in completions[2 * i : 2 * i + 2]])
    told = torch.tensor([c.logprobs[0] for c in completions])
    gap = (told - after[firsts[:, 0], firsts[:, 1]]).abs()
    assert (gap < 1e-3).sum() >= 20
    assert gap.max() < 0.5
    assert all(len(c.ranks) == len(c.logprobs) == len(c.token_ids) for c in completions)


@pytest.mark.slow
def test_it_does_not_matter_which_server_answers(fleet, remote):
    told = []
    both = remote.generate(PROMPTS, SAMPLING, 4, 1, lambda place, group: told.append((place, group)))
    assert sorted(place for place, _ in told) == list(range(12))
    assert all(group == both[4 * place : 4 * place + 4] for place, group in told)
    assert len({tuple(c.token_ids) for c in both}) > 30
    for server, url in zip(remote._servers.all, fleet.urls, strict=True):
        server.cause = "not asked"
        alone = remote.generate(PROMPTS, SAMPLING, 4, seed=1)
        server.cause = None
        # Batches are others, and so is their rounding: now and then a token is, too; how often depends on the CPU.
        assert sum(a.token_ids == b.token_ids for a, b in zip(alone, both, strict=True)) > 40, url
    other = remote.generate(PROMPTS, SAMPLING, 4, seed=2)
    assert sum(a.token_ids == b.token_ids for a, b in zip(other, both, strict=True)) < 10
    assert remote.generate([], SAMPLING, 4, seed=1) == []


@pytest.mark.slow
def test_long_prompts_are_read_whole(remote):
    prompts = [[6, *[40 + i % 7] * 300, 7] for i in range(24)]  # more tokens than vLLM computes in a step
    completions = remote.generate(prompts, Sampling(max_tokens=4), 1, seed=1)
    assert all(1 <= len(c.token_ids) <= 4 for c in completions)


@pytest.mark.slow
def test_only_who_has_the_token_may_ask(fleet, remote):
    for path in ("/v1/models", "/metrics", "/dclightning/status", "/dclightning/weights/1/0"):
        for headers in ({}, {"Authorization": "Bearer guess"}):
            assert httpx.get(fleet.urls[0] + path, headers=headers).status_code == 401, path
    assert httpx.get(f"{fleet.urls[0]}/health").status_code == 200
    known = {"Authorization": "Bearer secret"}
    answer = httpx.get(f"{fleet.urls[0]}/v1/models", headers=known)
    assert answer.status_code == 200
    assert answer.headers[WEIGHTS] == remote._weights  # every answer says which weights there are
    refused = httpx.get(f"{fleet.urls[0]}/v1/models", headers={**known, WEIGHTS: LOADED})
    assert (refused.status_code, "has weights" in refused.text) == (409, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN, "guess")
        stranger = RemoteEngine(fleet.urls)
        with pytest.raises(UserError, match="refuses: 401: wrong token"):
            stranger.start(resolve_model(TINY), 100)
        stranger.close()


@pytest.mark.slow
def test_what_is_not_served_is_refused(fleet, remote, tmp_path):
    other = saved(tmp_path, FAMILIES["qwen3"]())
    for model, length, message in (
        (other, 100, "serves a model of another configuration"),
        (resolve_model(TINY), 1000, "serves max_length=512, 1000 are needed"),
    ):
        engine = RemoteEngine(fleet.urls)
        with pytest.raises(UserError, match=message):
            engine.start(str(model), length)
        engine.close()
    nobody = RemoteEngine(["http://127.0.0.1:9"], start_seconds=0.1)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9 has not answered within start_seconds=0.1: .*ConnectError"):
        nobody.start(resolve_model(TINY), 100)
    nobody.close()


TWO_RANKS = """
import os, sys
import torch
from torch import distributed
from dclightning import RemoteEngine, Sampling
from dclightning.errors import RunStoppedError
from dclightning.models import load_policy, named_weights, resolve_model

distributed.init_process_group("gloo")
engine = RemoteEngine(sys.argv[1:], retry_seconds=2)
engine.start(resolve_model("dclightning/tiny-arithmetic"), 100)
model = load_policy("dclightning/tiny-arithmetic")
taken = []
engine.load_weights(((taken.append(name), (name, weight))[1] for name, weight in named_weights(model)), 1)
assert len(taken) == len(dict(model.named_parameters()))  # each rank takes part in gathering
(completion,) = engine.generate([[6, 40, 7]], Sampling(max_tokens=20), 1, seed=0)
print(engine.version, completion.token_ids, flush=True)
engine.load_weights([("lm_head.weight", torch.zeros(2, 2))], 2)
try:
    engine.generate([[6, 40, 7]], Sampling(max_tokens=20), 1, seed=0)
except RunStoppedError as error:
    print(error, flush=True)
engine.load_weights(named_weights(model), 3)
assert engine.generate([[6, 40, 7]], Sampling(max_tokens=20), 1, seed=0)[0].token_ids == completion.token_ids
"""


@pytest.mark.slow
def test_one_rank_pushes_and_all_stop_if_that_fails(fleet, remote, tmp_path):
    (tmp_path / "rank.py").write_text(TWO_RANKS)
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "rank.py", *fleet.urls],
            env={**os.environ, **where, "RANK": str(rank)}, text=True, stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=200)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said[0] == said[1]
    assert said[0].startswith("1 [")
    for url in fleet.urls:
        assert f"{url}: 422: weight lm_head.weight has the shape (2, 2), and in the model None" in said[0]


@pytest.mark.slow
def test_doctor_finds_servers_sound(fleet):
    from tests.test_doctor import examined

    engine = RemoteEngine(fleet.urls)
    assert {finding.state for finding in examined(engine)} == {"ok"}


MINE = """
import json, os, signal
import lightning as L
from dclightning import Completion, RemoteEngine, Sampling
from dclightning.rollout.engine import Finished


class Killing(RemoteEngine):
    '''Kills servers as soon as the first prompt of a rollout is done.'''

    def __init__(self, victims: dict[str, int], **options):
        super().__init__(**options)
        self.victims, self.calls = victims, 0

    def generate(
        self, prompts: list[list[int]], sampling: Sampling, group_size: int, seed: int, finished: Finished | None = None
    ) -> list[Completion]:
        places = []

        def told(place, group):
            if not places and (victim := self.victims.get(str(self.calls))):
                os.kill(victim, signal.SIGKILL)
            places.append(place)
            finished(place, group)

        completions = super().generate(prompts, sampling, group_size, seed, told)
        assert sorted(places) == list(range(len(prompts)))
        assert len(completions) == len(prompts) * group_size
        self.calls += 1
        return completions


class Trace(L.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        prompts, responses = zip(*batch.sequences())
        row = {"rollout": trainer.fit_loop.total_batch_idx, "versions": batch.weight_versions.unique().tolist(),
               "prompts": [ids.tolist() for ids in prompts], "responses": [ids.tolist() for ids in responses],
               "loss": float(trainer.callback_metrics["train/loss"])}
        with open("trace.jsonl", "a") as file:
            print(json.dumps(row), file=file)
"""


@pytest.mark.slow
def test_a_run_outlives_one_server_and_is_saved_when_both_are_dead(fleet, remote, tmp_path):
    remote.load_weights(named_weights(load_policy(TINY)), 0)
    (tmp_path / "mine.py").write_text(MINE)
    (command,) = re.findall(r"^dclightning (fit .*)$", DOCUMENT, flags=re.MULTILINE)
    words = [str(ROOT / word) if word.startswith("configs/") else word for word in command.split()]
    words += ["--data.prompts_per_step=8", "--data.group_size=4", "--trainer.limit_train_batches=4"]
    words += ["--data.validation_problems=null", "--trainer.callbacks+=mine.Trace"]

    def fit(*options, urls=fleet.urls):
        (tmp_path / "trace.jsonl").unlink(missing_ok=True)
        listed = ["--data.engine.responses_at_once=8", "--data.engine.retry_seconds=2", f"--data.engine.urls={urls}"]
        run, how = dclightning(*words, *options, *listed, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        done = subprocess.run(run, **how)
        assert (tmp_path / "trace.jsonl").exists(), done.stderr
        return done, [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]

    done, undisturbed = fit()
    assert done.returncode == 0, done.stderr
    assert [row["versions"] for row in undisturbed] == [[0], [1], [2], [3]]

    families = [fleet.family(i) for i in range(2)]
    victims = {"1": families[0][0].pid, "3": families[1][0].pid}
    options = ["--data.engine=mine.Killing", f"--data.engine.victims={json.dumps(victims)}"]
    done, before = fit(*options)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "error: fit: no rollout server is left" in line]
    assert all(re.search(rf"{url}: \S.*Error\)", line) for url in fleet.urls)
    assert len(before) == 3
    psutil.wait_procs([process for family in families for process in family], timeout=30)
    assert not any(process.is_running() and process.status() != "zombie" for f in families for process in f)

    fleet.start(1)
    # A restarted server does not sample with what it was started with; it waits for the next push.
    wait_for(fleet.urls[1])
    with pytest.raises(RunStoppedError, match=rf"{fleet.urls[1]}: 409: has weights 'default' and not"):
        remote.generate(PROMPTS, SAMPLING, 1, seed=0)
    remote.load_weights(named_weights(load_policy(TINY)), 4)
    assert len(remote.generate(PROMPTS, SAMPLING, 1, seed=0)) == 12

    done, after = fit("--ckpt_path=last", urls=fleet.urls[1:])
    assert done.returncode == 0, done.stderr
    rows = before + after
    assert [row["rollout"] for row in rows] == [0, 1, 2, 3]
    for row, want in zip(rows, undisturbed, strict=True):
        assert (row["prompts"], row["versions"]) == (want["prompts"], want["versions"])
        # Batches are others when a server is missing, and so is their rounding: now and then a token is, too.
        assert sum(a == b for a, b in zip(row["responses"], want["responses"], strict=True)) >= 28
        if row["responses"] == want["responses"]:
            assert row["loss"] == pytest.approx(want["loss"], abs=1e-4)


def wait_for(url):
    until = time.monotonic() + 200
    while time.monotonic() < until:
        try:
            return httpx.get(f"{url}/health").raise_for_status()
        except httpx.HTTPError:
            time.sleep(1)
    raise AssertionError(f"{url} has not come back")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"urls": []}, "urls: name at least one server"),
        ({"urls": ["10.0.0.5:8000"]}, "urls: '10.0.0.5:8000' must start with http://"),
        ({"urls": ["http://a:1", "http://a:1"]}, "is named twice"),
        ({"urls": ["http://a:1"], "responses_at_once": 0}, "responses_at_once=0: must be at least 1"),
        ({"urls": ["http://a:1"], "retry_seconds": 0.0}, "retry_seconds=0.0: must be positive"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        RemoteEngine(**options)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "trainer"])
def test_nothing_is_served_to_others_without_a_token(host, monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(UserError, match=f"host='{host}': others can reach it; set {TOKEN}"):
        serve(TINY, VLLMEngine(), host=host)


@pytest.mark.slow
def test_the_server_for_other_machines_has_the_options_that_are_printed(tmp_path):
    (command,) = re.findall(r"^dclightning (serve .*--host 0.0.0.0)$", DOCUMENT, flags=re.MULTILINE)
    words, options = dclightning(*command.split(), "--print_config", cwd=tmp_path, capture_output=True, timeout=120)
    done = subprocess.run(words, text=True, **options)
    assert (done.returncode, "quantization: fp8" in done.stdout) == (0, True), done.stderr


class Counting(BaseHTTPRequestHandler):
    """Answers after a while, and dies of the tenth request of any."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked["place"])
        if len(self.server.asked) == self.server.mortal:
            self.server.socket.close()
        if len(self.server.asked) >= self.server.mortal:
            self.connection.close()
            return
        time.sleep(0.05)
        self.send_response(200)
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"0")

    def log_message(self, *_):
        pass


class Spoilt(BaseHTTPRequestHandler):
    """Cannot use what it has sampled."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(422)
        self.send_header("Content-Length", "8")
        self.end_headers()
        self.wfile.write(b"sample 7")

    def log_message(self, *_):
        pass


def test_a_bad_sample_is_named_and_no_server_is_left_out_for_it():
    http = ThreadingHTTPServer(("127.0.0.1", 0), Spoilt)
    Thread(target=http.serve_forever, daemon=True).start()

    async def run():
        servers = Servers([f"http://127.0.0.1:{http.server_port}"], None, 0.3, 10.0)
        with pytest.raises(RuntimeError, match="sample 7"):
            await servers.spread("generate", [{"place": 0}], "any", 1, lambda place, answer: None)
        await servers.close()
        return servers.all[0].cause

    assert asyncio.run(run()) is None
    http.shutdown()


def test_weights_of_two_runs_are_never_mixed(monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    from dclightning.rollout.server import Gate

    async def run():
        gate, others_came = Gate(app=None), asyncio.Event()
        client = httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://server/dclightning/weights")

        async def slowly():
            yield b"half of a chunk"
            await others_came.wait()
            yield b", and the rest"

        first = asyncio.create_task(client.put("/mine/1", content=slowly()))
        await asyncio.sleep(0.05)
        answers = [(await client.put(f"/others/{index}", content=b"whole")).status_code for index in (0, 2)]
        others_came.set()
        answers.append((await first).status_code)
        return answers, gate.incoming, sorted(gate.chunks)

    assert asyncio.run(run()) == ([204, 204, 409], "others", [0, 2])


@pytest.mark.parametrize("mortal", [1000, 10])
def test_work_is_shared_and_each_piece_done_once(mortal):
    https = [ThreadingHTTPServer(("127.0.0.1", 0), Counting) for _ in range(2)]
    for http, limit in zip(https, (mortal, 1000), strict=True):
        http.asked, http.mortal = [], limit
        Thread(target=http.serve_forever, daemon=True).start()
    done = []

    async def run():
        servers = Servers([f"http://127.0.0.1:{http.server_port}" for http in https], None, 0.3, 10.0)
        asked = [{"place": place} for place in range(40)]
        await servers.spread("generate", asked, "any", 20, lambda place, answer: done.append(place))
        await servers.close()
        return [server.cause for server in servers.all]

    causes = asyncio.run(run())
    assert sorted(done) == list(range(40))
    if mortal == 1000:
        assert min(len(http.asked) for http in https) >= 12
        assert causes == [None, None]
    else:
        assert sorted({*https[0].asked, *https[1].asked}) == list(range(40))
        assert len(https[1].asked) > 20
        assert causes[1] is None
    for http in https[mortal < 1000 :]:
        http.shutdown()
