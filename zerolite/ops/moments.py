"""A step of AdamW whose moments are codes of 8 bits, by the kernel of the host.

The kernel reads, computes and writes block by block, so moments in fp32 are in its cache alone. Its bits are those of
torch's operations on processors with FMA, with a square root that is rounded correctly
(:func:`zerolite.ops.reference.correct_root`).
"""

from __future__ import annotations

import torch

from zerolite.ops.call import CELLS, CODES, QUANT_BLOCK, Adam8Call
from zerolite.ops.cpu_kernels import CpuKernels
from zerolite.ops.library import kernels_for
from zerolite.utils.accelerator import is_fake
from zerolite.utils.dtypes import FLOATS


def adam8_step(call: Adam8Call) -> bool:
    """Make a step on the host. Tensors without memory are checked and not computed.

    Returns:
        False if nothing was done, because there is no kernel: on other devices, in other dtypes, or without a compiler.

    Raises:
        ValueError: the kernel would read or write past the end of a tensor.
    """
    param = call.param
    if param.device.type != "cpu" or param.dtype not in FLOATS or call.grad.dtype not in FLOATS:
        return False
    _check(call)
    if is_fake(param):
        return True
    kernels = kernels_for(param.device)
    if not isinstance(kernels, CpuKernels):
        return False
    kernels.adam8(call)
    torch.autograd.graph.increment_version([param, *call.codes, *call.maxima])
    return True


def _check(call: Adam8Call) -> None:
    numel, blocks = call.param.numel(), -(-(call.lead + call.param.numel()) // QUANT_BLOCK)
    expected = {"param": (call.param, call.param.dtype, numel), "grad": (call.grad, call.grad.dtype, numel)}
    for name, codes, maxima, table in zip(("first", "second"), call.codes, call.maxima, call.tables, strict=True):
        expected |= {
            f"codes of the {name} moment": (codes, torch.uint8, numel),
            f"maxima of the {name} moment": (maxima, torch.float32, blocks),
            f"numbers of the {name} moment": (table.numbers, torch.float32, CODES),
            f"borders of the {name} moment": (table.borders, torch.float32, CODES),
            f"cells of the {name} moment": (table.cells, torch.uint8, CELLS),
        }
    for name, (tensor, dtype, count) in expected.items():
        good = tensor.dtype == dtype and tensor.numel() == count and tensor.is_contiguous()
        if not good or tensor.device != call.param.device:
            raise ValueError(
                f"expected {name} contiguous, {count} elements in {dtype} on {call.param.device}, got "
                f"{list(tensor.shape)} in {tensor.dtype} on {tensor.device}"
            )
