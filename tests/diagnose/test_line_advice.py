"""Advice for a line as people write it: what must be in it, and what would be wrong there."""

from __future__ import annotations

import pytest

from perfdoctor.diagnose.advice import advice_for_kind
from perfdoctor.diagnose.line_advice import advice_at
from perfdoctor.record.capture import Frame, Site
from perfdoctor.record.sync_kinds import KINDS


def advice(kind: str, line: str, library: str = "") -> str:
    frame = Frame(file="train.py", line=3, function="f", owner="user")
    made_by = Frame(file=library, line=9, function="g", owner="torch") if library else None
    found = advice_at(kind, Site(frame=frame, library=made_by, text=line))
    return "\n".join((found.text, *found.lines))


@pytest.mark.parametrize(
    ("kind", "line", "said"),
    [
        ("item", "history.append(loss.item())", "every N steps"),
        ("item", "correct += (out.argmax(1) == y).sum().item()", "every N steps"),
        ("item", "num_correct = hits.sum().item()", "every N steps"),
        ("item", "pos = [torch.arange(int(n)) for n in lens]", ".tolist()"),
        ("item", "values = {k: v.item() for k, v in losses.items()}", ".tolist()"),
        ("item", "x = torch.zeros(int(n), 4)", "host"),
        ("item", "longest = torch.zeros(lens.max(), device=device)", "host"),
        ("item", "max_len = lens.max().item()", "host"),
        ("tolist", "parts = torch.split(x, lens.tolist())", "host"),
        ("tolist", "chosen = scores.topk(5).indices.tolist()", "gather"),
        ("tolist", "rows += out.tolist()", "every N steps"),
        ("cpu", "packed = pack_padded_sequence(x, lens.cpu(), batch_first=True)", "collate"),
        ("cpu", "best = {k: v.cpu() for k, v in model.state_dict().items()}", "clone"),
        ("cpu", "host = h.cpu().numpy()", "pinned"),
        ("item", "obs, reward, done, _ = env.step(action.item())", "environments"),
        ("tensor_to_bool", "while error > 0.1:", "turns"),
        ("tensor_to_bool", "assert torch.isfinite(loss)", "_assert_async"),
        ("tensor_to_bool", "if torch.isnan(loss) or torch.isinf(loss):", "torch.where"),
        ("tensor_to_bool", "if not torch.isfinite(p.grad).all():", "torch.where"),
        ("tensor_to_bool", "if loss != loss:", "isfinite"),
        ("tensor_to_bool", "if keep.sum() == 0:", "masked sum"),
        ("tensor_to_bool", "best = min(best, loss)", "torch.minimum"),
        ("tensor_to_bool", "if p.grad.norm() > 1.0:", "clip_grad_norm_"),
        ("tensor_to_bool", "if loss > limit:", "every N steps"),
        ("boolean_mask", "loss = F.cross_entropy(out[keep], y[keep])", "multiply by the mask"),
        ("boolean_mask", "x[x < 0] = floor", "torch.where(mask, value, x)"),
        ("boolean_mask", "x[mask] *= scale", "torch.where(mask, value, x)"),
        ("boolean_mask", "loss.backward()", "forward"),
        ("boolean_mask", "same = a[mask] == b[mask]", "multiply by the mask"),
        ("h2d_blocking", "w = torch.tensor([1.0, 2.0], device=out.device)", "register_buffer"),
        ("h2d_blocking", "returns = torch.tensor(rewards, device=device)", "torch.stack"),
        ("h2d_blocking", "x, y = x.to(device), y.to(device)", "non_blocking=True"),
        ("h2d_blocking", "rows = x[[1, 2, 3]]", "index"),
        ("h2d_blocking", "x[0, 0] = 1.0", "masked_fill_"),
        ("h2d_blocking", "order = torch.randperm(64).to(device)", "randperm(n, device=device)"),
        ("h2d_pageable", "x = data[order[i : i + 64]]", "index"),
        ("h2d_pageable", "x, y = data[i].to(device), labels[i].to(device)", "pin_memory=True"),
        ("h2d_pageable", "batch = {k: v.cuda() for k, v in batch.items()}", "pin_memory=True"),
        ("h2d_pageable", "obs = torch.from_numpy(obs).to(device)", "pin_memory()"),
        ("other_sync", "counts = torch.histc(grad, 100)", "min="),
    ],
)  # fmt: skip
def test_the_advice_fits_the_line(kind: str, line: str, said: str) -> None:
    assert said in advice(kind, line)


@pytest.mark.parametrize(
    ("kind", "line", "wrong"),
    [
        ("tensor_to_bool", "while error > 0.1:", "isfinite"),
        ("tensor_to_bool", "if loss > limit:", "isfinite"),
        ("h2d_blocking", "w = torch.tensor([1.0, 2.0], device=device)", "x is pinned"),
        ("h2d_blocking", "x = x.to(device)", "register_buffer"),
        ("h2d_pageable", "x = data[order]", "DataLoader"),
        ("tolist", "parts = torch.split(x, lens.tolist())", "sum detached"),
        ("item", "n_correct = hits.sum().item()", "collate"),
    ],
)
def test_and_says_nothing_that_does_not(kind: str, line: str, wrong: str) -> None:
    assert wrong not in advice(kind, line)


def test_a_library_s_read_is_the_library_s() -> None:
    scheduler = "/usr/lib/python3/site-packages/torch/optim/lr_scheduler.py"
    assert "scheduler.step" in advice("item", "scheduler.step(loss)", scheduler)
    assert "scheduler.step" in advice("optimizer_internal", "scheduler.step(loss)", scheduler.replace("/", "\\"))
    assert "average" in advice("h2d_pageable", "ema.update_parameters(model)", "site-packages/torch/optim/swa_utils.py")
    assert advice("torchmetrics", "while metric(x, y) > 0:", "site-packages/torchmetrics/metric.py").startswith(
        KINDS["torchmetrics"].advice
    )


@pytest.mark.parametrize("kind", KINDS)
def test_where_no_line_is_known_the_kind_decides(kind: str) -> None:
    frame = Frame(file="train.py", line=3, function="f", owner="user")
    for site in (None, Site(frame=frame)):
        assert advice_at(kind, site) == advice_for_kind(kind)
