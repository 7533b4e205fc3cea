"""Build a CUDA extension the way torch does (its own version checks included) and call it."""

import ctypes
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

# No torch headers: they are most of a build's minute, and the tool chain is what is tried.
SOURCE = """
#include <cuda_runtime.h>
__global__ void put(int* where, int value) { *where = value; }
extern "C" int answer() {
    int *device, host = 0;
    if (cudaMalloc(&device, sizeof(int)) != cudaSuccess) return -1;
    put<<<1, 1>>>(device, 42);
    cudaMemcpy(&host, device, sizeof(int), cudaMemcpyDeviceToHost);
    cudaFree(device);
    return host;
}
"""

if torch.version.cuda is None:
    print("torch is a CPU build; there is no CUDA to build for")
    sys.exit(77)
with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    source = Path(folder) / "answer.cu"
    source.write_text(SOURCE)
    path = cpp_extension.load(
        "perfdoctor_try", [str(source)], build_directory=folder, is_python_module=False, is_standalone=False
    )
    library = next(Path(folder).glob("perfdoctor_try*.so"), path)
    result = ctypes.CDLL(str(library)).answer() if torch.cuda.is_available() else 42
if result != 42:
    sys.exit(f"built, but the kernel gave {result} and not 42")
print(
    f"built for CUDA {torch.version.cuda}" + (", kernel ran" if torch.cuda.is_available() else "; no GPU to run it on")
)
