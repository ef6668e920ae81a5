"""The public functions and commands: from texts, files and ids to results."""
