"""Lightning reads a logged value after the step: the line of `self.log` is what the user can change."""

import sys
import textwrap

import pytest
import torch

pl = pytest.importorskip("pytorch_lightning")

from perfdoctor.record.call_site import SiteTable  # noqa: E402
from perfdoctor.watch.logged_metrics import LoggedMetrics  # noqa: E402
from perfdoctor.watch.patches import Patches  # noqa: E402

SCRIPT = """
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"twice": loss * 2}, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


@pytest.mark.filterwarnings("ignore")
def test_a_read_is_charged_to_the_line_that_logged(tmp_path, monkeypatch):
    file = tmp_path / "net.py"
    file.write_text(textwrap.dedent(SCRIPT))
    space = {"pl": pl, "torch": torch, "__name__": "net"}
    exec(compile(file.read_text(), str(file), "exec"), space)
    table, patches = SiteTable(), Patches()
    metrics = LoggedMetrics(table)
    found = set()
    item = torch.Tensor.item

    def read(tensor):
        site = metrics.site_of(sys._getframe(1))
        if site is not None:
            found.add(table.sites[site].frame.line)
        return item(tensor)

    before = pl.LightningModule.log
    metrics.install(patches)
    monkeypatch.setattr(torch.Tensor, "item", read)
    try:
        trainer = pl.Trainer(
            max_steps=3, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(space["Net"](), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(12, 4)), 4))
    finally:
        patches.undo()
    assert found == {9, 10}
    assert pl.LightningModule.log is before


def test_lightning_may_be_loaded_late(monkeypatch):
    metrics, patches, log = LoggedMetrics(SiteTable()), Patches(), pl.LightningModule.log
    with monkeypatch.context() as absent:
        absent.delitem(sys.modules, "pytorch_lightning.core.module")
        absent.delitem(sys.modules, "lightning.pytorch.core.module", raising=False)
        metrics.install(patches)
        assert not patches
    metrics.install(patches)
    noting = pl.LightningModule.log
    metrics.install(patches)
    assert log is not noting is pl.LightningModule.log  # watched once, however often it is asked for
    patches.undo()
    metrics.forget()
    assert pl.LightningModule.log is log
