"""Doubles of the slow parts, for tests and measurements.

toy_engine.py  a deterministic engine without a model
"""
