"""`autocast("cuda")` casts by CUDA's list, not by the CPU's."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from perfdoctor.emulate import amp, emulate_cuda

HALF, FULL = torch.float16, torch.float32
# (call, dtype of the result under float16 autocast), from torch's table of CUDA ops that autocast.
CASES = {
    "x @ x": HALF, "F.linear(x, x)": HALF, "torch.einsum('ij,jk->ik', x, x)": HALF, "torch.mv(x, x[0])": HALF,
    "F.conv1d(x[None], x[:, :, None])": HALF, "F.prelu(x, x[0, :1])": HALF,
    "torch.baddbmm(x[None], x[None], x[None])": HALF,
    "torch.linalg.multi_dot([x, x, x])": HALF, "F.scaled_dot_product_attention(x[None], x[None], x[None])": HALF,
    "nn.LSTM(4, 4).cuda()(x[None])[0]": HALF, "nn.GRUCell(4, 4).cuda()(x)": HALF,
    "h.exp()": FULL, "h.log()": FULL, "h.pow(2)": FULL, "h.rsqrt()": FULL, "h.sum()": FULL, "h.softmax(0)": FULL,
    "h.norm()": FULL,
    "F.layer_norm(h, (4,))": FULL, "F.group_norm(h, 2)": FULL, "F.mse_loss(h, h)": FULL, "F.cross_entropy(h, y)": FULL,
    "F.binary_cross_entropy_with_logits(h, h)": FULL, "torch.cdist(h, h)": FULL, "h.cumsum(0)": FULL, "h.prod()": FULL,
    "F.softplus(h)": FULL, "F.interpolate(h[None, None], scale_factor=2)": FULL,
    "h.relu()": HALF, "h.mean()": HALF, "F.gelu(h)": HALF, "h + h": HALF, "h + x": FULL, "torch.trace(h)": HALF,
    "h.sum(dtype=torch.float16)": HALF,
    "torch.addcmul(h, h, x)": FULL, "torch.dot(h[0], h[0])": HALF, "torch.atan2(h, x)": FULL,
    "F.batch_norm(h, None, None, training=True)": HALF,
    "x.double() @ x.double()": torch.float64,
}  # fmt: skip


@pytest.mark.parametrize(("code", "dtype"), CASES.items())
def test_result_type(code: str, dtype: torch.dtype) -> None:
    with emulate_cuda():
        torch.manual_seed(0)
        space = {
            "torch": torch,
            "F": F,
            "nn": nn,
            "x": torch.rand(4, 4, device="cuda"),
            "y": torch.arange(4, device="cuda"),
        }
        space["h"] = space["x"].half()
        with torch.autocast("cuda", dtype=HALF):
            out = eval(code, space)
    assert out.dtype is dtype
    assert out.is_cuda


def test_values_are_those_of_explicit_casts_and_gradients_are_full() -> None:
    with emulate_cuda():
        model = nn.Linear(4, 4).cuda()
        x = torch.randn(3, 4, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = model(x)
        expected = F.linear(x.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16())
        assert torch.equal(out, expected)
        out.float().sum().backward()
        assert model.weight.grad.dtype is FULL


def test_nested_off_and_default_type() -> None:
    with emulate_cuda():
        x = torch.ones(2, 2, device="cuda")
        with torch.autocast("cuda"):
            assert torch.is_autocast_enabled("cuda")
            assert (x @ x).dtype is HALF
            with torch.autocast("cuda", enabled=False):
                assert (x @ x).dtype is FULL
            assert (x @ x).dtype is HALF
        assert (x @ x).dtype is FULL


def test_a_loss_that_autocast_forbids_is_forbidden() -> None:
    with emulate_cuda(), torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(torch.rand(2, device="cuda"), torch.rand(2, device="cuda"))


def test_lists_follow_the_header_of_this_torch() -> None:
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    if not header.is_file():
        pytest.skip("this torch ships no headers")
    text = header.read_text()
    for macro, names in (("LOWER_PRECISION_FP", amp._LOWER), ("FP32", amp._FP32), ("PROMOTE", amp._WIDEST)):
        block = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?)\n\n", text, re.S)
        assert block is not None
        entries = re.findall(r"_\((\w+)(?:, (\w+))?\)", block.group(1))
        wanted = {f"{name}.{overload}" if overload else name for name, overload in entries}
        cuda_only = {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention"}
        assert wanted - cuda_only <= set(names.split())
