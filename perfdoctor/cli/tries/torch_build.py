"""Which torch is here, and does it see a GPU."""

import torch

build = (
    f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"
)
seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(seen)}))
print(f"{torch.__version__}, {build} build, " + (f"sees {seen} x {names}" if seen else "sees no GPU"))
