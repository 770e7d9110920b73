"""The command line's sub-commands, one file a group. `fp8watch.cli` puts them together."""
