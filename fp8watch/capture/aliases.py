"""Modules and parameters that a model holds in several places: seen once, under the first of their names.

Where else they are is said (`fp8watch.records.Layout.aliases`), so that nobody looks for a layer in vain.
"""

from __future__ import annotations

import torch

MOST_ALIASED = 256
"""Modules and parameters whose other names travel with a layout."""


def aliases(model: torch.nn.Module) -> dict[str, list[str]]:
    """First name -> the others, of modules and then of parameters; what lies in a shared module is not named again."""
    names: dict[int, list[str]] = {}
    tied: dict[int, dict[tuple[int, str], str]] = {}
    twice: set[str] = set()
    """Places of modules that were met before, and of all that lies below."""
    for name, module in model.named_modules(remove_duplicate=False):
        known = names.setdefault(id(module), [])
        if name.rpartition(".")[0] in twice:
            twice.add(name)
            continue
        if known:
            twice.add(name)
        known.append(name)
        for local, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            # By the module that holds it: the same one elsewhere is another name of the module.
            places = tied.setdefault(id(parameter), {})
            places.setdefault((id(module), local), f"{name}.{local}" if name else local)
    found = [*names.values(), *(list(places.values()) for places in tied.values())]
    return {first: others for first, *others in [one for one in found if len(one) > 1][:MOST_ALIASED]}
