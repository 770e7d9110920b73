"""Reads a distributed checkpoint without trusting its pickle.

torch writes `.metadata` as a pickle and reads it with `pickle.load` (torch/distributed/checkpoint/filesystem.py), which
can run any code. Here only the classes that torch uses for tensors are allowed. Bytes entries are not, because they are
unpickled while loading. torch reads the tensor files with `weights_only=True`.
"""

from __future__ import annotations

import enum
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    (_METADATA, "ChunkStorageMetadata"), (_METADATA, "Metadata"), (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"), (_METADATA, "TensorProperties"), (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"), ("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}  # fmt: skip


def _member(kind: Any, name: str) -> Any:
    """Early releases of Python 3.11 pickle an enum member as `getattr(kind, name)`. Only that is allowed."""
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[name]
    raise pickle.UnpicklingError(f"the checkpoint's metadata asks for an attribute of {kind!r}")


class _TensorsOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the checkpoint's metadata asks for {module}.{name}")


class TensorReader(FileSystemReader):
    """A reader of tensors. `read_metadata` raises `pickle.UnpicklingError` for anything else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """The metadata of all ranks, with the load ID that torch expects."""
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _TensorsOnly(file).load()
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
