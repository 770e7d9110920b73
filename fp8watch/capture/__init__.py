"""Reading numerics in the training process: one source a framework, one asynchronous copy a step."""
