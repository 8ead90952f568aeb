"""Read-only SQL over pinned versions.

query.py  one read-only SQL statement at pinned versions
views.py  views and macros for common queries
"""
