"""A text classifier on sentences of all lengths, padded to the longest of each batch; the words seen are counted."""

import os
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

STEPS = int(os.environ.get("STEPS", "60"))
BATCH, WIDTH, DEPTH, WORDS, CLASSES = 96, 768, 8, 20_000, 20
device = torch.device("cuda")
torch.manual_seed(7)
random.seed(7)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 12, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids):
        hidden = self.words(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        kept = (ids != 0).unsqueeze(-1)
        return self.head((hidden * kept).sum(1) / kept.sum(1))


corpus = [[random.randrange(1, WORDS) for _ in range(random.randint(40, 320))] for _ in range(2000)]


def collate(sentences):
    """Truncates, drops words at random, pads: Python lists until here."""
    rows = [torch.tensor([word for word in sentence[:256] if random.random() > 0.05]) for sentence in sentences]
    return pad_sequence(rows, batch_first=True).pin_memory()


model = Classifier().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
labels = torch.randint(0, CLASSES, (BATCH,), device=device)
num_words = 0
for _ in range(STEPS):
    ids = collate(random.sample(corpus, BATCH)).to(device, non_blocking=True)
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(ids), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    num_words += int((ids != 0).sum())  # GUILTY: int
print(f"{int(num_words)} words")
