"""Why a try of `perfdoctor env` failed, and what to do about it, told from what it printed."""

from __future__ import annotations

# (found in the output, cause, remedy): the first that matches counts, so narrow ones come first.
_CAUSES = (
    ("No module named 'torch'", "torch is not installed", "pip install torch"),
    ("No module named 'triton'", "triton is not installed", "pip install triton (Linux; torch's CUDA builds bring it)"),
    ("No module named 'nvtx'", "nvtx is not installed", "pip install nvtx"),
    ("Python.h", "Python's headers are missing", "install python3-dev (Debian) or python3-devel"),
    ("Failed to find C compiler", "there is no C compiler", "install gcc (Debian: apt-get install build-essential)"),
    ("InvalidCxxCompiler", "there is no C++ compiler", "install g++ (Debian: apt-get install build-essential)"),
    ("No working C++ compiler", "there is no C++ compiler", "install g++ (Debian: apt-get install build-essential)"),
    ("Ninja is required", "ninja is missing", "pip install ninja"),
    ("CUDA_HOME environment variable is not set", "there is no CUDA toolkit", "install nvcc of torch's CUDA version"),
    (
        "mismatches the version that was used to compile",
        "nvcc and torch are of different CUDA versions",
        "install the CUDA toolkit of torch's version (see the rows torch and nvcc), and put it first on PATH",
    ),
    (
        "unsupported GNU version",
        "the host compiler is too new for this nvcc",
        "install an older g++ and set NVCC_CCBIN",
    ),
    (
        "No supported gcc/g++",
        "the host compiler is missing or too new for nvcc",
        "install a g++ that this nvcc supports",
    ),
    ("nvcc: not found", "nvcc is missing", "install the CUDA toolkit of torch's version"),
    ("cannot find -lcuda", "the driver's libcuda.so is not on the linker's path", "run ldconfig, or link libcuda.so.1"),
    ("libcuda.so cannot found", "the driver's libcuda.so is not on the linker's path", "run ldconfig as root"),
    ("forward compatibility was attempted", "driver and CUDA runtime do not fit", "update the driver"),
    (
        "driver version is insufficient",
        "the driver is older than torch's CUDA",
        "update the driver, or install an older build of torch",
    ),
    (
        "no kernel image is available",
        "torch was not built for this GPU",
        "install a build of torch for its architecture",
    ),
    ("out of memory", "the GPU's memory is full", "end what else runs on it (nvidia-smi lists it)"),
    ("no importer", "nsys has no importer, its recordings stay .qdstrm", "install the host part of Nsight Systems"),
    ("importer binary", "nsys has no importer, its recordings stay .qdstrm", "install the host part of Nsight Systems"),
    (
        "ranges lost",
        "NVTX ranges of the nvtx package do not arrive in this nsys",
        "pip install nvtx==0.2.11, or a newer nsys",
    ),
    ("No space left on device", "the disk is full", "free some space, or set TMPDIR to another disk"),
    (
        "Permission denied",
        "a folder cannot be written or run from",
        "look at the rights of the temporary folder (TMPDIR)",
    ),
)


def explain(output: str) -> tuple[str, str]:
    """Cause and remedy for a failed try. What is not known is given by its last line, with no remedy made up."""
    for sign, cause, remedy in _CAUSES:
        if sign in output:
            return cause, remedy
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return (lines[-1][:200] if lines else "it ended without a word"), ""
