"""A Diagnosis for code review: SARIF 2.1.0, and GitHub's workflow commands. Pure: Diagnosis -> str.

Rule ids are `<finding code>/<kind>` (`host-sync/item`) and stay as they are; paths below `root` are relative to it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import PurePath
from typing import Any

from perfdoctor.diagnose.finding import Diagnosis, Finding, Severity
from perfdoctor.record.capture import Site
from perfdoctor.version import VERSION

_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.COST: "warning", Severity.MINOR: "note", Severity.INFO: "note"}
_COMMANDS = {Severity.ERROR: "error", Severity.COST: "error", Severity.MINOR: "notice", Severity.INFO: "notice"}


def render_sarif(diagnosis: Diagnosis, root: str = "") -> str:
    """One SARIF run. Findings without a line are left out: SARIF is about places."""
    findings = [finding for finding in (*diagnosis.findings, *diagnosis.leave_alone) if finding.site is not None]
    rules = sorted({rule_id(finding): finding for finding in findings}.items())
    index = {identifier: position for position, (identifier, _) in enumerate(rules)}
    driver = {"name": "perfdoctor", "version": VERSION, "rules": [_rule(name, finding) for name, finding in rules]}
    run: dict[str, Any] = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, index, root) for finding in findings],
    }
    document = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def render_github(diagnosis: Diagnosis, root: str = "") -> str:
    """One workflow command a finding: GitHub shows it at its line in the pull request."""
    lines = []
    for finding in (*diagnosis.findings, *diagnosis.leave_alone):
        place = ""
        if finding.site is not None:
            file, line = relative_path(finding.site.frame.file, root), finding.site.frame.line
            place = f" file={_escape_property(file)},line={line},title={_escape_property(rule_id(finding))}"
        lines.append(f"::{_COMMANDS[finding.severity]}{place}::{escaped(message(finding))}\n")
    return "".join(lines)


def rule_id(finding: Finding) -> str:
    """The stable name of what was found."""
    return f"{finding.code}/{finding.kind}" if finding.kind else finding.code


def message(finding: Finding) -> str:
    """What was found and what to do, in two sentences."""
    text = f"{finding.title[:1].upper()}{finding.title[1:]}, {finding.count:.3g} a step"
    if finding.site is not None and finding.site.library is not None:
        text += f" (inside {finding.site.library.owner}, {PurePath(finding.site.library.file).name})"
    return f"{text}. {_sentence(finding.advice.text)}" if finding.advice is not None else f"{text}."


def relative_path(file: str, root: str) -> str:
    """The path with forward slashes, relative to `root` where it lies below it."""
    path = file
    if root and os.path.isabs(file):
        inside = os.path.relpath(file, root)
        path = file if inside.startswith("..") else inside
    return path.replace("\\", "/")


def fingerprint(site: Site, kind: str, root: str) -> str:
    """A name for the site that survives lines added above it: file, kind and the text of the line."""
    text = "\n".join((relative_path(site.frame.file, root), kind, site.text or str(site.frame.line)))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _rule(identifier: str, finding: Finding) -> dict[str, Any]:
    rule: dict[str, Any] = {
        "id": identifier,
        "shortDescription": {"text": finding.title},
        "defaultConfiguration": {"level": _LEVELS[finding.severity]},
    }
    if finding.advice is not None:
        rule["help"] = {"text": _sentence(finding.advice.text)}
    return rule


def _result(finding: Finding, index: dict[str, int], root: str) -> dict[str, Any]:
    assert finding.site is not None
    identifier = rule_id(finding)
    frame = finding.site.frame
    region: dict[str, Any] = {"startLine": max(frame.line, 1)}
    if finding.site.text:
        region["snippet"] = {"text": finding.site.text}
    place = {"artifactLocation": _artifact(frame.file, root), "region": region}
    return {
        "ruleId": identifier,
        "ruleIndex": index[identifier],
        "level": _LEVELS[finding.severity],
        "message": {"text": message(finding)},
        "locations": [{"physicalLocation": place, "logicalLocations": [{"name": frame.function or "<module>"}]}],
        "partialFingerprints": {"perfdoctorSite/v1": fingerprint(finding.site, finding.kind, root)},
        "properties": {"countPerStep": round(finding.count, 4)},
    }


def _artifact(file: str, root: str) -> dict[str, str]:
    path = relative_path(file, root)
    if os.path.isabs(path):
        return {"uri": PurePath(path).as_uri()}
    from urllib.parse import quote

    return {"uri": quote(path), "uriBaseId": "%SRCROOT%"}


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")


def escaped(text: str) -> str:
    """As the text of a GitHub workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return escaped(text).replace(":", "%3A").replace(",", "%2C")
