"""What `DeviceMetrics` gives out: numbers on the host, with the step that they belong to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfdoctor.errors import UsageError
from perfdoctor.kernels import metrics_reference as columns

STATISTICS = ("mean", "sum", "last", "min", "max", "ema", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricValue:
    """One metric since the last reset. All are NaN, `sum` and `weight` 0, where nothing was added since then."""

    mean: float
    """sum of weight times value over the sum of the weights"""
    sum: float
    """of weight times value"""
    last: float
    min: float
    """NaN once a NaN was added, as torch.min; until the next reset"""
    max: float
    ema: float
    """exponential moving average, one step an update, weights ignored; corrected for its start as Adam's moments are"""
    weight: float
    """sum of the weights: the number of updates where none were given"""
    num_updates: int
    """since the start; a reset does not change it"""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Reading(Mapping[str, float]):
    """A mapping from each metric's name to one float, the statistic `shown`; all of them are in `statistics`.

    Empty, and with the start step, where nothing has arrived yet.
    """

    step: int
    """the update that the numbers include as the last one"""
    statistics: Mapping[str, MetricValue]
    shown: str

    def __getitem__(self, name: str) -> float:
        if name not in self.statistics:
            known = ", ".join(self.statistics) or "none has arrived yet"
            raise KeyError(f"no metric {name!r} (there are: {known})")
        value: float = getattr(self.statistics[name], self.shown)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.statistics)

    def __len__(self) -> int:
        return len(self.statistics)

    def __repr__(self) -> str:
        return f"Reading(step={self.step}, {', '.join(f'{name}={value:.6g}' for name, value in self.items())})"


def check_statistic(name: str) -> None:
    """Raises UsageError for what is no statistic."""
    if name not in STATISTICS:
        raise UsageError(f"statistic={name!r}: expected one of {', '.join(STATISTICS)}")


def reading_of(rows: Mapping[str, Sequence[float]], start_step: int, num_calls: int, shown: str) -> Reading:
    """From the rows of the state, by metric, after at least `num_calls` updates."""
    updates = max((int(row[columns.NUM_UPDATES]) for row in rows.values()), default=0)
    updates = max(updates, num_calls if rows else 0)
    statistics = {name: value_of(row) for name, row in rows.items() if row[columns.NUM_UPDATES]}
    return Reading(step=start_step + updates, statistics=statistics, shown=shown)


def value_of(row: Sequence[float]) -> MetricValue:
    """From one row of the state."""
    is_empty = row[columns.EMA_WEIGHT] == 0
    weight = row[columns.WEIGHT]
    return MetricValue(
        mean=row[columns.SUM] / weight if weight else math.nan,
        sum=row[columns.SUM],
        last=math.nan if is_empty else row[columns.LAST],
        min=math.nan if is_empty else row[columns.MIN],
        max=math.nan if is_empty else row[columns.MAX],
        ema=math.nan if is_empty else row[columns.EMA] / row[columns.EMA_WEIGHT],
        weight=weight,
        num_updates=int(row[columns.NUM_UPDATES]),
    )


def combined(ranks: Iterable[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """One row a metric from those of all ranks: sums and weights added, extremes of all, `last` and the average as the
    mean of the ranks that have one; the updates are those of the rank that had most."""
    found: dict[str, list[Sequence[float]]] = {}
    for rows in ranks:
        for name, row in rows.items():
            found.setdefault(name, []).append(row)
    return {name: _combined_row(rows) for name, rows in found.items()}


def _combined_row(rows: list[Sequence[float]]) -> list[float]:
    used = [row for row in rows if row[columns.EMA_WEIGHT] != 0] or rows[:1]

    def mean(column: int) -> float:
        return sum(row[column] for row in used) / len(used)

    out = [0.0] * columns.COLUMNS
    out[columns.SUM] = sum(row[columns.SUM] for row in used)
    out[columns.WEIGHT] = sum(row[columns.WEIGHT] for row in used)
    out[columns.LAST] = mean(columns.LAST)
    out[columns.MIN] = _extreme([row[columns.MIN] for row in used], min)
    out[columns.MAX] = _extreme([row[columns.MAX] for row in used], max)
    out[columns.EMA] = sum(row[columns.EMA] / (row[columns.EMA_WEIGHT] or 1.0) for row in used) / len(used)
    out[columns.EMA_WEIGHT] = 1.0 if used[0][columns.EMA_WEIGHT] else 0.0
    out[columns.NUM_UPDATES] = max(row[columns.NUM_UPDATES] for row in rows)
    return out


def _extreme(values: list[float], pick: Callable[[list[float]], float]) -> float:
    return math.nan if any(math.isnan(value) for value in values) else pick(values)
