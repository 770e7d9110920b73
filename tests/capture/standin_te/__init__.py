"""Transformer Engine's shape on a CPU: tensor classes with its attributes, modules that call `general_gemm` as its do.

Written after TE 2.20 (`pytorch/tensor/storage/*.py`, `pytorch/module/*.py`, `pytorch/cpp_extensions/gemm.py`).
"""
