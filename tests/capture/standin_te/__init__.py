"""Stand-in for Transformer Engine on a CPU: tensors with its attributes, modules that call `general_gemm` as its do.

Written after TE 2.20 (`pytorch/tensor/storage/*.py`, `pytorch/module/*.py`, `pytorch/cpp_extensions/gemm.py`).
"""
