"""Record one NVTX range with nsys and look for it in the export: some pairs of nvtx and nsys lose every range."""

import shutil
import sqlite3
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

NAME = "perfdoctor-try"
PROGRAM = f"import nvtx\nwith nvtx.annotate({NAME!r}):\n    pass\n"


def call(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        sys.exit(f"{' '.join(command[:2])} gave no answer within 60 s")
    if done.returncode != 0:
        sys.exit(done.stderr.strip() or done.stdout.strip() or f"{command[0]} exited with {done.returncode}")


if shutil.which("nsys") is None:
    print("nsys is not on PATH")
    sys.exit(77)
with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    report = Path(folder) / "try"
    # osrt beside nvtx: nsys 2022.4 spins for ever on a recording without any event, which is what lost ranges leave.
    call("nsys", "profile", "-t", "nvtx,osrt", "-s", "none", "-o", str(report), sys.executable, "-c", PROGRAM)
    if not report.with_suffix(".nsys-rep").exists():
        sys.exit("no importer: nsys left a .qdstrm and no .nsys-rep")
    export = report.with_suffix(".sqlite")
    call("nsys", "export", "--type", "sqlite", "-o", str(export), str(report.with_suffix(".nsys-rep")))
    connection = sqlite3.connect(export)
    query = (
        "SELECT count(*) FROM NVTX_EVENTS e LEFT JOIN StringIds s ON s.id = e.textId WHERE e.text = ? OR s.value = ?"
    )
    try:
        found = connection.execute(query, (NAME, NAME)).fetchone()[0]
    except sqlite3.OperationalError:  # the table is made only when a range arrived
        found = 0
    connection.close()
if not found:
    sys.exit(f"ranges lost: nvtx {version('nvtx')} and this nsys do not go together")
print(f"nvtx {version('nvtx')}: the range arrived in nsys")
