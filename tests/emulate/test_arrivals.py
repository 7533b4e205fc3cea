"""Copies to the host that do not wait: who reads the target too early is seen, who waits first is not."""

import torch

from perfdoctor.emulate import emulate_cuda


def kinds(device: object) -> list[str]:
    return [hit.kind for hit in device.log.hits]  # type: ignore[attr-defined]


def test_a_read_before_a_wait_is_a_race() -> None:
    with emulate_cuda() as device:
        host = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
        float(host[0])
        assert kinds(device) == ["d2h_race"]
        host.numpy()
        assert kinds(device) == ["d2h_race"] * 2


def test_into_pinned_memory_too() -> None:
    with emulate_cuda() as device:
        host = torch.empty(3).pin_memory()
        host.copy_(torch.ones(3, device="cuda"), non_blocking=True)
        host.sum()
        assert kinds(device) == ["d2h_race"]


def test_asking_for_shapes_and_views_reads_nothing() -> None:
    with emulate_cuda() as device:
        host = torch.ones(4, device="cuda").to("cpu", non_blocking=True)
        assert (host.shape, host.dtype, host.is_pinned(), host.dim()) == ((4,), torch.float32, True, 1)
        view = host.view(2, 2)
        assert kinds(device) == []
        view.sum()
        assert kinds(device) == ["d2h_race"]


def test_a_wait_after_the_copy_makes_it_safe() -> None:
    x_waits = [
        torch.cuda.synchronize,
        lambda: torch.cuda.current_stream().synchronize(),
        lambda: torch.ones(1, device="cuda").item(),
    ]
    for index in range(len(x_waits)):
        with emulate_cuda() as device:
            waits = [
                torch.cuda.synchronize,
                lambda: torch.cuda.current_stream().synchronize(),
                lambda: torch.ones(1, device="cuda").item(),
            ]
            host = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
            waits[index]()
            host.sum().item()
            assert type(host) is torch.Tensor
            assert "d2h_race" not in kinds(device)


def test_an_event_covers_what_was_copied_before_it() -> None:
    with emulate_cuda() as device:
        x = torch.ones(3, device="cuda")
        first = x.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        second = x.to("cpu", non_blocking=True)
        event.synchronize()
        first.sum()
        assert kinds(device) == ["cuda_synchronize"]
        second.sum()
        assert kinds(device) == ["cuda_synchronize", "d2h_race"]


def test_polling_an_event_waits_for_nothing_and_is_safe() -> None:
    with emulate_cuda() as device:
        host = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        if event.query():
            host.sum()
        assert kinds(device) == []


def test_events_tell_time_in_order() -> None:
    with emulate_cuda():
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        end.record()
        assert start.elapsed_time(end) >= 0


def test_streams_are_entered_and_left() -> None:
    with emulate_cuda() as device:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert torch.cuda.current_stream() == stream
            torch.ones(1, device="cuda").record_stream(stream)
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        torch.cuda.current_stream().wait_event(stream.record_event())
        assert kinds(device) == []


def test_pending_copies_end_with_the_device() -> None:
    with emulate_cuda():
        host = torch.ones(3, device="cuda").to("cpu", non_blocking=True)
    assert type(host) is torch.Tensor
