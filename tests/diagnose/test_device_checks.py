"""no-tensor-cores, fusion, exposed-communication: how the device spends its busy time."""

from __future__ import annotations

import pytest
from loop_capture import GEMM, MS, POINTWISE, US, Body, Machine, period, run_loop, site

from perfdoctor.diagnose import diagnose
from perfdoctor.diagnose.finding import Binding, Diagnosis, Finding, Severity
from perfdoctor.record.capture import Phase

SGEMM = "ampere_sgemm_128x64_nn"
TF32 = "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16_stage4_warpsize2x2x1_tensor16x8x8_kernel"
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LAYER_NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>(int, float, ...)"


def of(diagnosis: Diagnosis, code: str) -> list[Finding]:
    return [f for f in (*diagnosis.findings, *diagnosis.leave_alone) if f.code == code]


def kernels(*launched: tuple[str, int], host_ns: int = 500 * US, stream: int = 7) -> Body:
    def body(machine: Machine, step: int) -> None:
        machine.host(host_ns)
        for name, ns in launched:
            machine.launch(ns, name, stream=stream)

    return body


@pytest.mark.parametrize(
    "name", [SGEMM, "cutlass_80_simt_sgemm_128x64_8x5_nn_align1", "volta_sgemm_128x64_tn"]
)  # fmt: skip
def test_products_on_the_plain_units_by_hand(name: str) -> None:
    slow = run_loop(kernels((name, 8 * MS), (POINTWISE, 2 * MS)), 14)
    diagnosis = diagnose(slow.capture(4))
    (finding,) = of(diagnosis, "no-tensor-cores")
    assert finding.count == 1
    assert finding.headroom is not None
    # 2, 4 and 8 times as fast: 4, 6 and 7 of 8 ms.
    assert finding.headroom.mid_ns == pytest.approx(6 * MS, rel=0.01)
    assert finding.headroom.low_ns == pytest.approx(4 * MS, rel=0.05)
    assert finding.headroom.high_ns == pytest.approx(7 * MS, rel=0.05)
    assert diagnosis.binding == Binding.MATRIX


@pytest.mark.parametrize("name", [TF32, GEMM, "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", POINTWISE])
def test_other_kernels_are_not_told_to_use_tensor_cores(name: str) -> None:
    diagnosis = diagnose(run_loop(kernels((name, 8 * MS), (POINTWISE, 2 * MS)), 14).capture(4))
    assert not of(diagnosis, "no-tensor-cores")


def test_small_products_without_tensor_cores_in_a_host_bound_loop_give_nothing() -> None:
    slow = run_loop(kernels((SGEMM, 1 * MS), host_ns=10 * MS), 12)
    diagnosis = diagnose(slow.capture(2))
    assert not [f for f in diagnosis.findings if f.code == "no-tensor-cores"]


def test_a_chain_of_pointwise_kernels_would_merge_into_its_longest() -> None:
    chain = [(POINTWISE, 500 * US)] * 3 + [(LAYER_NORM, 800 * US)] + [(POINTWISE, 400 * US)]
    slow = run_loop(kernels((GEMM, 2 * MS), *chain, (GEMM, 2 * MS)), 14)
    (finding,) = of(diagnose(slow.capture(4)), "fusion")
    assert finding.count == 1
    truth = slow.period_ns - period(kernels((GEMM, 2 * MS), (LAYER_NORM, 800 * US), (GEMM, 2 * MS)))
    assert truth == pytest.approx(1_900 * US, rel=0.01)
    assert finding.headroom is not None
    assert finding.headroom.mid_ns == pytest.approx(truth, rel=0.02)


def test_two_pointwise_kernels_between_products_are_no_chain() -> None:
    body = kernels((GEMM, 2 * MS), (POINTWISE, 500 * US), (POINTWISE, 500 * US), (GEMM, 2 * MS))
    assert not of(diagnose(run_loop(body, 14).capture(4)), "fusion")


def test_chains_in_a_host_bound_loop_merge_for_their_launches_only() -> None:
    """Pointwise kernels of 5 us in a loop of 20 ms of host work: merging them gives next to nothing."""
    body = kernels((GEMM, 50 * US), *[(POINTWISE, 5 * US)] * 4, (GEMM, 50 * US), host_ns=20 * MS)
    assert not of(diagnose(run_loop(body, 10).capture(2)), "fusion")


@pytest.mark.parametrize("longest", [0, 3])
def test_host_work_before_a_chain_is_not_given_back(longest: int) -> None:
    """4 ms of host work, a chain of 5 x 300 us, products, a wait: merging gives 4 x 300 us and four launches."""
    chain = [(POINTWISE, 310 * US if at == longest else 300 * US) for at in range(5)]

    def body(machine: Machine, step: int) -> None:
        machine.host(4 * MS)
        for name, ns in (*chain, (GEMM, 2 * MS)):
            machine.launch(ns, name)
        machine.wait_device()

    (finding,) = of(diagnose(run_loop(body, 12).capture(2)), "fusion")
    assert finding.headroom is not None
    assert finding.headroom.mid_ns == pytest.approx(1_200 * US, rel=0.05)
    assert finding.headroom.high_ns < 1_500 * US


def collective(beside: bool) -> Body:
    """8 ms of matrix; 4 ms of all-reduce after it, or on its own stream beside it."""

    def body(machine: Machine, step: int) -> None:
        machine.host(200 * US)
        if beside:
            machine.launch(4 * MS, NCCL, stream=13)
        machine.launch(8 * MS, GEMM)
        if not beside:
            machine.record("gradients")
            machine.stream_waits("gradients", 13, noted=True, known=True)
            machine.launch(4 * MS, NCCL, stream=13)
            machine.record("reduced", 13)
            machine.stream_waits("reduced", 7, noted=True, known=True)
        machine.launch(500 * US, POINTWISE)
        machine.wait_device()

    return body


def test_an_exposed_collective_by_hand() -> None:
    slow = run_loop(collective(False), 12)
    diagnosis = diagnose(slow.capture(2))
    (finding,) = of(diagnosis, "exposed-communication")
    assert finding.count == 1
    assert finding.headroom is not None
    assert finding.headroom.mid_ns == pytest.approx(4 * MS, rel=0.02)
    assert "4.0 ms" in finding.afterwards
    assert diagnosis.accounting is not None
    assert diagnosis.accounting.communication_ns == pytest.approx(4 * MS, rel=0.01)


def test_a_hidden_collective_is_silent() -> None:
    diagnosis = diagnose(run_loop(collective(True), 12).capture(2))
    assert not of(diagnosis, "exposed-communication")
    assert diagnosis.accounting is not None
    assert diagnosis.accounting.communication_ns < 50 * US


def test_the_binding_is_the_largest_class_of_busy_time() -> None:
    bound = {
        Binding.MATRIX: kernels((GEMM, 8 * MS), (POINTWISE, 2 * MS)),
        Binding.BANDWIDTH: kernels((GEMM, 2 * MS), (POINTWISE, 8 * MS)),
        Binding.COMMUNICATION: kernels((GEMM, 2 * MS), (NCCL, 8 * MS)),
    }
    for binding, body in bound.items():
        assert diagnose(run_loop(body, 12).capture(4)).binding == binding

    def copies(machine: Machine, step: int) -> None:
        machine.launch(1 * MS)
        machine.to_device(9 * MS, 10**8)

    assert diagnose(run_loop(copies, 12).capture(4)).binding == Binding.COPIES


NORM = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float> > >(int)"
)


def test_the_reads_of_a_loop_are_said_to_be_part_of_it() -> None:
    machine = Machine()
    for _ in range(6):
        machine.step()
        machine.host(2 * MS)
        for _ in range(20):
            start = machine.now
            machine.launch(3 * US, NORM)
            machine.read()
            machine.hit(site(7), "item", start, Phase.LIGHT)
    findings = diagnose(machine.capture()).findings
    loop = next(f for f in findings if f.code == "gradient-loop")
    reads = next(f for f in findings if f.code == "host-sync")
    assert loop.site == reads.site == site(7)
    assert loop.severity == Severity.COST
    assert reads.severity == Severity.INFO
    assert findings.index(loop) < findings.index(reads)
    assert "part of the loop" in reads.afterwards
    assert reads.count == 20
