"""Waiting for batches: exactly what the loop takes, and how many samples a batch holds."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from perfdoctor.watch.batches import BatchWaits, num_samples


class Sizes(dict):
    pass


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(5, 2), 5),
        ([torch.zeros(5, 2), torch.zeros(5)], 5),
        ({"x": torch.zeros(3, 2), "n": 7, "names": ["a", "b", "c"]}, 3),
        ((Sizes(ids=torch.zeros(4, 9)), torch.zeros(4)), 4),
        ([torch.zeros(5), torch.zeros(4)], -1),
        (torch.zeros(()), -1),
        ("text", -1),
        (None, -1),
        ([], -1),
    ],
)
def test_samples_of_a_batch(batch, samples):
    assert num_samples(batch) == samples


@pytest.fixture
def waits():
    handed, pauses = [], []
    waits = BatchWaits(pauses, lambda samples, ns: handed.append(samples))
    waits.pauses, waits.handed = pauses, handed
    waits.patch_loaders()
    yield waits
    waits.remove()


def test_loaders_are_timed_wherever_they_are_iterated(waits):
    loader = DataLoader(TensorDataset(torch.zeros(10, 2)), batch_size=4)
    assert [len(batch[0]) for batch in loader] == [4, 4, 2]
    assert waits.handed == [4, 4, 2]
    # The fourth fetch ends the epoch and hands nothing out.
    assert [(pause.name, pause.amount) for pause in waits.pauses] == [("data", 4), ("data", 4), ("data", 2)]
    assert all(pause.end_ns >= pause.start_ns for pause in waits.pauses)


def test_batches_of_an_evaluation_are_told_apart(waits):
    with torch.no_grad():
        list(DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=4))
    assert waits.handed == []
    assert [pause.name for pause in waits.pauses] == ["eval-data"]


def test_a_loader_inside_a_loader_is_one_wait(waits):
    def doubled():
        yield from DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4)

    source = doubled()
    waits.next_of(source)
    assert waits.handed == [4]


def test_starting_workers_is_a_pause_of_its_own(waits):
    loader = DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2, num_workers=1, multiprocessing_context="fork")
    assert len(list(loader)) == 2
    assert [pause.amount for pause in waits.pauses if pause.name == "worker-start"] == [1]
    assert waits.loader._num_workers == 1


def test_an_error_in_the_data_comes_out_unchanged(waits):
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            raise LookupError(f"row {index}")

    with pytest.raises(LookupError, match="row 0"):
        next(iter(DataLoader(Broken())))
    assert waits.pauses == []
    assert waits.next_of(iter([torch.zeros(3)])).shape == (3,)
    assert waits.handed == [3]
