"""SARIF and GitHub annotations.

`sarif-2.1.0-rtm.5.json` beside this file is the SARIF 2.1.0 schema of OASIS as SchemaStore publishes it
(https://raw.githubusercontent.com/schemastore/schemastore/master/src/schemas/json/sarif-2.1.0-rtm.5.json), unchanged,
taken from Microsoft's npm package @microsoft/jest-sarif (MIT).
"""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from perfdoctor.diagnose.finding import Advice, Binding, Diagnosis, Finding, Severity
from perfdoctor.record.capture import Frame, Site
from perfdoctor.report.annotations import fingerprint, relative_path, render_github, render_sarif

ROOT = "/home/me/project"
SCHEMA = json.loads((Path(__file__).parent / "sarif-2.1.0-rtm.5.json").read_text())


def site(file: str, line: int, text: str = "loss.item()", library: Frame | None = None) -> Site:
    return Site(frame=Frame(file=file, line=line, function="main"), library=library, text=text)


def finding(**changes: Any) -> Finding:
    values: dict[str, Any] = {
        "code": "host-sync", "kind": "item", "severity": Severity.COST, "title": "reads a device value", "count": 1.0,
        "site": site(f"{ROOT}/src/train me.py", 20), "advice": Advice(text="read it every N steps"),
    }  # fmt: skip
    return Finding(**{**values, **changes})


def diagnosis(*findings: Finding, leave_alone: tuple[Finding, ...] = ()) -> Diagnosis:
    return Diagnosis(
        source="t", step=None, accounting=None, binding=Binding.UNKNOWN, findings=findings, leave_alone=leave_alone
    )


RACE = finding(code="unsynchronised-read", kind="d2h_race", severity=Severity.ERROR)
ELSEWHERE = finding(code="pageable-copy", kind="h2d_pageable", site=site("/elsewhere/a.py", 3, text=""))
PLACELESS = finding(code="launch-bound", kind="", site=None, advice=None)
SAMPLES = [
    diagnosis(),
    diagnosis(finding()),
    diagnosis(finding(), RACE, ELSEWHERE, PLACELESS, leave_alone=(finding(count=0.1, severity=Severity.INFO),)),
]


@pytest.mark.parametrize("sample", SAMPLES)
def test_sarif_follows_the_official_schema(sample: Diagnosis) -> None:
    jsonschema.Draft4Validator(SCHEMA).validate(json.loads(render_sarif(sample, ROOT)))


def test_sarif_says_where_and_what() -> None:
    (run,) = json.loads(render_sarif(diagnosis(finding(), RACE, ELSEWHERE, PLACELESS), ROOT))["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert rules == ["host-sync/item", "pageable-copy/h2d_pageable", "unsynchronised-read/d2h_race"]
    first, race, elsewhere = run["results"]
    assert (first["ruleId"], rules[first["ruleIndex"]], first["level"]) == (
        "host-sync/item",
        "host-sync/item",
        "warning",
    )
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "src/train%20me.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"]["startLine"] == 20
    assert race["level"] == "error"
    assert elsewhere["locations"][0]["physicalLocation"]["artifactLocation"] == {"uri": "file:///elsewhere/a.py"}
    assert first["message"]["text"] == "Reads a device value, 1 a step. Read it every N steps."


def test_a_site_keeps_its_name_when_lines_are_added_above_it() -> None:
    one, moved = site(f"{ROOT}/a.py", 20), site(f"{ROOT}/a.py", 31)
    assert (
        fingerprint(one, "item", ROOT) == fingerprint(moved, "item", ROOT) == fingerprint(site("a.py", 1), "item", ROOT)
    )
    others = [site(f"{ROOT}/b.py", 20), site(f"{ROOT}/a.py", 20, text="x.item()")]
    assert len({fingerprint(s, "item", ROOT) for s in (one, *others)} | {fingerprint(one, "cpu", ROOT)}) == 4


def test_github_commands_escape_what_would_end_them() -> None:
    odd = finding(site=site("a,b:c.py", 3), title="50 % slow\nsecond line", count=2.0)
    assert render_github(diagnosis(odd), ROOT) == (
        "::error file=a%2Cb%3Ac.py,line=3,title=host-sync/item::"
        "50 %25 slow%0Asecond line, 2 a step. Read it every N steps.\n"
    )


def test_github_levels() -> None:
    text = render_github(diagnosis(RACE, PLACELESS, leave_alone=(finding(severity=Severity.INFO),)), ROOT)
    assert [line.split(" ")[0].split("::")[1] for line in text.splitlines()] == ["error", "error", "notice"]


def test_the_library_that_reads_is_named() -> None:
    library = Frame(file="/site-packages/torch/optim/lbfgs.py", line=9, function="step", owner="torch")
    assert "(inside torch, lbfgs.py)" in render_github(diagnosis(finding(site=site("a.py", 1, library=library))))


def test_paths() -> None:
    assert relative_path(f"{ROOT}/a/b.py", ROOT) == "a/b.py"
    assert relative_path("/other/b.py", ROOT) == "/other/b.py"
    assert relative_path("a\\b.py", ROOT) == "a/b.py"
    assert relative_path("In[3]", ROOT) == "In[3]"
