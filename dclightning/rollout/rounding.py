"""Low-precision number formats: what a tensor becomes when it is stored in one and read back.

Numbers share a scale in groups: a whole tensor, a row, a part of a row or a block. A group's largest magnitude becomes
the largest number of the element format; then each number is rounded to the nearest one that the format has, ties to
even, as torch's own casts do.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

LARGEST = {"e4m3": 448.0, "e2m1": 6.0, "int8": 127.0, "int4": 7.0}
"""The magnitude that a group's largest one is scaled to: the format's largest, of integers without the lowest."""
WHOLE = 0
"""In a group's shape: as far as the tensor goes."""


@dataclass(frozen=True)
class Rounding:
    """How the numbers of a tensor are rounded.

    Args:
        element: The format of each scaled number: ``e4m3`` (FP8), ``e2m1`` (FP4), ``int8`` or ``int4``.
        group: Rows and columns that share a scale; 0 for all of them.
        scale: The format of the scales: ``float32``; ``e8m0``, powers of two (OCP microscaling); ``e4m3`` times one
            float32 for the whole tensor (NVFP4's weights), or ``e4m3_by_row``, for each row (its activations: what one
            token is rounded to must not depend on the others).
    """

    element: Literal["e4m3", "e2m1", "int8", "int4"]
    group: tuple[int, int]
    scale: Literal["float32", "e8m0", "e4m3", "e4m3_by_row"] = "float32"

    def __call__(self, values: Tensor) -> Tensor:
        """The values after rounding: same shape and dtype. (rows, columns); further leading dimensions are stacked."""
        if values.ndim > 2:
            return torch.stack([self(part) for part in values])
        groups = _in_groups(values.float(), self.group)
        largest = groups.abs().amax((1, 3), keepdim=True)
        scales = self._scales(largest)
        scaled = torch.where(scales > 0, groups / scales, 0.0)
        back = nearest(scaled, self.element) * scales
        rows, columns = values.shape
        return back.flatten(2, 3).flatten(0, 1)[:rows, :columns].to(values.dtype)

    def _scales(self, largest: Tensor) -> Tensor:
        scales = largest / LARGEST[self.element]
        if self.scale == "e8m0":  # OCP: the exponent of the largest number less that of the format's largest
            exponents = torch.frexp(largest)[1] - torch.frexp(torch.tensor(LARGEST[self.element]))[1]
            return torch.ldexp(torch.ones_like(largest), exponents.clamp(-127, 127))
        if self.scale in ("e4m3", "e4m3_by_row"):
            whole = largest.amax() if self.scale == "e4m3" else largest.amax(2, keepdim=True)
            whole = (whole / (LARGEST[self.element] * LARGEST["e4m3"])).clamp_min(torch.finfo().tiny)
            return nearest(scales / whole, "e4m3") * whole
        return scales


def nearest(values: Tensor, element: str) -> Tensor:
    """The nearest numbers that a format has, float32; what is beyond its largest becomes that."""
    if element == "e4m3":
        return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float()
    if element == "e2m1":  # 0, 0.5, 1, 1.5, 2, 3, 4, 6: steps of a half to 2, of one to 4, of two to 6
        size = values.abs()
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        return ((size / step).round() * step).clamp(max=6.0).copysign(values)
    return values.round().clamp(-LARGEST[element], LARGEST[element])


def _in_groups(values: Tensor, group: tuple[int, int]) -> Tensor:
    """(rows, columns) as (groups, rows of a group, groups, columns of a group), filled up with zeros."""
    height, width = (size or whole for size, whole in zip(group, values.shape, strict=True))
    padded = pad(values, (0, -values.shape[1] % width, 0, -values.shape[0] % height))
    return padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)


ROW, TENSOR = (1, WHOLE), (WHOLE, WHOLE)
FORMATS: dict[str, tuple[Rounding, Rounding | None]] = {
    "fp8": (Rounding("e4m3", TENSOR), Rounding("e4m3", ROW)),
    "fp8_per_channel": (Rounding("e4m3", ROW), Rounding("e4m3", ROW)),
    "fp8_per_block": (Rounding("e4m3", (128, 128)), Rounding("e4m3", (1, 128))),
    "mxfp8": (Rounding("e4m3", (1, 32), "e8m0"), Rounding("e4m3", (1, 32), "e8m0")),
    "int8": (Rounding("int8", ROW), Rounding("int8", ROW)),
    "int4": (Rounding("int4", (1, 128)), None),
    "mxfp4": (Rounding("e2m1", (1, 32), "e8m0"), None),
    "nvfp4": (Rounding("e2m1", (1, 16), "e4m3"), Rounding("e2m1", (1, 16), "e4m3_by_row")),
}
"""By name how weights, (outputs, inputs), and activations, (tokens, inputs), are rounded; None: not at all."""
