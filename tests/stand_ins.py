"""Imports a copy of a module over stand-ins for packages that are not installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def import_over(path: Path, members: Mapping[str, Mapping[str, Any]]) -> Any:
    """A copy of the module at `path`; the one that others import is untouched.

    `members` are those of each stand-in, by module name, parents before children.
    """
    stubs = {name: ModuleType(name) for name in members}
    for name, stub in stubs.items():
        stub.__dict__.update(members[name])
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(stubs[parent], child, stub)
    spec = spec_from_file_location(f"{path.stem}_over_stand_ins", path)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, stub in stubs.items():
            patch.setitem(sys.modules, name, stub)
        spec.loader.exec_module(module)
    return module
