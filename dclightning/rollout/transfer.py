"""Weights from files into a running vLLM, in its worker processes."""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from dclightning.rollout.vllm_weights import checksums, multiply_fp8_in_fp32, repack_for_cpu


@dataclass
class Nothing(WeightTransferInitInfo):  # type: ignore[misc]
    """There is no connection to set up."""


@dataclass
class File(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Some of the weights, by the names of the model's own checkpoint."""

    path: str
    """Of a safetensors file that each worker can read."""


class FileTransfer(WeightTransferEngine[Nothing, File]):  # type: ignore[misc]
    """Loads files one after another, and quantises anew, exactly as when a model is loaded.

    What the files hold has to be checked before: after an update that fails the model cannot compute.
    """

    init_info_cls = Nothing
    update_info_cls = File

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        super().__init__(config, vllm_config, device, model)
        if device.type == "cpu":
            multiply_fp8_in_fp32(model)

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nothing to do."""

    def start_weight_update(self) -> None:
        """Make ready for weights as a checkpoint has them."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: File) -> None:
        """Load a file."""
        with safe_open(update_info.path, "pt") as file:
            self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        """Finish the layers that wait for more, and what CPU kernels keep beside the weights."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack_for_cpu(self.model)

    def shutdown(self) -> None:
        """Nothing to do."""


class WorkerExtension:
    """What vLLM's workers can be asked for besides."""

    def dclightning_checksums(self: Any) -> tuple[dict[str, int], dict[str, list[str]]]:
        """Of the weights that the worker holds; see :func:`~dclightning.rollout.vllm_weights.checksums`."""
        return checksums(self.model_runner.get_model(), self.vllm_config.model_config.dtype)
