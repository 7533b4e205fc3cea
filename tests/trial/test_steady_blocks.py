"""Whether the counted steps of a block are those of the long run: a host and a device with a queue between them.

A step of the model: the host works for `before` ms, launches kernels one by one (each costs the host `launch` ms, it
waits while 1024 are queued), reads if `reads`, and works for `after` ms. The device takes `kernel` ms for each, in
order, never before its launch. Step times are those between the ends of the last kernels, as CUDA events tell them.
"""

from dataclasses import dataclass, replace

import pytest

from perfdoctor.trial.schedule import BASE, EDGE, Layout

QUEUE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    before: float
    num_kernels: int
    launch: float
    kernel: float
    reads: bool = False
    after: float = 0.0


class Machine:
    def __init__(self) -> None:
        self.host = 0.0
        self.ends: list[float] = [0.0]  # of every kernel so far

    def run(self, step: Step) -> float:
        """The end of the step on the device."""
        self.host += step.before
        for _ in range(step.num_kernels):
            if len(self.ends) > QUEUE:
                self.host = max(self.host, self.ends[-QUEUE])
            self.host += step.launch
            self.ends.append(max(self.ends[-1], self.host) + step.kernel)
        if step.reads:
            self.drain()
        self.host += step.after
        return self.ends[-1]

    def drain(self) -> None:
        self.host = max(self.host, self.ends[-1])


def long_run(step: Step) -> float:
    machine = Machine()
    stamps = [machine.run(step) for _ in range(120)]
    return (stamps[-1] - stamps[59]) / 60


def tried(off: Step, on: Step, edge: int, *, drained: bool = True, rounds: int = 12) -> float:
    """What a trial says that `on` saves: mean of its blocks' differences. `on` begins with a step as it was."""
    blocks = Layout(counted=4, edges=(edge,), base_edges=(1,), rounds=rounds).blocks()
    machine = Machine()
    means: dict[int, list[float]] = {BASE: [], 0: []}
    for block in blocks:
        stamps = []
        for number in range(block.steps):
            step = on if block.arm == 0 and number > 0 else off
            stamps.append(machine.run(step))
        means[block.arm].append((stamps[-1] - stamps[-1 - block.counted]) / block.counted)
        if drained:
            machine.drain()
    return sum(means[BASE]) / len(means[BASE]) - sum(means[0]) / len(means[0])


COSTLY = Step(before=15.0, num_kernels=1500, launch=0.015, kernel=0.031, reads=True)  # device 46.5 ms, host 37.5
TIGHT = replace(COSTLY, launch=0.0205)  # host 45.75 ms: the queue hardly grows
HOST_BOUND = Step(before=8.0, num_kernels=500, launch=0.04, kernel=0.009, reads=True)
DATA = Step(before=45.0, num_kernels=100, launch=0.05, kernel=0.4)  # host 50 ms, device 40; ten steps fit the queue
COPYING = Step(before=1.0, num_kernels=200, launch=0.02, kernel=0.15, after=12.0)


@pytest.mark.parametrize(
    ("off", "on", "edge"),
    [
        (COSTLY, replace(COSTLY, reads=False), EDGE),
        (TIGHT, replace(TIGHT, reads=False), EDGE),
        (replace(COSTLY, before=0.5), replace(COSTLY, before=0.5, reads=False), EDGE),
        (HOST_BOUND, replace(HOST_BOUND, reads=False), 1),
        (DATA, replace(DATA, before=0.5), EDGE),
        (COPYING, replace(COPYING, after=0.0), EDGE),
        (replace(COPYING, reads=True), COPYING, EDGE),
        (replace(COPYING, after=40.0), replace(COPYING, after=0.0), EDGE),
    ],
)
def test_a_block_counts_what_the_long_run_gives(off: Step, on: Step, edge: int) -> None:
    truth = long_run(off) - long_run(on)
    assert tried(off, on, edge) == pytest.approx(truth, abs=0.01 * long_run(off))


def test_without_waiting_between_blocks_the_queue_of_one_arm_hides_the_cost_of_the_other() -> None:
    off, on = DATA, replace(DATA, before=0.5)
    truth = long_run(off) - long_run(on)
    assert truth == pytest.approx(10.0, abs=0.1)
    assert tried(off, on, EDGE, drained=False) < 0.5 * truth
