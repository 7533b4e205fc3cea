"""The live hooks on a GPU: each call on a line of its own, with the kind it must be filed under."""

import warnings

import pytest
import torch

from perfdoctor.record.call_site import HitLog
from perfdoctor.watch.call_sites import CallSiteHooks

pytestmark = pytest.mark.gpu

PREPARE = """
import torch, math
F = torch.nn.functional
x = torch.randn(64, 64, device="cuda")
s = x.sum().abs()
mask = x > 0
index = torch.arange(10, device="cuda")
two = torch.tensor(2, device="cuda"); five = torch.tensor(5, device="cuda")
lengths = torch.tensor([3, 2, 1], device="cuda")
host = torch.randn(64, 64); pinned = torch.randn(64, 64).pin_memory()
target = torch.empty(64, 64); pinned_target = torch.empty(64, 64).pin_memory()
batch = {"x": torch.randn(8, 8)}
spd = x @ x.T + 64 * torch.eye(64, device="cuda")
layer = torch.nn.Linear(64, 64).cuda()
layer(x).sum().backward()
weights = list(layer.parameters())
event = torch.cuda.Event()
"""

SYNCS = [
    ("s.item()", "item"),
    ("float(s)", "item"),
    ("int(s)", "item"),
    ("math.sqrt(s)", "item"),
    ("[int(n) for n in lengths[:1]]", "item"),
    ("torch.arange(five)", "item"),
    ("x[0].tolist()", "tolist"),
    ("x.cpu()", "cpu"),
    ('x.to("cpu")', "cpu"),
    ('x.to(device="cpu")', "cpu"),
    ("x.cpu().numpy()", "cpu"),
    ("target.copy_(x)", "cpu"),
    ("bool(s > 0)", "tensor_to_bool"),
    ("1 if s > 0 else 2", "tensor_to_bool"),
    ("s > 0 and 1", "tensor_to_bool"),
    ("not s", "tensor_to_bool"),
    ("max(s, five)", "tensor_to_bool"),
    ('f"{s:.3f}"', "format_tensor"),
    ('"%.3f" % s', "format_tensor"),
    ("str(s)", "format_tensor"),
    ('print("value", s)', "print_tensor"),
    ("x[mask]", "boolean_mask"),
    ("x[x > 1]", "boolean_mask"),
    ("x[~mask]", "boolean_mask"),
    ("x.masked_select(mask)", "masked_select"),
    ("x.nonzero()", "nonzero"),
    ("torch.nonzero(mask)", "nonzero"),
    ("torch.where(mask)", "nonzero"),
    ("torch.unique(index)", "unique"),
    ("index.unique()", "unique"),
    ("F.one_hot(index)", "one_hot"),
    ("torch.bincount(index)", "bincount"),
    ("x[:3].repeat_interleave(lengths, 0)", "repeat_interleave"),
    ("x[two:five]", "scalar_index"),
    ("x[two]", "scalar_index"),
    ("x[[0, 1, 2]]", "h2d_blocking"),
    ("x[torch.tensor([0, 1])]", "h2d_blocking"),
    ("torch.tensor(1.0, device=x.device)", "h2d_blocking"),
    ('torch.tensor([1.0, 2.0], device="cuda")', "h2d_blocking"),
    ("torch.as_tensor(0.5).to(x.device)", "h2d_blocking"),
    ("torch.zeros(4).cuda()", "h2d_blocking"),
    ("pinned.to(x.device)", "h2d_blocking"),
    ("host.to(x.device)", "h2d_pageable"),
    ("host.cuda()", "h2d_pageable"),
    ('batch["x"].to(x.device)', "h2d_pageable"),
    ("x.copy_(host)", "h2d_pageable"),
    ("host.to(x.device, non_blocking=True)", "h2d_pageable"),
    ("host.to(x.device, torch.float32, True)", "h2d_pageable"),
    ("host.cuda(non_blocking=True)", "h2d_pageable"),
    ("x.copy_(host, non_blocking=True)", "h2d_pageable"),
    ("torch.cuda.synchronize()", "cuda_synchronize"),
    ("torch.cuda.current_stream().synchronize()", "cuda_synchronize"),
    ("event.synchronize()", "cuda_synchronize"),
    ("torch.cuda.empty_cache()", "empty_cache"),
    ("torch.nn.utils.clip_grad_norm_(weights, 1.0, error_if_nonfinite=True)", "clip_grad_norm"),
    ("torch.linalg.cholesky(spd)", "linalg_check"),
    ("torch.linalg.solve(spd, x)", "linalg_check"),
    ("torch.distributions.Normal(x, x.abs() + 1, validate_args=True)", "distribution_check"),
    ('torch.save(layer.state_dict(), __import__("io").BytesIO())', "save"),
]

SILENT = [
    "x[mask] = 1.0",
    "x.masked_fill(mask, 0.0)",
    "torch.where(mask, x, 0.0)",
    'pinned.to("cuda", non_blocking=True)',
    "pinned_target.copy_(x, non_blocking=True)",
    'torch.full((2,), 1.0, device="cuda")',
    "F.one_hot(index, 16)",
    "x[:3].repeat_interleave(lengths, 0, output_size=6)",
    "torch.nn.utils.clip_grad_norm_(weights, 1.0)",
    "x.argmax(), x.isfinite().all()",
    "x.to(torch.float16)",
    "torch.tensor([1.0])",
]


@pytest.fixture
def names():
    space = {}
    exec(PREPARE, space)
    torch.cuda.synchronize()
    return space


def hits_of(code, space, tmp_path):
    """Run one line twice under all hooks; the second run's hits, as library code may initialise itself in the first."""
    file = tmp_path / "line.py"
    file.write_text(f"{code}\n")
    program = compile(code, str(file), "exec")
    exec(program, space)
    log = HitLog()
    hooks = CallSiteHooks(log)
    hooks.catch_warnings()
    hooks.patch_calls()
    try:
        exec(program, space)
    finally:
        hooks.remove()
    assert all(log.sites.sites[hit.site].frame.line == 1 for hit in log.hits)
    assert all(log.sites.sites[hit.site].frame.file == str(file) for hit in log.hits)
    return [hit.kind for hit in log.hits]


@pytest.mark.parametrize(("code", "kind"), SYNCS, ids=[code for code, _ in SYNCS])
def test_a_sync_has_its_kind_and_line(code, kind, names, tmp_path):
    kinds = hits_of(code, names, tmp_path)
    assert set(kinds) == {kind}


@pytest.mark.parametrize("code", SILENT)
def test_a_call_that_does_not_wait_is_no_hit(code, names, tmp_path):
    assert hits_of(code, names, tmp_path) == []


def test_counts_are_those_that_torch_warns_of(names, tmp_path):
    assert len(hits_of("torch.bincount(index)", names, tmp_path)) == 2
    assert len(hits_of("s.item() + s.item()", names, tmp_path)) == 2


def test_backward_of_a_mask_is_filed_at_the_backward_line(tmp_path):
    x = torch.randn(64, device="cuda", requires_grad=True)
    picked = x[torch.arange(64, device="cuda") > 3].sum()
    kinds = hits_of("loss.backward(retain_graph=True)", {"loss": picked}, tmp_path)
    assert set(kinds) == {"boolean_mask"}


def test_an_early_read_of_an_asynchronous_copy_is_a_race(names, tmp_path):
    assert hits_of('float(s.to("cpu", non_blocking=True))', names, tmp_path) == ["d2h_race"]
    waited = 'h = s.to("cpu", non_blocking=True); event.record(); event.synchronize(); float(h)'
    assert hits_of(waited, names, tmp_path) == ["cuda_synchronize"]


def test_a_mode_that_the_user_sets_is_the_users(names, tmp_path):
    hooks = CallSiteHooks(HitLog())
    hooks.catch_warnings()
    try:
        torch.cuda.set_sync_debug_mode("error")
        assert torch.cuda.get_sync_debug_mode() == 2
        with pytest.raises(RuntimeError, match="synchronizing"):
            names["s"].item()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            names["s"].item()
        assert len(seen) == 1
        torch.cuda.set_sync_debug_mode("warn")
    finally:
        hooks.remove()
    assert torch.cuda.get_sync_debug_mode() == 1
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore")
def test_hooks_in_a_compiled_region():
    def loss(batch):
        return batch.to("cuda", non_blocking=True).sum()

    compiled = torch.compile(loss, backend="eager")
    compiled(torch.randn(8))
    log = HitLog()
    hooks = CallSiteHooks(log)
    hooks.catch_warnings()
    hooks.patch_calls()
    try:
        compiled(torch.randn(8)).item()
    finally:
        hooks.remove()
    assert [hit.kind for hit in log.hits] == ["h2d_pageable", "item"]
