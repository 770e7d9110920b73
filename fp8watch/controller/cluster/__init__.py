"""The controller of many runs: one process decides, others stand by; Redis connects them with the agents."""
