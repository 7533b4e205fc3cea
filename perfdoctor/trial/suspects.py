"""From findings to suspects: who can be neutralised, by what, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from perfdoctor.diagnose.finding import Diagnosis, Finding
from perfdoctor.diagnose.tensor_loop import MIN_REPEATS
from perfdoctor.record.capture import Site
from perfdoctor.record.sync_kinds import ALLOCATOR, BLOCKING_COPY, GARBAGE_COLLECTION, HOST_SYNC, PAGEABLE_COPY
from perfdoctor.trial.call_hooks import Place
from perfdoctor.trial.loader_replay import LoaderReplay
from perfdoctor.trial.neutral_anomaly import NeutralAnomaly
from perfdoctor.trial.neutral_clip import NeutralClip
from perfdoctor.trial.neutral_copy import NeutralCopy
from perfdoctor.trial.neutral_garbage import NeutralGarbage
from perfdoctor.trial.neutral_inplace import NeutralInplace
from perfdoctor.trial.neutral_launch import NeutralLaunch
from perfdoctor.trial.neutral_loader import NeutralLoader
from perfdoctor.trial.neutral_logger import NeutralLogger
from perfdoctor.trial.neutral_mask import NeutralMask
from perfdoctor.trial.neutral_norms import NeutralNorms
from perfdoctor.trial.neutral_optimizer import NeutralOptimizer, is_single_tensor
from perfdoctor.trial.neutral_read import NeutralRead
from perfdoctor.trial.neutral_skip import NeutralSkip, NeutralWait, cache_calls, collections, saves
from perfdoctor.trial.neutraliser import Neutraliser

MOST_SUSPECTS = 6
MOST_LEFT_ALONE = 2

_BY_SIZE = frozenset(["boolean_mask", "nonzero", "masked_select", "unique", "one_hot", "bincount", "repeat_interleave"])
_REFUSED = {
    "small-kernels": "only a captured or compiled step removes launches; no train_step is known",
    "fusion": "only compilation fuses kernels; no train_step is known",
    "no-tensor-cores": "another precision is another computation: change it and compare",
    "exposed-communication": "collectives cannot be left out",
    "worker-respawn": "the trial keeps the workers from epoch to epoch: set persistent_workers=True and compare",
    "debug-switches": "it is set for the whole process: change it and compare",
    "unsynchronised-read": "it is an error, not a cost: correct it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A finding on trial. `neutraliser` is None where `refusal` says why there is none."""

    finding: Finding
    neutraliser: Neutraliser | None = None
    refusal: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What neutralisers act on, besides calls."""

    optimizers: tuple[Any, ...]
    replay: LoaderReplay


def choose_suspects(diagnosis: Diagnosis, surroundings: Surroundings) -> list[Suspect]:
    """The suspects, dearest first. How many are tried is the trial's affair: it refuses some once it has seen them.

    A few of those that the diagnosis says to leave alone come along: it is scored on them too.
    """
    idle = sorted(diagnosis.leave_alone, key=lambda finding: -(finding.host_blocked_ns or 0))[:MOST_LEFT_ALONE]
    candidates = [*diagnosis.findings, *idle]
    lines = _loop_lines(_with_known_loops(candidates))
    suspects: list[Suspect] = []
    for finding in candidates:
        suspects.append(_once(_suspect_among(finding, candidates, lines, surroundings), suspects))
    return suspects


_WHOLE = (NeutralLaunch, NeutralClip, NeutralOptimizer, NeutralLoader, NeutralGarbage, NeutralAnomaly)


def _once(suspect: Suspect, others: list[Suspect]) -> Suspect:
    """What acts on the whole loop is tried once, for the dearest of its findings."""
    kind = type(suspect.neutraliser)
    if kind in _WHOLE and any(type(other.neutraliser) is kind for other in others):
        return Suspect(finding=suspect.finding, refusal="it goes with a finding above: the same change removes both")
    return suspect


def _suspect_among(
    finding: Finding, candidates: list[Finding], lines: set[tuple[str, int]], surroundings: Surroundings
) -> Suspect:
    if _in_loop(finding, lines):
        return Suspect(finding=finding, refusal="it is part of the loop on the same line, and tried with it")
    if finding.code == "small-kernels" and any(other.code == "launch-bound" for other in candidates):
        return Suspect(finding=finding, refusal="it goes with the launch-bound finding: the same change removes both")
    known = _with_known_loops([finding, *candidates])[0]
    return replace(suspect_of(known, surroundings), finding=finding)


def suspect_of(finding: Finding, surroundings: Surroundings) -> Suspect:
    """One finding with what neutralises it, or with the reason why nothing does."""
    found = _neutraliser(finding, surroundings)
    if isinstance(found, str):
        return Suspect(finding=finding, refusal=found)
    return Suspect(finding=finding, neutraliser=found)


def _neutraliser(finding: Finding, surroundings: Surroundings) -> Neutraliser | str:
    if finding.code == "launch-bound":
        replay = surroundings.replay
        return NeutralLaunch(surroundings.optimizers, lambda: replay.turn)
    if finding.code == "small-kernels" and surroundings.optimizers:
        return NeutralClip(surroundings.optimizers, _REFUSED[finding.code])
    if finding.code in _REFUSED:
        return _REFUSED[finding.code]
    if finding.code == "data-wait":
        return NeutralLoader(surroundings.replay)
    if finding.code == "anomaly-mode":
        return NeutralAnomaly()
    if finding.code == GARBAGE_COLLECTION and finding.site is None:
        return NeutralGarbage()
    if finding.code == "gradient-loop":
        return _of_loop(finding, surroundings)
    if finding.site is None:
        return "the line is not known"
    make = _at_line(finding, surroundings)
    return make if isinstance(make, str) else make(Place.of(finding.site))


def _at_line(finding: Finding, surroundings: Surroundings) -> Callable[[Place], Neutraliser] | str:
    code, kind = finding.code, finding.kind
    if code == HOST_SYNC:
        return _of_sync(finding, surroundings)
    if code in (PAGEABLE_COPY, BLOCKING_COPY):
        return lambda place: NeutralCopy(place, building=code == BLOCKING_COPY)
    if code == GARBAGE_COLLECTION:
        return lambda place: NeutralSkip(place, collections())
    if code == ALLOCATOR and kind == "empty_cache":
        return lambda place: NeutralSkip(place, cache_calls())
    if code == ALLOCATOR:
        return "what the allocator does follows from the shapes: it cannot be left out"
    return f"nothing is known that neutralises {code}"


def _of_sync(finding: Finding, surroundings: Surroundings) -> Callable[[Place], Neutraliser] | str:
    kind = finding.kind
    if kind in _BY_SIZE:
        replay = surroundings.replay
        return lambda place: NeutralMask(place, lambda: replay.turn)
    if kind == "cuda_synchronize":
        return NeutralWait
    if kind == "save":
        return lambda place: NeutralSkip(place, saves())
    if kind == "logging":
        caller = _caller(finding.site)
        return lambda place: NeutralLogger(place, caller)
    if kind == "ctc_loss":
        return "the read is inside C++: give the lengths as host tensors and compare"
    if kind in ("barrier", "sync_dist"):
        return "every rank meets there: one that left it out would leave the others waiting"
    caller = _caller(finding.site)
    return lambda place: NeutralRead(place, caller)


def _of_loop(finding: Finding, surroundings: Surroundings) -> Neutraliser | str:
    optimizers = list(surroundings.optimizers)
    if finding.kind == "slow_grad_norm_loop" and finding.site is not None:
        return NeutralNorms(Place.of(finding.site), optimizers, _caller(finding.site))
    single = any(is_single_tensor(each) for each in optimizers)
    if single and finding.title.startswith(("a single-tensor optimizer", "small updates")):
        return NeutralOptimizer(optimizers)
    if finding.site is None:
        return "the line of the loop is not known"
    return NeutralInplace(Place.of(finding.site))


def _caller(site: Site | None) -> Place | None:
    if site is None or site.caller is None:
        return None
    return Place(file=site.caller.file, first=site.caller.line, last=site.caller.line)


def _with_known_loops(findings: list[Finding]) -> list[Finding]:
    """A loop of norms whose line the recording does not tell is where the many reads are."""
    reads = [f for f in findings if f.code == HOST_SYNC and f.site is not None and f.count >= MIN_REPEATS]
    if not reads:
        return findings
    site = max(reads, key=lambda f: f.count).site
    return [
        replace(f, site=site) if f.kind == "slow_grad_norm_loop" and f.code == "gradient-loop" and f.site is None else f
        for f in findings
    ]


def _loop_lines(findings: list[Finding]) -> set[tuple[str, int]]:
    return {(f.site.frame.file, f.site.frame.line) for f in findings if f.code == "gradient-loop" and f.site}


def _in_loop(finding: Finding, lines: set[tuple[str, int]]) -> bool:
    """Whether a finding sits on the line of a loop, with which it goes."""
    site = finding.site
    return finding.code != "gradient-loop" and site is not None and (site.frame.file, site.frame.line) in lines
