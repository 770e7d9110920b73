"""The process beside the training ranks: receives frames, reduces them, exports metrics, runs the controller."""
