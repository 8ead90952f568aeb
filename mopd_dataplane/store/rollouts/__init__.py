"""TABLES -> ROLLOUTS: one row per sample with columns from every table; conditions and expressions over such rows.

columns.py      the columns and their meaning, and the statement that makes the rows from the tables
derived.py      columns computed from other tables and other samples, as arrays
arrays.py       all columns of a snapshot, each read or computed when it is first used
referenced.py   the columns that a statement names, and the functions that a condition may call
expressions.py  the text of a condition: its check, its parts, and the conditions that a job has named
conditions.py   selects samples that meet a condition, and evaluates expressions
as_view.py      the table of rollouts as a view in SQL
"""
