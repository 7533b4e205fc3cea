"""`autocast("cuda")` on CPU tensors: CUDA's cast list put in the place of the CPU's while the device is open.

torch looks autocast up by the tensors' backend, which is the CPU here. So switching autocast on for "cuda" switches it
on for "cpu" too, and the CPU's list, which differs, is overlaid op by op with CUDA's (ATen/autocast_mode.h of torch 2.6
to 2.13). The overlay goes when the device closes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from perfdoctor.emulate.patches import Patches

_LOWER = (
    "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input "
    "conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm "
    "baddbmm bmm chain_matmul linalg_multi_dot lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "scaled_dot_product_attention "
    # cuDNN's RNN casts weights and inputs as a whole.
    "lstm.input lstm.data gru.input gru.data rnn_tanh.input rnn_tanh.data rnn_relu.input rnn_relu.data"
)
_FP32 = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp upsample_nearest1d "
    "_upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa "
    "upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa"
)
# Their result is fp32 unless a dtype is given: the argument is widened first, which sums the same numbers.
_FP32_RESULT = (
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm "
    "linalg_matrix_norm.str_ord sum sum.dim_IntList norm.Scalar norm.ScalarOpt_dim"
)
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add"
# On the CPU's list and not on CUDA's.
_LEFT_ALONE = (
    "mkldnn_rnn_layer avg_pool3d grid_sampler polar quantile quantile.scalar nanquantile nanquantile.scalar "
    "stft stft.center trace view_as_complex cholesky cholesky_inverse cholesky_solve inverse lu_solve orgqr "
    "ormqr pinverse max_pool3d max_unpool2d max_unpool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d "
    "replication_pad1d replication_pad2d replication_pad3d ctc_loss.IntList ctc_loss.Tensor "
    "multilabel_margin_loss binary_cross_entropy fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn "
    "fft_rfft fft_irfft fft_rfft2 fft_irfft2 fft_rfftn fft_irfftn fft_hfft fft_ihfft linalg_cond "
    "linalg_cond.p_str linalg_matrix_rank linalg_matrix_rank.tol linalg_matrix_rank.atol_rtol_tensor "
    "linalg_solve linalg_cholesky linalg_svdvals linalg_eigvals linalg_eigvalsh linalg_inv "
    "linalg_householder_product linalg_tensorinv linalg_tensorsolve fake_quantize_per_tensor_affine geqrf "
    "_lu_with_info qr svd triangular_solve fractional_max_pool2d fractional_max_pool3d adaptive_max_pool3d "
    "multi_margin_loss linalg_qr linalg_cholesky_ex linalg_svd linalg_eig linalg_eigh linalg_lstsq "
    "linalg_inv_ex cat stack index_copy"
)
_EXCLUDED = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
_skip_autocast = torch._C._ExcludeDispatchKeyGuard  # type: ignore[attr-defined]


def install(patches: Patches) -> None:
    """Lay CUDA's cast list over the CPU's, and let the switches of "cuda" move both."""
    set_enabled, set_dtype = torch.set_autocast_enabled, torch.set_autocast_dtype

    def set_autocast_enabled(*args: Any) -> None:
        set_enabled(*args)
        if len(args) == 1 or args[0] == "cuda":
            set_enabled("cpu", args[-1])

    def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
        set_dtype(device_type, dtype)
        if device_type == "cuda":
            set_dtype("cpu", dtype)

    cpu_dtype = torch.get_autocast_dtype("cpu")
    patches.set(torch, "set_autocast_enabled", set_autocast_enabled)
    patches.set(torch, "set_autocast_dtype", set_autocast_dtype)
    patches.on_undo(lambda: set_dtype("cpu", cpu_dtype))
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    patches.on_undo(library._destroy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel" is what is meant
        _overlay(library)


def _overlay(library: Any) -> None:
    table: dict[str, Any] = dict.fromkeys(_LEFT_ALONE.split(), torch.library.fallthrough_kernel)
    for names, cast in ((_LOWER, _lowered), (_FP32, _widened), (_FP32_RESULT, _summed), (_WIDEST, _promoted)):
        table.update({name: _kernel(name, cast) for name in names.split()})
    table["binary_cross_entropy"] = _banned
    for name, kernel in table.items():
        if _overload(name) is not None:
            library.impl(name, kernel, "AutocastCPU")


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _kernel(name: str, cast: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    op = _overload(name)

    def run(*args: Any, **kwargs: Any) -> Any:
        with _skip_autocast(_EXCLUDED):
            args, kwargs = cast(args, kwargs)
            return op(*args, **kwargs)

    return run


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        # fp64 is left alone, as CUDA's list does.
        eligible = value.is_floating_point() and value.dtype is not torch.float64
        return value.to(dtype) if eligible and value.dtype is not dtype else value
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _lowered(args: Any, kwargs: Any) -> tuple[Any, Any]:
    dtype = torch.get_autocast_dtype("cuda")
    return _cast(args, dtype), {name: _cast(value, dtype) for name, value in kwargs.items()}


def _widened(args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _cast(args, torch.float32), {name: _cast(value, torch.float32) for name, value in kwargs.items()}


def _summed(args: Any, kwargs: Any) -> tuple[Any, Any]:
    if kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args):
        return args, kwargs
    return _widened(args, kwargs)


def _promoted(args: Any, kwargs: Any) -> tuple[Any, Any]:
    dtypes = [value.dtype for value in _tensors((args, tuple(kwargs.values()))) if value.is_floating_point()]
    dtype = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cuda")
    return _cast(args, dtype), {name: _cast(value, dtype) for name, value in kwargs.items()}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _banned(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. Many models use a "
        "sigmoid layer right before the binary cross entropy layer. In this case, combine the two layers using "
        "torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss. "
        "binary_cross_entropy_with_logits and BCEWithLogits are safe to autocast."
    )
