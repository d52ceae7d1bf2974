"""The `hadal` command: one file for each subcommand."""
