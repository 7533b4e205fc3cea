"""Kernel names as profilers print them, classed by hand from what the kernels do."""

from __future__ import annotations

import re

import pytest

from perfdoctor.record.kernel_names import KernelClass, kernel_class, kernel_family, without_tensor_cores

M, C, P, R, N, T, OTHER = (
    KernelClass.MATRIX, KernelClass.COMMUNICATION, KernelClass.POINTWISE, KernelClass.REDUCTION,
    KernelClass.NORMALISATION, KernelClass.MULTI_TENSOR, KernelClass.OTHER,
)  # fmt: skip

ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >"
    "(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
MUL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, float, "
    "at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int, at::native::AUnaryFunctor<float, "
    "float, float, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul>)"
)
MUL_UNROLLED = MUL.replace("vectorized_elementwise_kernel<4, ", "unrolled_elementwise_kernel<")
MUL_STRIDED = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::AUnaryFunctor<float, "
    "float, float, at::native::binary_internal::MulFunctor<float> > >(at::TensorIteratorBase&, at::native::AUnary"
    "<float, float, float, at::native::binary_internal::MulFunctor<float> > const&)::{lambda(int)#1}>(int, ...)"
)
GELU = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&, "
    "at::native::GeluType)::{lambda()#2}::operator()() const::{lambda()#2}::operator()() const::{lambda(float)#1}, "
    "std::array<char*, 2ul> >(int, ...)"
)
COPY = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::"
    "{lambda()#3}::operator()() const::{lambda()#7}::operator()() const::{lambda(float)#1}, std::array<char*, 2ul>, "
    "4, TrivialOffsetCalculator<1, unsigned int>, TrivialOffsetCalculator<1, unsigned int>, at::native::memory::"
    "LoadWithCast<1>, at::native::memory::StoreWithCast<1> >(int, ...)"
)
FILL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >"
    "(int, at::native::FillFunctor<float>, std::array<char*, 1ul>)"
)
SUM = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
    "at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, "
    "unsigned int, float, 4> >(at::native::ReduceOp<float, ...>)"
)
NORM = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float, float>, "
    "unsigned int, float, 4> >(at::native::ReduceOp<float, at::native::NormTwoOps<float, float, float>, unsigned int, "
    "float, 4>)"
)
FOREACH = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<1>, at::native::(anonymous namespace)::BinaryOpScalarFunctor<float, 1, 1, 0>, "
    "std::multiplies<float>, float>(at::native::(anonymous namespace)::TensorListMetadata<1>, at::native::(anonymous "
    "namespace)::BinaryOpScalarFunctor<float, 1, 1, 0>, std::multiplies<float>, float)"
)
FUSED_ADAM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
    "(at::native::ADAM_MODE)1, false>, float const*, double, double, double, double, double, bool, float const*, "
    "float const*>(...)"
)
FOREACH_NORM = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<1>, at::native::(anonymous namespace)::LpNormFunctor<float, (at::native::NormType)1, float, 1, "
    "1, 0>, float*, int>(...)"
)
LAYER_NORM = (
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, float const*, "
    "float const*, float const*, float*, float*, float*)"
)
SOFTMAX = (
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>(float*, float const*, int, "
    "int, int, bool const*, int, bool)"
)
CROSS_ENTROPY = (
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, at::native::(anonymous "
    "namespace)::LogSoftMaxForwardEpilogue>(float*, float const*, int)"
)
CAT = (
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_aligned16_contig<at::native::(anonymous namespace)::"
    "OpaqueType<4u>, unsigned int, 3, 64, 64>(...)"
)
FLASH = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::bfloat16_t, "
    "Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, true, false, false, true, true, false, false>"
    "(pytorch_flash::Flash_fwd_params)"
)
EMBEDDING = (
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2, 2, -2, true>(...)"
)
MAX_POOL = "void at::native::(anonymous namespace)::max_pool_forward_nchw<float, float>(int, float const*, ...)"
SIMT = "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nn_align1>(cutlass_80_simt_sgemm_128x64_8x5::Params)"
TENSOR_OP = (
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4>"
    "(cutlass_80_tensorop_s1688gemm_128x256_16x3_tn_align4::Params)"
)
CONV_DGRAD = (
    "sm80_xmma_dgrad_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16_stage4_warpsize2x2x1_g1"
)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ampere_sgemm_128x64_nn", M),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", M),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", M),
        ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_NNT", M),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_ffma_kernel", M),
        ("volta_sgemm_128x64_tn", M),
        ("void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false, false>(...)", M),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, true, false, false>(...)", M),
        (SIMT, M),
        (TENSOR_OP, M),
        (CONV_DGRAD, M),
        ("cudnn_infer_ampere_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v0", M),
        ("void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, false, false, 0, 0, int, float>(...)", M),
        (FLASH, M),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<...>::Params)", M),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_kernel0_0", M),
        ("Cijk_Ailk_Bljk_SB_MT64x64x16_MI32x32x2x1_SN_1LDSB0_APM1", M),
        ("triton_tem_fused_addmm_relu_3_mm_template", M),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", C),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", C),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", C),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, ...)", C),
        (ADD, P), (MUL, P), (MUL_UNROLLED, P), (MUL_STRIDED, P), (GELU, P), (COPY, P), (FILL, P), (CAT, P),
        ("triton_poi_fused_add_gelu_0", P),
        ("triton_red_fused_native_layer_norm_1", N),
        ("triton_per_fused__softmax_2", N),
        ("triton_red_fused_sum_1", R),
        ("triton_per_fused_mean_4", R),
        (SUM, R), (NORM, R),
        (FOREACH, T), (FUSED_ADAM, T), (FOREACH_NORM, T),
        (LAYER_NORM, N), (SOFTMAX, N), (CROSS_ENTROPY, N),
        ("void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(...)", N),
        ("void at::native::batch_norm_collect_statistics_kernel<at::native::InvStd, float, float, float, int>(...)", N),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 32u, 1u>(...)", N),
        (EMBEDDING, OTHER), (MAX_POOL, OTHER),
        ("void at::native::im2col_kernel<float>(long, float const*, long, ...)", OTHER),
        ("void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(...)", OTHER),
        ("DeviceRadixSortSingleTileKernel", OTHER),
        ("", OTHER),
    ],
)  # fmt: skip
def test_class(name: str, expected: KernelClass) -> None:
    assert kernel_class(name) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ampere_sgemm_128x64_nn", True),
        ("ampere_sgemm_32x128_tn", True),
        ("volta_sgemm_128x64_tn", True),
        ("maxwell_sgemm_128x64_raggedMn_nt", True),
        (SIMT, True),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_ffma_aligna4_alignc4_execute", True),
        ("ampere_sgemm_128x128_nn_tf32", False),
        ("ampere_s16816gemm_bf16_128x64_ldg8_stages_64x3_tn", False),
        ("volta_h884gemm_128x64_ldg8_nn", False),
        ("turing_fp16_s1688gemm_fp16_128x64_ldg8_f2f_tn", False),
        ("sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel", False),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_warpgroupsize1x1x1_execute_kernel", False),
        (TENSOR_OP, False),
        (CONV_DGRAD, False),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", False),
        (FLASH, False),
        (ADD, False),
    ],
)  # fmt: skip
def test_products_without_tensor_cores(name: str, expected: bool) -> None:
    assert without_tensor_cores(name) is expected


@pytest.mark.parametrize(
    ("name", "family"),
    [
        (ADD, "CUDAFunctor_add"),
        (MUL, "MulFunctor"),
        (MUL_UNROLLED, "MulFunctor"),
        (MUL_STRIDED, "MulFunctor"),
        (FILL, "FillFunctor"),
        (COPY, "direct_copy_kernel_cuda"),
        (GELU, "GeluCUDAKernelImpl"),
        (NORM, "NormTwoOps"),
        (SUM, "sum_functor"),
        (FOREACH, "foreach BinaryOpScalarFunctor multiplies"),
        (FUSED_ADAM, "foreach FusedAdamMathFunctor"),
        (FOREACH_NORM, "foreach LpNormFunctor"),
        ("ampere_sgemm_128x64_nn", "ampere_sgemm_x_nn"),
        ("", ""),
    ],
)
def test_family_is_the_operation_whatever_variant_the_size_chose(name: str, family: str) -> None:
    assert kernel_family(name) == family


@pytest.mark.parametrize("spelling", ["<unnamed>", "{anonymous}"])
@pytest.mark.parametrize("name", [ADD, MUL, COPY, GELU, NORM, FOREACH, FUSED_ADAM, FOREACH_NORM, LAYER_NORM])
def test_nameless_namespaces_of_other_demanglers(name: str, spelling: str) -> None:
    """nsys writes `<unnamed>` and `<(int)4, ...>` where CUPTI has `(anonymous namespace)` and `<4, ...>`."""
    other = re.sub(r"<(\d+),", r"<(int)\1,", name.replace("(anonymous namespace)", spelling))
    assert kernel_family(other) == kernel_family(name)
    assert kernel_class(other) == kernel_class(name)


def test_two_operations_are_two_families() -> None:
    families = [kernel_family(name) for name in (ADD, MUL, FILL, COPY, GELU, NORM, SUM, FOREACH, FOREACH_NORM)]
    assert len(set(families)) == len(families)
