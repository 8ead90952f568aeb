"""Samples of other stores: their metadata lies here, their payload stays there.

references.py    a payload row that names another store
sources.py       the other stores of one store, by number
readers.py       payload of samples of several stores, read as if it were in one
link.py          metadata of another store's samples, rewards and signals, inserted here
"""
