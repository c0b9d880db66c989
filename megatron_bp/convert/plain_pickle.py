"""Loads torch-saved Python objects with every unknown class replaced by a harmless stand-in.

Training checkpoints mention Megatron enums and configs in their common state. Importing what a file
names would need megatron and would run code that the file chooses. Specified by
tests/convert/test_torch_dist_io.py.
"""

from __future__ import annotations

import io
import pickle
from types import SimpleNamespace
from typing import Any

import torch

_KNOWN = frozenset(
    {
        ("argparse", "Namespace"),
        ("types", "SimpleNamespace"),
        ("collections", "OrderedDict"),
        ("torch", "Size"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("builtins", "set"),
        ("builtins", "complex"),
    }
)


class Opaque:
    """Stands for an object whose class is not loaded; remembers nothing of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accepts anything."""

    def __call__(self, *args: Any, **kwargs: Any) -> Opaque:
        """Accepts anything."""
        return Opaque()

    def __setstate__(self, state: Any) -> None:
        """Accepts anything."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Accepts anything."""

    def append(self, value: Any) -> None:
        """Accepts anything."""

    def extend(self, values: Any) -> None:
        """Accepts anything."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_storage = module == "torch" and name.endswith("Storage")
        if (module, name) in _KNOWN or is_dtype or is_storage:
            return super().find_class(module, name)
        return Opaque


def load_plain(stream: io.BytesIO) -> Any:
    """Returns the object in a `torch.save` stream; classes it names are not imported."""
    module = SimpleNamespace(
        __name__=__name__, Unpickler=_Unpickler, load=lambda f, **kw: _Unpickler(f, **kw).load()
    )
    return torch.load(stream, map_location="cpu", pickle_module=module, weights_only=False)
