"""Record NVTX ranges with nsys and look for them in the export: some pairs of nvtx and nsys lose every range.

One range as anybody writes it, and the two kinds that perfdoctor.annotate makes, in its own domain.
"""

import shutil
import sqlite3
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

NAMES = ("perfdoctor-try", "perfdoctor-try pushed", "perfdoctor-try started")
PROGRAM = f"""
import nvtx
with nvtx.annotate({NAMES[0]!r}):
    pass
with nvtx.annotate({NAMES[1]!r}, domain="perfdoctor"):
    pass
nvtx.end_range(nvtx.start_range({NAMES[2]!r}, domain="perfdoctor"))
"""


def call(*command: str, times: int = 1) -> None:
    """Run it, again where it fails, `times` in all."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        sys.exit(f"{' '.join(command[:2])} gave no answer within 60 s")
    if done.returncode != 0 and times > 1:
        call(*command, times=times - 1)
    elif done.returncode != 0:
        sys.exit(done.stderr.strip() or done.stdout.strip() or f"{command[0]} exited with {done.returncode}")


if shutil.which("nsys") is None:
    print("nsys is not on PATH")
    sys.exit(77)
with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    report = Path(folder) / "try"
    # nsys 2022.4 often spins for ever where it may not trace context switches (in containers), and on a recording
    # without any event, which is what lost ranges leave: hence --cpuctxsw, and osrt beside nvtx.
    flags = ("-t", "nvtx,osrt", "--sample=none", "--cpuctxsw=none")
    # It also fails to start anything about once in 50 runs (nsys_start.py).
    call("nsys", "profile", *flags, "-o", str(report), sys.executable, "-c", PROGRAM, times=3)
    if not report.with_suffix(".nsys-rep").exists():
        sys.exit("no importer: nsys left a .qdstrm and no .nsys-rep")
    export = report.with_suffix(".sqlite")
    call("nsys", "export", "--type", "sqlite", "-o", str(export), str(report.with_suffix(".nsys-rep")))
    connection = sqlite3.connect(export)
    query = (
        "SELECT COALESCE(e.text, s.value) FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId "
        "WHERE e.end IS NOT NULL"
    )
    try:
        found = {row[0] for row in connection.execute(query)}
    except sqlite3.OperationalError:  # the table is made only when a range arrived
        found = set()
    connection.close()
lost = [name for name in NAMES if name not in found]
if lost:
    sys.exit(f"ranges lost: nvtx {version('nvtx')} and this nsys do not go together ({len(lost)} of {len(NAMES)} lost)")
print(f"nvtx {version('nvtx')}: the ranges arrived in nsys")
