"""The public ops, one per file, and the pieces only they use."""
