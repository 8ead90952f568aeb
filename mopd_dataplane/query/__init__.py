"""STORE -> ANSWERS: read-only SQL, one sample token by token, where a step's samples came from, one HTML page."""
