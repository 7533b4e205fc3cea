"""data-wait, worker-respawn, allocator, garbage-collection, launch-bound, small-kernels, gradient-loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from loop_capture import GEMM, MS, POINTWISE, US, Body, Machine, period, run_loop, site

from perfdoctor.diagnose import diagnose
from perfdoctor.diagnose.finding import Binding, Diagnosis, Finding
from perfdoctor.record.capture import CallKind, Environment, Note

NATIVE = "void at::native::vectorized_elementwise_kernel<4, at::native::"
MUL = (
    NATIVE
    + "AUnaryFunctor<float, float, float, at::native::binary_internal::MulFunctor<float> >, std::array<...> >(...)"
)
LERP = NATIVE + "lerp_scalar_kernel(at::TensorIteratorBase&)::{lambda()#1}, std::array<char*, 3ul> >(int, ...)"
ADDCMUL = NATIVE + "addcmul_cuda_scalar_kernel(at::TensorIteratorBase&)::{lambda()#1}, std::array<...> >(int, ...)"
ADDCDIV = NATIVE + "addcdiv_cuda_kernel(at::TensorIteratorBase&)::{lambda()#1}, std::array<char*, 4ul> >(int, ...)"
SQRT = NATIVE + "sqrt_kernel_cuda(at::TensorIteratorBase&)::{lambda()#2}, std::array<char*, 2ul> >(int, ...)"
NORM = (
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float, float>, "
    "unsigned int, float, 4> >(...)"
)
FOREACH = (
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "TensorListMetadata<4>, at::native::(anonymous namespace)::{}<float, 4, 3, 3>, std::{}<float>, float>(...)"
)


def of(diagnosis: Diagnosis, code: str) -> list[Finding]:
    return [f for f in (*diagnosis.findings, *diagnosis.leave_alone) if f.code == code]


def only(diagnosis: Diagnosis, code: str) -> Finding:
    found = [f for f in diagnosis.findings if f.code == code]
    assert len(found) == 1, [f.title for f in (*diagnosis.findings, *diagnosis.leave_alone)]
    return found[0]


def assert_headroom(finding: Finding, truth: float, step: float, share: float = 0.01) -> None:
    assert finding.headroom is not None
    assert finding.headroom.mid_ns == pytest.approx(truth, abs=share * step)


# ---- data-wait ----


def loading(wait_ns: int, kernel_ns: int = 10 * MS, mark: str = "data") -> Body:
    def body(machine: Machine, step: int) -> None:
        machine.host(wait_ns, pause=mark if mark == "data" else "", named=mark if mark != "data" else "")
        machine.host(200 * US)
        for _ in range(10):
            machine.launch(kernel_ns // 10)
        machine.read()

    return body


@pytest.mark.parametrize("mark", ["data", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"])
def test_a_slow_loader_by_hand(mark: str) -> None:
    slow = run_loop(loading(6 * MS, mark=mark), 12)
    truth = slow.period_ns - period(loading(0, mark=mark))
    assert truth == pytest.approx(6 * MS, rel=0.001)
    diagnosis = diagnose(slow.capture(2))
    finding = only(diagnosis, "data-wait")
    assert finding.host_blocked_ns == 6 * MS
    assert finding.count == 1
    assert finding.gpu_idle_ns == pytest.approx(6 * MS, rel=0.001)
    assert_headroom(finding, truth, slow.period_ns)
    assert diagnosis.binding == Binding.HOST_DATA


def test_a_loader_slower_than_the_device_comes_first() -> None:
    """Without the read the host still waits 15 ms a step for its batch: the read hides at most the kernels' 10 ms."""
    slow = run_loop(loading(15 * MS), 12)
    diagnosis = diagnose(slow.capture(2))
    assert diagnosis.findings[0].code == "data-wait"
    assert_headroom(diagnosis.findings[0], 15 * MS, slow.period_ns)


def test_a_loader_that_keeps_up_is_silent() -> None:
    assert not of(diagnose(run_loop(loading(50 * US), 12).capture(2)), "data-wait")


def test_a_wait_that_the_device_hides_gives_nothing_back() -> None:
    """The host waits 3 ms of a 10 ms step, and the device never waits for it."""

    def body(machine: Machine, step: int) -> None:
        machine.host(3 * MS, pause="data")
        for _ in range(10):
            machine.launch(1 * MS)

    diagnosis = diagnose(run_loop(body, 20).capture(4))
    assert not [f for f in diagnosis.findings if f.code == "data-wait"]


def test_data_wait_is_not_judged_before_the_buffered_batches_are_used_up() -> None:
    """4 workers x 2 batches ready: the first 8 steps wait for nothing, whatever the loader."""

    def body(machine: Machine, step: int) -> None:
        loading(8 * MS if step >= 8 else 10 * US)(machine, step)

    environment = Environment(num_workers=4, prefetch_factor=2)
    short = diagnose(run_loop(body, 8).capture(environment=environment))
    assert not of(short, "data-wait")
    assert [s.why for s in short.skipped if s.check == "data-wait"]
    full = run_loop(body, 20)
    finding = only(diagnose(full.capture(environment=environment)), "data-wait")
    # A mean over all twenty steps would be 4.8 ms.
    assert finding.host_blocked_ns == 8 * MS
    assert_headroom(finding, 8 * MS, full.period_ns, 0.05)


def test_an_unmarked_window_with_workers_is_judged_as_one() -> None:
    capture = run_loop(loading(6 * MS), 3).capture(marked=False, environment=Environment(num_workers=4))
    assert diagnose(capture).step is not None


def test_no_mark_of_a_loader_is_said() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(5 * MS)
        machine.launch(5 * MS)

    diagnosis = diagnose(run_loop(body, 8).capture())
    assert not of(diagnosis, "data-wait")
    assert any(s.check == "data-wait" for s in diagnosis.skipped)


def test_workers_started_again() -> None:
    def body(machine: Machine, step: int) -> None:
        if step % 4 == 0:
            machine.host(40 * MS, pause="worker-start")
        machine.launch(5 * MS)
        machine.read()

    slow = run_loop(body, 16)
    finding = only(diagnose(slow.capture(4)), "worker-respawn")
    assert finding.count == 0.25
    assert finding.host_blocked_ns == 10 * MS
    assert_headroom(finding, 10 * MS, slow.period_ns)
    steady = diagnose(run_loop(loading(1 * MS), 8).capture())
    assert not of(steady, "worker-respawn")


def respawning(start_ns: int, first_ns: int, usual_ns: int, at_most: int = 1000) -> Body:
    """Epochs of four steps. `at_most`: workers are started in so many of them."""

    def body(machine: Machine, step: int) -> None:
        fresh = step % 4 == 0 and step // 4 < at_most
        if fresh and start_ns:
            machine.host(start_ns, pause="worker-start")
        machine.host(200 * US)
        machine.host(first_ns if fresh else usual_ns, pause="data")
        machine.launch(5 * MS)
        machine.read()

    return body


def test_workers_started_again_are_priced_with_the_wait_for_their_first_batch() -> None:
    """7 ms to start them, 25 ms for the first batch, of which a batch takes 1 ms anyhow: (7 + 24) / 4 a step."""
    slow = run_loop(respawning(7 * MS, 25 * MS, 1 * MS), 16)
    diagnosis = diagnose(slow.capture(4))
    respawn, wait = only(diagnosis, "worker-respawn"), only(diagnosis, "data-wait")
    assert (
        respawn.title == "DataLoader workers are started again (31.0 ms each time, 24.0 ms of it for the first batch)"
    )
    assert respawn.count == 0.25
    assert respawn.host_blocked_ns == 7_750 * US
    assert_headroom(respawn, slow.period_ns - period(respawning(0, 1 * MS, 1 * MS)), slow.period_ns)
    assert wait.host_blocked_ns == 1 * MS  # no millisecond of the first batch's 25 twice
    assert diagnosis.accounting is not None
    idle = diagnosis.accounting.idle_by_code
    # Of the twelve recorded steps the first, with one of the three starts, has no window of its own.
    assert idle["worker-respawn"] == pytest.approx(2 * 31 * MS / 11, rel=0.01)
    assert idle["data-wait"] == pytest.approx(1 * MS, rel=0.01)


def test_where_every_wait_is_for_new_workers_none_is_for_data() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(2 * MS, pause="worker-start")
        machine.host(3 * MS, pause="data")
        machine.launch(5 * MS)
        machine.read()

    diagnosis = diagnose(run_loop(body, 16).capture(4))
    assert only(diagnosis, "worker-respawn").host_blocked_ns == 5 * MS
    assert not of(diagnosis, "data-wait")


def test_workers_of_another_loader_take_no_wait_of_this_one() -> None:
    """Those of an evaluation, whose own batches wait elsewhere; the loop's next batch takes what each takes."""

    def body(machine: Machine, step: int) -> None:
        if step % 4 == 0:
            machine.host(7 * MS, pause="worker-start")
            machine.host(25 * MS, pause="eval-data")
        machine.host(2 * MS, pause="data")
        machine.launch(5 * MS)
        machine.read()

    diagnosis = diagnose(run_loop(body, 16).capture(4))
    assert only(diagnosis, "worker-respawn").host_blocked_ns == 1_750 * US
    assert only(diagnosis, "data-wait").host_blocked_ns == 2 * MS


def test_without_a_gpu_what_the_host_waits_longest_for_comes_first() -> None:
    """One start in sixteen steps costs more than all waits for data."""

    def body(machine: Machine, step: int) -> None:
        if step % 16 == 8:
            machine.host(7 * MS, pause="worker-start")
        machine.host((1000 if step % 16 == 8 else 20) * MS, pause="data")
        machine.host(5 * MS, named="forward")

    diagnosis = diagnose(run_loop(body, 16).capture())
    codes = [found.code for found in diagnosis.findings]
    assert codes.index("worker-respawn") < codes.index("data-wait")


# ---- allocator, garbage collection ----


def test_cuda_malloc_in_every_step() -> None:
    def loop(fixed: bool) -> Body:
        def body(machine: Machine, step: int) -> None:
            machine.host(2 * MS)
            if not fixed:
                machine.allocate(1_500 * US)
                machine.allocate(500 * US, CallKind.FREE)
            machine.launch(3 * MS)
            machine.read()

        return body

    slow = run_loop(loop(False), 10)
    finding = only(diagnose(slow.capture(2)), "allocator")
    assert finding.kind == "cuda_malloc"
    assert finding.count == 2
    assert finding.host_blocked_ns == 2 * MS
    assert_headroom(finding, slow.period_ns - period(loop(True)), slow.period_ns)


@pytest.mark.parametrize("marked", [True, False])
def test_cuda_malloc_at_the_start_alone_is_warm_up(marked: bool) -> None:
    def body(machine: Machine, step: int) -> None:
        if step == 0:
            for _ in range(20):
                machine.allocate(1 * MS)
        machine.host(2 * MS)
        machine.launch(3 * MS, name=GEMM if step % 3 else POINTWISE)

    assert not of(diagnose(run_loop(body, 10).capture(marked=marked)), "allocator")


def test_garbage_collections_in_the_steps() -> None:
    def loop(fixed: bool) -> Body:
        def body(machine: Machine, step: int) -> None:
            machine.host(2 * MS)
            if step % 2 == 0 and not fixed:
                machine.host(6 * MS, pause="gc:2")
            machine.launch(3 * MS)
            machine.read()

        return body

    slow = run_loop(loop(False), 12)
    finding = only(diagnose(slow.capture(2)), "garbage-collection")
    assert finding.host_blocked_ns == 3 * MS
    assert finding.count == 0.5
    assert "5 full collections" in finding.title
    assert_headroom(finding, slow.period_ns - period(loop(True)), slow.period_ns)


def test_a_line_that_collects_is_one_finding_with_its_price() -> None:
    place = site(9)

    def loop(fixed: bool) -> Body:
        def body(machine: Machine, step: int) -> None:
            machine.host(2 * MS)
            start = machine.now
            if not fixed:
                machine.host(6 * MS, pause="gc:2")
                machine.hit(place, "python_gc", start)
            machine.launch(3 * MS)
            machine.read()

        return body

    slow = run_loop(loop(False), 12)
    finding = only(diagnose(slow.capture(2)), "garbage-collection")
    assert (finding.site, finding.count, finding.host_blocked_ns) == (place, 1.0, 6 * MS)
    assert finding.advice is not None
    assert finding.advice.lines[-1].strip() == "gc.collect()"
    assert_headroom(finding, slow.period_ns - period(loop(True)), slow.period_ns)


def test_what_python_collects_beside_a_line_that_collects_is_the_other_finding() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(1 * MS, pause="gc:1")
        machine.host(1 * MS)
        start = machine.now
        machine.host(4 * MS, pause="gc:2")
        machine.hit(site(9), "python_gc", start)
        machine.launch(3 * MS)
        machine.read()

    found = of(diagnose(run_loop(body, 12).capture(2)), "garbage-collection")
    by_line = {f.site.frame.line if f.site else 0: f for f in found}
    assert sorted(by_line) == [0, 9]
    assert (by_line[0].host_blocked_ns, by_line[9].host_blocked_ns) == (1 * MS, 4 * MS)
    assert "0 full collections" in by_line[0].title


def test_a_rare_call_of_collect_is_left_alone() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(2 * MS)
        if step == 10:
            start = machine.now
            machine.host(6 * MS, pause="gc:2")
            machine.hit(site(9), "python_gc", start)
        machine.launch(3 * MS)
        machine.read()

    diagnosis = diagnose(run_loop(body, 22).capture(2))
    assert not [f for f in diagnosis.findings if f.code == "garbage-collection"]
    assert [f.site for f in diagnosis.leave_alone if f.code == "garbage-collection"] == [site(9)]


def test_short_collections_are_silent() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(20 * US, pause="gc:0")
        machine.host(5 * MS)
        machine.launch(3 * MS)

    assert not of(diagnose(run_loop(body, 10).capture(2)), "garbage-collection")


def window(late: bool) -> Body:
    """Launches that never repeat, with ten allocations at the start or all along."""

    def body(machine: Machine, step: int) -> None:
        for i in range(100):
            if (late and i % 10 == 0) or (not late and i < 10):
                machine.allocate(1 * MS)
            machine.host(1 * MS)
            machine.launch(500 * US, name=f"kernel_{chr(97 + i * i % 23)}_{chr(97 + i * i * i % 19)}")

    return body


@pytest.mark.parametrize("late", [True, False])
def test_an_unmarked_window_tells_allocations_at_its_start_from_those_all_along(late: bool) -> None:
    capture = run_loop(window(late), 1).capture(marked=False)
    assert bool(of(diagnose(capture), "allocator")) is late


# ---- launch-bound, small kernels ----


def launching(kernel_ns: int, host_ns: int = 10 * US, number: int = 300) -> Body:
    def body(machine: Machine, step: int) -> None:
        for i in range(number):
            machine.host(host_ns)
            machine.launch(kernel_ns, GEMM if i % 2 else POINTWISE)

    return body


def test_small_kernels_behind_a_slow_host_are_launch_bound() -> None:
    slow = run_loop(launching(5 * US), 10)
    diagnosis = diagnose(slow.capture(2))
    finding = only(diagnosis, "launch-bound")
    assert finding.count == 300
    assert finding.gpu_idle_ns == pytest.approx(300 * 9 * US, rel=0.02)  # 14 us a launch, 5 us of kernel
    assert diagnosis.binding == Binding.HOST_LAUNCHING
    assert finding.headroom is not None
    # From a CUDA graph: bound by the kernels and their gaps, 6 us each instead of 14.
    assert finding.headroom.mid_ns == pytest.approx(300 * 8 * US, rel=0.05)


def test_small_kernels_that_the_host_outruns_are_not_launch_bound() -> None:
    """The device has gaps of 1 us between kernels of 4 us, all launched long before: no launch came late."""
    diagnosis = diagnose(run_loop(launching(4 * US, host_ns=0, number=400), 30).capture(10))
    assert not [f for f in diagnosis.findings if f.code == "launch-bound"]
    assert diagnosis.accounting is not None
    assert diagnosis.accounting.idle_by_code.get("launch-bound", 0) == 0
    assert diagnosis.binding != Binding.HOST_LAUNCHING


def test_large_kernels_are_not_launch_bound() -> None:
    assert not of(diagnose(run_loop(launching(50 * US), 10).capture(2)), "launch-bound")


def test_a_graph_of_many_kernels_is_not_launch_bound() -> None:
    def body(machine: Machine, step: int) -> None:
        machine.host(100 * US)
        machine.launch(3 * US, kernels=1000)
        machine.read()

    diagnosis = diagnose(run_loop(body, 10).capture(2))
    assert not of(diagnosis, "launch-bound")
    assert not of(diagnosis, "small-kernels")


# ---- loops over tensors ----


def optimizer(body_of: str, tensors: int = 80) -> Body:
    """A model of 12 layers, then one of many ways to update its tensors."""

    def body(machine: Machine, step: int) -> None:
        for _ in range(12):
            machine.host(20 * US)
            machine.launch(200 * US, GEMM)
            machine.launch(20 * US, POINTWISE)
        if body_of == "single":
            for _ in range(tensors):
                for name in (MUL, LERP, ADDCMUL, SQRT, ADDCDIV):
                    machine.host(10 * US)
                    machine.launch(2 * US, name)
        elif body_of == "foreach":
            for name in ("BinaryOpScalarFunctor", "TernaryOpScalarFunctor", "PointwiseOpScalarFunctor"):
                for _ in range(20):  # the chunks of one call over much memory
                    machine.launch(10 * US, FOREACH.format(name, "multiplies"))
        elif body_of == "groups":
            for _ in range(tensors):
                for name in ("BinaryOpScalarFunctor", "TernaryOpScalarFunctor", "PointwiseOpScalarFunctor"):
                    machine.host(10 * US)
                    machine.launch(2 * US, FOREACH.format(name, "multiplies"))
        elif body_of == "norms":
            for _ in range(tensors):
                machine.host(10 * US)
                machine.launch(3 * US, NORM)
                machine.read(at=site(77))
        machine.wait_device()

    return body


@pytest.mark.parametrize(("kind", "launches"), [("single", 400), ("groups", 240)])
def test_an_optimizer_tensor_by_tensor(kind: str, launches: int) -> None:
    slow = run_loop(optimizer(kind), 8)
    diagnosis = diagnose(slow.capture(2))
    finding = only(diagnosis, "gradient-loop")
    assert f"{launches} launches for 80 tensors" in finding.title
    assert finding.count == 1
    most = slow.period_ns - period(optimizer(""))
    assert finding.headroom is not None
    assert 0.5 * most < finding.headroom.mid_ns <= 1.01 * most
    if kind == "single":
        assert finding.advice is not None
        assert any("fused" in line for line in finding.advice.lines)


@pytest.mark.parametrize("kind", ["", "foreach"])
def test_layers_and_multi_tensor_calls_are_no_loops_over_tensors(kind: str) -> None:
    assert not of(diagnose(run_loop(optimizer(kind), 8).capture(2)), "gradient-loop")


def test_thirty_layers_with_matrix_kernels_are_no_loop_over_tensors() -> None:
    def body(machine: Machine, step: int) -> None:
        for _ in range(30):
            machine.host(20 * US)
            machine.launch(50 * US, GEMM)
            machine.launch(5 * US, POINTWISE)
            machine.launch(5 * US, MUL)

    assert not of(diagnose(run_loop(body, 8).capture(2)), "gradient-loop")


def test_a_norm_and_a_read_for_each_tensor() -> None:
    slow = run_loop(optimizer("norms"), 8)
    diagnosis = diagnose(slow.capture(2))
    finding = only(diagnosis, "gradient-loop")
    assert finding.kind == "slow_grad_norm_loop"
    assert "80 launches and 80 reads for 80 tensors" in finding.title
    assert finding.site == site(77)
    assert diagnosis.findings[0] is finding or diagnosis.findings[0].site == site(77)
    assert_headroom(finding, slow.period_ns - period(optimizer("")), slow.period_ns, 0.05)


def test_a_loop_over_few_tensors_is_silent() -> None:
    assert not of(diagnose(run_loop(optimizer("single", tensors=8), 8).capture(2)), "gradient-loop")


def test_a_loop_in_one_of_many_steps_is_no_cost_of_every_step() -> None:
    def body(machine: Machine, step: int) -> None:
        optimizer("norms" if step == 7 else "")(machine, step)

    assert not of(diagnose(run_loop(body, 12).capture(2)), "gradient-loop")


def test_steps_of_the_session_count_towards_the_used_up_buffer() -> None:
    """A session that records from step 100 on has long used up what its loader had ready."""
    capture = run_loop(loading(6 * MS), 6).capture(environment=Environment(num_workers=8, prefetch_factor=2))
    late = replace(capture, steps=replace(capture.steps, index=capture.steps.index + 100))
    only(diagnose(late), "data-wait")
    assert not of(diagnose(capture), "data-wait")


@pytest.mark.parametrize(
    ("workers", "cpus", "said", "line"),
    [
        (0, 16.0, "give it workers (the process may use 16 CPUs: 8 workers beside the loop)", "num_workers=8,"),
        (0, 4.0, "give it workers (the process may use 4 CPUs: 3 workers beside the loop)", "num_workers=3,"),
        (0, 2.0, "(the process may use 2 CPUs: 1 worker beside the loop)", "num_workers=1,"),
        (0, 1.0, "the process may use 1 CPU, where a worker would only take turns with the loop", ""),
        (0, 1.5, "the process may use 1.5 CPUs, where a worker would only take turns", ""),
        (1, 16.0, "give the loader more workers, or make a sample cheaper (the process may use 16 CPUs: 8", "=8,"),
        (8, 64.0, "more workers, or make a sample cheaper (the process may use 64 CPUs: 16 workers", "num_workers=16,"),
        (3, 4.0, "3 workers, and the process may use 4 CPUs: make a sample cheaper", ""),
        (1, 2.0, "1 worker, and the process may use 2 CPUs: make a sample cheaper", ""),
        (1, 2.0, "waits for files or a network gains from more workers than CPUs, 4 to 8", ""),
        (0, None, "give it workers", "len(os.sched_getaffinity(0)) - 1"),
    ],
)
def test_the_advice_of_workers_follows_the_recorded_cpus(
    workers: int, cpus: float | None, said: str, line: str
) -> None:
    environment = Environment(num_workers=workers, num_cpus=cpus, prefetch_factor=2)
    capture = run_loop(loading(6 * MS), 40).capture(environment=environment)
    advice = only(diagnose(capture), "data-wait").advice
    assert advice is not None
    assert said in advice.text
    assert line in " ".join(advice.lines)
    assert bool(advice.lines) == bool(line)


def test_a_loop_without_cuda_is_not_told_to_pin() -> None:
    environment = Environment(num_workers=0, num_cpus=4.0)
    capture = run_loop(loading(6 * MS), 40).capture(environment=environment)
    said = {
        notes: only(diagnose(replace(capture, notes=notes)), "data-wait").advice
        for notes in ((), (Note(code="no-gpu", text="the loop does not use CUDA"),))
    }
    pinned, plain = (row.lines[0] for row in said.values() if row is not None)
    assert pinned == "loader = DataLoader(..., num_workers=3, persistent_workers=True, pin_memory=True)"
    assert plain == "loader = DataLoader(..., num_workers=3, persistent_workers=True)"
