"""The command line: one verb a file, and `main`, the only place that prints or exits.

Exit codes: 0 done, 1 over `--gate` or `--budget`, 2 wrong use or unreadable input, 3 perfdoctor itself failed (a bug),
130 interrupted, 143 ended by SIGTERM. `perfdoctor run` gives back the script's own exit code where that is not 0.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from perfdoctor.cli.output import Outcome, complain, write_whole
from perfdoctor.errors import INTERRUPTED, PerfDoctorError, UsageError
from perfdoctor.version import VERSION

# Each verb is the module of its name, imported when it is used: `analyze` must not pay for `run`.
_VERBS = {
    "run": "run a training script and say which lines make it slow",
    "check": "find every sync of a training step without a GPU, and hold it against a budget",
    "trial": "measure what each suspect of a training script really costs, in a throw-away run",
    "compare": "hold the report after a change against the one before it",
    "nsys": "record a command with Nsight Systems and say which lines make it slow",
    "bench": "what this machine can do: matmul, mlp, bandwidth, launch, norm",
    "analyze": "say the same of a trace: torch.profiler, Nsight Systems or a saved capture",
    "env": "GPU, driver, versions, and whether the tools of a kernel author work here",
}


def script_main() -> NoReturn:
    """The entry point `perfdoctor`."""
    sys.exit(_main(sys.argv[1:], _keep_aside))


def main(argv: Sequence[str]) -> int:
    """Run one verb and return the exit code. Errors made by the caller are one line on standard error."""
    return _main(argv, lambda: None)


def _main(argv: Sequence[str], delivered_alone: Callable[[], None]) -> int:
    try:
        outcome = _execute(argv)
        code = _deliver(outcome)
        if outcome.alone:
            delivered_alone()
        return code
    except (PerfDoctorError, OSError) as error:
        complain(_one_line(error))
        return 2
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 2
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        complain("this is a bug in perfdoctor; please report it with the lines above")
        return 3


def _execute(argv: Sequence[str]) -> Outcome:
    verb, *rest = argv or ["--help"]
    if verb in ("-h", "--help", "help"):
        return Outcome(text=_usage())
    if verb == "--version":
        return Outcome(text=f"perfdoctor {VERSION}\n")
    if verb not in _VERBS:
        raise UsageError(f"no verb {verb!r}; there are {', '.join(_VERBS)} (perfdoctor --help says more)")
    try:
        module = import_module(f"perfdoctor.cli.{verb}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("perfdoctor"):
            raise
        raise UsageError(
            f"{sys.executable} lacks the package {error.name}, which {verb} needs: use scripts/perfdoctor, which sets "
            "itself up, or pip install perfdoctor there"
        ) from error
    outcome: Outcome = module.execute(rest)
    return outcome


def _usage() -> str:
    rows = "".join(f"  {verb:<9}{summary}\n" for verb, summary in _VERBS.items())
    return (
        "usage: perfdoctor VERB ...\n\n"
        f"{rows}\nperfdoctor VERB --help lists a verb's options.\n"
        "Exit codes: 0 done, 1 over the gate or budget, 2 wrong use or unreadable input, 3 a bug in perfdoctor,\n"
        "130 or 143 interrupted.\n"
    )


def _deliver(outcome: Outcome) -> int:
    if outcome.path:
        write_whole(outcome.path, outcome.text)
        complain(f"wrote {outcome.path}")
    else:
        _show(outcome.text)
    for message in outcome.messages:
        complain(message)
    return outcome.exit_code


def _show(text: str) -> None:
    if sys.stdout is None:
        raise UsageError("standard output is closed: nowhere to write the report; name a file with -o FILE")
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader (`head`) has seen enough. Python would flush again at exit and complain.
        _silence_stdout()
    except OSError as error:
        _silence_stdout()
        raise UsageError(f"standard output cannot be written ({error.strerror or error})") from error


def _keep_aside() -> None:
    """What the script prints at the exit of the process (atexit) must not follow the report."""
    if sys.stdout is not None and sys.stderr is not None:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())


def _silence_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    return " ".join(str(error).split()) or type(error).__name__
