"""The `whet` command: its parser, and the subcommands that have no folder of their own."""
