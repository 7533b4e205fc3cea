"""Rounds of processes on made-up runs with known times: the order, the verdicts, the budget, losses first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfdoctor.treat.switches import treatment
from perfdoctor.treat.treatment import Loop
from perfdoctor.trial.estimate import Estimate
from perfdoctor.trial.live_obstacles import kept_state, undecided
from perfdoctor.trial.parity import Parity
from perfdoctor.trial.process_rounds import MOST_ROUNDS, Candidate, ProcessRounds
from perfdoctor.trial.process_run import ProcessOrder, ProcessRun
from perfdoctor.trial.verdict import Verdict, failed

MS = 1_000_000
LOSSES = tuple(1.0 / step for step in range(1, 9))


class Machine:
    """Runs that take `seconds` each and whose steps are of `step_ms[names]`, plus what `drift` adds with each run."""

    def __init__(self, step_ms: dict[tuple[str, ...], float], seconds: float = 1.0, drift_ms: float = 0.0) -> None:
        self.step_ms = step_ms
        self.seconds = seconds
        self.drift_ms = drift_ms
        self.time = 0.0
        self.asked: list[tuple[str, ...]] = []
        self.counts: list[int] = []
        self.dry: list[bool] = []
        self.change: Callable[[tuple[str, ...], ProcessRun], ProcessRun | None] = lambda names, run: run

    def run(self, names: tuple[str, ...], counted: int, dry: bool) -> ProcessRun | None:
        self.time += self.seconds
        ns = round((self.step_ms[names] + self.drift_ms * len(self.asked)) * MS)
        self.asked.append(names)
        self.counts.append(counted)
        self.dry.append(dry)
        found = ProcessRun(names=names, step_ns=(ns,) * 20, losses=LOSSES, num_steps=40, started=bool(names))
        return self.change(names, found)

    def rounds(self, seconds: float) -> ProcessRounds:
        return ProcessRounds(self.run, until=seconds, now=lambda: self.time)


def _candidate(*names: str) -> Candidate:
    return Candidate(treatments=tuple(map(treatment, names)), why="state stays")


FUSED, CLIP = ("fused_optimizer",), ("our_clip",)
FROZEN = ("gc_frozen",)  # claims equal bits


def test_a_faster_treatment_in_a_b_b_a_order_with_a_drift_that_cancels() -> None:
    machine = Machine({(): 10.0, FUSED: 8.0}, drift_ms=0.1)
    (verdict,) = machine.rounds(13.5).judge([_candidate(*FUSED)])
    # One process before the rounds; then A B B A ... for six rounds.
    assert machine.asked == [(), (), FUSED, FUSED, (), (), FUSED, FUSED, (), (), FUSED, FUSED, ()]
    assert machine.counts == [0, *[20] * 12]
    assert machine.dry == [True, True, True, *[False] * 10]
    assert verdict.accepted, verdict.reason
    assert verdict.saving is not None
    # B comes a run later than A in three rounds and a run earlier in three: 2 ms less or more 0.1 ms.
    assert verdict.saving.mid_ns == pytest.approx(2.0 * MS)
    assert (verdict.saving.low_ns, verdict.saving.high_ns) == pytest.approx((1.9 * MS, 2.1 * MS))
    assert verdict.num_processes == 12
    assert verdict.before is not None
    assert verdict.before.basis == "6 processes of 20 steps"
    assert verdict.parity.difference == 0


def test_more_rounds_where_there_is_time_but_not_without_end() -> None:
    machine = Machine({(): 10.0, FUSED: 10.0})
    (verdict,) = machine.rounds(1000).judge([_candidate(*FUSED)])
    assert len(machine.asked) == 1 + 2 * MOST_ROUNDS
    assert verdict.reason == "no difference: the interval holds zero"
    assert not verdict.accepted


def test_what_the_time_does_not_allow_is_said_before_it_is_spent() -> None:
    machine = Machine({(): 10.0, FUSED: 8.0, CLIP: 9.0}, seconds=2.0)
    # 2 s for the first; 32 s are left: three sides of six processes of 2 s are 36 s, two are 24 s.
    first, second = machine.rounds(34).judge([_candidate(*FUSED), _candidate(*CLIP)])
    assert first.accepted
    assert second.reason == (
        "not tried: it takes 12 processes of about 2.0 s, 24 s in all, and 32 s were left (--seconds)"
    )
    assert second.wants_time
    machine = Machine({(): 10.0, FUSED: 8.0}, seconds=2.0)
    (verdict,) = machine.rounds(20).judge([_candidate(*FUSED)])
    assert machine.asked == [()]
    assert verdict.wants_time


def _slow(machine: Machine, seconds: float, until: float) -> None:
    def slow(names: tuple[str, ...], run: ProcessRun) -> ProcessRun | None:
        machine.time += seconds if names == FUSED else 0.0
        return run if machine.time <= until else None

    machine.change = slow


def test_a_treatment_whose_processes_take_too_long_is_given_up_for_the_others() -> None:
    machine = Machine({(): 10.0, FUSED: 8.0, CLIP: 9.0})
    # One second for the first, then rounds of 1 + 4 + 1 s: after two, at 13 s, four of 6 s do not fit, four of 2 s do.
    _slow(machine, 3.0, 25)
    slow, quick = machine.rounds(25).judge([_candidate(*FUSED), _candidate(*CLIP)])
    assert slow.reason == (
        "not tried: a process with it takes 4.0 s, one as it is 1.0 s: 6 of each do not fit into the time (--seconds)"
    )
    assert slow.wants_time
    assert slow.parity.kept
    assert machine.asked.count(FUSED) == 2
    assert quick.accepted


def test_what_got_slower_on_the_way_is_not_decided() -> None:
    machine = Machine({(): 10.0, FUSED: 8.0})

    def slow(names: tuple[str, ...], run: ProcessRun) -> ProcessRun | None:
        machine.time += 3.0 if len(machine.asked) > 5 else 0.0
        return run if machine.time <= 14 else None

    machine.change = slow
    (verdict,) = machine.rounds(14).judge([_candidate(*FUSED)])
    assert verdict.reason == "only 3 pairs of processes fitted into the time: not decided"
    assert verdict.wants_time
    assert not verdict.accepted


def test_losses_come_first() -> None:
    machine = Machine({(): 10.0, FUSED: 8.0, CLIP: 8.0})

    def off(names: tuple[str, ...], run: ProcessRun) -> ProcessRun:
        return replace(run, losses=tuple(loss * 1.01 for loss in run.losses)) if names == FUSED else run

    machine.change = off
    wrong, right = machine.rounds(100).judge([_candidate(*FUSED), _candidate(*CLIP)])
    assert wrong.reason.startswith("not timed, as it changes the numbers more than it claims")
    assert machine.asked.count(FUSED) == 1
    assert right.accepted


@pytest.mark.parametrize(
    ("shaken", "kept", "then"),
    [
        # The first, A and B of the first round; then as it is until it differs as much, or five have been the same.
        ((2, 3), True, [FROZEN, ()]),
        # Then treated until it has been the same twice, or another in four.
        ((2,), True, [(), (), FROZEN, FROZEN]),
        ((2, 7, 8), True, [(), (), FROZEN, FROZEN, FROZEN, FROZEN]),
        ((2, 6, 7, 8), False, [(), (), FROZEN, FROZEN, FROZEN]),
        ((2, 6, 7, 9), False, [(), (), FROZEN, FROZEN, FROZEN, FROZEN]),
    ],
)
def test_what_differs_by_chance_is_run_more_often(
    shaken: tuple[int, ...], kept: bool, then: list[tuple[str, ...]]
) -> None:
    machine = Machine({(): 10.0, FROZEN: 8.0})

    def shaky(names: tuple[str, ...], run: ProcessRun) -> ProcessRun:
        differs = len(machine.asked) - 1 in shaken
        return replace(run, losses=tuple(loss * (1 + 1e-5 * differs) for loss in LOSSES))

    machine.change = shaky
    (verdict,) = machine.rounds(100).judge([_candidate(*FROZEN)])
    assert machine.asked[:4] == [(), (), FROZEN, ()]
    assert machine.asked[4 : 4 + len(then)] == then
    assert verdict.parity.kept is kept


def test_other_masks_are_no_other_numbers() -> None:
    machine = Machine({(): 10.0, FUSED: 8.0})

    def masked(names: tuple[str, ...], run: ProcessRun) -> ProcessRun:
        losses = tuple(loss * 1.2 for loss in LOSSES) if names else LOSSES
        return replace(run, losses=losses, dry_losses=LOSSES)

    machine.change = masked
    (verdict,) = machine.rounds(100).judge([_candidate(*FUSED)])
    assert verdict.accepted
    assert "compared without dropout" in verdict.parity.text


@pytest.mark.parametrize(
    ("shaken", "kept", "num_treated", "shown"),
    [
        ((2,), True, 3, "in 1 of 3 runs with the treatment (compared without dropout, whose masks are others)"),
        ((2, 6, 7, 8), False, 4, "losses not equal bit for bit: largest difference 0.2"),
    ],
)
def test_what_other_masks_hide_may_differ_by_chance_too(
    shaken: tuple[int, ...], kept: bool, num_treated: int, shown: str
) -> None:
    machine = Machine({(): 10.0, FROZEN: 8.0})

    def masked(names: tuple[str, ...], run: ProcessRun) -> ProcessRun:
        differs = len(machine.asked) - 1 in shaken
        dry = tuple(loss * (1 + 1e-5 * differs) for loss in LOSSES)
        return replace(run, losses=tuple(loss * 1.2 for loss in LOSSES) if names else LOSSES, dry_losses=dry)

    machine.change = masked
    (verdict,) = machine.rounds(100).judge([_candidate(*FROZEN)])
    # The first, A and B of the first round, three more as it is; then treated ones.
    assert machine.asked[: 5 + num_treated] == [(), (), FROZEN, (), (), (), *[FROZEN] * (num_treated - 1)]
    assert verdict.parity.kept is kept
    assert verdict.parity.text.endswith(shown)


def test_one_treated_run_alone_accuses_nobody() -> None:
    """The time ends before a second one: it may have been chance."""
    machine = Machine({(): 10.0, FROZEN: 8.0})

    def off(names: tuple[str, ...], run: ProcessRun) -> ProcessRun | None:
        return replace(run, losses=tuple(loss * (1 + 1e-5 * bool(names)) for loss in LOSSES))

    machine.change = off
    rounds = machine.rounds(100)
    machine.change = lambda names, run: None if len(machine.asked) > 5 and names else off(names, run)
    (verdict,) = rounds.judge([_candidate(*FROZEN)])
    assert not verdict.accepted
    assert verdict.parity.kept is None
    assert "perhaps by chance: largest difference 1e-05, in 1 of 1 run with the treatment" in verdict.parity.text


def test_processes_that_begin_otherwise_each_time_prove_nothing() -> None:
    machine = Machine({(): 10.0, FUSED: 8.0})

    def other(names: tuple[str, ...], run: ProcessRun) -> ProcessRun:
        return replace(run, losses=tuple(loss * (1 + 0.2 * len(machine.asked)) for loss in LOSSES))

    machine.change = other
    (verdict,) = machine.rounds(100).judge([_candidate(*FUSED)])
    assert not verdict.accepted
    assert verdict.parity.kept is None
    assert "could not be compared" in verdict.reason


def test_a_treatment_that_fails_is_a_verdict_and_the_others_go_on() -> None:
    machine = Machine({(): 10.0, FUSED: 8.0, CLIP: 8.0})

    def failing(names: tuple[str, ...], run: ProcessRun) -> ProcessRun:
        return replace(run, step_ns=(), failure="failed: RuntimeError: planned") if names == FUSED else run

    machine.change = failing
    bad, good = machine.rounds(100).judge([_candidate(*FUSED), _candidate(*CLIP)])
    assert bad.reason == "failed: RuntimeError: planned"
    assert good.accepted


def test_a_script_that_ends_early_is_tried_no_further() -> None:
    machine = Machine({(): 10.0, FUSED: 8.0})
    machine.change = lambda names, run: replace(run, step_ns=(), failure="the script ended after 12 steps")
    (verdict,) = machine.rounds(100).judge([_candidate(*FUSED)])
    assert verdict.reason == "not tried: as it is, in a process of its own: the script ended after 12 steps"
    assert machine.asked == [()]


def test_of_a_set_those_that_fit_beside_each_other() -> None:
    both = (*FUSED, *CLIP, "gc_frozen")
    machine = Machine({(): 10.0, both: 7.0, (*FUSED, *CLIP): 7.0})
    machine.change = lambda names, run: replace(run, names=(*FUSED, *CLIP)) if names else run
    (verdict,) = machine.rounds(100).judge([_candidate(*both)])
    assert verdict.treatment == "fused_optimizer + our_clip"
    assert verdict.accepted
    machine.change = lambda names, run: replace(run, names=FUSED) if names else run
    assert machine.rounds(200).judge([_candidate(*both)]) == []  # one alone has its own verdict already


@settings(max_examples=30)
@given(st.floats(1, 100), st.floats(-0.5, 0.5), st.integers(1, 3))
def test_the_sign_of_the_answer_is_that_of_the_difference(base: float, share: float, num: int) -> None:
    names = ["fused_optimizer", "our_clip", "gc_frozen"][:num]
    machine = Machine({(): base, **{(name,): base * (1 - share) for name in names}})
    for verdict in machine.rounds(1000).judge([_candidate(name) for name in names]):
        assert verdict.saving is not None
        assert verdict.saving.mid_ns == pytest.approx(base * share * MS, abs=2)
        assert verdict.accepted == (round(base * share * MS) / round(base * MS) >= 0.005)


def test_what_travels_between_processes_comes_back_the_same() -> None:
    order = ProcessOrder(target="a b.py", arguments=("--x", "ü"), names=("tf32",), counted=3, dry=True, emulated=True)
    assert ProcessOrder.from_json(order.to_json()) == order
    run = ProcessRun(names=("tf32",), step_ns=(1, 2), losses=(0.1, float("nan")), peak_bytes=7, notes=("n",))
    assert ProcessRun.from_json(run.to_json()).step_ns == (1, 2)
    assert str(ProcessRun.from_json(run.to_json())) == str(run)


def test_only_cuda_keeps_state_that_blocks_cannot_take_back() -> None:
    import torch

    cpu, cuda = Loop(device=torch.device("cpu")), Loop(device=torch.device("cuda"))
    for name in ("cudnn_benchmark", "compile_reduce_overhead", "compile_max_autotune"):
        assert kept_state(treatment(name), cpu) is None
        assert "life of a process" in (kept_state(treatment(name), cuda) or "")
    assert kept_state(treatment("fused_optimizer"), cuda) is None


def test_which_verdicts_of_one_process_are_none() -> None:
    saving = Estimate(mid_ns=5, low_ns=4, high_ns=6, num_pairs=6)
    unclear = Parity(kept=None, text="other batches each time", num_losses=8)
    faster = Verdict(treatment="x", accepted=False, reason="faster, but", parity=unclear, saving=saving)
    assert undecided(faster)
    assert undecided(failed("x", MemoryError())) is None
    nothing = replace(saving, low_ns=-1)
    assert undecided(replace(faster, saving=nothing)) is None  # no difference is an answer
    assert undecided(replace(faster, parity=replace(unclear, num_losses=0))) is None  # no process will see a loss
    assert undecided(replace(faster, parity=replace(unclear, kept=True))) is None
