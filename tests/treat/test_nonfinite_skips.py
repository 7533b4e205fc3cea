"""Bad updates that are skipped: on the device where that was asked, and by a GradScaler, which is no alarm."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from nonfinite_loops import model_on, spoil

from perfdoctor.errors import NonFiniteError, TreatmentRefused, UsageError
from perfdoctor.treat.nonfinite import NonFiniteWatch


@pytest.fixture
def device(computing_device: str) -> str:
    return computing_device


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_skipped_step_changes_nothing(device: str, kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Bitwise: training with a bad step in between ends where training without that step ends."""

    def parameters(bad: bool) -> list[Any]:
        model = model_on(device)
        optimizer = kind(model.parameters(), lr=0.05, fused=True)
        generator = torch.Generator().manual_seed(3)
        with NonFiniteWatch(model, optimizer, on_hit="skip") as watch:
            for step in range(6):
                if step == 3 and not bad:
                    continue
                x = torch.randn(8, 3, generator=generator) if step != 3 else torch.full((8, 3), math.nan)
                model(x.to(device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                watch.step()
        assert not hasattr(optimizer, "found_inf")
        assert [(hit.step, hit.skipped) for hit in watch.hits] == ([(4, True)] if bad else [])
        states = [value for state in optimizer.state.values() for value in state.values()]
        return [value.detach().cpu() for value in (*model.parameters(), *states) if value is not None]

    with caplog.at_level(logging.WARNING, "perfdoctor"):
        for skipped, clean in zip(parameters(True), parameters(False), strict=True):
            assert torch.equal(skipped, clean)
    assert "step 4: the gradient of 0.weight" in caplog.text
    assert "skipped" in caplog.text


def test_a_bad_loss_skips_the_update_too(device: str) -> None:
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with NonFiniteWatch(model, on_hit="skip") as watch:
        model(torch.ones(2, 3).to(device)).sum().backward()
        watch.check(torch.full((), math.nan, device=device))
        optimizer.step()
        watch.step()
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        optimizer.step()
        watch.step()
        assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_what_cannot_skip_is_refused(device: str) -> None:
    model = model_on(device)
    plain = torch.optim.Adam(model.parameters())
    with pytest.raises(TreatmentRefused, match=r"Adam cannot skip an update on the device\. Make it with fused=True"):
        NonFiniteWatch(model, plain, on_hit="skip")
    model(torch.ones(2, 3).to(device)).sum().backward()
    with NonFiniteWatch(model, on_hit="skip"), pytest.raises(TreatmentRefused, match="fused=True"):
        plain.step()
    fused = torch.optim.Adam(model.parameters(), fused=True)
    with NonFiniteWatch(model, on_hit="skip"), pytest.raises(TreatmentRefused, match="closure"):
        fused.step(lambda: 0.0)
    with pytest.raises(UsageError, match="put the loop inside `with watch:`"):
        NonFiniteWatch(model, fused, on_hit="skip").check(torch.ones(()))


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_are_no_alarm(device: str, fused: bool) -> None:
    model = model_on(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16, growth_interval=100)
    with NonFiniteWatch(model, scaler=scaler) as watch:
        for step in range(1, 6):
            loss = model(torch.ones(4, 3).to(device)).square().mean()
            scaler.scale(loss).backward()
            if step in (2, 3):
                spoil(model[0].weight, math.inf)
            watch.check(loss)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            watch.step()
        assert scaler.get_scale() == 2.0**14  # it has skipped two
        assert watch.hits == ()
        # What goes bad after the scaler has looked is a real update with it.
        loss = model(torch.ones(4, 3).to(device)).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        spoil(model[2].weight, math.nan)
        scaler.step(optimizer)
        scaler.update()
        with pytest.raises(NonFiniteError, match=r"step 6: the gradient of 2\.weight"):
            watch.step()


def test_a_scaler_by_hand(device: str) -> None:
    model = model_on(device)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    watch = NonFiniteWatch(model, scaler=scaler)
    for scale in (4.0, 1.0, 0.5):
        scaler.update(scale) if scale != 4.0 else None
        scaler.scale(model(torch.ones(2, 3).to(device)).sum()).backward()
        spoil(model[0].weight, math.inf)
        watch.check(torch.ones((), device=device))
        if scale >= 1:
            watch.step()
    with pytest.raises(NonFiniteError, match="step 3"):  # the scale has collapsed: skipping does not help any more
        watch.step()
    watch.check(torch.full((), math.inf, device=device))
    with pytest.raises(NonFiniteError, match="step 4: the loss"):
        watch.step()
    assert NonFiniteWatch(model, scaler=torch.amp.GradScaler(device, enabled=False))._scaler is None
