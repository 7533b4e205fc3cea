"""Links of calls and work against a plain search in Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from perfdoctor.record.capture import CallKind, WorkKind
from perfdoctor.record.correlations import fill_external, make_unique

Columns = dict[str, np.ndarray]


def calls_of(rows: list[tuple[int, int, int]]) -> Columns:
    table = np.array(rows, np.int64).reshape(-1, 3)
    return {"start_ns": table[:, 0], "kind": table[:, 1], "correlation": table[:, 2], "external": table[:, 2]}


def works_of(rows: list[tuple[int, int]]) -> Columns:
    table = np.array(rows, np.int64).reshape(-1, 2)
    return {
        "start_ns": table[:, 0],
        "correlation": table[:, 1],
        "kind": np.zeros(len(table), np.int64),
        "external": table[:, 1],
    }


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_cycles_that_repeat_their_ids(launches: list[tuple[int, int]], cycles: int) -> None:
    """Each cycle numbers its calls from one again; each call launches some kernels soon after it."""
    calls, works, owner = [], [], []
    for cycle in range(cycles):
        for i, (num_kernels, _) in enumerate(launches):
            at = 10_000 * cycle + 100 * i
            calls.append((at, CallKind.GRAPH_LAUNCH, i + 1))
            for k in range(num_kernels):
                works.append((at + 10 + k, i + 1))
                owner.append(len(calls) - 1)
    call_columns, work_columns = calls_of(calls), works_of(works)
    renumbered = make_unique(call_columns, work_columns, {})
    found = call_columns["correlation"]
    assert renumbered == len(launches) * (cycles - 1)
    assert len(set(found.tolist())) == len(calls)
    assert work_columns["correlation"].tolist() == found[owner].tolist()
    assert found[: len(launches)].tolist() == list(range(1, len(launches) + 1))  # the first keep their own


def test_queued_kernels_of_a_shared_id_go_in_order() -> None:
    """Three launches of one op run far ahead of the device: all three come before the first kernel."""
    calls = calls_of(
        [(1, CallKind.LAUNCH, 9), (2, CallKind.LAUNCH, 9), (3, CallKind.LAUNCH, 9), (4, CallKind.SYNC_STREAM, 9)]
    )
    works = works_of([(300, 9), (100, 9), (200, 9)])
    make_unique(calls, works, {})
    first, second, third, _ = calls["correlation"].tolist()
    assert works["correlation"].tolist() == [third, first, second]


def test_unknown_ids_stay_unknown() -> None:
    calls = calls_of([(1, CallKind.LAUNCH, 0), (2, CallKind.LAUNCH, -1), (3, CallKind.LAUNCH, 4)])
    works = works_of([(10, 0), (11, 4), (12, 77)])
    assert make_unique(calls, works, {}) == 0
    assert calls["correlation"].tolist() == [-1, -1, 4]
    assert works["correlation"].tolist() == [-1, 4, 77]


def test_external_ids_serve_only_without_any_correlation() -> None:
    calls, works = calls_of([(1, CallKind.LAUNCH, -1)]), works_of([(2, -1)])
    calls["external"], works["external"] = np.array([5]), np.array([5])
    assert fill_external(calls, works)
    assert works["correlation"].tolist() == [5]
    works["correlation"] = np.array([3])
    assert not fill_external(calls, works)
    assert works["kind"].tolist() == [WorkKind.KERNEL]
