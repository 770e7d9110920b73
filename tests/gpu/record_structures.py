"""Records what the adapters rely on in the real Transformer Engine, for tests that replay it on any machine.

    python tests/gpu/record_structures.py [tests/data/te_structure.json]      (on a GPU, with Transformer Engine)

Only names, classes, shapes and dtypes are written: for modules and operations under each recipe their state,
quantizers and roles; for the process the global buffers; for tensors the attributes that hold bytes and scales; for a
training step the GEMM calls and the casts, in order.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

WIDTH, ROWS = 256, 64
STATE = ("fp8", "fp8_meta", "quantizers", "primary_weights_in_fp8", "_fp8_workspaces", "_fp8_metas", "_quantizers")
TENSOR = (
    "_data", "_transpose", "_scale_inv", "_fp8_dtype", "_quantizer", "_rowwise_data", "_rowwise_scale_inv",
    "_columnwise_data", "_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise",
)  # fmt: skip


def as_text(found: dict[str, dict[str, Any]]) -> str:
    """JSON with an entry a line."""
    parts = []
    for part, entries in sorted(found.items()):
        named = {name: json.dumps(entry, sort_keys=True) for name, entry in sorted(entries.items())}
        lines = [f"  {json.dumps(name)}: {entry}" for name, entry in named.items()]
        parts.append(f" {json.dumps(part)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> int:
    import transformer_engine
    import transformer_engine.pytorch as te
    import transformer_engine_torch as tex
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch import quantization

    path = Path(sys.argv[1] if len(sys.argv) > 1 else "tests/data/te_structure.json")
    found: dict[str, Any] = {
        "versions": {
            "transformer_engine": transformer_engine.__version__, "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(),
        },
        "recipes": {
            name: sorted(f.name for f in dataclasses.fields(cls))
            for name, cls in inspect.getmembers(recipes, inspect.isclass)
            if issubclass(cls, recipes.Recipe) and dataclasses.is_dataclass(cls)
        },
        "functions": functions(tex),
    }  # fmt: skip
    bf16 = {"params_dtype": torch.bfloat16}
    makers = {
        "Linear": lambda: te.Linear(WIDTH, WIDTH, **bf16),
        "LayerNormLinear": lambda: te.LayerNormLinear(WIDTH, WIDTH, **bf16),
        "LayerNormMLP": lambda: te.LayerNormMLP(WIDTH, 2 * WIDTH, **bf16),
        "GroupedLinear": lambda: te.GroupedLinear(2, WIDTH, WIDTH, **bf16),
        "ops.Linear": lambda: te.ops.Sequential(te.ops.Linear(WIDTH, WIDTH, dtype=torch.bfloat16, device="cuda")),
    }
    kinds = {
        "delayed": lambda: recipes.DelayedScaling(amax_history_len=4),
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
    }
    found["modules"] = {}
    for kind, make_recipe in kinds.items():
        for name, make in makers.items():
            try:
                found["modules"][f"{name}/{kind}"] = one(te, make().cuda(), make_recipe(), name)
            except Exception as error:  # not on this GPU, or not in this build
                found["modules"][f"{name}/{kind}"] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    state = quantization.FP8GlobalStateManager.quantization_state
    found["global"] = {
        "class": type(state).__name__, "fields": [f.name for f in dataclasses.fields(state)],
        "buffers": {
            field: {key.split("recipe=")[0]: kinds_of(values[0]) for key, values in getattr(state, field).items()}
            for field in ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer")
        },
        "autocast_arguments": [type(item).__name__ for item in next(iter(state.autocast_arguments.values()))],
        "keys_of_buffers_are_those_of_arguments": all(
            key.split("_", 1)[1] in state.autocast_arguments for key in state.global_amax_buffer
        ),
    }  # fmt: skip
    found["primary_weights"] = primary(te, recipes)
    found["attention"] = attention(te, recipes)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(found))
    print(f"{path}: {path.stat().st_size} bytes")
    return 0


def functions(tex: Any) -> dict[str, Any]:
    """Of the functions that are tapped: where they are, and how they are called."""
    from fp8watch.capture.te.cast_tap import ACTIVATIONS, CASTS, NORMS, NORMS_IMPORTED_BY, WITH_BIAS
    from fp8watch.capture.te.gemm_tap import CONSUMERS, GEMM, GROUPED, GROUPED_CONSUMER
    from fp8watch.capture.te.tap import UPDATE

    found: dict[str, Any] = {}
    for name in (UPDATE, "split_quantize", *CASTS, *NORMS, *ACTIVATIONS, *WITH_BIAS):
        lines = (getattr(getattr(tex, name, None), "__doc__", None) or "").strip().splitlines()
        found[name] = "".join(lines[:1]) if hasattr(tex, name) else None
    for consumer in CONSUMERS:
        module = importlib.import_module(f"transformer_engine.pytorch.module.{consumer}")
        found[f"{consumer}.{GEMM}"] = str(inspect.signature(getattr(module, GEMM)).parameters.keys())
    base = importlib.import_module("transformer_engine.pytorch.module.base").TransformerEngineBaseModule
    found["prepare_forward"] = list(inspect.signature(base.prepare_forward).parameters)
    found["end_forward"] = (
        list(inspect.signature(base.end_forward).parameters) if hasattr(base, "end_forward") else None
    )
    grouped = importlib.import_module(f"transformer_engine.pytorch.module.{GROUPED_CONSUMER}")
    found[f"{GROUPED_CONSUMER}.{GROUPED}"] = list(inspect.signature(getattr(grouped, GROUPED)).parameters)
    found["norms_imported_by"] = [name for name in NORMS_IMPORTED_BY if importlib.util.find_spec(name) is not None]
    return found


def one(te: Any, model: Any, recipe: Any, name: str) -> dict[str, Any]:
    """A step of one module, and what it leaves."""
    calls: list[list[str]] = []
    restore = listen(calls)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(2):
                calls.clear()
                x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                with te.autocast(enabled=True, recipe=recipe):
                    output = model(x, [ROWS // 2, ROWS // 2]) if name == "GroupedLinear" else model(x)
                output.float().square().mean().backward()
    finally:
        restore()
    held = {path: module for path, module in model.named_modules() if any(hasattr(module, a) for a in STATE)}
    return {"calls": calls, "held": {path: module_facts(module) for path, module in held.items()}}


def module_facts(module: Any) -> dict[str, Any]:
    """What a module or operation has of `STATE`."""
    facts: dict[str, Any] = {"classes": [c.__name__ for c in type(module).__mro__], "home": type(module).__module__}
    for name in STATE:
        if not hasattr(module, name):
            continue
        value = getattr(module, name)
        if name == "_fp8_workspaces":
            facts[name] = sorted(value)
        elif isinstance(value, dict):
            facts[name] = {str(key): kinds_of(item) for key, item in value.items()}
        else:
            facts[name] = kinds_of(value)
    roles = getattr(module, "get_quantizer_roles", None)
    if roles is not None:
        facts["roles"] = {}
        for forward, key in ((True, "scaling_fwd"), (False, "scaling_bwd")):
            mode = "forward" if forward else "backward"
            try:
                num = len(module.quantizers[key]) if hasattr(module, "quantizers") else module.num_quantizers(mode)
                given = roles(fwd=forward, num_quantizers=num) if hasattr(module, "quantizers") else roles(mode)
            except Exception as error:
                given = [error]
            facts["roles"][key] = [None if r is None else [getattr(r, "tensor_type", str(r)), getattr(r, "name", "")]
                                   for r in given or []]  # fmt: skip
    return facts


def kinds_of(value: Any) -> Any:
    """A value as its class, and what is in it."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return [kinds_of(item) for item in value]
    if isinstance(value, dict):
        return {str(key): kinds_of(item) for key, item in value.items()}
    facts = {"class": type(value).__name__}
    for name in ("scale", "amax_history", "amax", "dtype", *TENSOR):
        if isinstance(item := getattr(value, name, None), torch.Tensor):
            facts[name] = kinds_of(item)
        elif item is not None:
            facts[name] = type(item).__name__ if name == "_quantizer" else str(item)
    return facts


def listen(calls: list[list[str]]) -> Any:
    """Note GEMM calls (layout, operands) and casts (function, quantizer) until the returned function is called."""
    import transformer_engine_torch as tex

    from fp8watch.capture.patches import Patches
    from fp8watch.capture.te.cast_tap import ACTIVATIONS, CASTS, NORMS, WITH_BIAS
    from fp8watch.capture.te.gemm_tap import CONSUMERS, GEMM, GROUPED, GROUPED_CONSUMER

    def gemm(original: Any) -> Any:
        def noted(A: Any, B: Any, *args: Any, **options: Any) -> Any:
            calls.append([GEMM, options.get("layout", "TN"), type(A).__name__, type(B).__name__])
            return original(A, B, *args, **options)

        return noted

    def grouped_gemm(original: Any) -> Any:
        def noted(A: Any, B: Any, *args: Any, **options: Any) -> Any:
            calls.append([GROUPED, options.get("layout", "TN"), *(type(side[0]).__name__ for side in (A, B))])
            return original(A, B, *args, **options)

        return noted

    def casting(name: str) -> Any:
        def make(original: Any) -> Any:
            def noted(*args: Any, **options: Any) -> Any:
                result = original(*args, **options)
                kinds = [type(a).__name__ for a in (*args, *options.values())]
                made = [kinds_of(r) for r in (result if isinstance(result, tuple | list) else (result,))]
                calls.append([name, *[k for k in kinds if "Quantizer" in k], json.dumps(made, sort_keys=True)])
                return result

            return noted

        return make

    patches = Patches()
    names = [n for n in (*CASTS, "split_quantize", *NORMS, *ACTIVATIONS, *WITH_BIAS) if hasattr(tex, n)]
    modules = [importlib.import_module(f"transformer_engine.pytorch.module.{c}") for c in CONSUMERS]
    grouped = importlib.import_module(f"transformer_engine.pytorch.module.{GROUPED_CONSUMER}")
    extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")  # norms are looked up there
    holders = {n: extensions if n in NORMS else tex for n in names}
    gemms = [*((m, GEMM, gemm) for m in modules), (grouped, GROUPED, grouped_gemm)]
    patches.put([(holders[n], n, casting(n)) for n in names] + gemms)
    return patches.take_out


def attention(te: Any, recipes: Any) -> Any:
    """FP8 attention under each recipe: whose scales its state holds, and how many quantizers it has."""
    found = {}
    for kind, recipe in (
        ("delayed", recipes.DelayedScaling(fp8_dpa=True)), ("current", recipes.Float8CurrentScaling(fp8_dpa=True)),
    ):  # fmt: skip
        layer = te.MultiheadAttention(WIDTH, 2, attention_dropout=0.0, qkv_format="bshd", params_dtype=torch.bfloat16)
        try:
            for _ in range(2):
                x = torch.randn(2, ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                with te.autocast(enabled=True, recipe=recipe):
                    output = layer.cuda()(x)
                (output[0] if isinstance(output, tuple) else output).float().square().mean().backward()
            found[kind] = module_facts(layer.core_attention)
        except Exception as error:  # not on this GPU, or not in this build
            found[kind] = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    return found


def primary(te: Any, recipes: Any) -> Any:
    """A weight that exists in FP8 only."""
    with te.quantized_model_init(enabled=True, recipe=recipes.DelayedScaling()):
        layer = te.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16).cuda()
    weight = layer.weight
    return {"weight": kinds_of(weight), "classes": [c.__name__ for c in type(weight).__mro__],
            "primary_weights_in_fp8": layer.primary_weights_in_fp8}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
