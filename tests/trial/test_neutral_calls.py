"""Loggers and clipping, on a real loop: skipped whole, exchanged, and put back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from suspect_trials import line_of
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils.tensorboard import SummaryWriter

from perfdoctor.trial.call_hooks import CallHooks, Place
from perfdoctor.trial.neutral_clip import NeutralClip
from perfdoctor.trial.neutral_logger import NeutralLogger, logger_calls
from perfdoctor.trial.neutraliser import OFF


def test_a_logger_is_not_called_and_what_it_reads_is_not_read(device: Any, tmp_path: Path) -> None:
    writer = SummaryWriter(str(tmp_path))
    written: list[Any] = []
    writer._get_file_writer().add_summary = lambda summary, *_: written.append(summary.value[0].simple_value)  # type: ignore[method-assign, union-attr]
    hooks = CallHooks()
    line = line_of(__file__, "logged")
    neutral = NeutralLogger(Place(file=__file__, first=line, last=line))
    before = SummaryWriter.add_scalar, torch.Tensor.item
    neutral.install(hooks)
    hooks.install()
    try:
        for step in range(12):
            if step == 4:
                assert neutral.refusal() == ""
                neutral.observing = False
                neutral.switch("gone")
            if step == 8:
                neutral.switch(OFF)
            value = torch.tensor(float(step)).cuda()
            hits = len(device.log.hits)
            writer.add_scalar("loss", value, step)  # logged
            crossed = len(device.log.hits) - hits
            assert (crossed == 0) == (5 <= step < 8), step  # step 4 begins the block: still written
            neutral.stepped()
    finally:
        hooks.remove()
        writer.close()
    assert written == [0.0, 1.0, 2.0, 3.0, 4.0, 8.0, 9.0, 10.0, 11.0]
    assert (SummaryWriter.add_scalar, torch.Tensor.item) == before


def test_the_loggers_that_are_loaded_are_known() -> None:
    import pytorch_lightning

    known = {(owner, name) for owner, name in logger_calls()}
    assert (SummaryWriter, "add_histogram") in known
    assert (pytorch_lightning.LightningModule, "log") in known
    assert (pytorch_lightning.LightningModule, "log_dict") in known
    assert not [name for _, name in known if name == "logger"]


def test_a_loop_that_does_not_clip_has_no_clip_to_exchange() -> None:
    model = nn.Linear(3, 3)
    inner = clip_grad._get_total_norm
    neutral = NeutralClip([torch.optim.SGD(model.parameters(), lr=0.1)], "no train_step")
    neutral.install(CallHooks())
    assert clip_grad._get_total_norm is not inner
    assert neutral.refusal() == "no train_step"
    assert clip_grad._get_total_norm is inner
    neutral.remove()


def test_clip_is_ours_while_on_and_torchs_again_after(device: Any) -> None:
    model = nn.Linear(3, 3).to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    neutral = NeutralClip([optimizer], "no train_step")
    neutral.install(CallHooks())
    cells = [cell.cell_contents for cell in nn.utils.clip_grad_norm_.__closure__ or ()]

    def clip() -> float:
        optimizer.zero_grad()
        model(torch.ones(2, 3).cuda()).square().sum().backward()
        return float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))

    theirs = clip()
    assert neutral.refusal() == ""
    neutral.switch("clip")
    assert [cell.cell_contents for cell in nn.utils.clip_grad_norm_.__closure__ or ()] != cells
    assert clip() == pytest.approx(theirs, rel=1e-5)
    neutral.switch(OFF)
    assert [cell.cell_contents for cell in nn.utils.clip_grad_norm_.__closure__ or ()] == cells
    neutral.switch("clip")
    neutral.switch("clip")
    neutral.remove()
    assert [cell.cell_contents for cell in nn.utils.clip_grad_norm_.__closure__ or ()] == cells
