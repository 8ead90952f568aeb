"""Object stores: files, folders, byte ranges, and their errors.

objects.py      the files of a store on an object store
network.py      errors of an object store: no answer, refused credentials, no bucket
artifacts.py    folders of files on an object store, published atomically
sidecars.py     files with hidden states, on a disk or an object store
range_cache.py  byte ranges of an object store, cached on the node
cached_files.py files of a store, read in blocks that are cached on the node
file_server.py  serves these files to Lance
"""
