"""The batches of a Lightning fit: the wait for each, and batches that are on the device before they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from types import GeneratorType
from typing import Any

from perfdoctor.doors.windows import Windows
from perfdoctor.errors import TreatmentRefused
from perfdoctor.treat.prefetch import DevicePrefetcher
from perfdoctor.watch.patches import Patches

_HOST_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device")


class FetchWaits:
    """Times each batch that the fit loop fetches, whatever its loader is, for whoever watches."""

    def __init__(self, trainer: Any, windows: Windows) -> None:
        self._trainer = trainer
        self._windows = windows
        self._patches = Patches()

    def install(self) -> None:
        """Begin, or say again which loader it is."""
        self._note_loader()
        if self._patches:
            return
        fetcher = self._trainer.fit_loop._data_fetcher
        kind: Any = next(each for each in type(fetcher).__mro__ if each.__name__ == "_DataFetcher")
        original = kind.__next__

        def fetched(fetcher: Any) -> Any:
            if fetcher is not self._trainer.fit_loop._data_fetcher:
                return original(fetcher)
            return self._windows.next_of(_Fetch(original, fetcher))

        self._patches.replace(kind, "__next__", fetched)

    def remove(self) -> None:
        """Take everything back."""
        self._patches.undo()

    def _note_loader(self) -> None:
        session, loaders = self._windows.session, self._trainer.fit_loop._combined_loader.flattened
        if session is not None and loaders:
            session.recorder.batches.loader = loaders[0]


class _Fetch(Iterator[Any]):
    """An iterator of one item: what the fetcher fetches."""

    def __init__(self, fetch: Any, fetcher: Any) -> None:
        self._fetch = fetch
        self._fetcher = fetcher

    def __next__(self) -> Any:
        return self._fetch(self._fetcher)


class Prefetch:
    """The fit loop's batches, copied to the device ahead of the step. Lightning's own transfer then finds them there.

    Every fetcher that the fit loop makes is given a combined loader whose iterator is a `DevicePrefetcher`.
    """

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer = trainer
        self._module = module
        self._patches = Patches()
        self._treated: Any = None

    def apply(self) -> None:
        """Begin, with the iterator that the fit loop has made already.

        Raises:
            TreatmentRefused: a hook expects batches on the host, or the loader's state would run ahead.
        """
        self._refuse()
        self.apply_to_new()

    def apply_to_new(self) -> None:
        """Where the fit loop has made a new fetcher, treat that one."""
        fetcher = self._trainer.fit_loop._data_fetcher
        if fetcher is None or fetcher is self._treated:
            return
        self.undo()
        self._treated = fetcher
        loader = _PrefetchingLoader(fetcher._combined_loader, self._trainer.strategy.root_device)
        self._patches.replace(fetcher, "_combined_loader", loader)
        if fetcher.iterator is not None:
            fetcher.iterator = loader.ahead_of(fetcher.iterator)

    def undo(self) -> None:
        """The loader as it was. What was fetched ahead is lost: the fit loop makes a new iterator before it goes on."""
        fetcher, self._treated = self._treated, None
        if fetcher is not None:
            if isinstance(fetcher.iterator, GeneratorType):
                fetcher.iterator.close()
            fetcher._combined_loader.close()
        self._patches.undo()

    def _refuse(self) -> None:
        for owner in (self._module, self._trainer.datamodule):
            for hook in _HOST_HOOKS:
                if owner is not None and _is_users(getattr(type(owner), hook, None)):
                    raise TreatmentRefused(
                        f"prefetch: {type(owner).__name__} overrides {hook}, which expects the batch on the host: "
                        "move its work to the dataset, the collate function or on_after_batch_transfer"
                    )
        for loader in self._trainer.fit_loop._combined_loader.flattened:
            if hasattr(loader, "state_dict"):
                raise TreatmentRefused(
                    f"prefetch: {type(loader).__name__} has a state_dict, which in a checkpoint would be up to two "
                    "batches ahead of the training: leave prefetch out, or wrap the loader in "
                    "perfdoctor.DevicePrefetcher yourself, which keeps the state right"
                )


def _is_users(function: Any) -> bool:
    module = getattr(function, "__module__", "") or ""
    return not module.startswith(("pytorch_lightning.", "lightning."))


class _PrefetchingLoader:
    """A combined loader seen through a DevicePrefetcher: as many `iter`s and batches, in the same order."""

    def __init__(self, loader: Any, device: Any) -> None:
        self._loader = loader
        self._prefetcher = DevicePrefetcher(_Iterators(loader), device)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._prefetcher)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def ahead_of(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """The rest of `iterator`, prefetched."""
        self._prefetcher.loader.begun = iterator  # type: ignore[attr-defined]
        return iter(self._prefetcher)

    def close(self) -> None:
        """Give the memory back."""
        self._prefetcher.close()


class _Iterators:
    """A loader whose first `iter` may be one that was made before."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.begun: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        begun, self.begun = self.begun, None
        return begun if begun is not None else iter(self._loader)
