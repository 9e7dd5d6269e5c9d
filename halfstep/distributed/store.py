"""Tensors and objects by name in a folder, through torch.distributed.checkpoint.

Each rank writes what it holds: of a tensor that is cut over the ranks its own part, of one that all hold a share of
such tensors. Reading needs no other rank: each takes the parts of the files that make up its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

_FILE_BYTES = 2**28


class _Writer(FileSystemWriter):
    """Writes several files of a bounded size, since torch keeps what it copied to the host until a file is full.

    So a rank needs 256 MiB of the host's memory, or what its largest tensor takes, instead of a copy of all it writes.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_portions(plan.items)):
            name = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            results += super().write_data(replace(plan, items=items, storage_data=name), planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _portions(items: list[WriteItem]) -> Iterator[list[WriteItem]]:
    portion: list[WriteItem] = []
    num_bytes = 0
    for item in items:
        size = item.tensor_storage_size() or 0
        if portion and num_bytes + size > _FILE_BYTES:
            yield portion
            portion, num_bytes = [], 0
        portion.append(item)
        num_bytes += size
    if portion:
        yield portion


def write(folder: Path, contents: Mapping[str, Any], group: distributed.ProcessGroup | None) -> None:
    """Write ``contents`` of all ranks of ``group`` into ``folder``, which exists; all of them call it.

    A name that several ranks give belongs to one tensor that they all hold, or of which each holds a shard.

    Raises :class:`torch.distributed.checkpoint.CheckpointException` on all ranks when one of them cannot write.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        save_state(
            dict(contents),
            storage_writer=_Writer(folder),
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )


class _Planner(DefaultLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        # On the host, whatever device it was on: this machine may have another number of them.
        loaded = torch.load(value, map_location="cpu", weights_only=False)
        self.state_dict[read_item.dest_index.fqn] = loaded


class _Reader(FileSystemReader):
    """Reads the metadata, which are large where there are many ranks, once."""

    metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.metadata is None:
            self.metadata = super().read_metadata(*args, **kwargs)
        return self.metadata


class Store:
    """What :func:`write` has left in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._reader = _Reader(folder)
        self._entries = self._reader.read_metadata().state_dict_metadata

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def names(self, prefix: str) -> list[str]:
        """What follows ``prefix`` in the names that begin with it."""
        return [name.removeprefix(prefix) for name in self._entries if name.startswith(prefix)]

    def dtype(self, name: str) -> torch.dtype:
        return self._tensor(name).properties.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self._tensor(name).size)

    def _tensor(self, name: str) -> TensorStorageMetadata:
        entry = self._entries[name]
        assert isinstance(entry, TensorStorageMetadata), name
        return entry

    def read_object(self, name: str) -> Any:
        """An object that is no tensor, with any tensors in it on the CPU."""
        into = {name: None}
        self._read(into)
        return into[name]

    def read_into(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill ``tensors`` in place, each with its part of what is stored under its name, in the same format."""
        for name, tensor in tensors.items():
            assert tensor.dtype == self.dtype(name), name
        if tensors:
            self._read(dict(tensors))

    def _read(self, into: dict[str, Any]) -> None:
        planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load_state(into, storage_reader=self._reader, planner=planner, no_dist=True)
