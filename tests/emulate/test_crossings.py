"""What crosses the border, call by call. The expectations are those counted on an H200 with torch 2.11."""

import itertools
import linecache
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from perfdoctor.emulate import emulate_cuda

_numbers = itertools.count()


def kinds_of(code: str, **names: object) -> list[str]:
    """The kinds that `code` writes to the log, after the names are made."""
    with emulate_cuda() as device:
        space = {"torch": torch, "F": F, "np": np, **names}
        space["x"] = torch.arange(12.0, device="cuda").reshape(3, 4)
        space["h"] = torch.arange(12.0).reshape(3, 4)
        space["hp"] = space["h"].pin_memory()
        space["mask"] = space["x"] > 5
        space["i"] = torch.tensor([0, 2], device="cuda")
        space["one"] = torch.ones((), device="cuda", dtype=torch.int64)
        before = len(device.log.hits)
        name = f"<snippet {next(_numbers)}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        exec(compile(code, name, "exec"), space)
        return [hit.kind for hit in device.log.hits[before:]]


READS = {
    "x.sum().item()": ["item"],
    "float(x.sum())": ["item"],
    "int(x.sum()); complex(x.sum())": ["item", "item"],
    "bool(x.sum())": ["tensor_to_bool"],
    "x.sum() > 3 and None": ["tensor_to_bool"],
    "x[0].tolist()": ["tolist"],
    "x.cpu()": ["cpu"],
    "x.to('cpu')": ["cpu"],
    "x.to(torch.device('cpu'), torch.float64)": ["cpu"],
    "x.to(h)": ["cpu"],
    "x.cpu().numpy()": ["cpu"],
    "x.numpy(force=True)": ["numpy"],
    "f'{x.sum():.3f}'": ["format_tensor"],
    "'%.3f' % x.sum()": ["format_tensor"],
    "print(x)": ["print_tensor"],
    "str(x)": ["format_tensor"],
    "list(range(one))": ["item"],
    "h.copy_(x)": ["cpu"],
    "h.copy_(x, non_blocking=True)": ["cpu"],
    "torch.allclose(x, x + 1)": ["tensor_to_bool"],
    "torch.equal(x, x + 1)": ["tensor_to_bool"],
    "3.0 in x": ["tensor_to_bool"],
    "torch.tensor([one, one])": ["item", "item"],
    "torch.save({'x': x}, __import__('io').BytesIO())": ["save"],
}
SIZES = {
    "x[mask]": ["boolean_mask"],
    "x[mask] = x[mask]": ["boolean_mask", "boolean_mask"],
    "x[mask] = x.sum()": ["boolean_mask"],
    "x.nonzero()": ["nonzero"],
    "torch.where(mask)": ["nonzero"],
    "torch.argwhere(mask)": ["nonzero"],
    "torch.masked_select(x, mask)": ["masked_select"],
    "torch.unique(x)": ["unique"],
    "x.unique_consecutive()": ["unique"],
    "torch.bincount(i)": ["bincount"],
    "F.one_hot(i)": ["one_hot"],
    "x.repeat_interleave(torch.tensor([1, 2, 3], device='cuda'), 0)": ["h2d_blocking", "repeat_interleave"],
    "x[one:]": ["scalar_index"],
    "x[one]": ["scalar_index"],
    "x.to_sparse()": ["nonzero"],
    "torch.sparse_coo_tensor(i[None], x[0, :2], (4,), check_invariants=False).coalesce()": ["unique"],
}
NUMBERS = {  # a tensor where CUDA's kernel takes a number or checks one
    "x.masked_fill(mask, x.sum())": ["item"],
    "x.clone().masked_fill_(mask, x.sum())": ["item"],
    "x.index_fill(0, i, x.sum())": ["item"],
    "torch.normal(x, x)": ["tensor_to_bool"],
    "torch.normal(0.0, x)": ["tensor_to_bool"],
    "torch.distributions.Normal(x, x + 1, validate_args=False).sample()": ["library_read"],
    "torch.where(mask, x, torch.tensor(0.0))": ["h2d_blocking"],
    "x.where(mask, torch.tensor(0.0))": ["h2d_blocking"],
    "torch.linalg.pinv(x)": ["linalg_check"],
    "torch.linalg.lstsq(x.reshape(2, -1), x.reshape(2, -1))": ["linalg_check"],
}
COPIES = {
    "h.to('cuda')": ["h2d_pageable"],
    "h.cuda()": ["h2d_pageable"],
    "h.to('cuda', non_blocking=True)": ["h2d_pageable"],
    "h.to(x.device, torch.float64)": ["h2d_pageable"],
    "h.to(x)": ["h2d_pageable"],
    "s = h.to_sparse(); s.to('cuda')": ["h2d_pageable"],
    "h.type_as(x)": ["h2d_pageable"],
    "h.type(torch.cuda.FloatTensor)": ["h2d_pageable"],
    "hp.to('cuda')": ["h2d_blocking"],
    "hp.cuda(non_blocking=True)": [],
    "hp[1:].to('cuda', non_blocking=True)": [],
    "x.copy_(h)": ["h2d_pageable"],
    "x.copy_(hp, non_blocking=True)": [],
    "torch.tensor(1.0, device='cuda')": ["h2d_blocking"],
    "torch.as_tensor([1.0, 2.0], device='cuda')": ["h2d_blocking"],
    "torch.as_tensor(np.ones(3), device='cuda')": ["h2d_pageable"],
    "torch.tensor([1.0, 2.0]).to('cuda')": ["h2d_blocking"],
    "torch.zeros(3).double().cuda()": ["h2d_blocking"],
    "torch.from_numpy(np.ones(3)).to('cuda')": ["h2d_pageable"],
    "x.new_tensor([1.0])": ["h2d_blocking"],
    "torch.cuda.LongTensor([1, 2])": ["h2d_blocking"],
    "x[0, 0] = 1.0": ["h2d_blocking"],
    "x[i] = 1.0": ["h2d_blocking"],
    "x[[0, 1]]": ["h2d_blocking"],
    "k = torch.tensor([0, 1]); x[k]": ["h2d_pageable"],
    "torch.nn.Linear(2, 2).to('cuda')": ["h2d_pageable", "h2d_pageable"],
}
CLEAN = (
    "torch.where(mask, x, 0.0)", "x.masked_fill(mask, 0.0)", "x[mask] = 1.0", "x[0] = 1.0", "x[i]", "x[1:, ::2]",
    "x[..., None]",
    "F.one_hot(i, 5)", "x.repeat_interleave(2, 0)", "x.argmax(), x.topk(2), x.sort(), x.cumsum(0)",
    "x.isfinite().all()",
    "torch.full((2,), 1.0, device='cuda')", "torch.zeros(2, device='cuda'), torch.randn(2, device='cuda')",
    "torch.zeros_like(x)",
    "torch.zeros_like(h, device='cuda')", "x.new_zeros(3)", "h.pin_memory()", "h.sum().item()", "float(h.sum())",
    "h[h > 3]",
    "x.to('cpu', non_blocking=True)", "hp.copy_(x, non_blocking=True)", "x.to('cuda')", "x.cuda()",
    "x.to(torch.float64)",
    "len(x), x.shape, x.is_cuda, x.device", "torch.multinomial(x.abs() + 1, 2)", "x.quantile(0.5)", "x.std(), x.norm()",
    "torch.equal(x, x)", "torch.cuda.memory_allocated(), torch.cuda.mem_get_info()", "x.detach().clone().contiguous()",
    "F.cross_entropy(x, torch.zeros(3, dtype=torch.int64, device='cuda'))", "torch.as_tensor(x)",
    "torch.nn.Linear(2, 2, device='cuda')",
    "torch.repeat_interleave(x, torch.full((3,), 2, device='cuda'), dim=0, output_size=6)", "x + torch.tensor(2.0)",
    "x.masked_fill(mask, torch.tensor(0.0))", "x.clone().fill_(x.sum())", "torch.normal(x, 1.0)",
    "torch.where(mask, x, x)", "torch.where(mask, 1.0, 0.0)",
    "torch.distributions.Normal(x, x + 1, validate_args=False).rsample()",
    # nothing to copy
    "torch.tensor([], device='cuda')", "h[:0].to('cuda')", "x[:0].cpu(), x[:0].tolist()", "x[[]]", "h[:0].copy_(x[:0])",
    "__import__('copy').copy(x)",
    "torch.nn.utils.rnn.pad_sequence([x[:2], x])", "torch.nn.utils.rnn.pack_sequence([x, x[:2]])",
)  # fmt: skip


@pytest.mark.parametrize(("code", "expected"), [*READS.items(), *SIZES.items(), *NUMBERS.items(), *COPIES.items()])
def test_a_call_that_waits_is_seen_with_its_kind(code: str, expected: list[str]) -> None:
    assert kinds_of(code) == expected


@pytest.mark.parametrize("code", CLEAN)
def test_a_call_that_does_not_wait_is_not_seen(code: str) -> None:
    assert kinds_of(code) == []


def test_each_index_from_the_host_is_a_copy() -> None:
    assert kinds_of("x[[0, 1], [2, 3]]") == ["h2d_blocking"] * 2
    order = torch.tensor([1, 0, 2])
    assert kinds_of("x[order, order]", order=order) == ["h2d_pageable"] * 2
    assert kinds_of("x[order[:2]]", order=order) == ["h2d_pageable"]
    assert kinds_of("x[i, [2, 3]]") == ["h2d_blocking"]


def test_the_line_is_that_of_the_call() -> None:
    with emulate_cuda() as device:
        x = torch.ones(3, device="cuda")
        line = sys._getframe().f_lineno + 1
        x.sum().item()
    (hit,) = device.log.hits
    frame = device.log.sites.sites[hit.site].frame
    assert (frame.file, frame.line) == (__file__, line)


def test_library_calls_are_named_for_what_they_were_asked() -> None:
    code = "p = torch.ones(3, device='cuda', requires_grad=True); p.sum().backward()\n"
    clip = "torch.nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite={})"
    assert kinds_of(code + clip.format(True)) == ["clip_grad_norm"]
    assert kinds_of(code + clip.format(False)) == []
    assert set(kinds_of("torch.distributions.Normal(x, x + 1, validate_args=True)")) == {"distribution_check"}
    assert kinds_of("torch.distributions.Normal(x, x + 1, validate_args=False)") == []


def test_inference_mode_hides_nothing() -> None:
    assert kinds_of("with torch.inference_mode(): (x.argmax(1) == 0).sum().item(); x[mask]; F.linear(x, x)") == [
        "item",
        "boolean_mask",
    ]


def test_backward_of_a_masked_selection_waits_too() -> None:
    assert kinds_of("w = x.clone().requires_grad_(); y = w[mask].sum(); y.backward()") == ["boolean_mask"] * 2


def test_anomaly_mode_reads_are_told_apart() -> None:
    code = (
        "w = x.clone().requires_grad_()\nwith torch.autograd.detect_anomaly(check_nan=True): (w * 2).sum().backward()"
    )
    with pytest.warns(UserWarning, match="Anomaly Detection"):
        assert set(kinds_of(code)) == {"anomaly_check"}


def test_grad_scaler_reads_once_a_step() -> None:
    code = (
        "p = torch.nn.Parameter(torch.ones(3, device='cuda')); opt = torch.optim.SGD([p], 0.1)\n"
        "s = torch.amp.GradScaler('cuda'); s.scale(p.sum()).backward(); s.step(opt); s.update()"
    )
    assert kinds_of(code) == ["grad_scaler"]


@pytest.mark.parametrize("options", ["", "foreach=True", "fused=True", "capturable=True"])
def test_adamw_reads_nothing_from_the_device(options: str) -> None:
    code = "p = torch.nn.Parameter(torch.ones(3, device='cuda')); p.grad = torch.ones_like(p)\n"
    assert kinds_of(code + f"torch.optim.AdamW([p], {options}).step()") == []


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.synchronize()",
        "torch.cuda.current_stream().synchronize()",
        "e = torch.cuda.Event(); e.record(); e.synchronize()",
        "torch.accelerator.synchronize()",
    ],
)
def test_outright_waits(code: str) -> None:
    assert kinds_of(code) == ["cuda_synchronize"]


def test_empty_cache() -> None:
    assert kinds_of("torch.cuda.empty_cache()") == ["empty_cache"]


def test_factorisations_check_on_the_host_unless_told_not_to() -> None:
    assert kinds_of("torch.linalg.inv(torch.eye(3, device='cuda'))") == ["linalg_check"]
    assert kinds_of("torch.linalg.inv_ex(torch.eye(3, device='cuda'))") == []


def test_host_lengths_are_asked_for_as_on_cuda() -> None:
    with pytest.raises(RuntimeError, match="1D CPU int64 tensor"):
        kinds_of("torch.nn.utils.rnn.pack_padded_sequence(x[None], i[:1] + 1, batch_first=True)")


def test_numpy_of_a_device_tensor_is_refused_as_on_cuda() -> None:
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        kinds_of("x.numpy()")
    with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy"):
        kinds_of("np.asarray(x)")


def test_sync_debug_mode_of_the_user_is_obeyed() -> None:
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        kinds_of("torch.cuda.set_sync_debug_mode('error'); x.sum().item()")
    with pytest.warns(UserWarning, match="synchronizing CUDA operation"):
        kinds_of("torch.cuda.set_sync_debug_mode('warn'); x.sum().item()")
    assert kinds_of("assert torch.cuda.get_sync_debug_mode() == 0; x.sum().item()") == ["item"]


def test_a_new_tensor_is_told_from_a_batch_after_torch_compile_has_run_too() -> None:
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    batch = torch.ones(3)
    with emulate_cuda() as device:
        torch.ones(3).to("cuda")
        batch.to("cuda")
    torch._dynamo.reset()
    assert [hit.kind for hit in device.log.hits] == ["h2d_blocking", "h2d_pageable"]
