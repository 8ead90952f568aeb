"""Object stores: files, folders, byte ranges, and what can go wrong.

objects.py      its files on an object store
network.py      errors of an object store: no answer, refused credentials, no bucket
artifacts.py    folders of files on an object store, whole or not at all
sidecars.py     the files that hold them, on a disk or an object store
range_cache.py  byte ranges of an object store, kept on the node
"""
