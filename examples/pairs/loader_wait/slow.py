"""A convolutional classifier of sounds, fed by worker processes that are too few."""

import os

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

STEPS = int(os.environ.get("STEPS", "60"))
BATCH, SAMPLES, WIDTH = 48, 16_384, 192
device = torch.device("cuda")
torch.manual_seed(19)
torch.backends.cudnn.benchmark = True


class Sounds(Dataset):
    """Noise with an echo, a filter and a gain, drawn anew each time."""

    def __len__(self):
        return STEPS * BATCH

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        sound = rng.standard_normal(SAMPLES, dtype=np.float32)
        spectrum = np.fft.rfft(sound) * np.linspace(1, 0.1, SAMPLES // 2 + 1)
        sound = np.fft.irfft(spectrum).astype(np.float32)
        sound += 0.3 * np.roll(sound, int(rng.integers(1, 2000)))
        return torch.from_numpy(sound * np.float32(rng.uniform(0.5, 2)))[None], index % 35


def layer(before, after, stride):
    conv = nn.Conv1d(before, after, 9, stride, 4, bias=False)
    return nn.Sequential(conv, nn.BatchNorm1d(after), nn.ReLU(inplace=True))


def block(before, after):
    return nn.Sequential(layer(before, after, 4), layer(after, after, 1))


def main():
    model = nn.Sequential(
        block(1, WIDTH), block(WIDTH, 2 * WIDTH), block(2 * WIDTH, 4 * WIDTH), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
        nn.Linear(4 * WIDTH, 35),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    loader = DataLoader(Sounds(), BATCH, num_workers=1, pin_memory=True, persistent_workers=True)
    for sound, label in loader:  # GUILTY: data_wait
        sound, label = sound.to(device, non_blocking=True), label.to(device, non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(sound), label)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(f"last loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
