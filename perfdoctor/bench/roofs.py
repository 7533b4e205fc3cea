"""The roofs of a machine: what was measured here, and the vendor's figure where one is known by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from perfdoctor.bench.result import BenchResult, BenchRow


@dataclass(frozen=True, slots=True, kw_only=True)
class VendorPeak:
    """Dense figures, without sparsity, and the document that they stand in."""

    source: str
    bytes_per_s: float
    flops_per_s: dict[str, float]
    """by dtype; float32 without TF32"""


_HOPPER_SXM = {"float32": 67e12, "bfloat16": 989.5e12}
_AMPERE = {"float32": 19.5e12, "bfloat16": 312e12}
# By the name that the driver gives. A GPU that is not here is held against the best measured alone.
_VENDOR_PEAKS = {
    "NVIDIA H200": VendorPeak(
        source="NVIDIA H200 data sheet (SXM; bfloat16: half of the figure with sparsity)",
        bytes_per_s=4.8e12,
        flops_per_s=_HOPPER_SXM,
    ),
    "NVIDIA H100 80GB HBM3": VendorPeak(
        source="NVIDIA H100 data sheet (SXM; bfloat16: half of the figure with sparsity)",
        bytes_per_s=3.35e12,
        flops_per_s=_HOPPER_SXM,
    ),
    "NVIDIA A100-SXM4-80GB": VendorPeak(
        source="NVIDIA A100 data sheet (80 GB SXM)", bytes_per_s=2.039e12, flops_per_s=_AMPERE
    ),
    "NVIDIA A100-SXM4-40GB": VendorPeak(
        source="NVIDIA A100 data sheet (40 GB SXM)", bytes_per_s=1.555e12, flops_per_s=_AMPERE
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofs:
    """The best that was measured in this run, and the vendor's figures if any."""

    bytes_per_s: float | None
    """of device memory, by reading or copying"""
    flops_per_s: dict[str, float]
    """of matrix products, by dtype"""
    vendor: VendorPeak | None


def find_roofs(results: Iterable[BenchResult], device_name: str) -> Roofs:
    """From the rows of `bandwidth` and `matmul`; a roof that was not measured is not there."""
    bandwidth: float | None = None
    flops: dict[str, float] = {}
    for result in results:
        for row in result.rows:
            found = row.measurement
            if result.verb == "bandwidth" and found.name in ("memory read", "memory copy"):
                bandwidth = max(bandwidth or 0.0, found.bytes_per_s or 0.0)
            if result.verb == "matmul" and row.on_roofline and found.flops_per_s is not None:
                flops[row.dtype] = max(flops.get(row.dtype, 0.0), found.flops_per_s)
    return Roofs(bytes_per_s=bandwidth, flops_per_s=flops, vendor=vendor_peak(device_name))


def vendor_peak(device_name: str) -> VendorPeak | None:
    """The vendor's figures of a GPU of exactly this name."""
    return _VENDOR_PEAKS.get(device_name)


def shares(row: BenchRow, verb: str, roofs: Roofs) -> tuple[float | None, float | None]:
    """(of the best measured, of the vendor's figure): of operations where they bind, else of device memory's bytes."""
    found = row.measurement
    if verb == "matmul" and not row.on_roofline:
        return None, None  # wall times, and those of the CPU
    if verb in ("matmul", "mlp") and found.flops_per_s is not None:
        measured = roofs.flops_per_s.get(row.dtype)
        peak = roofs.vendor.flops_per_s.get(row.dtype) if roofs.vendor else None
        return _ratio(found.flops_per_s, measured), _ratio(found.flops_per_s, peak)
    if found.bytes_per_s is None or not (found.name.startswith("memory") or (verb == "norm" and row.on_roofline)):
        return None, None  # L2, H2D and D2H are under roofs of their own
    return _ratio(found.bytes_per_s, roofs.bytes_per_s), _ratio(
        found.bytes_per_s, roofs.vendor.bytes_per_s if roofs.vendor else None
    )


def _ratio(value: float, roof: float | None) -> float | None:
    return value / roof if roof else None
