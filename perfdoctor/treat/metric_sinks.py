"""Where metric values go once they have arrived: a TensorBoard writer, a Lightning logger, or any function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from perfdoctor.errors import UsageError
from perfdoctor.treat.metric_readings import Reading

Sink = Callable[[Reading], None]


def sinks_of(targets: object) -> tuple[Sink, ...]:
    """One function a target; `targets` is one or several.

    Raises UsageError for what is neither a SummaryWriter (`add_scalar`), a Lightning logger (`log_metrics`) nor
    callable.
    """
    several = targets if isinstance(targets, Iterable) and not _is_target(targets) else (targets,)
    return tuple(_sink_of(target) for target in several)


def _is_target(target: object) -> bool:
    return callable(target) or hasattr(target, "log_metrics") or hasattr(target, "add_scalar")


def _sink_of(target: Any) -> Sink:
    if isinstance(target, type):
        raise UsageError(f"sinks: {target.__name__} is a class: pass an instance of it")
    if hasattr(target, "log_metrics"):
        return lambda reading: target.log_metrics(dict(reading), step=reading.step)
    if hasattr(target, "add_scalar"):
        return lambda reading: _write(target, reading)
    if callable(target):
        return lambda reading: target(reading)
    raise UsageError(
        f"sinks: {type(target).__name__} is none: pass a SummaryWriter, a Lightning logger, or a function that takes "
        "a reading (a mapping of names to floats with `.step`)"
    )


def give_to_all(sinks: Iterable[Sink], reading: Reading) -> None:
    """Every sink gets it, also where one before it raises. Raises what the first of those did."""
    failed: list[Exception] = []
    for sink in sinks:
        try:
            sink(reading)
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]


def _write(writer: Any, reading: Reading) -> None:
    for name, value in reading.items():
        writer.add_scalar(name, value, reading.step)
