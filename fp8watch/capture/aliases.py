"""Modules and parameters that a model holds in several places: observed once, under the first of their names.

The other names are reported (`fp8watch.records.Layout.aliases`), so that nobody looks for a layer in vain.
"""

from __future__ import annotations

import torch

MOST_ALIASED = 256
"""Most modules and parameters whose other names are sent with a layout."""


def aliases(model: torch.nn.Module) -> dict[str, list[str]]:
    """First name -> other names, modules before parameters. The contents of a shared module are not listed again."""
    names: dict[int, list[str]] = {}
    tied: dict[int, dict[tuple[int, str], str]] = {}
    twice: set[str] = set()
    """Repeated places of modules, and every place below them."""
    for name, module in model.named_modules(remove_duplicate=False):
        known = names.setdefault(id(module), [])
        if name.rpartition(".")[0] in twice:
            twice.add(name)
            continue
        if known:
            twice.add(name)
        known.append(name)
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            # Keyed by the holding module: if that is found elsewhere, the module has two names, not the parameter.
            places = tied.setdefault(id(parameter), {})
            places.setdefault((id(module), local), f"{name}.{local}" if name else local)
    found = [*names.values(), *(list(places.values()) for places in tied.values())]
    return {first: others for first, *others in [one for one in found if len(one) > 1][:MOST_ALIASED]}
