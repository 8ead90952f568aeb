"""TABLES -> ROLLOUTS: one row per sample with columns from every table; conditions and expressions over such rows.

columns.py      the columns and their meaning, and the statement that makes the rows from the tables
derived.py      columns computed from other tables and other samples, as arrays
arrays.py       the columns of a snapshot, each read or computed when it is first used, or a stretch at a time
other_rows.py   rows of rewards, scores and other tables for a stretch of samples
referenced.py   the columns that a statement names, and the functions that a condition may call
expressions.py  the text of a condition: its check, its parts, and the conditions that a job has named
conditions.py   selects samples that meet a condition, and evaluates expressions
as_view.py      the table of rollouts as a view in SQL
"""
