"""The meaning of each slot in a Transformer Engine module's scale vector.

TE keeps one scale vector and one amax history per module and direction, with one element per quantized tensor, in the
order of its GEMMs (TE 2.20 `pytorch/module/base.py` 1139, `csrc/common.h` 75, `cpp_extensions/fused_attn.py` 167).
Operations of `te.ops` hold only what they quantize (`ops/basic/basic_linear.py` 272, `grouped_linear.py` 401). The
order is tested against roles recorded from the library's own `get_quantizer_roles`.

Slots for the output and the gradient of the input are used only with FP8 output. Otherwise their amax always stays 0,
which is why an amax of 0 means "not observed".
"""

from __future__ import annotations

from typing import Any, Literal

Tensor = Literal["input", "weight", "output", "grad_output", "grad_input"]

_LINEAR_FORWARD: tuple[Tensor, ...] = ("input", "weight", "output")
_LINEAR_BACKWARD: tuple[Tensor, ...] = ("grad_output", "grad_input")
_OPERATION_FORWARD: tuple[Tensor, ...] = ("input", "weight")
_OPERATION_BACKWARD: tuple[Tensor, ...] = ("grad_output",)
_ATTENTION = {"DotProductAttention", "FusedAttention", "MultiheadAttention"}

# Fused attention: index -> (part, tensor). Slots without an entry are never written.
_ATTENTION_FORWARD: dict[int, tuple[str, Tensor]] = {2: ("qkv", "input"), 3: ("o", "output"), 8: ("s", "output")}
_ATTENTION_BACKWARD: dict[int, tuple[str, Tensor]] = {
    0: ("qkv", "grad_input"), 3: ("o", "grad_output"), 5: ("s", "grad_output"),
}  # fmt: skip


def slot_names(module: Any, name: str, *, forward: bool, num_slots: int) -> list[tuple[str, Tensor] | None]:
    """`(qualified module name, tensor)` for every slot of one direction; None for a slot without a meaning.

    A module of several GEMMs gets one name per GEMM: `mlp.fc1` and `mlp.fc2` for LayerNormMLP, `moe.gemm_3` for
    GroupedLinear, `attention.qkv` for fused attention.
    """
    # All base classes, because other frameworks derive from TE's under other names (Megatron's TEDotProductAttention).
    kinds = {base.__name__ for base in type(module).__mro__}
    if kinds & _ATTENTION:
        table = _ATTENTION_FORWARD if forward else _ATTENTION_BACKWARD
        return [(f"{name}.{table[i][0]}", table[i][1]) if i in table else None for i in range(num_slots)]
    tensors = _LINEAR_FORWARD if forward else _LINEAR_BACKWARD
    if "BasicOperation" in kinds or num_slots % len(tensors):
        tensors = _OPERATION_FORWARD if forward else _OPERATION_BACKWARD
        if num_slots == 1 and forward:
            return [(name, "input")]  # an operation that quantizes what passes through it
    if num_slots == 0 or num_slots % len(tensors):
        return [None] * num_slots
    gemms = num_slots // len(tensors)
    parts = [name] if gemms == 1 else [f"{name}.{part}" for part in _gemm_parts(kinds, gemms)]
    return [(part, tensor) for part in parts for tensor in tensors]


def _gemm_parts(kinds: set[str], gemms: int) -> list[str]:
    return ["fc1", "fc2"] if "LayerNormMLP" in kinds and gemms == 2 else [f"gemm_{i}" for i in range(gemms)]
