import multiprocessing
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path

import pytest
from pebble import ProcessExpired

from dclightning.rewards.workers import Workers
from tests import calls


@pytest.fixture
def workers():
    workers = Workers(2, time_limit=0.5)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def patient():
    workers = Workers(2, time_limit=60)
    yield workers
    workers.close()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def children():
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def test_results_come_in_the_order_of_the_calls(patient):
    pauses = [random.Random(0).random() / 50 for _ in range(50)]
    assert patient.map(calls.slowly, list(enumerate(pauses))) == list(range(50))


@pytest.mark.parametrize("hang", [calls.forever, calls.big_power])
def test_what_takes_too_long_is_killed_and_the_rest_is_answered(workers, hang):
    before = workers.map(calls.process_id, [()] * 8)
    assert all(isinstance(result, TimeoutError) for result in workers.map(hang, [()] * 4))
    assert workers.map(calls.double, [(x,) for x in range(20)]) == [2 * x for x in range(20)]
    assert eventually(lambda: not any(alive(pid) for pid in before))


def test_a_call_that_fails_or_crashes_takes_no_other_with_it(patient):
    assert all(isinstance(result, ProcessExpired) for result in patient.map(calls.crash, [()] * 3))
    (error,) = patient.map(calls.fail, [()])
    assert isinstance(error, ZeroDivisionError)
    assert patient.map(calls.double, [(4,)]) == [8]


def test_memory_is_limited(patient):
    results = patient.map(calls.take_memory, [(0.1,), (50,)])
    assert results[0] == int(0.1 * 2**30)
    assert isinstance(results[1], MemoryError)


def test_a_worker_that_dies_between_calls_is_replaced(patient):
    for pid in set(patient.map(calls.process_id, [()] * 8)):
        os.kill(pid, signal.SIGKILL)
    assert patient.map(calls.double, [(x,) for x in range(50)]) == [2 * x for x in range(50)]


def test_many_threads_get_their_own_results(patient):
    with ThreadPoolExecutor(8) as threads:
        batches = [[(x,) for x in range(start, start + 20)] for start in range(0, 400, 20)]
        results = list(threads.map(lambda batch: patient.map(calls.double, batch), batches))
    assert [x for batch in results for x in batch] == [2 * x for x in range(400)]


def test_a_forked_process_has_workers_of_its_own(patient):
    patient.map(calls.double, [(1,)])
    with multiprocessing.get_context("fork").Pool(1) as pool:  # whose processes are daemons
        assert pool.apply_async(calls.map_in_this_process, (patient, [1, 2])).get(timeout=60) == [2, 4]
    assert patient.map(calls.double, [(3,)]) == [6]


def test_a_copy_works_as_the_original(patient):
    patient.map(calls.double, [(1,)])
    copy = pickle.loads(pickle.dumps(patient))
    assert copy.map(calls.double, [(2,)]) == [4]
    copy.close()


def test_after_a_close_no_process_is_left_and_calls_start_new_ones():
    before = children()
    workers = Workers(2, time_limit=60)
    assert workers.map(calls.double, [(1,)]) == [2]
    workers.close()
    workers.close()
    trackers = {pid for pid in children() if "tracker" in Path(f"/proc/{pid}/cmdline").read_text()}
    assert children() - trackers <= before
    assert workers.map(calls.double, [(2,)]) == [4]
    del workers  # closes, too
    assert eventually(lambda: children() - trackers <= before)


def test_closing_ends_calls_that_wait_in_another_thread():
    workers, outcome = Workers(1, time_limit=60), []

    def wait():
        try:
            workers.map(calls.slowly, [(0, 30)] * 3)
        except CancelledError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.5)
    workers.close()
    thread.join(timeout=20)
    assert len(outcome) == 1


SCRIPT = """
import sys
from dclightning.rewards.workers import Workers
from tests import calls
print("main", flush=True)
workers = Workers(2, 60)
print(workers.map(calls.double, [(1,), (2,)]), flush=True)
if sys.argv[1:]:
    workers.map(calls.write_pid_and_hang, [(sys.argv[1],)])
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    root = Path(__file__).parents[1]
    return lambda *arguments: subprocess.Popen(
        [sys.executable, path, *arguments],
        env={**os.environ, "PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def test_a_script_needs_no_guard_and_no_close(script):
    out, err = script().communicate(timeout=60)
    assert (out, err) == ("main\n[2, 4]\n", "")


def test_ctrl_c_ends_the_workers(script, tmp_path):
    pid = tmp_path / "pid"
    process = script(str(pid))
    assert eventually(lambda: pid.exists() and pid.read_text())
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in err
    assert eventually(lambda: not alive(int(pid.read_text())))


def test_no_worker_outlives_a_killed_parent(script, tmp_path):
    pid = tmp_path / "pid"
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("Workers(2, 60)", "Workers(2, 2)"))  # the alarm rings after 2 * 2 + 1 seconds
    process = script(str(pid))
    assert eventually(lambda: pid.exists() and pid.read_text())
    process.kill()
    process.wait()
    assert alive(int(pid.read_text()))
    assert eventually(lambda: not alive(int(pid.read_text())))


def test_a_function_that_workers_could_not_import_is_refused(patient, monkeypatch):
    monkeypatch.setattr(calls.double, "__module__", "__main__")
    with pytest.raises(ValueError, match="double: workers can call functions of importable modules only"):
        patient.map(calls.double, [(1,)])


def test_a_child_that_ends_leaves_the_workers_of_its_parent_alone(patient):
    before = set(patient.map(calls.process_id, [()] * 8))
    child = multiprocessing.get_context("fork").Process(target=calls.double, args=(1,))
    child.start()
    child.join(timeout=30)
    assert child.exitcode == 0
    assert all(map(alive, before))


def test_a_worker_that_waits_is_not_taken_for_one_that_hangs():
    workers = Workers(1, time_limit=0.1)
    before = workers.map(calls.process_id, [()])
    time.sleep(2 * 0.1 + 1 + 0.5)  # the alarm of a call that hangs would have rung
    assert workers.map(calls.process_id, [()]) == before
    workers.close()


def test_a_worker_is_replaced_after_many_calls(monkeypatch):
    monkeypatch.setattr("dclightning.rewards.workers._CALLS", 3)
    workers = Workers(1, time_limit=30)
    assert len(set(workers.map(calls.process_id, [()] * 7))) == 3
    workers.close()


@pytest.mark.parametrize(
    ("count", "limit", "field"), [(0, 1.0, "workers=0"), (1, 0.0, "time_limit=0"), (1, float("inf"), "time_limit=inf")]
)
def test_what_makes_no_sense_is_refused(count, limit, field):
    with pytest.raises(ValueError, match=field):
        Workers(count, limit)
