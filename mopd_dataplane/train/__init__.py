"""BATCHES → POLICY: a declared objective, one optimizer step after another, checkpoints, a new policy folder."""
