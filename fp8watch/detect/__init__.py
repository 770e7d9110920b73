"""Finding instability: pure detectors, attribution of the cause, one incident an event. No torch, no I/O."""
