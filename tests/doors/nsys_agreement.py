"""Two recordings of one script, by nsys and by torch.profiler: the same findings, counts and milliseconds?

python tests/doors/nsys_agreement.py run.sqlite profiler.perfdoctor
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from perfdoctor.diagnose import diagnose
from perfdoctor.diagnose.finding import Diagnosis, Finding
from perfdoctor.record.load import load_capture

MOST = 0.10
FLOOR_NS = 100_000  # below a tenth of a millisecond ten per cent is noise

Key = tuple[str, str]


def keyed(diagnosis: Diagnosis) -> dict[Key, Finding]:
    return {
        (f.code, f"{f.site.frame.file.rsplit('/', 1)[-1]}:{f.site.frame.line}" if f.site else ""): f
        for f in diagnosis.findings
    }


def numbers(diagnosis: Diagnosis) -> Iterator[tuple[str, float | None]]:
    """What must agree within ten per cent, in ns."""
    yield "step", diagnosis.step.median_ns if diagnosis.step else None
    yield "window", diagnosis.accounting.window_ns if diagnosis.accounting else None
    yield "busy", diagnosis.accounting.busy_ns if diagnosis.accounting else None
    for key, finding in sorted(keyed(diagnosis).items()):
        name = " ".join(key)
        yield f"{name}: host blocked", finding.host_blocked_ns
        yield f"{name}: GPU idle", finding.gpu_idle_ns
        yield f"{name}: comes back", finding.headroom.mid_ns if finding.headroom else None


def compare(nsys: Diagnosis, profiler: Diagnosis) -> Iterator[tuple[str, bool]]:
    """(what was compared, whether it agrees)."""
    one, other = keyed(nsys), keyed(profiler)
    yield f"findings: {sorted(one)} and {sorted(other)}", one.keys() == other.keys()
    for key in sorted(one.keys() & other.keys()):
        counts = one[key].count, other[key].count
        yield f"{' '.join(key)}: count {counts[0]:g} and {counts[1]:g}", abs(counts[0] - counts[1]) < 1e-9
    theirs = dict(numbers(profiler))
    for name, value in numbers(nsys):
        if name in theirs:
            yield _pair(name, value, theirs[name])


def _pair(name: str, one: float | None, other: float | None) -> tuple[str, bool]:
    if one is None or other is None:
        return f"{name}: {one} and {other}", one is other
    return f"{name}: {one / 1e6:.3f} and {other / 1e6:.3f} ms", abs(one - other) <= max(MOST * abs(other), FLOOR_NS)


def main(nsys: str, profiler: str) -> int:
    rows = list(compare(diagnose(load_capture(nsys)), diagnose(load_capture(profiler))))
    for text, agrees in rows:
        print("ok  " if agrees else "OFF ", text)
    return 0 if all(agrees for _, agrees in rows) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
