"""Texts as parts of SQL statements."""


def literal(text: str) -> str:
    """Return the text as an SQL string literal.

    >>> literal("it's")
    "'it''s'"
    """
    return "'" + text.replace("'", "''") + "'"
