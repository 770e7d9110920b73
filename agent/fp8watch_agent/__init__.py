"""The agent: a process beside the training ranks that receives frames, exports metrics and runs the controller."""
