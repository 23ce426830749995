"""What worker processes are asked for in tests: they import it by name."""

import os
import signal
import time
from pathlib import Path

from dclightning import MathReward


def double(x):
    return 2 * x


def slowly(x, seconds):
    time.sleep(seconds)
    return x


def forever(*_):
    while True:
        pass


def big_power(*_):  # one long operation of the interpreter
    return 7 ** (7**9)


def crash(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(*_):
    raise ZeroDivisionError("no")


def take_memory(gib):
    return len(bytearray(int(gib * 2**30)))


def write_pid_and_hang(path):
    Path(path).write_text(str(os.getpid()))
    forever()


def process_id(*_):
    time.sleep(0.05)
    return os.getpid()


def map_in_this_process(workers, numbers):
    return workers.map(double, [(x,) for x in numbers])


def verdict_in_this_process(reward, gold, response):
    verdict = reward.verdict(gold, response)
    reward.close()
    return verdict


shared = MathReward()  # as in a script, where processes inherit it


def verdict_of_the_shared_reward(gold, response):
    return shared.verdict(gold, response).equal
