"""`fp8watch demo`: a small real FP8 training run with a fault, its healthy twin, and what fp8watch does about it."""
