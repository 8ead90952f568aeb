"""TABLES -> ROLLOUTS: one row a sample, with what every table says of it; conditions and expressions over such rows.

columns.py      the columns and their meaning, and the statement that makes the rows from the tables
derived.py      columns that other tables and other samples give, as arrays
arrays.py       all columns of a snapshot, each read or computed when it is first asked for
referenced.py   the columns that a statement names, and the functions that a condition may call
expressions.py  the text of a condition: its check, its parts, and the names that a job gave to conditions
conditions.py   which samples meet a condition, and the numbers of an expression
as_view.py      the table of rollouts as a view in SQL
"""
