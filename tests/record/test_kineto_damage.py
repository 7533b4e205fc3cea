"""Damaged Kineto traces: what can be read is read, what was done about the rest is said."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_rows import document, kineto_text, launch, row, two_steps

from perfdoctor.errors import BrokenTraceError, CaptureError, NotATraceError
from perfdoctor.record.capture import Capture
from perfdoctor.record.kineto import read_kineto
from perfdoctor.record.load import load_capture
from perfdoctor.record.summary import summarise

WHOLE = kineto_text(two_steps())


def read(folder: Path, content: bytes | str) -> Capture:
    path = folder / "trace.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_kineto(path)


def notes(capture: Capture) -> dict[str, int]:
    return {note.code: note.count for note in capture.notes}


def with_name(raw: bytes) -> bytes:
    """The small trace with one more op whose name is these bytes, unescaped, in the middle of the file."""
    middle = json.dumps(row("cpu_op", "@NAME@", 55.0, 1.0)).encode().replace(b"@NAME@", raw)
    head, tail = WHOLE.encode().split(b'"name": "ProfilerStep#6"')
    cut = head.rindex(b"{")
    return head[:cut] + middle + b",\n " + head[cut:] + b'"name": "ProfilerStep#6"' + tail


@pytest.mark.parametrize(
    ("raw", "text", "code"),
    [
        (rb"C:\users\dev\new\x.py(7): f", r"C:\users\dev\new\x.py(7): f", "repaired-escapes"),
        (rb"\\server\share\x.py(7): f", r"\\server\share\x.py(7): f", "repaired-escapes"),
        (b"bad \x01\x00 name", "bad \ufffd\ufffd name", "repaired-control-characters"),
        (b"torch: \x9f\x80(", "torch: \ufffd\ufffd(", "repaired-utf8"),
        (b'operator "" _x', 'operator "" _x', "repaired-quotes"),
        (b'f("a", b)', 'f("a", b)', "repaired-quotes"),
        (rb"lone \ud83d half", "lone \ufffd half", ""),
    ],
)
def test_bad_names(tmp_path: Path, raw: bytes, text: str, code: str) -> None:
    capture = read(tmp_path, with_name(raw))
    assert text in {capture.text(int(i)) for i in capture.ops.name}
    assert notes(capture) == ({code: 1} if code else {})
    assert summarise(capture) == summarise(read(tmp_path, WHOLE))


def test_valid_escapes_stay_what_they_are(tmp_path: Path) -> None:
    names = ['quote " and backslash \\', "\u00e9\u4e2d", "slash / in it"]
    capture = read(tmp_path, json.dumps(document([row("cpu_op", name, 1, 1) for name in names])))
    assert [capture.text(int(i)) for i in capture.ops.name] == names


def test_windows_path_whose_every_escape_is_valid(tmp_path: Path) -> None:
    """`C:\\new\\table.py` written raw decodes without an error, to a newline and a tab."""
    text = json.dumps(document([row("python_function", "@", 1, 1)])).replace("@", r"C:\new\table.py(3): f")
    capture = read(tmp_path, text)
    assert capture.text(int(capture.frames.name[0])) == r"C:\new\table.py(3): f"


def test_numbers_that_json_does_not_know(tmp_path: Path) -> None:
    rows = [row("kernel", "k", 5, 3, 7, stream=7, occupancy=float("nan"), bandwidth=float("inf")), launch(1, 2)]
    capture = read(tmp_path, json.dumps(document(rows)))
    assert notes(capture)["repaired-numbers"] == 1
    assert summarise(capture)["gpu_busy_us"] == 3


@pytest.mark.parametrize(
    "number",
    [
        "inf",
        "-inf",
        "nan",
        "-nan",
        "nan(ind)",
        "-nan(snan)",
        "INF",
        "Infinity",
        "-Infinity",
        "NaN",
        "1.#INF",
        "-1.#IND00",
    ],
)
@pytest.mark.parametrize("more", ["", ', "note": "inf, nan} ]"', r', "path": "C:\users\nan"'])
def test_numbers_as_c_and_windows_print_them(tmp_path: Path, number: str, more: str) -> None:
    text = WHOLE.replace('"bytes": 4', f'"bytes": 4, "bandwidth (GB/s)": {number}, "list": [{number}, 1]{more}')
    capture = read(tmp_path, text)
    assert summarise(capture) == summarise(read(tmp_path, WHOLE))
    assert notes(capture)["repaired-numbers"] == 2
    assert set(notes(capture)) <= {"repaired-numbers", "repaired-escapes"}


@pytest.mark.parametrize(
    ("damage", "by"),
    [
        ("},\n    {", "}\n    {"),
        ("},\n    {", "},,\n    {"),
        ("\n      }\n", ",\n      }\n"),
        ('"dur": 30.0', '"dur": 30.0,'),
    ],
)
def test_commas_too_many_or_missing(tmp_path: Path, damage: str, by: str) -> None:
    assert damage in WHOLE
    capture = read(tmp_path, WHOLE.replace(damage, by, 3))
    assert summarise(capture) == summarise(read(tmp_path, WHOLE))
    assert set(notes(capture)) <= {"repaired-commas"}


def test_commas_and_numbers_inside_names_stay(tmp_path: Path) -> None:
    name = "f(a,,b,) -> [inf, nan, ]"
    text = WHOLE.replace('"gemm"', json.dumps(name)).replace('"bytes": 4', '"bytes": inf')
    assert name in read(tmp_path, text).strings


def test_gzip_whose_check_sum_is_wrong_gives_what_it_holds(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(WHOLE.encode(), mtime=0))
    packed[-8] ^= 0xFF
    capture = read(tmp_path, bytes(packed))
    assert summarise(capture) == summarise(read(tmp_path, WHOLE))
    assert notes(capture) == {"truncated": 1}


@pytest.mark.parametrize("ts", [1e18, 9007199254740993, "soon", None])
def test_a_file_without_one_usable_time_is_an_error(tmp_path: Path, ts: object) -> None:
    rows = [event | {"ts": ts} for event in two_steps()]
    with pytest.raises(BrokenTraceError, match="none of its 16 events"):
        read(tmp_path, json.dumps(document(rows)))


@pytest.mark.parametrize("grid", [[1e999, 1, 1], "[Infinity, 1, 1]", [2**40, 2**40, 2**40], [1], {"x": 1}, "a"])
def test_grids_that_are_none(tmp_path: Path, grid: object) -> None:
    text = json.dumps(document([row("kernel", "k", 5, 3, 7, grid="@")])).replace('"@"', json.dumps(grid))
    assert read(tmp_path, text.replace("Infinity", "1e999")).work.blocks.tolist() == [-1]


ODD = st.sampled_from([None, "odd", "", -1, 0, True, [], {}, [1], {"a": 1}, 2**64, 1e308, "12"])


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 15), field=st.sampled_from(("ph", "cat", "args")), value=ODD, gone=st.booleans())
def test_an_event_that_is_lost_is_said(
    tmp_path_factory: pytest.TempPathFactory, at: int, field: str, value: object, gone: bool
) -> None:
    """A field that decides what an event is goes or changes: the figures stay, or a note tells that they may not."""
    rows = two_steps()
    if gone:
        del rows[at][field]
    else:
        rows[at][field] = value
    folder = tmp_path_factory.mktemp("damage")
    capture = read(folder, json.dumps(document(rows)))
    assert capture.notes or summarise(capture) == summarise(read(folder, WHOLE))


@pytest.mark.parametrize("name", [None, "", 5, [], {}])
@pytest.mark.parametrize("at", [0, 3, 4, 7])
def test_rows_without_a_name_are_said(tmp_path: Path, name: object, at: int) -> None:
    rows = two_steps()
    rows[at]["name"] = name
    assert notes(read(tmp_path, json.dumps(document(rows))))["nameless-rows"] == 1


@pytest.mark.parametrize("tid", [None, "", [], {}, "main"])
@pytest.mark.parametrize("at", [0, 2, 3, 7])
def test_rows_without_a_thread_are_said(tmp_path: Path, tid: object, at: int) -> None:
    rows = two_steps()
    rows[at]["tid"] = tid
    assert notes(read(tmp_path, json.dumps(document(rows))))["threadless-rows"] == 1


def test_broken_events_are_skipped_and_counted_once(tmp_path: Path) -> None:
    broken = [
        None,
        {},
        {"ph": "X"},
        row("cpu_op", "negative", 5, -1659e6),
        {"ph": "X", "cat": "kernel", "name": "no dur", "ts": 4},
        row("kernel", "never closed", 0, 0),
        {"ph": "X", "cat": "kernel", "name": "no ts", "dur": 4},
        row("cpu_op", "text", "soon", "long"),
    ]
    capture = read(tmp_path, json.dumps(document([*broken, *two_steps(), *broken])))
    assert notes(capture) == {"skipped-events": 2 * len(broken)}
    assert summarise(capture) == summarise(read(tmp_path, WHOLE))


def test_event_that_starts_at_zero_on_a_far_clock(tmp_path: Path) -> None:
    rows = [row("cpu_op", "a", 1.7e15, 5), row("cpu_op", "b", 0, 9)]
    capture = read(tmp_path, json.dumps(document(rows)))
    assert len(capture.ops) == 1
    assert notes(capture)["skipped-events"] == 1


@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9])
def test_cut_file_gives_every_whole_event(tmp_path: Path, keep: float) -> None:
    text = WHOLE[: int(len(WHOLE) * keep)]
    whole_events = text.count("\n    },") + text.count("\n    }\n")
    capture = read(tmp_path, text)
    tables = (capture.calls, capture.work, capture.ops, capture.frames, capture.ranges)
    assert sum(map(len, tables)) == whole_events
    assert notes(capture)["truncated"] == 1


def test_array_without_its_end_loses_nothing(tmp_path: Path) -> None:
    text = json.dumps(two_steps())[:-1]
    for ending in ("", ",", "\n,\n"):
        capture = read(tmp_path, text + ending)
        assert summarise(capture)["kernels"] == 2
        assert "not closed" in next(note.text for note in capture.notes if note.code == "truncated")


def test_cut_gzip(tmp_path: Path) -> None:
    rows = [row("cpu_op", f"op {i} {hash(i * 7919)}", float(i), 0.5) for i in range(20_000)]
    data = gzip.compress(json.dumps(document(rows)).encode())
    capture = read(tmp_path, data[: len(data) // 2])
    assert 5_000 < len(capture.ops) < 15_000
    assert "gzip" in next(note.text for note in capture.notes if note.code == "truncated")


def test_key_without_its_opening_quote(tmp_path: Path) -> None:
    capture = read(tmp_path, WHOLE.replace('"tid": 11', 'tid": 11', 1))
    assert notes(capture) == {"repaired-keys": 1}
    assert summarise(capture) == summarise(read(tmp_path, WHOLE))


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BrokenTraceError, match=r"trace\.json"):
        read(tmp_path, '{"traceEvents": [{"ph" "X" nothing here is an event}, {"ph" "X"}]}')
    with pytest.raises(NotATraceError, match="traceEvents"):
        read(tmp_path, '{"loss": [1, 2, 3]}')


def test_damage_costs_only_its_own_event(tmp_path: Path) -> None:
    """In a file of several blocks, one bad event in each of them."""
    rows = [row("cpu_op", f"op {i} " + "x" * 150, float(i), 0.5) for i in range(8000)]
    text = json.dumps(document(rows))
    for i in range(500, 8000, 1000):
        text = text.replace(f'"op {i} x', f'"op {i} \\q\x02x', 1)
    capture = read(tmp_path, text)
    assert len(capture.ops) == 8000
    assert notes(capture)["repaired-escapes"] == 8


@settings(max_examples=300)
@given(
    at=st.integers(0, len(WHOLE) - 1),
    length=st.integers(0, 40),
    put=st.sampled_from([b"", b'"', b"\\", b"{", b"}", b"]", b",", b"null", b"\xff", b"\x00", b"1e999", b'"a"']),
    packed=st.booleans(),
)
def test_any_damage_ends_in_a_capture_or_a_clear_error(
    tmp_path_factory: pytest.TempPathFactory, at: int, length: int, put: bytes, packed: bool
) -> None:
    path = tmp_path_factory.mktemp("damage") / "trace.json"
    raw = WHOLE.encode()
    raw = raw[:at] + put + raw[at + length :]
    path.write_bytes(gzip.compress(raw, 1) if packed else raw)
    try:
        summarise(load_capture(path))
        message = ""
    except CaptureError as error:
        message = str(error)
    assert not message or str(path) in message
