"""Quantisation that vLLM has no kernels for here, simulated in vLLM: what is stored and computed with is rounded.

Weights are rounded each time they are loaded, the engine's first load and every sync alike; activations as they enter
a linear layer. All the rest is vLLM's own. As in vLLM's own online quantisation, embeddings and the head stay as they
are. Of experts the weights are rounded, and what enters the layer, but not what passes between an expert's matrices.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from dclightning.rollout.rounding import FORMATS, Rounding

NAME = "dclightning_simulated"


class SimulatedLinear(UnquantizedLinearMethod):  # type: ignore[misc]
    """A linear layer on rounded weights and activations."""

    def __init__(self, weights: Rounding, activations: Rounding | None) -> None:
        super().__init__()
        self.weights = weights
        self.activations = activations

    def process_weights_after_loading(self, layer: Any) -> None:
        """Round, before a kernel takes the weights over."""
        layer.weight.data.copy_(self.weights(layer.weight.data))
        super().process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's output."""
        if self.activations is not None:
            x = self.activations(x.flatten(0, -2)).view_as(x)
        return super().apply(layer, x, bias)  # type: ignore[no-any-return]


@CustomOp.register("dclightning_simulated_experts")
class SimulatedExperts(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Experts on rounded weights and inputs."""

    def __init__(self, layer: RoutedExperts, weights: Rounding, activations: Rounding | None) -> None:
        super().__init__(layer.moe_config)
        self.weights = weights
        self.activations = activations

    def process_weights_after_loading(self, layer: Any) -> None:
        """Round, before a kernel takes the weights over."""
        for weight in (layer.w13_weight, layer.w2_weight):
            weight.data.copy_(self.weights(weight.data))
        super().process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's output."""
        return super().apply(layer, self._rounded(x), *args, **kwargs)

    def apply_monolithic(self, layer: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The layer's output, where the kernel routes, too."""
        return super().apply_monolithic(layer, self._rounded(x), *args, **kwargs)

    def _rounded(self, x: Tensor) -> Tensor:
        return x if self.activations is None else self.activations(x)


@register_quantization_config(NAME)
class SimulatedConfig(QuantizationConfig):  # type: ignore[misc]
    """What vLLM asks how to treat a layer."""

    def __init__(self, name: str, activations: bool) -> None:
        super().__init__()
        weights, of_activations = FORMATS[name]
        self.roundings = weights, of_activations if activations else None

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of a layer; None leaves it as it is."""
        if isinstance(layer, LinearBase):
            return SimulatedLinear(*self.roundings)
        if isinstance(layer, RoutedExperts):
            return SimulatedExperts(layer, *self.roundings)
        return None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SimulatedConfig":
        """From what :func:`overrides` gave to the engine."""
        return cls(config["format"], config["activations"])

    @classmethod
    def get_name(cls) -> str:
        """The name under which vLLM knows it."""
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Any."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any device."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: it is in no checkpoint."""
        return []


def overrides(name: str, activations: bool) -> dict[str, Any]:
    """What makes vLLM simulate a format: goes over the model's own config."""
    return {"quantization_config": {"quant_method": NAME, "format": name, "activations": activations}}
