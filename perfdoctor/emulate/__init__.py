"""A CUDA device in name only: run the loop with no GPU and see every sync."""

from perfdoctor.emulate.device import EmulatedDevice, emulate_cuda
from perfdoctor.emulate.stand_ins import stand_in

__all__ = ["EmulatedDevice", "emulate_cuda", "stand_in"]
