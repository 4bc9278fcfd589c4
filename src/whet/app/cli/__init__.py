"""The `whet` command: one file a subcommand."""
