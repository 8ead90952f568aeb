"""The public ops, one a file, and the pieces only they use."""
