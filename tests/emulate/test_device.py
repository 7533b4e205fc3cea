"""What code sees of the emulated device, and that nothing of it is left afterwards."""

import copy
import gc
import io
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch import randn as randn_imported_early
from torch.utils.data import DataLoader, TensorDataset

from perfdoctor.emulate import emulate_cuda, stand_in
from perfdoctor.emulate.tensor import CudaTensor, plain
from perfdoctor.errors import UsageError
from perfdoctor.record.call_site import HitLog

OWNERS = (
    torch, torch.Tensor, torch.cuda, torch.cuda.memory, torch.accelerator, torch.backends.cudnn, torch.nn.functional,
    torch.linalg,
    torch._utils, torch.distributed, torch.utils._device.DeviceContext, torch._C, torch._C._nn, torch.multiprocessing,
    torch.UntypedStorage, torch.cuda.nccl,
)  # fmt: skip


def surroundings() -> list[dict[str, int]]:
    return [{name: id(value) for name, value in vars(owner).items()} for owner in OWNERS]


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, Interrupt])
def test_everything_is_as_before_on_every_way_out(error: type[BaseException] | None) -> None:
    torch._dynamo  # noqa: B018 - loaded by the first device; not something to be undone
    with emulate_cuda():
        torch.compile(lambda x: x + 1)(torch.ones(1, device="cuda"))
    before, registry = surroundings(), list(torch.serialization._package_registry)
    try:
        with emulate_cuda():
            torch.ones(1, device="cuda").item()
            with torch.autocast("cuda", dtype=torch.float16):
                if error is not None:
                    raise error
    except (ValueError, KeyboardInterrupt, Interrupt):
        pass
    assert surroundings() == before
    assert list(torch.serialization._package_registry) == registry
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.ones(2, 2).exp().dtype is torch.float32
        assert torch.trace(torch.ones(2, 2, dtype=torch.bfloat16)).dtype is torch.float32  # only on the CPU's list


def test_blocks_nest_and_both_logs_hear() -> None:
    outer_log, inner_log = HitLog(), HitLog()
    with emulate_cuda(outer_log) as outer:
        with emulate_cuda(inner_log):
            torch.ones(1, device="cuda").item()
        assert torch.cuda.is_available()
        torch.ones(1, device="cuda").item()
    assert outer.log is outer_log
    assert (len(outer_log.hits), len(inner_log.hits)) == (2, 1)
    assert torch.Tensor.to is torch._C.TensorBase.to


def test_tensors_outlive_the_block_and_stay_silent() -> None:
    with emulate_cuda() as device:
        x = torch.arange(3.0, device="cuda")
    assert (x + 1).sum().item() == 6
    assert device.log.hits == []


def test_a_tensor_says_cuda() -> None:
    with emulate_cuda():
        x = torch.ones(2, 3, device="cuda:0", dtype=torch.float16)
        assert x.device == torch.device("cuda", 0)
        assert (x.is_cuda, x.is_cpu, x.get_device(), x.type()) == (True, False, 0, "torch.cuda.HalfTensor")
        assert x.float().device.type == x[0].device.type == x.t().device.type == "cuda"
        assert isinstance(x, torch.Tensor)
        assert isinstance(x, torch.cuda.HalfTensor)
        assert not isinstance(torch.ones(1), torch.cuda.FloatTensor)
        assert repr(torch.ones(2, device="cuda")) == "tensor([1., 1.], device='cuda:0')"
        assert (
            repr(torch.ones(1, dtype=torch.int32, device="cuda")) == "tensor([1], device='cuda:0', dtype=torch.int32)"
        )
        assert f"{torch.tensor(0.5, device='cuda'):.2f}" == "0.50"


def test_the_machine_answers_like_one_with_a_gpu() -> None:
    with emulate_cuda():
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.current_device() == 0
        assert "emulated" in torch.cuda.get_device_name()
        assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]
        assert torch.cuda.is_bf16_supported()
        assert torch.accelerator.current_accelerator().type == "cuda"
        with torch.cuda.device(0), torch.cuda.nvtx.range("step"):
            torch.cuda.nvtx.range_push("a")
            torch.cuda.nvtx.range_pop()
        torch.cuda.manual_seed_all(3)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.cudart().cudaProfilerStart()
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(1, device="cuda:1")


def test_names_imported_before_are_covered_and_given_back() -> None:
    original = randn_imported_early
    with emulate_cuda():
        assert randn_imported_early(2, device="cuda").is_cuda
    assert randn_imported_early is original


def test_default_device_and_device_context() -> None:
    with emulate_cuda():
        with torch.device("cuda"):
            assert torch.zeros(2).is_cuda
            assert nn.Linear(2, 2).weight.is_cuda
            assert torch.tensor([1.0]).is_cuda
        torch.set_default_device("cuda")
        try:
            assert torch.randn(2).is_cuda
        finally:
            torch.set_default_device(None)
        assert torch.randn(2).device.type == "cpu"
    with torch.device("meta"):
        assert torch.zeros(2).is_meta


def test_moving_a_module_keeps_its_parameters_objects() -> None:
    with emulate_cuda():
        model = nn.Linear(2, 2)
        weight = model.weight
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.to("cuda")
        assert model.weight is weight
        assert isinstance(weight, nn.Parameter)
        assert weight.is_cuda
        before = plain(weight).clone()
        model(torch.ones(1, 2, device="cuda")).sum().backward()
        optimizer.step()
        assert not torch.equal(plain(weight), before)
        model.half()
        assert (weight.dtype, weight.is_cuda) == (torch.float16, True)
        model.cpu()
        assert model.weight is weight
        assert type(weight) is nn.Parameter
        assert weight.grad.device.type == "cpu"
        assert model.bias.requires_grad


def test_copies_are_copies() -> None:
    with emulate_cuda():
        host = torch.zeros(2)
        device = host.to("cuda")
        device += 1
        assert host.tolist() == [0, 0]
        back = device.cpu()
        device += 1
        assert back.tolist() == [1, 1]
        source = torch.zeros(2, requires_grad=True)
        (source.to("cuda") * 3).sum().backward()
        assert source.grad.tolist() == [3, 3]
        assert type(source.grad) is torch.Tensor
        x = torch.ones(2, device="cuda", requires_grad=True)
        (x.cpu() * 2).sum().backward()
        assert x.grad.is_cuda


def test_a_gradient_of_zeros_is_on_the_device_too() -> None:
    with emulate_cuda():
        x = torch.ones(2, device="cuda", requires_grad=True)
        x.sgn().sum().backward()
        assert x.grad.is_cuda
        assert x.grad is x.grad
        assert x.grad.tolist() == [0, 0]
        x.grad = None
        assert x.grad is None
        x.grad = torch.ones(2, device="cuda")
        del x.grad
        assert x.grad is None


def test_deepcopy_keeps_what_a_model_is() -> None:
    with emulate_cuda():
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).cuda()
        model.requires_grad_(False)
        twin = copy.deepcopy(model)
        for old, new in zip(model.parameters(), twin.parameters(), strict=True):
            assert isinstance(new, nn.Parameter)
            assert new.is_cuda
            assert new is not old
            assert not new.requires_grad
        assert twin[1].running_mean.is_cuda


def test_checkpoints_come_back_to_the_device_or_where_they_are_sent(tmp_path: Path) -> None:
    with emulate_cuda():
        model = nn.Linear(2, 2).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 2, device="cuda")).sum().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
        loaded = torch.load(tmp_path / "a.pt")
        assert loaded["model"]["weight"].is_cuda
        assert type(torch.load(tmp_path / "a.pt", map_location="cpu")["model"]["weight"]) is torch.Tensor
        other = nn.Linear(2, 2).cuda()
        other.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        assert torch.equal(plain(other.weight), plain(model.weight))
        assert optimizer.state[model.weight]["exp_avg"].is_cuda
    host = torch.load(tmp_path / "a.pt", map_location="cpu")
    assert torch.equal(host["model"]["weight"], plain(model.weight))


def test_a_parameter_survives_pickling() -> None:
    with emulate_cuda():
        buffer = io.BytesIO()
        torch.save(nn.Parameter(torch.ones(2, device="cuda")), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer)
        assert isinstance(loaded, nn.Parameter)
        assert loaded.is_cuda


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_pin(num_workers: int) -> None:
    data = TensorDataset(torch.arange(8.0))
    with emulate_cuda() as device:
        loader = DataLoader(data, batch_size=4, pin_memory=True, num_workers=num_workers)
        total = sum(batch.to("cuda", non_blocking=True).sum() for (batch,) in loader)
        assert device.log.hits == []
        assert total.item() == 28
        (batch,) = next(iter(DataLoader(data, batch_size=4)))
        assert not batch.is_pinned()


def test_threads_see_the_device_and_are_told_apart() -> None:
    with emulate_cuda() as device:
        x = torch.ones(2, device="cuda")
        thread = threading.Thread(target=lambda: torch.zeros(1, device="cuda").item() + x.sum().item())
        thread.start()
        thread.join()
        x.sum().item()
    assert [hit.kind for hit in device.log.hits] == ["item"] * 3
    assert device.log.hits[0].thread == device.log.hits[1].thread != device.log.hits[2].thread


def test_generators() -> None:
    with emulate_cuda():
        generator = torch.Generator(device="cuda")
        first = torch.randn(3, device="cuda", generator=generator.manual_seed(5))
        second = torch.randn(3, device="cuda", generator=generator.manual_seed(5))
        assert torch.equal(plain(first), plain(second))
        assert generator.device.type == "cuda"
        assert isinstance(generator, torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator)


def test_compile_runs_eagerly_and_says_so_once() -> None:
    with emulate_cuda() as device:
        double = torch.compile(lambda x: x * 2)
        again = torch.compile(nn.Linear(2, 2).cuda())
        assert double(torch.ones(2, device="cuda")).is_cuda
        assert again(torch.ones(1, 2, device="cuda")).is_cuda
    assert [note.code for note in device.notes] == ["compile-eager"]


@pytest.mark.parametrize("make", [lambda: torch.cuda.CUDAGraph(), lambda: torch.cuda.graph(None)])
def test_graph_capture_is_refused_in_words(make: object) -> None:
    with emulate_cuda(), pytest.raises(UsageError, match="cannot be captured"):
        make()  # type: ignore[operator]


def test_an_op_without_a_cpu_kernel_asks_for_a_stand_in() -> None:
    library = torch.library.Library("perfdoctor_test", "DEF")
    library.define("only_cuda(Tensor x) -> Tensor")
    try:
        with emulate_cuda():
            x = torch.ones(2, device="cuda")
            with pytest.raises(UsageError, match=r"test_device\.py:\d+: the op perfdoctor_test::only_cuda"):
                torch.ops.perfdoctor_test.only_cuda(x)
            stand_in("perfdoctor_test::only_cuda", lambda x: x * 3)
            assert torch.ops.perfdoctor_test.only_cuda(x).tolist() == [3, 3]
    finally:
        library._destroy()


def test_a_triton_kernel_asks_for_a_stand_in() -> None:
    triton = pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels run on the CPU by themselves")

    @triton.autotune([triton.Config({"BLOCK": 16})], key=[])
    @triton.jit
    def double_kernel(x, out, BLOCK):  # type: ignore[no-untyped-def]
        pass

    with emulate_cuda():
        x = torch.ones(2, device="cuda")
        out = torch.empty_like(x)
        with pytest.raises(UsageError, match=r"test_device\.py:\d+: the Triton kernel double_kernel"):
            double_kernel[(1,)](x, out, BLOCK=16)
        stand_in("double_kernel", lambda grid, x, out, BLOCK: out.copy_(x * 2))
        double_kernel[(1,)](x, out, BLOCK=16)
        assert out.tolist() == [2, 2]


def test_memory_of_tensors_is_given_back() -> None:
    with emulate_cuda():
        x = torch.ones(2, 3, 5, 7, device="cuda", requires_grad=True)
        (x * 2).sum().backward()
        del x
        gc.collect()
        assert not [
            o for o in gc.get_objects() if type(o) is CudaTensor and o.shape == (2, 3, 5, 7) and o.requires_grad
        ]


def test_torch_script_still_finds_its_builtins() -> None:
    with emulate_cuda():
        with pytest.warns(DeprecationWarning, match="torch.jit.script"):
            scripted = torch.jit.script(shifted)
        assert scripted(torch.ones(2, device="cuda")).tolist() == [3, 3]


def shifted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.ones([2]) * 2


@pytest.mark.parametrize("move", ["to", "data"])
def test_hooks_of_a_parameter_go_with_it(move: str) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    seen: list[str] = []
    model.weight.register_hook(lambda gradient: seen.append("gradient"))
    model.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    with emulate_cuda():
        if move == "to":
            model.to("cuda")
        else:
            model.weight.data = model.weight.data.cuda()
        model(torch.ones(1, 2, device="cuda")).sum().backward()
        assert seen == ["gradient", "accumulated"]
        model.cpu()
    model(torch.ones(1, 2)).sum().backward()
    assert seen == ["gradient", "accumulated"] * 2
