"""SAMPLES → SIGNALS: what every teacher says of what the student wrote, and what a verifier says of the answer."""
