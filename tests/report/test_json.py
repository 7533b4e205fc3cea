"""The JSON report against its published schema."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest

from perfdoctor.diagnose.finding import Binding, Diagnosis, RankRow, Severity
from perfdoctor.record.capture import Frame
from perfdoctor.report.json import SCHEMA_VERSION, as_document, render_json, schema


def check(diagnosis: Diagnosis) -> dict:  # type: ignore[type-arg]
    document = json.loads(render_json(diagnosis))
    jsonschema.validate(document, schema(), cls=jsonschema.Draft202012Validator)
    return document  # type: ignore[no-any-return]


def test_schema_is_a_schema_and_knows_every_enum_value() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    assert schema()["properties"]["schema_version"] == {"const": SCHEMA_VERSION}
    assert schema()["properties"]["verdict"]["properties"]["binding"]["enum"] == [b.value for b in Binding]
    assert schema()["$defs"]["finding"]["properties"]["severity"]["enum"] == [s.value for s in Severity]


def test_times_are_milliseconds_and_the_parts_add_up(diagnosis: Diagnosis) -> None:
    document = check(diagnosis)
    first = document["findings"][0]
    assert first["headroom"] == {"low_ms": 4.9, "mid_ms": 5.4, "high_ms": 6.0}
    assert (first["host_blocked_ms"], first["gpu_idle_ms"]) == (12.3, 5.6)
    assert first["headroom_ratio"] == pytest.approx(5.4 / 25.2, abs=1e-4)
    assert first["hours_per_day"] == pytest.approx(24 * 5.4 / 25.2, abs=0.01)
    assert first["site"]["file"].endswith("train.py")
    assert first["site"]["line"] == 84
    start, end = first["evidence_ms"][0]
    assert end - start == pytest.approx(12.3, abs=1e-3)  # also at Unix times
    where = document["accounting"]
    parts = where["busy_ms"] + sum(where["idle_by_code_ms"].values()) + where["unexplained_ms"]
    assert parts == pytest.approx(where["window_ms"])


def test_what_was_not_measured_is_null(diagnosis: Diagnosis) -> None:
    bare = Diagnosis(
        source="t.json",
        step=None,
        accounting=None,
        binding=Binding.UNKNOWN,
        findings=diagnosis.findings,
        leave_alone=(),
    )
    document = check(bare)
    assert document["verdict"]["step"] is None
    assert document["verdict"]["gpu_busy_ratio"] is None
    assert document["findings"][0]["headroom_ratio"] is None
    assert document["findings"][2]["headroom"] is None
    assert document["findings"][2]["host_blocked_ms"] is None


def test_ranks_and_library_sites_are_in_the_schema(diagnosis: Diagnosis, rank_rows: tuple[RankRow, ...]) -> None:
    finding = diagnosis.findings[0]
    assert finding.site is not None
    library = Frame(file="clip_grad.py", line=88, function="clip", owner="torch")
    site = replace(finding.site, library=library, caller=replace(library, owner="user"))
    document = check(replace(diagnosis, findings=(replace(finding, site=site),), ranks=rank_rows))
    assert document["findings"][0]["site"]["library"]["line"] == 88
    assert document["findings"][0]["site"]["owner"] == "torch"
    assert [row["rank"] for row in document["ranks"]] == [0, 1]


def test_schema_rejects_a_report_without_findings(diagnosis: Diagnosis) -> None:
    document = as_document(diagnosis)
    del document["findings"]
    with pytest.raises(jsonschema.ValidationError, match="findings"):
        jsonschema.validate(document, schema())
