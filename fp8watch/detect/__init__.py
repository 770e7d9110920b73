"""Finding instability: pure detectors, attribution of the cause, one incident per event. No torch, no I/O."""
