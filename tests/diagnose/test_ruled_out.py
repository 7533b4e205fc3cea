"""No advice that the loop follows already: what the recording tells of it, and what is said instead."""

from __future__ import annotations

from dataclasses import replace

import pytest
from loop_capture import GEMM, MS, POINTWISE, US, Body, Machine, run_loop, site

from perfdoctor.diagnose import diagnose
from perfdoctor.diagnose.finding import Advice, Diagnosis
from perfdoctor.diagnose.gradient_loop import describe
from perfdoctor.record.capture import Environment, Note

SGEMM = "ampere_sgemm_128x64_nn"
DGEMM = "void cutlass::Kernel2<cutlass_80_simt_dgemm_128x64_8x5_nn_align1>(cutlass_80_simt_dgemm::Params)"
FUSED = "triton_poi_fused_add_gelu_{}"
NATIVE = "void at::native::vectorized_elementwise_kernel<4, at::native::"
FILL = NATIVE + "FillFunctor<float>, std::array<char*, 1ul> >(int, at::native::FillFunctor<float>)"
ZERO = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<1>, at::native::(anonymous namespace)::ZeroFunctor<float, 1, 1, 0>>(...)"
)
CLIP = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<1>, at::native::(anonymous namespace)::LpNormFunctor<float, (at::native::NormType)1, float, 1, "
    "1, 0>, float*, int>(...)"
)
CONVOLUTION = "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_kernel_cudnn"

ATTENTION = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1_kernel0_0"


def kernels(*launched: tuple[str, int], host_ns: int = 500 * US) -> Body:
    def body(machine: Machine, step: int) -> None:
        machine.host(host_ns)
        for name, ns in launched:
            machine.launch(ns, name)

    return body


def judged(*launched: tuple[str, int], notes: tuple[Note, ...] = (), **environment: object) -> Diagnosis:
    capture = run_loop(kernels(*launched), 14).capture(4, environment=Environment(**environment))  # type: ignore[arg-type]
    return diagnose(replace(capture, notes=notes))


def advice(diagnosis: Diagnosis, code: str) -> Advice:
    found = [f.advice for f in (*diagnosis.findings, *diagnosis.leave_alone) if f.code == code]
    assert len(found) == 1
    assert found[0] is not None
    return found[0]


def note(treatment: str) -> tuple[Note, ...]:
    return (Note(code=f"has-{treatment}", text="seen"),)


@pytest.mark.parametrize("name", ["prefetch", "persistent_workers", "gc_frozen", "tf32"])
def test_what_a_session_saw_of_the_loop_is_ruled_out(name: str) -> None:
    assert name in judged((GEMM, 2 * MS), notes=note(name)).ruled_out
    assert name not in judged((GEMM, 2 * MS)).ruled_out


@pytest.mark.parametrize(
    ("names", "treatment", "out"),
    [
        ((GEMM, POINTWISE), "compile", False),
        ((GEMM, FUSED.format(0)), "compile", True),
        ((GEMM, FUSED.format(0)), "compile_reduce_overhead", True),
        ((SGEMM,), "bf16_autocast", False),
        ((SGEMM, GEMM), "bf16_autocast", True),
        ((SGEMM,), "tf32", False),
        ((DGEMM,), "tf32", True),
        ((DGEMM,), "bf16_autocast", True),
        ((SGEMM, DGEMM), "tf32", False),
        ((GEMM,), "channels_last", True),
        ((CONVOLUTION,), "channels_last", False),
        ((ATTENTION,), "channels_last", True),
        ((GEMM,), "our_clip", True),
        ((GEMM, CLIP), "our_clip", False),
        ((GEMM, CLIP, "grad_norm_kernel"), "our_clip", True),
        ((GEMM, FILL), "set_to_none", True),
        ((GEMM, *[FILL] * 12), "set_to_none", False),
        ((GEMM, ZERO), "set_to_none", False),
    ],
)
def test_what_the_kernels_tell(names: tuple[str, ...], treatment: str, out: bool) -> None:
    assert (treatment in judged(*((name, 1 * MS) for name in names)).ruled_out) is out


def test_a_recording_without_device_work_rules_nothing_out() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(5 * MS)

    assert diagnose(run_loop(body, 8).capture()).ruled_out == frozenset()


def test_products_in_float64_are_not_told_to_use_tf32() -> None:
    assert "float32" in advice(judged((DGEMM, 8 * MS)), "no-tensor-cores").text
    assert not advice(judged((DGEMM, 8 * MS)), "no-tensor-cores").lines
    assert "set_float32_matmul_precision" in advice(judged((SGEMM, 8 * MS)), "no-tensor-cores").lines[0]


def test_products_beside_an_autocast_and_with_tf32_allowed() -> None:
    assert "into the autocast" in advice(judged((SGEMM, 8 * MS), (GEMM, 1 * MS)), "no-tensor-cores").text
    allowed = advice(judged((SGEMM, 8 * MS), notes=note("tf32")), "no-tensor-cores")
    assert "allowed already" in allowed.text
    assert not allowed.lines


def test_what_torch_compile_has_fused_is_no_chain_to_fuse() -> None:
    fused = [(FUSED.format(at), 500 * US) for at in range(5)]
    diagnosis = judged((GEMM, 2 * MS), *fused, (GEMM, 2 * MS))
    assert not [f for f in (*diagnosis.findings, *diagnosis.leave_alone) if f.code == "fusion"]


def test_a_chain_outside_of_what_is_compiled_is_told_so() -> None:
    plain = [(POINTWISE, 500 * US)] * 5
    beside = judged((FUSED.format(0), 1 * MS), (GEMM, 2 * MS), *plain, (GEMM, 2 * MS))
    assert "compiled already" in advice(beside, "fusion").text
    alone = judged((GEMM, 2 * MS), *plain, (GEMM, 2 * MS))
    assert "torch.compile(model)" in advice(alone, "fusion").lines[0]


def launches(graphed: bool) -> Body:
    def body(machine: Machine, step: int) -> None:
        if graphed:
            machine.launch(2 * US, kernels=30)
        for at in range(60):
            machine.host(30 * US)
            machine.launch(2 * US, GEMM if at % 2 else POINTWISE)

    return body


def test_a_loop_with_a_cuda_graph_is_not_told_to_take_one() -> None:
    with_graph = advice(diagnose(run_loop(launches(True), 10).capture(2)), "launch-bound")
    assert "beside the CUDA graph" in with_graph.text
    assert not with_graph.lines
    assert "reduce-overhead" in advice(diagnose(run_loop(launches(False), 10).capture(2)), "launch-bound").text


def respawning(machine: Machine, step: int) -> None:
    if step % 3 == 0:
        machine.host(20 * MS, pause="worker-start")
    machine.launch(2 * MS)
    machine.read()


def test_workers_that_persist_and_start_anew_are_a_loader_built_anew() -> None:
    capture = run_loop(respawning, 12).capture(2)
    assert "persistent_workers=True" in advice(diagnose(capture), "worker-respawn").lines[0]
    persistent = advice(diagnose(replace(capture, notes=note("persistent_workers"))), "worker-respawn")
    assert "build the DataLoader once" in persistent.text
    assert not persistent.lines


def test_frozen_objects_are_not_to_be_frozen_again() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(3 * MS, pause="gc:1")
        machine.launch(2 * MS)
        machine.read()

    capture = run_loop(body, 12).capture(2)
    assert "freeze" in advice(diagnose(capture), "garbage-collection").lines[0]
    frozen = advice(diagnose(replace(capture, notes=note("gc_frozen"))), "garbage-collection")
    assert "frozen already" in frozen.text
    assert "set_threshold" in frozen.lines[0]


@pytest.mark.parametrize("hooked", [True, False])
def test_a_loader_that_pins_is_not_told_to_pin(hooked: bool) -> None:
    def body(machine: Machine, step: int) -> None:
        start = machine.now
        machine.to_device(4 * MS, 10**8, pageable=True)
        if hooked:
            machine.hit(replace(site(5), text="x = x.to(device)"), "h2d_pageable", start)
        machine.launch(2 * MS)

    capture = run_loop(body, 12).capture(2)
    assert "DataLoader" in advice(diagnose(capture), "pageable-copy").lines[0]
    pinned = replace(capture, environment=Environment(pin_memory=True))
    for known in (pinned, replace(capture, notes=note("prefetch"))):
        found = advice(diagnose(known), "pageable-copy")
        assert "already" in found.text
        assert not any("DataLoader" in line for line in found.lines)


MUL, ADD, LERP = "MulFunctor", "CUDAFunctor_add", "lerp_scalar_kernel"


@pytest.mark.parametrize(
    ("motif", "line", "key"),
    [
        ((MUL, ADD), "e.mul_(decay).add_(p, alpha=1 - decay)", "ema-loop"),
        ((MUL, ADD), "", "ema-loop"),
        ((MUL, MUL, ADD), "e.data = decay * e.data + (1 - decay) * p.data", "ema-loop"),
        ((LERP,), "torch.lerp(e, p, 0.01, out=e)", "ema-loop"),
        ((ADD,), "ema_p.add_(p - ema_p)", "ema-loop"),
        ((MUL, ADD), "optimizer.step()", "optimizer-loop"),
        ((MUL, ADD, ADD), "optimizer.step()", "optimizer-loop"),  # momentum
        ((MUL, ADD, ADD), "", "optimizer-loop"),
        ((ADD,), "p.add_(p.grad, alpha=-lr)", "optimizer-loop"),
        ((MUL,), "p.grad.mul_(scale)", "scale-loop"),
    ],
)
def test_an_average_by_hand_is_told_from_an_update(motif: tuple[str, ...], line: str, key: str) -> None:
    assert describe(motif, line)[2] == key


@pytest.mark.parametrize("fused", [True, False, None])
def test_a_fused_optimizer_is_not_to_be_fused_again(fused: bool | None) -> None:
    add = NATIVE + "CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)"

    def body(machine: Machine, step: int) -> None:
        machine.launch(1 * MS, GEMM)
        for _ in range(40):
            machine.host(10 * US)
            machine.launch(2 * US, add)
        machine.wait_device()

    found = advice(
        diagnose(run_loop(body, 10).capture(2, environment=Environment(fused_optimizer=fused))), "gradient-loop"
    )
    assert any("fused=True" in line for line in found.lines) is not bool(fused)
    assert ("fused already" in found.text) is bool(fused)
