"""torchao's float8 training: scales read where they pass, eager and compiled."""
