"""torchao's float8 training: reads the scales of its casts, eager and compiled."""
