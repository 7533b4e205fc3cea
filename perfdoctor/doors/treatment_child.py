"""One process of a trial in processes: the script from its start, treatments applied early, some steps timed, the end.

    python -m perfdoctor.doors.treatment_child

Not for hands: treatment_processes.py starts it. Each line on standard input names three files: the order, where to put
what came of it, where to put what the script says. A process is forked for it, so that torch is imported once (1.5 to
4 s); nothing has touched CUDA or OpenMP by then. Its exit code is the answer on standard output, after "ready".

Files that the script writes go to a scratch folder, as in a trial in
one process. Generators are seeded before the script (whose own seeds come later and win): processes start alike.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from perfdoctor.doors.script import as_main, execute_program, load_program
from perfdoctor.doors.script_errors import caught_errors
from perfdoctor.doors.script_stop import ScriptStop
from perfdoctor.doors.trial import files_of
from perfdoctor.emulate import emulate_cuda
from perfdoctor.treat.kept_lines import merged
from perfdoctor.treat.switches import treatment
from perfdoctor.treat.treatment import Loop, Treatment
from perfdoctor.trial.dropout import without_dropout
from perfdoctor.trial.live_loop import LiveLoop
from perfdoctor.trial.live_obstacles import AT_FIRST_CALL
from perfdoctor.trial.process_run import ProcessOrder, ProcessRun
from perfdoctor.trial.sandbox import Sandbox
from perfdoctor.trial.treated_steps import PARITY_STEPS
from perfdoctor.trial.treatment_time import loader_period
from perfdoctor.trial.treatments_trial import refusal_of
from perfdoctor.trial.verdict import failed
from perfdoctor.watch.clocks import Stamp, cuda_active, elapsed_ns
from perfdoctor.watch.device_events import new_event
from perfdoctor.watch.steps import StepDetector

_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
_SEED = 0
_LOOKED_AT = 4  # steps until model, optimizers and loader are known
_EDGE = 8  # behind the steps whose losses are noted: a treatment may compile, workers fill their queue
_COUNTED_NS = 500_000_000
_FEWEST_COUNTED, _MOST_COUNTED = 24, 200

Steps = Generator[int, Stamp, None]


def main() -> int:
    """Serve orders until standard input ends."""
    with _nothing_of_cuda(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("torch._dynamo")  # an optimizer's constructor imports it: 1.5 s and more in each process
    print("ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        order, run, said = line.rstrip("\n").split("\t")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # numpy's idle threads count as threads that are lost
            pid = os.fork()
        if not pid:
            _become(said)
            os._exit(_carry_out(order, run))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return 0


@contextmanager
def _nothing_of_cuda() -> Iterator[None]:
    """Whoever asks whether there is a GPU asks NVML: CUDA itself would not survive a fork."""
    before = os.environ.get(_BY_NVML)
    os.environ[_BY_NVML] = "1"
    try:
        yield
    finally:
        os.environ.pop(_BY_NVML)
        if before is not None:
            os.environ[_BY_NVML] = before


def _become(said: str) -> None:
    """A process whose standard streams are its own."""
    null = os.open(os.devnull, os.O_RDWR)
    streams = (null, null, os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    for number, file in enumerate(streams):
        os.dup2(file, number)


def _carry_out(order_path: str, run_path: str) -> int:
    """Run the order, write what came of it; its end is the process's."""
    try:
        order = ProcessOrder.from_json(Path(order_path).read_text("utf-8"))
        process = TreatedProcess(order)
        with emulate_cuda() if order.emulated else nullcontext():
            process.execute()
        Path(run_path).write_text(process.result().to_json(), "utf-8")
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class TreatedProcess:
    """The script, treated from an early step to its end. `execute`, then `result`."""

    def __init__(self, order: ProcessOrder) -> None:
        self._order = order
        self._treatments = [treatment(name) for name in order.names]
        self._live = LiveLoop()
        self._box = Sandbox()
        self._applied = ExitStack()
        self._names: list[str] = []
        self._lines: list[str] = []
        self._settings: list[str] = []
        self._step_ns: list[int] = []
        self._losses: dict[bool, list[float]] = {True: [], False: []}  # by whether dropout was off
        self._peak: int | None = None
        self._failure = ""
        self._stop = ScriptStop(throw_away=True)
        self._num_steps = 0
        self._first_call: Any = None
        self._steps = self._all()
        self._left = next(self._steps)

    def execute(self) -> None:
        """Run the script until the steps are timed, or to its end. Nothing of it is left behind."""
        program = load_program(self._order.target, module=self._order.module)
        with ExitStack() as stack:
            stack.enter_context(self._box)
            stack.enter_context(as_main(program, self._order.arguments))
            errors = stack.enter_context(caught_errors())
            stack.callback(self._live.remove)
            stack.callback(self._leave)
            self._live.install()
            self._await_first_call(stack)
            steps = StepDetector(_moment, self._step)
            self._live.requested = steps.requested
            stack.callback(steps.remove)
            steps.install()
            _seed()
            exit_code, stopped = self._stop.run(partial(execute_program, program))
            if not stopped and not self._failure:
                self._failure = _ended(errors, exit_code, self._num_steps)
            errors.clear()
            self._leave()
            with suppress(BaseException):  # what the script does at its exit belongs into the sandbox, too
                atexit._run_exitfuncs()

    def result(self) -> ProcessRun:
        """What was found."""
        return ProcessRun(
            names=tuple(self._names),
            step_ns=() if self._failure else tuple(self._step_ns),
            losses=tuple(self._losses[False]),
            dry_losses=tuple(self._losses[True]),
            peak_bytes=self._peak,
            failure=self._failure,
            started=bool(self._names),
            num_steps=self._num_steps,
            notes=tuple(files_of(self._box)),
            lines=merged(self._lines),
            setting=", ".join(filter(None, self._settings)),
        )

    def _step(self, stamp: Stamp) -> None:
        self._num_steps += 1
        self._left -= 1
        if self._left > 0:
            return
        try:
            self._left = self._steps.send(stamp)
        except StopIteration:
            self._stop()
        except Exception as error:  # of applying a treatment, or of reading the losses
            self._failure = failed("", error).reason
            self._stop()

    def _all(self) -> Steps:
        """Each `yield n` lets n steps run and gets the stamp at their end."""
        yield _LOOKED_AT
        loop = self._live.loop()
        self._live.stop_looking()
        self._live.held = True
        self._live.restart(replayed=False)  # both sides begin the loader anew, whether or not it is another
        loop = self._apply([each for each in self._treatments if each.name not in self._names], loop)
        if self._order.dry:
            with without_dropout(loop.model) as found:
                if found:
                    yield from self._listen(dry=True)
        step_ns = yield from self._listen(dry=False)
        first = yield _EDGE
        if cuda_active():
            torch.cuda.reset_peak_memory_stats(loop.device)
        stamps = [first]
        for _ in range(self._order.counted or _counted(step_ns, loader_period(self._live.loader_use(), step_ns))):
            stamps.append((yield 1))
        self._step_ns = [elapsed_ns(a, b) for a, b in pairwise(stamps)]
        if loop.device.type == "cuda" and cuda_active():
            self._peak = torch.cuda.max_memory_allocated(loop.device)

    def _listen(self, *, dry: bool) -> Generator[int, Stamp, float]:
        """The losses of a few steps; gives the median step of their second half, in ns."""
        stamps = []
        self._live.listening = True
        for _ in range(PARITY_STEPS):
            stamps.append((yield 1))
        self._live.listening = False
        self._losses[dry] = self._live.values()
        late = stamps[PARITY_STEPS // 2 - 1 :]
        return float(sorted(elapsed_ns(a, b) for a, b in pairwise(late))[len(late) // 2 - 1])

    def _apply(self, treatments: Sequence[Treatment], loop: Loop) -> Loop:
        """Enter the treatments for the rest of the script. Of several, one that refuses beside the others is left."""
        for each in treatments:
            refusal = refusal_of(each, loop)
            if refusal and len(self._treatments) == 1:
                raise RuntimeError(f"does not fit: {refusal}")
            if not refusal:
                self._lines += each.lines_for(loop)
                self._settings.append(each.setting_for(loop))
                loop = self._applied.enter_context(each.applied(loop))
                self._names.append(each.name)
        return loop

    def _await_first_call(self, stack: ExitStack) -> None:
        """Treatments that must be on before the first forward pass are entered in front of it."""
        early = [each for each in self._treatments if each.name in AT_FIRST_CALL]
        if not early:
            return

        def called(module: torch.nn.Module, _: Any) -> None:
            loop = Loop(device=next(module.parameters(), torch.empty(0)).device, model=module)
            if not any(refusal_of(each, loop) for each in early):  # else it is another module than the model
                self._first_call.remove()
                self._apply(early, loop)

        self._first_call = register_module_forward_pre_hook(called)
        stack.callback(self._first_call.remove)

    def _leave(self) -> None:
        self._steps.close()
        try:
            self._applied.close()
        except Exception:  # the process ends now: what cannot be taken back is why it is one of its own
            self._applied = ExitStack()


def _moment() -> Stamp:
    """As `watch.clocks.stamp_now`, on the clock of the finest resolution: nothing here meets a recording's times."""
    event: Any = None
    if cuda_active():
        event = new_event(timed=True)
        event.record()
    return Stamp(time.perf_counter_ns(), event)


def _counted(step_ns: float, period: int) -> int:
    wanted = min(max(round(_COUNTED_NS / max(step_ns, 1.0)), _FEWEST_COUNTED), _MOST_COUNTED)
    return -(-wanted // period) * period


def _seed() -> None:
    random.seed(_SEED)
    torch.manual_seed(_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(_SEED)


def _ended(errors: Sequence[BaseException], exit_code: int, num_steps: int) -> str:
    """Why the script came to its end before it was stopped."""
    if errors:
        return failed("", errors[0]).reason
    if exit_code:
        return f"failed: the script ended with exit code {exit_code}"
    return f"the script ended after {num_steps} steps"


if __name__ == "__main__":
    sys.exit(main())
