"""METADATA → PLAN: pure functions on arrays that decide which samples make up which step, in which packs."""
