"""Any recording to a Capture. The format is told by the file's content, not by its name."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

from perfdoctor.errors import BrokenTraceError, CaptureError, NotATraceError
from perfdoctor.record.byte_stream import GZIP_MAGIC, as_utf8
from perfdoctor.record.capture import Capture, is_capture, read_capture
from perfdoctor.record.event_halves import Progress
from perfdoctor.record.kineto import read_kineto
from perfdoctor.record.nsys import read_nsys
from perfdoctor.record.sites_file import join_beside
from perfdoctor.record.sqlite_tables import SQLITE_MAGIC

_EXPECTED = (
    "Expected a torch.profiler trace (.json, .json.gz), an Nsight Systems SQLite export or a saved perfdoctor capture."
)
_EXPORT_TIMEOUT_S = 1800
# What a report of `nsys profile` begins with: the name of its container, in the first bytes of every version seen.
_REPORT_MARKS = (b"QDSTRM", b"NVIDIA Tegra Profiler", b"nsys-rep", b"Nsight Systems")
_REPORT_NAMES = (".nsys-rep", ".qdrep", ".qdstrm")


def load_capture(path: str | os.PathLike[str], progress: Progress | None = None) -> Capture:
    """Read a recording of torch.profiler, Nsight Systems or perfdoctor.

    `progress` is called with the fraction done, 0 to 1, while a torch.profiler trace is read.

    Raises:
        NotATraceError: the file is something else, or empty; the message says what to do.
        UnsupportedTraceError: a recording of a kind or a version that is not read.
        BrokenTraceError: it is damaged past repair.
    """
    file = Path(path)
    try:
        return replace(_load(file, progress), path=str(path))
    except OSError as error:
        raise CaptureError(f"{path}: cannot be read ({error.strerror or error})") from error


def _load(file: Path, progress: Progress | None) -> Capture:
    if file.is_dir():
        raise NotATraceError(f"{file}: a folder. Name the trace files in it. {_EXPECTED}")
    if file.exists() and not file.is_file():
        raise NotATraceError(f"{file}: a pipe or a device, which cannot be read twice. Write it to a file first.")
    with file.open("rb") as opened:
        head = opened.read(4096)
    if not head:
        raise NotATraceError(f"{file}: the file is empty. {_EXPECTED}")
    if is_capture(head):
        return read_capture(file)
    if head.startswith(SQLITE_MAGIC):
        return join_beside(read_nsys(file), file)
    if head.startswith(GZIP_MAGIC):
        return _load_gzip(file, progress)
    if _may_be_json(head):
        return read_kineto(file, progress)
    if _is_report(file, head):
        return _export_and_load(file)
    raise NotATraceError(f"{file}: no trace. {_EXPECTED}")


def _may_be_json(head: bytes) -> bool:
    return as_utf8(head).lstrip()[:1] in (b"{", b"[")


def _load_gzip(file: Path, progress: Progress | None) -> Capture:
    with file.open("rb") as opened:
        try:
            head = zlib.decompressobj(wbits=31).decompress(opened.read(1 << 16), 4096)
        except zlib.error as error:
            raise BrokenTraceError(f"{file}: the gzip file is damaged from its start ({error})") from error
    if not head:
        raise NotATraceError(f"{file}: an empty gzip file. {_EXPECTED}")
    if head.startswith(SQLITE_MAGIC) or is_capture(head):
        raise NotATraceError(f"{file}: this kind of recording is read uncompressed. Run: gunzip --keep {file}")
    if head.startswith(GZIP_MAGIC):
        raise NotATraceError(f"{file}: gzip inside gzip. Unpack it once: gzip -dc {file} > {file.stem}")
    if not _may_be_json(head):
        raise NotATraceError(f"{file}: gzip of something that is no JSON. {_EXPECTED}")
    return read_kineto(file, progress)


def _is_report(file: Path, head: bytes) -> bool:
    return file.suffix in _REPORT_NAMES or any(mark in head for mark in _REPORT_MARKS)


def _export_and_load(report: Path) -> Capture:
    """Export a report of `nsys profile` into a temporary folder and read that."""
    command = f"nsys export --type=sqlite --output={report.with_suffix('.sqlite')} {report}"
    nsys = shutil.which("nsys")
    if nsys is None:
        raise NotATraceError(
            f"{report}: a report of Nsight Systems, not its export, and nsys is not on PATH to make one. Run: {command}"
        )
    with tempfile.TemporaryDirectory(prefix="perfdoctor-") as folder:
        target = Path(folder) / "report.sqlite"
        arguments = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={target}", str(report)]
        try:
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=_EXPORT_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise NotATraceError(f"{report}: nsys export took over {_EXPORT_TIMEOUT_S} s. Run: {command}") from error
        if done.returncode or not target.exists():
            reason = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
            raise BrokenTraceError(f"{report}: nsys could not export it ({reason}). Try: {command}")
        return join_beside(read_nsys(target), report)
