"""Advice for a line as people write it: what must be in it, and what would be wrong there."""

from __future__ import annotations

import pytest

from perfdoctor.diagnose.advice import advice_for_kind
from perfdoctor.diagnose.line_advice import advice_at, written
from perfdoctor.diagnose.line_rules import BY_LIBRARY, BY_LINE
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
        ("tensor_to_bool", "assert (x >= 0).all()", "_assert_async"),
        ("tensor_to_bool", "assert torch.isfinite(loss)", "NonFiniteWatch"),
        ("tensor_to_bool", "if torch.isnan(loss) or torch.isinf(loss):", "NonFiniteWatch"),
        ("tensor_to_bool", "if torch.isnan(x).any():", "torch.where"),
        ("tensor_to_bool", "if not torch.isfinite(p.grad).all():", "NonFiniteWatch"),
        ("tensor_to_bool", "if loss != loss:", "NonFiniteWatch"),
        ("tensor_to_bool", "bad = bool(loss.isnan())", "NonFiniteWatch"),
        ("item", "if math.isnan(loss.item()):", "NonFiniteWatch"),
        ("item", "if not math.isfinite(loss):", "NonFiniteWatch"),
        ("item", "bad += torch.isnan(loss).sum().item()", "NonFiniteWatch"),
        ("cpu", "if np.isnan(loss.detach().cpu().numpy()):", "NonFiniteWatch"),
        ("item", "total += p.grad.norm().item() ** 2", "perfdoctor.grad_norm(params)"),
        ("item", "total += p.grad.data.norm(2).item() ** 2", "perfdoctor.grad_norm(params)"),
        ("item", "total_norm += param_norm.item() ** 2", "perfdoctor.grad_norm(params)"),
        ("item", "total += torch.norm(p.grad).item() ** 2", "perfdoctor.grad_norm(params)"),
        ("item", "norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in params)).item()", "perfdoctor.grad_norm(params)"),
        ("item", "norms = [p.grad.norm().item() for p in params]", "grad_stats"),
        ("item", "largest = max(p.grad.abs().max().item() for p in params)", "grad_stats"),
        ("item", "grad_norm = float(total_norm)", "grad_norm = total_norm.detach()"),
        ("item", "norm = float(norm) ** 0.5", "norm = norm.detach() ** 0.5"),
        ("item", "g = clip_grad_norm_(params, 1.0).item()", "g = clip_grad_norm_(params, 1.0).detach()"),
        ("item", "writer.add_scalar('norm', norm.item(), step)", "    writer.add_scalar('norm', norm.item(), step)"),
        ("item", "running += loss.item()", "running += loss.detach()"),
        ("item", "running += loss.item()", "print(running.item() / 50); running.zero_()"),
        ("item", "running += float(loss)", "running += loss.detach()"),
        ("item", "smooth = 0.9 * smooth + 0.1 * loss.item()", "smooth = 0.9 * smooth + 0.1 * loss.detach()"),
        ("item", "losses.append(loss.detach().cpu().item())", "losses.append(loss.detach())"),
        ("item", "meter.update(loss.item(), x.size(0))", "meter.update(loss.detach(), x.size(0))"),
        ("item", "correct += (out.argmax(1) == y).sum().item()", "correct += (out.argmax(1) == y).sum().detach()"),
        ("item", "return loss.item()", "return loss.detach()"),
        ("item", "if loss.item() < 0.1:", "decide on the device"),
        ("item", "wandb.log({'loss': loss.item()})", "    wandb.log({'loss': loss.item()})"),
        ("item", "wandb.log({'loss': loss.item(),", "    ..."),
        ("item", "self.log('loss', loss.item())", "self.log('loss', loss)"),
        ("item", "perplexity = math.exp(loss.item())", "torch.exp"),
        ("item", "value = torch.log(x).sum().item()", "value = torch.log(x).sum().detach()"),
        ("print_tensor", "print(loss)", "    print(loss)"),
        ("format_tensor", 'text = f"{loss:.3f}"', '    text = f"{loss:.3f}"'),
        ("cpu", "outputs.append(out.detach().cpu())", "end of the epoch"),
        ("cpu", "score = f1_score(y.cpu(), out.argmax(1).cpu())", "torch on the device"),
        ("tensor_to_bool", "if loss < best:", "torch.minimum"),
        ("tensor_to_bool", "if total_norm > 10:", "clip_grad_norm_"),
        ("h2d_pageable", "x = x.to(device, non_blocking=True)", "not pinned"),
        ("tensor_to_bool", "if keep.sum() == 0:", "masked sum"),
        ("tensor_to_bool", "best = min(best, loss)", "torch.minimum"),
        ("tensor_to_bool", "if p.grad.norm() > 1.0:", "clip_grad_norm_"),
        ("tensor_to_bool", "if loss > limit:", "every N steps"),
        ("boolean_mask", "loss = F.cross_entropy(out[keep], y[keep])", "ignore_index"),
        ("boolean_mask", "hard = out[keep]", "multiply by the mask"),
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
        ("item", "total += p.grad.norm().item() ** 2", "sum detached"),
        ("item", "x = self.norm(x).mean().item()", "the norm"),
        ("item", "x = layer_norm(x).sum().item()", "the norm"),
        ("item", "value = loss.item()", "sum detached"),
        ("item", "value = torch.log(x).sum().item()", "log every"),
        ("print_tensor", "print(loss)", "sum detached"),
        ("h2d_pageable", "x = x.to(device, non_blocking=True)", "and copy with"),
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


def test_what_torch_reads_for_a_line_is_the_line_s() -> None:
    graph, ops = "site-packages/torch/autograd/graph.py", "site-packages/torch/_ops.py"
    assert "forward pass" in advice("boolean_mask", "loss.backward()", graph)
    assert "collate" in advice("h2d_pageable", "p = pack_padded_sequence(x, n.cpu())", "torch/nn/utils/rnn.py")
    assert "hits += (a == b).sum().detach()" in advice("item", "hits += (a == b).sum().item()", ops)
    assert "NonFiniteWatch" in advice("tensor_to_bool", "if torch.isnan(loss):", ops)
    # A read inside a module is none of the line that calls it.
    assert advice("item", "x = model(x)", ops).startswith(KINDS["item"].advice)
    clipped = advice(
        "clip_grad_norm", "clip_grad_norm_(p, 5.0, error_if_nonfinite=True)", "torch/nn/utils/clip_grad.py"
    )
    assert "NonFiniteWatch" in clipped


def test_a_comment_is_no_part_of_the_line() -> None:
    assert "running += loss.detach()   #" in advice("item", "running += loss.item()  # the norm, for isnan")
    assert "    print('# 1', loss)" in advice("print_tensor", "print('# 1', loss)  # every step").split("\n")


def test_the_head_of_a_block_is_not_put_under_an_if() -> None:
    lines = advice("format_tensor", "def text(self, **kw): return f'{kw}'")
    assert "def" not in lines
    assert "    ..." in lines


@pytest.mark.parametrize("kind", KINDS)
def test_where_no_line_is_known_the_kind_decides(kind: str) -> None:
    frame = Frame(file="train.py", line=3, function="f", owner="user")
    for site in (None, Site(frame=frame)):
        assert advice_at(kind, site) == advice_for_kind(kind)


@pytest.mark.parametrize("own", ["print(a.item(),", "s += t.item()", "x", "return float(a.b)"])
def test_nothing_of_a_rule_s_own_writing_is_left_in_the_lines(own: str) -> None:
    site = Site(frame=Frame(file="train.py", line=3, function="f"), text=own)
    for rule in (*BY_LINE, *BY_LIBRARY):
        lines = "\n".join(written(line, own) for line in rule.lines)
        assert not any(mark in lines for mark in ("{line}", "{detached", "{target}"))
    assert advice_at("item", site).lines


def test_braces_of_the_user_s_own_line_stay() -> None:
    assert "    print(f'{line} {detached|a} {target}', x)" in advice(
        "print_tensor", "print(f'{line} {detached|a} {target}', x)"
    )
    assert "a[f'{line}'] += x.detach()" in advice("item", "a[f'{line}'] += x.item()")
