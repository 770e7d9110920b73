"""The controller of many runs: one process decides, others stand by; Redis between them and the agents."""
