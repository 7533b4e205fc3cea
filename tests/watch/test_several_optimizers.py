"""A critic that is updated several times on each batch: figures are those of a whole turn of the loop."""

from __future__ import annotations

import pytest
import torch

import perfdoctor


@pytest.mark.parametrize("updates", [1, 5])
def test_a_session_over_a_critic_and_a_generator(updates: int) -> None:
    with perfdoctor.emulate_cuda():
        critic = torch.nn.Linear(4, 1).to("cuda")
        generator = torch.nn.Linear(4, 4).to("cuda")
        of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
        of_generator = torch.optim.AdamW(generator.parameters(), lr=0.1)
        batches = [torch.randn(8, 4) for _ in range(24)]
        with perfdoctor.watch(warmup=2, active=4) as session:
            for batch in session.batches(batches):
                real = batch.pin_memory().to("cuda", non_blocking=True)
                for _ in range(updates):
                    loss = critic(generator(real).detach()).mean() - critic(real).mean()
                    of_critic.zero_grad()
                    loss.backward()
                    of_critic.step()
                    loss.item()
                loss = -critic(generator(real)).mean()
                of_generator.zero_grad()
                loss.backward()
                of_generator.step()
    diagnosis = session.diagnosis()
    reads = [finding for finding in diagnosis.findings if finding.kind == "item"]
    assert [finding.count for finding in reads] == [updates]
    assert diagnosis.samples_per_step == 8
    notes = [note.text for note in diagnosis.notes if note.code == "several-optimizers"]
    assert notes == [f"2 optimizers: updates a step are {updates} of SGD and 1 of AdamW"]
