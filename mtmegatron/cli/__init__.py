"""The command line tool `mtm`: one file per command, each thin."""
