"""What ``dclightning serve`` brings into each of vLLM's processes: a plugin, which they load."""

import os
import threading
from multiprocessing import parent_process
from multiprocessing.connection import wait

SERVING = "DCLIGHTNING_SERVING"
"""In the environment of a server's processes. In any other process that uses vLLM the plugin does nothing."""
TRANSFER = "dclightning"
"""The name of :class:`~dclightning.rollout.transfer.FileTransfer` in vLLM."""


def register() -> None:
    """Take part in vLLM's start."""
    if SERVING not in os.environ:
        return
    _leave_with_parent()
    import torch
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    import dclightning.rollout.simulated  # noqa: F401  registers the simulated formats

    torch.cpu._init_amx()  # vLLM's kernels use AMX where there is one, and the system wants to be asked first
    WeightTransferEngineFactory.register_engine(TRANSFER, "dclightning.rollout.transfer", "FileTransfer")


def _leave_with_parent() -> None:
    """End with the server: vLLM's engine processes outlive one that is killed, and keep its memory."""
    parent = parent_process()
    if parent is None:  # this is the server
        return

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="leave-with-parent").start()
