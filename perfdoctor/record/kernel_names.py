"""What a kernel's name says: which unit bounds it, and which operation it is."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache


class KernelClass(StrEnum):
    """What bounds a kernel, by its name."""

    MATRIX = "matrix"  # arithmetic: GEMM, convolution, attention
    COMMUNICATION = "communication"  # NCCL / RCCL
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    NORMALISATION = "normalisation"
    MULTI_TENSOR = "multi-tensor"
    OTHER = "other"  # moves memory as far as is known


_MATRIX = re.compile(
    r"gemm|gemv|nvjet|cutlass|cublas|xmma|wgmma|\bmma|conv(?!ert)|wgrad|dgrad|winograd|implicit|flash|fmha|attention|sdpa|"
    r"Cijk_|rocblas|tensile|miopen.*conv|splitKreduce|triton_(tem|mm)",
    re.IGNORECASE,
)
_NOT_MATRIX = re.compile(
    r"elementwise|(?<!splitK)reduce_kernel|im2col|col2im|convert_dq|compute_dot_do_o|nchwToNhwc|nhwcToNchw"
)
_COMMUNICATION = re.compile(r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|cross_device_reduce", re.IGNORECASE)
_NORMALISATION = re.compile(r"(layer|batch|group|instance|rms)_?norm|bn_(fw|bw)|GammaBeta|softmax", re.IGNORECASE)
# fp32 matrix products that run on the plain units: SIMT and FFMA kernels, and cuBLAS sgemm without tf32 in the name.
_NO_TENSOR_CORES = re.compile(r"simt|sgemm(?!.*(tf32|tensorop))|dgemm|_ffma_", re.IGNORECASE)
_TENSOR_CORES = re.compile(r"tensorop|tf32|bf16|h?884|1688|16816|wgmma|_mma|s16816|nvjet|hmma", re.IGNORECASE)


@lru_cache(maxsize=65536)
def kernel_class(name: str) -> KernelClass:
    """The class of a kernel by its (demangled or mangled) name."""
    if _COMMUNICATION.search(name) and "at::native" not in name:
        return KernelClass.COMMUNICATION
    if "multi_tensor_apply" in name:
        return KernelClass.MULTI_TENSOR
    if _MATRIX.search(name) and not _NOT_MATRIX.search(name):
        return KernelClass.MATRIX
    if _NORMALISATION.search(name):
        return KernelClass.NORMALISATION
    if "elementwise" in name or "triton_poi" in name or "CatArray" in name or "FillFunctor" in name:
        return KernelClass.POINTWISE
    if "reduce_kernel" in name or "Reduce" in name or "triton_red" in name or "triton_per" in name:
        return KernelClass.REDUCTION
    return KernelClass.OTHER


def without_tensor_cores(name: str) -> bool:
    """Whether a matrix kernel's name says that it runs on the plain arithmetic units."""
    return bool(_NO_TENSOR_CORES.search(name)) and not _TENSOR_CORES.search(name)


# A namespace without a name: CUPTI's demangler, nsys's, and GCC's spell it differently.
_KERNEL = re.compile(r"(?:void )?(?:[\w:]+::|\(anonymous namespace\)::|<unnamed>::|\{anonymous\}::)*(\w+)")
_FUNCTOR = re.compile(
    r"(\w*(?:_kernel_cuda|_cuda_kernel|_scalar_kernel|_kernel_impl|KernelImpl|Functor\w*|Op(?!timizer)\w*|functor))\b"
)


_STD_OP = re.compile(r"std::(plus|minus|multiplies|divides)")


@lru_cache(maxsize=65536)
def kernel_family(name: str) -> str:
    """The operation behind a kernel, without the variant that its tensor's size and layout chose.

    torch picks a vectorised, an unrolled or a strided variant, and reduction tiles, by size: one operation over many
    parameters shows several names. `vectorized_elementwise_kernel<4, AUnaryFunctor<..., MulFunctor<float>>...>` is
    'MulFunctor'; a kernel that is no template of torch's is its own name without digits.
    """
    match = _KERNEL.match(name)
    kernel = match.group(1) if match else name
    if kernel == "multi_tensor_apply_kernel":
        return "foreach " + " ".join(_FUNCTOR.findall(name.split(">(")[0])[:1] + _STD_OP.findall(name)[:1])
    if "elementwise_kernel" in kernel or kernel == "reduce_kernel":
        arguments = name[len(match.group(0)) if match else 0 :].split("(at::TensorIterator")[0]
        functors = [f for f in _FUNCTOR.findall(arguments) if f not in ("AUnaryFunctor", "BUnaryFunctor", "ReduceOp")]
        if functors:
            return str(functors[0])
    return re.sub(r"\d+", "", kernel)
