"""The sub-commands of the command line, one file per group. `fp8watch.cli` puts them together."""
