"""What the public functions and the commands do with texts, files and ids."""
